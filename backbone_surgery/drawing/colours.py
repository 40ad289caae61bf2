"""The colour of each kind of node."""

COLOURS = {
    "input": "#57606a",
    "output": "#57606a",
    "cache": "#0969da",
    "stateful": "#bc4c00",
    "block": "#24292f",
    "inserted": "#1a7f37",
    "layer": "#424a53",
}
