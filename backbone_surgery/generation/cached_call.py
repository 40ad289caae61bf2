"""What `call_with_cache` runs: its arguments, checked and completed."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery.caching.chunk import cache_length, check_chunk
from backbone_surgery.caching.model import BackboneWithCache
from backbone_surgery.errors import SurgeryError, shown_array, shown_ids
from backbone_surgery.generation.controls import read_inputs
from backbone_surgery.numbers import read_int32, read_mask

_OPERATION = "call_with_cache"
_OWN = ("token_ids", "cache", "cache_update_index", "positions", "cache_mask")


def complete(
    model: BackboneWithCache,
    vocabulary_size: int,
    max_positions: int | None,
    arguments: Mapping[str, Any],
    controls: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the inputs of a cached graph, with positions and mask where they were left out.

    Values are checked where there are any: not inside a compiled function, and of arrays on a
    device the slot alone, since looking at one waits for it.

    Args:
        model: the cached graph.
        vocabulary_size: how many tokens the model knows.
        max_positions: how many positions the model has learned, if it is limited.
        arguments: those of `call_with_cache` but the controls; `None` where one was left out.
        controls: `{input name: array[batch, ...]}`.

    Raises:
        SurgeryError: an argument does not fit, by name.
    """
    inputs = {name: value for name, value in arguments.items() if value is not None}
    inputs["token_ids"] = _read_ids("token_ids", arguments["token_ids"], vocabulary_size)
    if "positions" in inputs:
        inputs["positions"] = _read_ids("positions", inputs["positions"], max_positions)
    if "cache_mask" in inputs and not ops.is_tensor(inputs["cache_mask"]):
        inputs["cache_mask"] = read_mask(inputs["cache_mask"])
        if inputs["cache_mask"] is None:
            raise _error("cache_mask", "bool[batch, length]", arguments["cache_mask"])
    slot = inputs.get("cache_update_index")
    if not ops.is_tensor(slot):
        slot = read_int32(slot, -(2**31))  # the check below tells which there are
        if slot is None or slot.ndim:
            rule = "an int or int[], a slot of the cache"
            raise _error("cache_update_index", rule, arguments["cache_update_index"])
        inputs["cache_update_index"] = slot
    _check_dtypes(model, arguments["cache"])
    check_chunk(_OPERATION, model.states, inputs)
    batch, time = ops.shape(inputs["token_ids"])
    length = cache_length(model.states, inputs["cache"], _OPERATION)
    index = ops.convert_to_tensor(inputs["cache_update_index"], "int32")
    if "positions" not in inputs:
        _check_last(inputs["cache_update_index"], time, max_positions)
        positions = ops.arange(time, dtype="int32")[None] + index
        inputs["positions"] = ops.broadcast_to(positions, (batch, time))
    if "cache_mask" not in inputs:
        inputs["cache_mask"] = ops.ones((batch, length), "bool")
    tensors = {name: t for name, t in model.input.items() if name not in _OWN}
    values = read_inputs(_OPERATION, tensors, controls, batch)
    return {**inputs, "cache_update_index": index, **values}


def _read_ids(name: str, value: Any, count: int | None) -> Any:
    """Read int32[batch, time] from 0 to below a count; tensors of 32 bits stay where they are."""
    if ops.is_tensor(value) and keras.backend.standardize_dtype(value.dtype) == "int32":
        return value
    ids = read_int32(value, 0, (count or 2**31) - 1)
    if ids is None or ids.ndim != 2:
        limit = "" if count is None else f" from 0 to {count - 1}"
        raise SurgeryError(
            f"{_OPERATION} at '{name}': expected int[batch, time]{limit}. Received "
            f"{shown_ids(value)}. Pass a row for each row of the cache."
        )
    return ids


def _check_dtypes(model: BackboneWithCache, cache: Any) -> None:
    """Refuse a cache of arrays that are none, or of other kinds of numbers."""
    cache_length(model.states, cache, _OPERATION)
    for i, (specs, arrays) in enumerate(zip(model.states, cache, strict=True)):
        for name, spec in specs.items():
            dtype = str(getattr(arrays[name], "dtype", None)).rpartition(".")[2]
            if dtype != spec.dtype:
                rule = f"an array of {spec.dtype}, as `new_cache` makes it"
                raise _error(f"cache[{i}]['{name}']", rule, arrays[name])


def _check_last(index: Any, time: int, max_positions: int | None) -> None:
    """Refuse tokens after the last position that the model has learned."""
    if max_positions is None or not isinstance(index, np.ndarray):
        return
    if int(index) + time > max_positions:
        raise SurgeryError(
            f"{_OPERATION} at slot {index}: expected at most {max_positions} positions, as many as "
            f"the model has learned. Received {time} tokens from that slot on. Pass `positions`, "
            "or fewer tokens."
        )


def _error(name: str, rule: str, value: Any) -> SurgeryError:
    return SurgeryError(
        f"{_OPERATION} at '{name}': expected {rule}. Received {shown_array(value)}. Make the cache "
        "with `new_cache` for this model, and pass arrays of its rows and slots."
    )
