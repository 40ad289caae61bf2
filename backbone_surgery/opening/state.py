"""State: what a layer keeps from one run of tokens to the next, declared by the layer itself.

Generation runs a text in pieces: the prompt first, then token by token. A layer that works on each
token alone needs nothing for that. Any other layer keeps something of the earlier tokens: attention
its keys and values, a convolution its last inputs, a recurrence its state. It declares this by two
methods, those of `Stateful`; rewiring, caches, generation and pictures read nothing else.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import keras
import numpy as np
from keras import ops

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.numbers import is_int, read_number

RUNTIME_INPUTS = ("cache_update_index", "cache_mask", "positions", "padding_mask")
"""What `call_with_state` may ask for by name, besides `state` and the arguments of `call`."""


@dataclass(frozen=True)
class StateSpec:
    """One array of a layer's state.

    Rows are the first axis of every array, so that rows can be repeated, reordered and replaced.
    An axis that counts slots has one entry for each token that a row can have; it grows with the
    text. An array without one keeps its size.

    Attributes:
        name: of the array, among those of its layer.
        shape: of the array; `None` for the rows and for the slots.
        dtype: of the array.
        slot_axis: which axis counts slots; `None` if none does.
        head_axis: which axis counts attention heads, or channels that do not depend on each other:
            devices may share the array along it.
        initial: the number that the array is filled with before the first token.

    Raises:
        SurgeryError: a field does not fit the others.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    slot_axis: int | None = None
    head_axis: int | None = None
    initial: float = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise self._refuse("a name that is an identifier", shown(self.name))
        if not isinstance(self.shape, Sequence) or isinstance(self.shape, str):
            raise self._refuse("a shape of ints, and `None` for rows and slots", shown(self.shape))
        object.__setattr__(self, "shape", tuple(self.shape))
        open_axes = {i for i, size in enumerate(self.shape) if size is None}
        sizes = [size for size in self.shape if size is not None]
        if not all(is_int(size) and size >= 0 for size in sizes):
            raise self._refuse("a shape of ints, and `None` for rows and slots", str(self.shape))
        for name in ("slot_axis", "head_axis"):
            if getattr(self, name) is not None and not is_int(getattr(self, name)):
                raise self._refuse(f"`{name}` to be an axis or `None`", shown(getattr(self, name)))
        if self.slot_axis == 0 or open_axes != {0, self.slot_axis} - {None}:
            raise self._refuse(
                "`None` at axis 0, for the rows, and at `slot_axis` alone",
                f"shape {self.shape} and slot_axis {shown(self.slot_axis)}",
            )
        if self.head_axis is not None and (
            self.head_axis in open_axes or self.head_axis not in range(len(self.shape))
        ):
            raise self._refuse("`head_axis` to be an axis of fixed size", shown(self.head_axis))
        if not isinstance(self.initial, bool) and read_number(self.initial) is None:
            raise self._refuse("`initial` to be a number", shown(self.initial))
        try:
            object.__setattr__(self, "dtype", keras.backend.standardize_dtype(self.dtype))
        except (TypeError, ValueError) as error:
            raise self._refuse("the name of a dtype", shown(self.dtype)) from error

    def sizes(self, rows: Any, slots: Any) -> tuple[Any, ...]:
        """Return the shape of the array for some rows and slots."""
        return tuple(
            slots if i == self.slot_axis else rows if i == 0 else size
            for i, size in enumerate(self.shape)
        )

    def initial_array(self, rows: int, slots: int) -> Any:
        """Make the array as it is before the first token."""
        return ops.full(self.sizes(rows, slots), self.initial, self.dtype)

    def nbytes(self, rows: int, slots: int) -> int:
        """Return how much memory the array takes, in bytes."""
        return math.prod(self.sizes(rows, slots)) * np.dtype(self.dtype).itemsize

    def _refuse(self, rule: str, received: str) -> SurgeryError:
        return SurgeryError(
            f"StateSpec at {shown(self.name)}: expected {rule}. Received {received}. Declare an "
            "array such as `StateSpec('inputs', (None, 3, 64), 'float32')`."
        )


@runtime_checkable
class Stateful(Protocol):
    """A layer that can be run in pieces, by keeping state.

    Any `keras.layers.Layer` with these two methods takes part; it need not name this class.
    Its `call` is the layer over whole rows. `docs/state.md` has an example that runs. Where a token
    depends on the latest tokens alone, the layer may say on how many, as `sliding_window_size`:
    `check` then runs four tokens more than that, but never more than 64.
    """

    def state_specs(self, *args: Any, **kwargs: Any) -> Sequence[StateSpec]:
        """Return the arrays of the state.

        Args:
            *args: what the layer is called with in the graph, symbolic tensors among it.
            **kwargs: likewise.
        """

    def call_with_state(self, *, state: Mapping[str, Any], **kwargs: Any) -> tuple[Any, Any]:
        """Run the next tokens of each row.

        It is given what its parameters name: any argument of `call`, for the tokens of this run
        only, and any of the run-time inputs:

        * `cache_update_index` int32[], the slot of the first of these tokens;
        * `cache_mask` bool[batch, length], false where a slot holds padding;
        * `positions` int32[batch, time], the number of each token within its row;
        * `padding_mask` int32[batch, time], zero where a token is padding.

        Padding comes before the first token of a row, or after the last one of a run. It must leave
        a state without slots as it is.

        Args:
            state: `{name: array}`, as the last run left it.
            **kwargs: what its parameters name.

        Returns:
            What `call` would return for these tokens, and the state after them, in the names,
            shapes and dtypes of `state`.
        """


def specs_by_name(layer: Any, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, StateSpec]:
    """Return the specs of the state of a `Stateful` layer at one call, by name."""
    specs = layer.state_specs(*args, **kwargs)
    named = isinstance(specs, Sequence) and all(isinstance(spec, StateSpec) for spec in specs)
    if not named or len({spec.name for spec in specs}) != len(specs):
        raise SurgeryError(
            f"rewire at '{layer.name}': expected `state_specs` to return a list of `StateSpec`s of "
            f"different names. Received {specs!r}. Name each array of the state once."
        )
    return {spec.name: spec for spec in specs}


def wanted_inputs(
    layer: Any, args: tuple, kwargs: Mapping[str, Any], runtime: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the `call_with_state` of a layer asks for by name.

    Args:
        layer: a `Stateful` layer.
        args: what the layer is called with.
        kwargs: likewise.
        runtime: the run-time inputs, by name.

    Raises:
        SurgeryError: it asks for something else, or takes no `state`.
    """
    arguments = inspect.signature(layer.call).bind(*args, **kwargs).arguments
    known = {**runtime, **arguments}
    parameters = dict(inspect.signature(layer.call_with_state).parameters)
    wanted: dict[str, Any] = {}
    unknown = [] if parameters.pop("state", None) else ["no `state`"]
    for name, parameter in parameters.items():
        if name in known:
            wanted[name] = known[name]
        elif parameter.default is parameter.empty:
            unknown.append(f"'{name}'")
    if unknown:
        raise SurgeryError(
            f"rewire at '{layer.name}': expected `call_with_state` to take `state`, and else "
            f"arguments of `call` and some of {', '.join(RUNTIME_INPUTS)}. Received one with "
            f"{', '.join(unknown)}. Name what the layer needs."
        )
    return wanted


def kept_axes(shape: Sequence[int | None], slot_axis: int | None) -> list[int]:
    """Return the axes of an array of state that are not of size one; and that of the slots."""
    return [i for i, size in enumerate(shape) if i == slot_axis or size != 1]


def write_slots(array: Any, cache_update_index: Any, update: Any) -> Any:
    """Write the entries of new tokens into an array whose axis 1 counts slots, from a slot on."""
    index = ops.cast(cache_update_index, "int32")
    # In 64 bits JAX would take a number for int64, and refuses indices of two dtypes.
    start = [index if i == 1 else ops.zeros_like(index) for i in kept_axes(array.shape, 1)]
    update = ops.cast(update, array.dtype)
    written = ops.slice_update(_without_ones(array), start, _without_ones(update))
    return ops.reshape(written, ops.shape(array))


def _without_ones(array: Any) -> Any:
    """Drop the dimensions of size one, but for axis 1; see `caching.packing.Packing`."""
    kept, shape = kept_axes(array.shape, 1), ops.shape(array)
    return array if len(kept) == len(shape) else ops.reshape(array, [shape[i] for i in kept])
