"""The probe: whether a layer works on each token alone, found out by running it.

A cached graph runs a row in pieces, beside other rows. Any layer that is not `Stateful` must not
notice: what it gives for a token must depend on that token alone, on no other token, no other row
and not on where in the piece the token stands. So a layer that is not known is run twice on random
input: on long rows, and on the same tokens as rows of one token each. Both must give the same.

The weights are random for this, since weights that are zero hide what they multiply; nothing of the
layer changes.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from backbone_surgery import graph, hosts
from backbone_surgery.caching.known import is_known
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.opening.family import Family

_ROWS = 2
_LONG, _SHORT = 257, 19
"""Tokens of a row: a layer may look far back, but long rows of a large layer take long."""
_LARGE = 10**7
"""From this many weights on, a layer is large."""
_EMPTY_SLOTS = 3

_passed: weakref.WeakKeyDictionary[Any, set] = weakref.WeakKeyDictionary()
"""For each layer, the kinds of calls that were probed and found right."""


class Probe:
    """Checks the nodes of one graph, each layer once.

    Args:
        family: of the backbone.
        trust: layers, or their names, that are right by the word of the caller.

    Raises:
        SurgeryError: `trust` is neither.
    """

    def __init__(self, family: Family, trust: Iterable[Any] = ()) -> None:
        try:
            self.trust = [trust] if isinstance(trust, str | keras.Operation) else list(trust)
        except Exception as error:  # whatever iterating over an object runs into
            raise SurgeryError(
                "rewire at 'trust': expected layers of the graph, or their names. Received "
                f"{shown(trust)}. Pass a list, or leave it out."
            ) from error
        self.family = family
        self.used: set[int] = set()

    def check(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Check one node, called with symbolic tensors.

        Raises:
            SurgeryError: the layer mixes tokens or rows, or cannot be probed.
        """
        if is_known(operation, args, kwargs, self.family) or self._is_trusted(operation):
            return
        call = _kind_of_call(args, kwargs)
        if call in _passed.setdefault(operation, set()):
            return
        fault = _fault(operation, args, kwargs)
        if fault is not None:
            raise SurgeryError(
                f"rewire at '{operation.name}' ({type(operation).__name__}): expected a layer that "
                f"works on each token alone. Received one that {fault}. If it is a decoder block, "
                "describe it by `backbone_surgery.Family`; if it numbers the tokens, it needs "
                "`positions=`, in `open_block` or by the family's `position_layers`; if it looks "
                "back, give it state, see docs/state.md; "
                f"if you know that it is right, pass `trust=['{operation.name}']`."
            )
        _passed[operation].add(call)

    def finish(self) -> None:
        """Check that every trusted layer was met.

        Raises:
            SurgeryError: one was not.
        """
        for i, trusted in enumerate(self.trust):
            if i not in self.used:
                name = getattr(trusted, "name", trusted)
                raise SurgeryError(
                    f"rewire at trust={name!r}: expected a layer of the graph that needs trust, or "
                    "its name. Received another. Leave it out, or look at the name."
                )

    def _is_trusted(self, operation: Any) -> bool:
        held = graph.sublayers(operation) if isinstance(operation, keras.Layer) else []
        names = {operation.name, *(layer.name for layer in held)}
        ids = {id(operation), *map(id, held)}
        matches = [i for i, t in enumerate(self.trust) if id(t) in ids or t in names]
        self.used.update(matches)
        return bool(matches)


def _kind_of_call(args: tuple, kwargs: dict[str, Any]) -> str:
    """Describe a call: shapes and dtypes of tensors, and all else as it is."""

    def describe(x: Any) -> Any:
        return (x.shape, x.dtype) if isinstance(x, keras.KerasTensor) else repr(x)

    return repr(tree.map_structure(describe, (args, kwargs)))


def _fault(operation: Any, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Say what is wrong with a layer, or `None`."""
    tensors = [t for t in tree.flatten((args, kwargs)) if isinstance(t, keras.KerasTensor)]
    weights = getattr(operation, "variables", ())
    large = sum(math.prod(v.shape) for v in weights) > _LARGE or any(map(_has_slots, tensors))
    for time in (_SHORT,) if large else (_LONG, _SHORT):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they are about shapes of random input
                return _Trial(operation, args, kwargs, time).fault()
        except Exception as error:  # whatever the code of a user runs into
            reason = f"{type(error).__name__}: {error}"
    return f"cannot be probed, since it fails on random input with {reason}"


class _Trial:
    """One layer on random input, with random weights."""

    def __init__(self, operation: Any, args: tuple, kwargs: dict[str, Any], time: int) -> None:
        self.operation, self.time = operation, time
        self.part = slice(time // 3, time // 3 + 5)
        self.half = getattr(operation, "compute_dtype", "") in ("float16", "bfloat16")
        self.rng = np.random.default_rng(0)
        self.weights = [(v, self._weight(v)) for v in getattr(operation, "variables", ())]
        self.call = (args, kwargs)
        flat = tree.flatten(self.call)
        self.symbolic = {i: t for i, t in enumerate(flat) if isinstance(t, keras.KerasTensor)}
        self.values = {i: self._value(t) for i, t in self.symbolic.items()}

    def fault(self) -> str | None:
        """Say what the layer does that a cached graph cannot do, or `None`."""
        whole = self._run(lambda t, x: x)
        alone = self._run(self._each_alone)
        piece = self._run(self._piece)
        if not any(np.isfinite(a).any() for a in whole):
            return "cannot be probed, since it gives no finite number for random input"
        if not all(map(self._fits, whole, alone, piece)):
            return self._what_is_mixed(whole)
        if any(map(_has_slots, self.symbolic.values())):
            return self._fault_of_slots(whole)
        return None

    def _fits(self, whole: np.ndarray, alone: np.ndarray, piece: np.ndarray) -> bool:
        """Tell whether one output for long rows holds those for tokens alone, and for a piece."""
        if not whole.ndim or whole.ndim != alone.ndim or len(whole) * self.time != len(alone):
            return False
        pairs = list(enumerate(zip(whole.shape, alone.shape, strict=True)))
        axes = [i for i, (a, b) in pairs if i and a == self.time and b == 1]
        if len(axes) != 1:  # no token has an output of its own
            each, first = np.repeat(whole, self.time, axis=0), whole[:1]
        else:
            rows = np.moveaxis(whole, axes[0], 1)
            each = np.expand_dims(rows.reshape(-1, *rows.shape[2:]), axes[0])
            first = np.moveaxis(rows[:1, self.part], 1, axes[0])
        return _same(each, alone, self.half) and _same(first, piece, self.half)

    def _what_is_mixed(self, whole: list[np.ndarray]) -> str:
        """Run the first row without the others, to tell rows from tokens."""
        first = self._run(lambda t, x: x[:1] if _is_by_row(t) else x)
        if all(a.ndim and _same(a[:1], b, self.half) for a, b in zip(whole, first, strict=True)):
            return "gives for a token what depends on other tokens, or on where the token stands"
        return "gives for a row what depends on other rows"

    def _fault_of_slots(self, whole: list[np.ndarray]) -> str | None:
        """Check the slots of attention patterns: those after a token, and empty ones.

        These are after all tokens, and before them too, where prompts of other rows are longer.
        """
        for output in whole:
            is_pattern = output.ndim > 2 and output.shape[-1] == self.time
            if is_pattern and np.triu(output, 1).any():
                return "gives for a token what depends on tokens after it"
        for first in (0, _EMPTY_SLOTS):

            def extended(tensor: keras.KerasTensor, x: np.ndarray, first: int = first) -> Any:
                widths = [(0, 0)] * x.ndim
                if _has_slots(tensor):
                    widths[_open_axes(tensor)[1]] = (first, _EMPTY_SLOTS)
                return np.pad(x, widths)

            for before, after in zip(whole, self._run(extended), strict=True):
                sizes = zip(before.shape, after.shape, strict=True)
                begins = [first if more > size else 0 for size, more in sizes]
                kept = tuple(slice(i, i + n) for i, n in zip(begins, before.shape, strict=True))
                rest = after.copy()
                rest[kept] = 0
                if not _same(before, after[kept], self.half) or rest.any():
                    at = ", or with which of them a token is in" if first else ""
                    return f"changes with the number of slots of the attention pattern{at}"
        return self._fault_of_padding(whole)

    def _fault_of_padding(self, whole: list[np.ndarray]) -> str | None:
        """Check the pattern of a token that looks nowhere, as in padding: zero throughout."""

        def padded(tensor: keras.KerasTensor, x: np.ndarray) -> np.ndarray:
            kept = np.arange(self.time) >= _EMPTY_SLOTS
            queries = _open_axes(tensor)[0] if _has_slots(tensor) else None
            sizes = [self.time if i == queries else 1 for i in range(x.ndim)]
            return x if queries is None else x * kept.reshape(sizes)

        for before, after in zip(whole, self._run(padded), strict=True):
            if np.isfinite(before).all() and not np.isfinite(after).all():
                return (
                    "gives NaN or an infinite number for a padded token, whose attention pattern "
                    "is zero throughout: divide by what cannot be zero"
                )
        return None

    def _run(self, cut: Callable[[keras.KerasTensor, np.ndarray], np.ndarray]) -> list[Any]:
        flat = list(tree.flatten(self.call))
        for i, tensor in self.symbolic.items():
            flat[i] = ops.convert_to_tensor(cut(tensor, self.values[i]), tensor.dtype)
        args, kwargs = tree.pack_sequence_as(self.call, flat)
        with keras.StatelessScope(state_mapping=self.weights):
            outputs = self.operation(*args, **kwargs)
            arrays = [hosts.to_numpy(x) for x in tree.flatten(outputs)]
        return [array.astype("float64") for array in arrays]

    def _each_alone(self, tensor: keras.KerasTensor, x: np.ndarray) -> np.ndarray:
        """Make a row of each token."""
        if not _is_by_row(tensor):
            return x
        axes = _open_axes(tensor)
        if not axes:
            return np.repeat(x, self.time, axis=0)
        x = np.moveaxis(x, axes[0], 1)
        return np.expand_dims(x.reshape(-1, *x.shape[2:]), axes[0])

    def _piece(self, tensor: keras.KerasTensor, x: np.ndarray) -> np.ndarray:
        """Cut some tokens out of the first row."""
        if not _is_by_row(tensor):
            return x
        axes = _open_axes(tensor)[:1]
        return x[
            tuple(
                self.part if i in axes else slice(1) if i == 0 else slice(None)
                for i in range(x.ndim)
            )
        ]

    def _value(self, tensor: keras.KerasTensor) -> np.ndarray:
        """Draw a value: tokens of different sizes, none of mean zero, or patterns of attention."""
        open_axes = _open_axes(tensor)
        if len(open_axes) > 2 or (open_axes and not _is_by_row(tensor)):
            raise ValueError(f"an argument of shape {tensor.shape}")
        shape = [self.time if size is None else size for size in tensor.shape]
        if _is_by_row(tensor):
            shape[0] = _ROWS
        if not keras.backend.is_float_dtype(tensor.dtype):
            return self.rng.integers(0, 2, shape)
        if len(open_axes) == 2:
            weights = np.tril(np.moveaxis(self.rng.uniform(0.1, 1, shape), open_axes, (-2, -1)))
            return np.moveaxis(weights / weights.sum(-1, keepdims=True), (-2, -1), open_axes)
        value = 1 + self.rng.normal(size=shape)
        if open_axes:
            sizes = [n if i in (0, *open_axes) else 1 for i, n in enumerate(shape)]
            value *= 10 ** self.rng.uniform(-1, 0.5, sizes)
        return value

    def _weight(self, variable: keras.Variable) -> Any:
        """Draw a weight: large enough to show, small enough not to saturate, positive if a scale.

        What is no float, such as the state of a seed, stays as it is.
        """
        if not keras.backend.is_float_dtype(variable.dtype):
            return variable.value
        shape = variable.shape
        if len(shape) < 2:
            return ops.convert_to_tensor(self.rng.uniform(0.1, 0.5, shape), variable.dtype)
        some = self.rng.normal(0, math.prod(shape[:-1]) ** -0.5, min(math.prod(shape), 99991))
        return ops.convert_to_tensor(np.resize(some, shape), variable.dtype)


def _is_by_row(tensor: keras.KerasTensor) -> bool:
    return len(tensor.shape) > 0 and tensor.shape[0] is None


def _open_axes(tensor: keras.KerasTensor) -> list[int]:
    """Return the axes of open length but the first: time, and for attention patterns the slots."""
    return [i for i, size in enumerate(tensor.shape) if size is None and i]


def _has_slots(tensor: keras.KerasTensor) -> bool:
    return len(_open_axes(tensor)) == 2


def _same(a: np.ndarray, b: np.ndarray, half: bool) -> bool:
    """Compare token by token, up to rounding; in half precision up to a few tokens.

    There, rounding can turn a choice, such as that of an expert, into another.
    """
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return False
    a, b = (
        np.nan_to_num(x, posinf=1.0, neginf=-1.0).reshape(len(x) if x.ndim else 1, -1)
        for x in (a, b)
    )
    if not a.size:
        return True
    difference = np.sqrt(np.square(a - b).mean(axis=1))
    size = np.sqrt((np.square(a).mean(axis=1) + np.square(b).mean(axis=1)) / 2)
    wrong = difference > (5e-2 if half else 1e-3) * np.maximum(size, 1e-3 * size.max())
    return bool(wrong.mean() <= (0.02 if half else 0))
