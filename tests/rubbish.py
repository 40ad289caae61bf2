"""Values that no argument, or hardly any, is made for: what is refused must be refused in words."""

import keras
import numpy as np

import backbone_surgery as bs


def endless():
    while True:
        yield 0


def within_itself():
    values = []
    values.append(values)
    return values


RUBBISH = {
    "None": lambda: None,
    "True": lambda: True,
    "False of NumPy": lambda: np.False_,
    "list of booleans": lambda: [True],
    "array of booleans": lambda: np.array([True, False]),
    "boolean among numbers": lambda: [0, True],
    "NaN": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "list with NaN": lambda: [1.0, float("nan")],
    "0": lambda: 0,
    "-1": lambda: -1,
    "1.7": lambda: 1.7,
    "2**31": lambda: 2**31,
    "2**32": lambda: 2**32,
    "2**32 in a list": lambda: [2**32],
    "2**32 of NumPy": lambda: np.array([2**32, 1]),
    "2**40": lambda: 2**40,
    "2**64": lambda: 2**64,
    "10**400": lambda: 10**400,
    "10**5000": lambda: 10**5000,
    "1e300": lambda: 1e300,
    "complex": lambda: 1j,
    "text": lambda: "text",
    "empty text": lambda: "",
    "bytes": lambda: b"text",
    "list of text": lambda: ["text", "more"],
    "array of text": lambda: np.array(["text"]),
    "empty list": lambda: [],
    "empty array": lambda: np.zeros((2, 0)),
    "ragged list": lambda: [[1], [2, 3]],
    "ragged array": lambda: np.array([[1], [2, 3]], dtype=object),
    "array of objects": lambda: np.array([object()]),
    "large array": lambda: np.zeros((2, 3, 4, 5)),
    "array of no axes": lambda: np.array(3),
    "list in itself": within_itself,
    "empty dict": lambda: {},
    "dict of mixed keys": lambda: {0: np.ones(8), "0": np.ones(8)},
    "dict of float keys": lambda: {1.7: np.ones(8)},
    "dict of boolean keys": lambda: {True: np.ones(8)},
    "dict of None": lambda: {None: None},
    "dict of text": lambda: {"blocks.0": "text"},
    "dict of ragged lists": lambda: {"blocks.0": [[1], [2, 3]]},
    "set": lambda: {1, 2},
    "range": lambda: range(2),
    "generator": lambda: (i for i in [1]),
    "endless generator": endless,
    "object": object,
    "type": lambda: int,
    "function": lambda: lambda *args, **kwargs: None,
    "date": lambda: np.datetime64("2020-01-01"),
    "span of time": lambda: np.timedelta64(3, "s"),
    "ellipsis": lambda: ...,
    "layer": lambda: keras.layers.Dense(3),
    "symbolic tensor": lambda: keras.Input((3,)),
    "Schedule": lambda: bs.Schedule([1.0]),
    "Control": lambda: bs.Control(strength=1.0),
    "Capture": lambda: bs.Capture("blocks.0"),
}


def complaints(calls):
    """Run calls `{name: function}`; return those that fail in another way than in words."""
    found = []
    for name, call in calls.items():
        try:
            call()
        except bs.SurgeryError as error:
            if not ("expected" in str(error) and len(str(error)) < 3000):
                found.append(f"{name}: {error}")
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    return found


def with_rubbish(call, arguments):
    """Return `{name: function}` that call with one argument at a time replaced by rubbish."""

    def function(name, value):
        return lambda: call(**{**{k: v() for k, v in arguments.items()}, name: value()})

    return {
        f"{name}={what}": function(name, value)
        for name in arguments
        for what, value in RUBBISH.items()
    }
