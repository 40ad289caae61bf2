"""How the benchmark shows what it measured: a table for each row, and a picture of all."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from rich.table import Table

_COLUMNS = {
    "contender": lambda c: c["name"],
    "tokens/s": lambda c: _number(c, "tokens_per_s", "{:.1f}"),
    "decode tokens/s": lambda c: _number(c, "decode_tokens_per_s", "{:.1f}"),
    "of the limit": lambda c: _number(c, "share_of_limit", "{:.0%}"),
    "first token": lambda c: f"{1000 * c['first_token_s']:.0f} ms",
    "total (least, most)": lambda c: _times(c["total_s"], *c["spread_s"]),
    "compile": lambda c: f"{c['compile_s']:.0f} s",
    "peak of first call": lambda c: _number(c, "peak_extra_bytes", "{:.0f} MiB", 2**-20),
    "ours is faster by": lambda c: f"{c['ours_over_it']:.2f}",
    "tokens": lambda c: _agreement(c["differs_from"]),
}

_MARKERS = "osD^vPX*hp<>"

_CONTENDERS = {
    "keras_hub": "KerasHub",
    "hf": "transformers",
    "hf_static": "transformers, static cache, compiled",
    "hf_hooks": "transformers, hooks",
    "hf_hidden_states": "transformers, hidden states",
    "repeng": "repeng, one after another",
    "ours_steered": "ours, steered",
    "ours_capturing": "ours, capturing",
    "ours_streaming": "ours, streaming",
}

_KINDS = {
    "strengths": "each row at its own strength",
    "vectors": "each row with its own vector",
    "steering": "every block steered",
    "capture": "every block captured",
    "stream": "streamed",
}


def _number(contender: dict[str, Any], key: str, form: str, factor: float = 1) -> str:
    return form.format(contender[key] * factor) if contender.get(key) is not None else "-"


def _times(median: float, least: float, most: float) -> str:
    factor, unit, digits = (1000, "ms", 1) if median < 1 else (1, "s", 2)
    a, b, c = (f"{factor * x:.{digits}f}" for x in (median, least, most))
    return f"{a} {unit} ({b}, {c})"


def _agreement(differs_from: int | None) -> str:
    return "" if differs_from is None else f"differ from {differs_from}"


def table(result: dict[str, Any]) -> Table:
    """Return the table of one row of the benchmark."""
    title = (
        f"{result['name']}: {result['model']} {result['dtype']}, batch {result['batch']}, "
        f"{result['prompt']} → {result['length']}, {result['bandwidth'] / 1e9:.1f} GB/s read, "
        f"{result['bytes_per_step'] / 1e6:.1f} MB a step, {result['arithmetic'] / 1e9:.0f} "
        f"GFLOP/s, {result['operations_per_step'] / 1e9:.2f} GFLOP a step"
    )
    shown = Table(title=title)
    for name in _COLUMNS:
        shown.add_column(name, justify="left" if name == "contender" else "right")
    for contender in result["contenders"]:
        shown.add_row(*(show(contender) for show in _COLUMNS.values()))
    return shown


def plot(results: list[dict[str, Any]], to_file: Path) -> None:
    """Draw tokens per second, on a log scale, a column of points for each row."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    shown = [r for r in results if "tokens_per_s" in r["contenders"][0]]
    names = list(dict.fromkeys(c["name"] for r in shown for c in r["contenders"]))
    figure = Figure(figsize=(1.5 + 1.4 * len(shown), 4.4), layout="constrained")
    axes = figure.add_subplot()
    for name, marker in zip(names, _MARKERS, strict=False):
        speeds = [
            (x, c["tokens_per_s"])
            for x, r in enumerate(shown)
            for c in r["contenders"]
            if c["name"] == name
        ]
        label = _CONTENDERS.get(name, name)
        axes.plot(*zip(*speeds, strict=True), marker, label=label, markersize=9, alpha=0.8)
    axes.set_xlim(-0.5, len(shown) - 0.5)
    axes.grid(axis="y", alpha=0.3)
    axes.set_xticks(range(len(shown)), [_label(r) for r in shown])
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("tokens/s, log scale")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(to_file, dpi=150)


def _label(result: dict[str, Any]) -> str:
    """Return the words below a column: rows, tokens before and after, and what is special."""
    kind = textwrap.fill(_KINDS.get(result["name"], ""), 18)
    return f"batch {result['batch']}\n{result['prompt']} → {result['length']}\n{kind}".rstrip()
