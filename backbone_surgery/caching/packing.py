"""Packed caches: the arrays of a cache as a loop carries them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from backbone_surgery.caching.cache import Cache, map_cache, new_array, states_of
from backbone_surgery.opening.placement import Placement
from backbone_surgery.opening.state import StateSpec, kept_axes


@dataclass(frozen=True)
class Packing:
    """How a loop carries a cache: without dimensions of size one, but for the one of the slots.

    With them, XLA on a CPU writes a token into two copies of a cache: one for the products, which
    it computes without these dimensions, and one for the state of the loop.

    A mesh of TPUs has few heads on each chip, and multiplies one after the other. It turned a cache
    that comes with the slots first: a second copy during each call. So there heads come first.

    Attributes:
        model: what `rewire` returned.
        platform: what the programs are for.
        placement: where arrays lie on a mesh; `None` on one device.
    """

    model: keras.Model
    platform: str
    placement: Placement | None

    def new_cache(self, rows: int, slots: int) -> Cache:
        """Make an empty cache, packed; each shard on its device, if the weights lie on a mesh."""
        placement = self.placement
        if placement is None:
            made = self._new_on_one_device(rows, slots)
            pairs = zip(states_of(self.model), made, strict=True)
            return [{name: arrays[name] for name in specs} for specs, arrays in pairs]
        return [
            {
                name: self.pack_array(spec, new_array(spec, rows, slots, placement))
                for name, spec in specs.items()
            }
            for specs in states_of(self.model)
        ]

    @functools.cached_property
    def _new_on_one_device(self) -> Callable[[int, int], Cache]:
        """One program for all arrays: to ask for one of them takes longer than to fill it."""

        def make(rows: int, slots: int) -> Cache:
            def full(spec: StateSpec) -> Any:
                sizes = spec.sizes(rows, slots)
                return ops.full([sizes[i] for i in self.axes(spec, rows)], spec.initial, spec.dtype)

            states = states_of(self.model)
            return [{name: full(spec) for name, spec in specs.items()} for specs in states]

        import jax

        return jax.jit(make, static_argnums=(0, 1))

    def pack(self, cache: Cache) -> Cache:
        """Return a cache as the loop carries it."""
        return map_cache(self.pack_array, cache, self.model)

    def unpack(self, cache: Cache, rows: int) -> Cache:
        """Return a packed cache of so many rows as it was."""
        return map_cache(lambda spec, x: self._unpack_array(spec, x, rows), cache, self.model)

    def axes(self, spec: StateSpec, rows: int) -> list[int]:
        """Return which axes of an array are left, in their order."""
        kept = kept_axes(spec.sizes(rows, None), spec.slot_axis)
        return [i for i in self._order(spec) if i in kept]

    def slot_axis(self, spec: StateSpec, rows: int) -> int | None:
        """Return which dimension of a packed array counts the slots, if any."""
        return None if spec.slot_axis is None else self.axes(spec, rows).index(spec.slot_axis)

    def pack_array(self, spec: StateSpec, array: Any) -> Any:
        """Pack one array of a cache."""
        rows = array.shape[0]
        turned, shape = self._turn(spec, array), ops.shape(array)
        return ops.reshape(turned, [shape[i] for i in self.axes(spec, rows)])

    def _unpack_array(self, spec: StateSpec, array: Any, rows: int) -> Any:
        axis = self.slot_axis(spec, rows)
        sizes = spec.sizes(rows, None if axis is None else array.shape[axis])
        return self._turn(spec, ops.reshape(array, [sizes[i] for i in self._order(spec)]))

    def _turn(self, spec: StateSpec, array: Any) -> Any:
        """Exchange slots and heads, if heads come first; also the way back."""
        order = self._order(spec)
        return array if order == sorted(order) else ops.transpose(array, order)

    def _order(self, spec: StateSpec) -> list[int]:
        order, slots, heads = list(range(len(spec.shape))), spec.slot_axis, spec.head_axis
        if self.platform == "tpu" and self.placement is not None and slots and heads:
            order[slots], order[heads] = heads, slots
        return order
