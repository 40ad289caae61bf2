"""Checks of one run over a cache: shapes that fit together, and a slot that the cache has.

Inside a compiled function an argument has a shape and no value, so the slot cannot be checked
there: a run past the end overwrites the last slots of the cache.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery.errors import SurgeryError
from backbone_surgery.numbers import is_int
from backbone_surgery.opening.state import StateSpec

States = Sequence[Mapping[str, StateSpec]]


def check_chunk(operation: str, states: States, inputs: Mapping[str, Any]) -> None:
    """Check the inputs of one run over a cache, as far as they have values.

    Args:
        operation: whose inputs they are, for the error.
        states: for each entry of the cache the specs of its arrays, see `BackboneWithCache`.
        inputs: `token_ids`, `cache` and `cache_update_index`; `positions` and `cache_mask` too,
            unless they are to take defaults.

    Raises:
        SurgeryError: an array has another shape than the others ask for, the slot is no integer,
            or the cache has no room for the tokens from this slot on.
    """
    tokens = _shape(inputs["token_ids"])
    if len(tokens) != 2:
        _refuse(operation, "token_ids", "int[batch, time]", f"shape {tokens}")
    batch, time = tokens
    length = cache_length(states, inputs["cache"], operation)
    if length is None and "cache_mask" in inputs:
        length = _shape(inputs["cache_mask"])[-1]
    for i, (specs, arrays) in enumerate(zip(states, inputs["cache"], strict=True)):
        for name, spec in specs.items():
            _check_shape(
                operation, f"cache[{i}]['{name}']", arrays[name], spec.sizes(batch, length)
            )
    for name, shape in (("positions", (batch, time)), ("cache_mask", (batch, length))):
        if name in inputs:
            _check_shape(operation, name, inputs[name], shape)
    _check_slot(operation, inputs["cache_update_index"], time, length)


def cache_length(states: States, cache: Any, operation: str) -> int | None:
    """Return how many slots a cache has; `None` if none of its arrays counts any.

    Raises:
        SurgeryError: the cache has not the arrays that it should have.
    """
    names = [sorted(specs) for specs in states]
    listed = isinstance(cache, list | tuple) and all(isinstance(x, Mapping) for x in cache)
    if not listed or [sorted(arrays) for arrays in cache] != names:
        received = [sorted(arrays) for arrays in cache] if listed else type(cache).__name__
        _refuse(operation, "cache", f"a list of dicts with the arrays {names}", str(received))
    for specs, arrays in zip(states, cache, strict=True):
        for name, spec in specs.items():
            shape = _shape(arrays[name])
            if spec.slot_axis is not None and len(shape) == len(spec.shape):
                return shape[spec.slot_axis]
    return None


def _check_slot(operation: str, index: Any, time: Any, length: Any) -> None:
    dtype = "" if isinstance(index, bool | float | str) else getattr(index, "dtype", "")
    is_integer = is_int(index) or (
        dtype and keras.backend.standardize_dtype(dtype).startswith(("int", "uint"))
    )
    if not is_integer or _shape(index) != ():
        _refuse(operation, "cache_update_index", "an int or int[]", f"{index!r}")
    slot = _value(index)
    if slot is None or time is None:
        return
    if slot < 0 or (length is not None and slot + time > length):
        raise SurgeryError(
            f"{operation} at slot {slot}: expected room for {time} tokens. Received a cache of "
            f"{length} slots. Make a longer one with `new_cache`."
        )


def _check_shape(operation: str, name: str, array: Any, wanted: tuple[Any, ...]) -> None:
    shape = _shape(array)
    fits = len(shape) == len(wanted) and all(
        None in (size, other) or size == other for size, other in zip(shape, wanted, strict=True)
    )
    if not fits:
        _refuse(operation, name, f"shape {wanted}", f"shape {shape}")


def _shape(x: Any) -> tuple[Any, ...]:
    return tuple(x.shape) if hasattr(x, "shape") else np.shape(x)


def _value(index: Any) -> int | None:
    """Return an index as an int, or `None` inside a compiled function, where it has no value."""
    if isinstance(index, keras.KerasTensor):
        return None
    try:
        return int(ops.convert_to_numpy(index))
    except Exception:  # each backend has an error of its own for this
        return None


def _refuse(operation: str, name: str, rule: str, received: str) -> None:
    raise SurgeryError(
        f"{operation} at '{name}': expected {rule}. Received {received}. Make the cache with "
        "`new_cache` for this model, batch and length, and pass arrays of the same batch."
    )
