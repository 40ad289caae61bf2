"""The compiled programs that an engine adds: prefill in chunks, insert a row, make room.

The rows of an engine are the rows of one decode state, as `Programs.decode` runs it. All write to
one slot; a row's tokens lie side by side, and its last one stands right before that slot. So a
prefilled row is put where its tokens end at the slot, and all rows can be moved by some slots:
positions are explicit, and no value changes.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backbone_surgery.caching.cache import map_cache
from backbone_surgery.caching.packing import Packing
from backbone_surgery.generation.captures import time_axis
from backbone_surgery.generation.formats.in_loop import (
    FREE,
    OVER,
    keep_format,
    next_states,
    with_stops,
)
from backbone_surgery.generation.loop import State, pad
from backbone_surgery.generation.penalties import past_of
from backbone_surgery.generation.programs import Programs
from backbone_surgery.opening.site import is_pattern
from backbone_surgery.serving.logprobs import RecordedSampling


class RowPrograms:
    """Runs the rows of an engine.

    Args:
        programs: those of the model; what is compiled here is kept and counted there.
        strategy: how tokens are chosen.
        rows: how many rows there are.

    Attributes:
        weights: of all variables, inside `weights_of_now`.
    """

    def __init__(self, programs: Programs, strategy: RecordedSampling, rows: int) -> None:
        self.programs, self.strategy, self.rows = programs, strategy, rows
        self.model, self.packing = programs.model, programs.packing
        self.capture_specs = self.model.output.get("captures", {})
        self.weights: list[jax.Array] = []

    @contextlib.contextmanager
    def weights_of_now(self) -> Iterator[None]:
        """Have all that runs inside use the weights as they are now.

        To look them up takes a good part of the time in which a program is started.
        """
        self.weights = self.programs.weights()
        try:
            yield
        finally:
            self.weights = []  # outside they may change, and old ones are not to be kept

    def new_state(self, length: int) -> State:
        """Make a decode state of rows that have all ended."""
        rows = self.rows
        state = {
            "tokens": jnp.zeros((rows, length), jnp.int32),
            "cache_mask": jnp.ones((rows, length), bool),
            "lengths": jnp.zeros(rows, jnp.int32),
            "start": jnp.zeros(rows, jnp.int32),
            "done": jnp.ones(rows, bool),
            "draws": jax.device_put(self.strategy.start(np.zeros((rows, 2), np.uint32))),
            "slot": jnp.int32(1),
        }
        return {**self.lay_out(state), "cache": self.packing.new_cache(rows, length)}

    def new_captures(self, rows: int, length: int) -> State:
        """Make an empty buffer for each capture of the graph, with an entry for each slot."""
        captures = {
            name: jnp.zeros(_capture_shape(name, spec, rows, length), spec.dtype)
            for name, spec in self.capture_specs.items()
        }
        return self.lay_out(captures)

    def new_format_array(self, part: np.ndarray, length: int) -> jax.Array:
        """Make an empty array for parts of tables that are like this one, on every device."""
        placement, shape = self.programs.placement, (length, *part.shape[1:])
        if placement is None:
            return jnp.zeros(shape, part.dtype)
        return placement.put(np.zeros(shape, part.dtype))

    def put_format(self, array: jax.Array, part: np.ndarray, first: int) -> jax.Array:
        """Put a part of a table into the array of such parts, which is taken over."""
        placement = self.programs.placement

        def run(array: jax.Array, part: jax.Array, first: jax.Array) -> jax.Array:
            array = jax.lax.dynamic_update_slice_in_dim(array, part, first, 0)
            return array if placement is None else placement.pin_everywhere(array)

        args = (array, part, np.int32(first))
        return self.programs.run("format", self.strategy, run, args, (0,))

    def lay_out(self, values: State) -> State:
        """Put arrays whose first axis counts rows where the devices of a mesh have them."""
        if self.programs.placement is None:
            return values
        return jax.jit(self.programs.pin_rows)(values)

    def extend(self, staging: State, chunk: State, length: int) -> tuple[State, jax.Array, State]:
        """Run a chunk of one prompt.

        Args:
            staging: `cache`, packed, of one row; and `captures`, if they are kept. Taken over.
            chunk: `token_ids` int32[1, time], the first `count` of which are no padding, `first`
                int32[], the slot of the first one, and `controls` of one row. With `next`
                int32[time], the token after each, their log-probabilities are noted.
            length: number of slots of the cache.

        Returns:
            The staging after it, logits float[1, vocabulary] after the last token, and the notes,
            an entry for each of `next`; none without.
        """

        def run(weights: Any, staging: State, chunk: State) -> tuple[State, jax.Array, State]:
            return self._extend(weights, staging, chunk, length)

        args = (self.weights, staging, chunk)
        return self.programs.run("extend", self.strategy, run, args, (1,), length)

    def insert(
        self, state: State, controls: State, staging: State, new: State, staged: int
    ) -> tuple[State, State, State]:
        """Put a prefilled row into the state, and choose its first token.

        Args:
            state: the decode state, with captures if the staging has them. Taken over.
            controls: a row of each control for each row of the state. Taken over.
            staging: from `extend`.
            new: `row` int32[], `slot` int32[], the one that all rows write to next, `tokens`
                int32[1, staged], the prompt, `length` int32[], how many these are, `logits`
                float[1, vocabulary], and of the request `budget` int32[1], `stop_ids`
                int32[1, n], `settings`, `draws` and `controls` of one row; and `formats`, see
                `with_stops`, if it has one.
            staged: number of slots of the staging cache.

        Returns:
            The state, the controls, and of the row `token` int32[1] and `notes`, its
            log-probabilities.
        """

        def run(state: State, controls: State, staging: State, new: State) -> tuple:
            return self._insert(state, controls, staging, new, staged)

        others = {k: state.pop(k) for k in ("captures",) if k in state and k not in staging}
        args = (state, controls, staging, new)
        made = self.programs.run("insert", self.strategy, run, args, (0, 1), staged)
        state, controls, first = made
        return {**state, **others}, controls, first

    def decode(self, state: State, arguments: State, until: int) -> tuple[State, State]:
        """Run a chunk of steps, whose log-probabilities are noted from the first on.

        See `Programs.decode`.
        """
        state = {**state, "draws": self.strategy.rewind(state["draws"])}
        return self.programs.decode(self.strategy, state, arguments, until, weights=self.weights)

    def cut(self, staging: State, first: int, count: int, length: int) -> State:
        """Copy what some slots of a staging cache hold, and the state that has none.

        Args:
            staging: from `extend`.
            first: the first of the slots.
            count: how many they are.
            length: number of slots of the cache.
        """

        def run(staging: State, first: jax.Array) -> State:
            part = _map_slots(
                lambda x, axis: jax.lax.dynamic_slice_in_dim(x, first, count, axis),
                self.packing,
                staging,
            )
            return self._pin(part, 1)

        args = (staging, np.int32(first))
        return self.programs.run("cut", self.strategy, run, args, (), count, length)

    def restore(self, staging: State, chunk: State, first: int, length: int) -> State:
        """Put what `cut` copied into a staging cache, which is taken over."""

        def run(staging: State, chunk: State, first: jax.Array) -> State:
            whole = _map_slots(
                lambda x, axis, part: jax.lax.dynamic_update_slice_in_dim(x, part, first, axis),
                self.packing,
                staging,
                chunk,
            )
            return self._pin(whole, 1)

        args = (staging, {name: chunk[name] for name in staging}, np.int32(first))
        return self.programs.run("restore", self.strategy, run, args, (0,), length)

    def row_of(self, captures: State, row: int) -> State:
        """Copy the captures of one row."""
        return _row_of(captures, np.int32(row))

    def shift(self, state: State, slots: int, length: int) -> State:
        """Move all rows by some slots to the left; to the right, if it is negative.

        Args:
            state: the decode state. Taken over, unless its length changes.
            slots: how far.
            length: how many slots are left of it after that, on the left.
        """

        def run(state: State, slots: jax.Array) -> State:
            return self._shift(state, slots, length)

        args = (state, np.int32(slots))
        donate = (0,) if state["tokens"].shape[1] == length else ()
        return self.programs.run("shift", self.strategy, run, args, donate, length)

    def grow(self, state: State, length: int) -> State:
        """Give the state more slots, on the right."""
        if "captures" in state:
            state["captures"] = lengthen_captures(state["captures"], length)
        return self.programs.grow(state, length)

    def _extend(
        self, weights: Any, staging: State, chunk: State, length: int
    ) -> tuple[State, jax.Array, State]:
        time, is_noted = chunk["token_ids"].shape[1], "next" in chunk
        index, first, count = jnp.arange(time), chunk["first"], chunk["count"]
        # Padding comes last. It has positions that the model knows, and nothing attends to it.
        positions = jnp.where(index < count, first + index, 0)[None]
        logits, cache, captured = self.programs.forward(weights, count - 1, every=is_noted)(
            {
                "token_ids": chunk["token_ids"],
                "cache": staging["cache"],
                "cache_update_index": first,
                "positions": positions,
                "cache_mask": (jnp.arange(length) < first + count)[None],
                **chunk["controls"],
            }
        )
        notes: State = {}
        if is_noted:
            notes = self.strategy.notes(logits[0], chunk["next"])
            logits = jax.lax.dynamic_slice_in_dim(logits[0], count - 1, 1)
        staging = {**staging, "cache": cache}
        if "captures" in staging:
            staging["captures"] = {
                k: jax.lax.dynamic_update_slice_in_dim(buffer, captured[k], first, time_axis(k))
                for k, buffer in staging["captures"].items()
            }
        return self.programs.pin_state(staging), logits, notes

    def _pin(self, state: State, rows: int) -> State:
        """Hold a state, its cache packed, where the devices of a mesh have it."""
        if self.programs.placement is None:
            return state
        cache = self.packing.unpack(state["cache"], rows)
        cache = self.packing.pack(self.programs.pin_cache(cache))
        return {**self.programs.pin_state(state), "cache": cache}

    def _insert(
        self, state: State, controls: State, staging: State, new: State, staged: int
    ) -> tuple[State, State, State]:
        row, slot, length = new["row"], new["slot"], new["length"]
        first = slot - 1 - length
        rows, slots = state["tokens"].shape

        def put(table: jax.Array, entry: jax.Array) -> jax.Array:
            entry = entry.astype(table.dtype)
            return jax.lax.dynamic_update_slice_in_dim(table, entry, row, 0)

        def aligned(x: jax.Array, axis: int, initial: Any = 0) -> jax.Array:
            """Lengthen what is staged, and move it so that the prompt ends before the slot."""
            widths = [(0, slots - staged if i == axis else 0) for i in range(x.ndim)]
            return jnp.roll(jnp.pad(x, widths, constant_values=initial), first, axis)

        token, chosen = self._first_token(new)
        own = {
            "lengths": length[None],
            "start": slot[None] - 1,
            "cache_mask": (jnp.arange(slots) >= first)[None],
            **{name: x for name, x in chosen.items() if name in state},
        }
        placed = {name: jax.tree.map(put, state[name], value) for name, value in own.items()}
        state = {**state, **placed, "slot": slot}
        state["tokens"] = put(state["tokens"], aligned(new["tokens"], 1))
        state["tokens"] = state["tokens"].at[row, slot - 1].set(token[0])
        state["cache"] = self._insert_cache(state["cache"], staging["cache"], rows, put, aligned)
        if "captures" in state:
            state["captures"] = {**state["captures"]}
            for name, buffer in staging["captures"].items():
                for axis in _slot_axes(name):
                    buffer = aligned(buffer, axis)
                state["captures"][name] = put(state["captures"][name], buffer)
        controls = jax.tree.map(put, controls, new["controls"])
        state, controls = self._pin(state, rows), self.programs.pin_rows(controls)
        return state, controls, {"token": token, "notes": chosen["draws"]["notes"]}

    def _first_token(self, new: State) -> tuple[jax.Array, State]:
        """Choose the first token of a row: int32[1], and its `done`, `draws` and `formats`."""
        logits, length = new["logits"], new["length"]
        past = past_of(new["tokens"], length[None], length, length)
        settings = {**new["settings"], "past": past, "logits": logits}
        states, formats = jnp.full(1, FREE, jnp.int32), None
        if "formats" in new:
            states = new["formats"]["states"]
            formats = with_stops(new["formats"], new["stop_ids"])
            logits = keep_format(logits, formats, states)
        token, _, draws = self.strategy.choose(logits, new["budget"] <= 0, new["draws"], settings)
        done = (token[:, None] == new["stop_ids"]).any(axis=1) | (new["budget"] <= 1)
        if formats is not None:
            states = next_states(formats, states, token)
        return token, {"done": done | (states == OVER), "draws": draws, "formats": states}

    def _insert_cache(
        self, cache: Any, staged: Any, rows: int, put: Callable, aligned: Callable
    ) -> Any:
        """Put the cache of one row, packed as the other, among those of all rows."""

        def put_state(spec: Any, pair: tuple[jax.Array, jax.Array]) -> jax.Array:
            table, entry = pair
            if spec.slot_axis is not None:
                entry = aligned(entry, spec.slot_axis, spec.initial)
            return put(table, entry)

        tables, entries = self.packing.unpack(cache, rows), self.packing.unpack(staged, 1)
        pairs = [
            {name: (table[name], entry[name]) for name in table}
            for table, entry in zip(tables, entries, strict=True)
        ]
        return self.packing.pack(map_cache(put_state, pairs, self.model))

    def _shift(self, state: State, slots: jax.Array, length: int) -> State:
        rows = state["tokens"].shape[0]

        def move(x: jax.Array, axis: int) -> jax.Array:
            return jax.lax.slice_in_dim(jnp.roll(x, -slots, axis), 0, length, axis=axis)

        moved: State = {name: state[name] for name in ("cache", "captures") if name in state}
        start = state["start"] - slots
        state = {
            **state,
            **_map_slots(move, self.packing, moved, rows=rows),
            "tokens": move(state["tokens"], 1),
            "cache_mask": jnp.arange(length)[None] >= (start - state["lengths"])[:, None],
            "start": start,
            "slot": state["slot"] - slots,
        }
        return self._pin(state, rows)


def _map_slots(
    function: Callable[..., jax.Array], packing: Packing, *states: State, rows: int = 1
) -> State:
    """Return `function(array, axis, ...)` for each array with slots, once for each such axis.

    Of arrays without slots the last of the states has the say.

    Args:
        function: what to do along one axis.
        packing: of their caches.
        *states: `cache`, packed, and perhaps `captures`.
        rows: how many rows they have.
    """
    first, *others = states

    def of_state(spec: Any, arrays: tuple[jax.Array, ...]) -> jax.Array:
        axis = packing.slot_axis(spec, rows)
        return arrays[-1] if axis is None else function(arrays[0], axis, *arrays[1:])

    caches = zip(*(state["cache"] for state in states), strict=True)
    pairs = [{name: tuple(x[name] for x in entry) for name in entry[0]} for entry in caches]
    result: State = {"cache": map_cache(of_state, pairs, packing.model)}
    if "captures" in first:
        result["captures"] = {}
        for name, x in first["captures"].items():
            for axis in _slot_axes(name):
                x = function(x, axis, *(other["captures"][name] for other in others))
            result["captures"][name] = x
    return result


@jax.jit
def _row_of(captures: State, row: jax.Array) -> State:
    return {name: x[row] for name, x in captures.items()}


def lengthen_captures(captures: State, length: int) -> State:
    """Give buffers of captures more slots, on the right."""
    return {name: pad(x, length, 0, *_slot_axes(name)) for name, x in captures.items()}


def _slot_axes(name: str) -> tuple[int, ...]:
    """Return the axes of a buffer that count slots: of a pattern, those of queries and of keys."""
    return (2, 3) if is_pattern(name) else (1,)


def _capture_shape(name: str, spec: Any, rows: int, length: int) -> tuple[int, ...]:
    sizes = [length if i in _slot_axes(name) else size for i, size in enumerate(spec.shape)]
    return (rows, *sizes[1:])
