"""The compiled programs: prefill over the prompts, and decode, one while-loop over tokens.

Weights go in as arguments and through the loop's state, never as constants, so that training,
LoRA and another checkpoint are seen at once and nothing is stored twice. The state of a
generation, caches included, is donated from call to call, so it exists once.

Rows are left-padded to one length: every row's last prompt token stands in the same slot, and all
rows write to one slot at each step, whatever their lengths.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from backbone_surgery import graph, hosts, target
from backbone_surgery.caching.cache import map_cache, pack_cache, unpack_cache
from backbone_surgery.caching.model import BackboneWithCache
from backbone_surgery.generation.captures import time_axis
from backbone_surgery.generation.samplers import Strategy
from backbone_surgery.opening.placement import Placement, placement_of
from backbone_surgery.target import prefill_chunk

State = dict[str, Any]

_PER_ROW = ("tokens", "cache", "cache_mask", "lengths", "done", "captures")
"""What of the state belongs to a candidate row, and follows it."""

_READ = ("tokens", "slot", "done", "draws")
"""What of the state is read between two calls."""

_STRATEGIES = 16
"""How many strategies keep their programs: a sampler that was changed does not run its old ones."""


class Programs:
    """Compiles each program once for each strategy and shape of its arguments, and runs it.

    The programs of the strategies that were used last are kept, and those of others let go.

    Args:
        backbone_with_cache: what `rewire` returned.
        head: the layer that makes logits of hidden states.
        platform: what the programs are for; by default where the weights lie.
        placement: where arrays lie on a mesh; by default on that of the weights, if there is one.

    Attributes:
        compilations: how many programs of each kind were compiled, `{"prefill": n, "decode": n}`,
            and those of an `Engine`. Those that copy a cache into a longer one are not counted.
    """

    def __init__(
        self,
        backbone_with_cache: BackboneWithCache,
        head: keras.layers.Layer,
        platform: str | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.model = backbone_with_cache
        self.head = head
        variables = backbone_with_cache.variables
        self.platform = platform or target.platform_of(variables)
        self.placement = placement or placement_of(variables)
        self.compilations = {"prefill": 0, "decode": 0}
        self._compiled: OrderedDict[Hashable, dict[tuple, Any]] = OrderedDict()
        self._compiling, self._sorting = threading.RLock(), threading.Lock()

    @functools.cached_property
    def outline(self) -> list[str]:
        """What runs in the graph, in order, with shapes: to tell one edit from another."""
        return [
            f"{type(node.operation).__name__} {[tuple(x.shape) for x in node.outputs]}"
            for node in graph.all_nodes(self.model)
        ]

    def weights(self) -> list[jax.Array]:
        """Return the values of all variables, as they are now."""
        return [v.value for v in self.model.variables]

    def padded(self, rows: int) -> int:
        """Return how many rows to run, so that the devices of a mesh share them evenly."""
        return rows if self.placement is None else self.placement.padded(rows)

    def prefill(
        self, strategy: Strategy, cache: Any, arguments: State, length: int, captures: bool = False
    ) -> State:
        """Run the prompts, and choose the first token of each row.

        Args:
            strategy: how to choose.
            cache: an empty packed cache of more slots than the prompts are long. It is donated.
            arguments: `token_ids` int32[batch, prompt], `mask` bool[batch, prompt], `controls`,
                `settings` and `draws` of the strategy, `stop_ids` int32[n], `budget` int32[batch].
            length: number of slots of the cache.
            captures: whether to keep what the graph captures.

        Returns:
            The state for `decode`; `tokens` int32[rows, length] holds the prompt and what follows.
            With `captures` it has a buffer for each capture, with an entry for each slot, which
            `decode` fills in place.
        """
        run, donate = self.prefill_program(strategy, length, captures)
        args = (self.weights(), cache, arguments)
        return self.run("prefill", strategy, run, args, donate, length, captures)

    def prefill_program(
        self, strategy: Strategy, length: int, captures: bool
    ) -> tuple[Callable[..., State], tuple[int, ...]]:
        """Return what `prefill` compiles, of weights, cache and arguments; and what it donates."""

        def run(weights: list[jax.Array], cache: Any, arguments: State) -> State:
            return _prefill(self, weights, strategy, cache, arguments, length, captures)

        return run, (1,) if strategy.width == 1 else ()  # beams make the cache larger than it came

    def decode(
        self, strategy: Strategy, state: State, arguments: State, until: int
    ) -> tuple[State, State]:
        """Go on until a slot, or until every row is done. Takes the state over: it is donated.

        Returns:
            The state to go on from, and copies of what is read of it, which outlive it.
        """
        run, donate = self.decode_program(strategy)
        args = (self.weights(), state, arguments, np.int32(until))
        return self.run("decode", strategy, run, args, donate)

    def decode_program(
        self, strategy: Strategy
    ) -> tuple[Callable[..., tuple[State, State]], tuple[int, ...]]:
        """Return what `decode` compiles, of its arguments and weights; and what it donates."""
        placement = self.placement

        def run(
            weights: list[jax.Array], state: State, arguments: State, until: Any
        ) -> tuple[State, State]:
            state = _decode(self, weights, strategy, state, arguments, until)
            copies = jax.tree.map(jnp.copy, {name: state[name] for name in _READ})
            return state, copies if placement is None else placement.pin_everywhere(copies)

        return run, (1,)

    def grow(self, state: State, length: int) -> State:
        """Give the state a longer cache; array by array, so that only one exists twice at a time.

        Args:
            state: from `prefill` or `decode`. It is taken over.
            length: number of slots.
        """
        state["tokens"] = _grow(state["tokens"], length, 0, 1)
        state["cache_mask"] = _grow(state["cache_mask"], length, True, 1)
        rows = state["tokens"].shape[0]
        for specs, arrays in zip(self.model.states, state["cache"], strict=True):
            for name, spec in specs.items():
                axis = spec.packed_slot_axis(rows)
                if axis is not None:
                    arrays[name] = _grow(arrays.pop(name), length, spec.initial, axis)
        return state

    def forward(self, weights: list[jax.Array], token: Any = None) -> Callable[..., Any]:
        """Return the model as a function of its inputs, with these values as its weights.

        The cache goes in and comes out packed.

        Args:
            weights: the values of all variables.
            token: int32[], which of the tokens to take the logits of; the last one by default.
        """

        def forward(inputs: State) -> tuple[jax.Array, Any, State]:
            mapping = zip(self.model.variables, weights, strict=True)
            cache = unpack_cache(inputs["cache"], self.model, inputs["token_ids"].shape[0])
            cache = self.pin_cache(cache)
            made_for = target.made_for(self.platform, on_mesh=self.placement is not None)
            with keras.StatelessScope(state_mapping=mapping), made_for:
                cache = jax.tree.map(target.row_major, cache)
                outputs = self.model({**inputs, "cache": cache})
                states = outputs["hidden_states"]
                if token is None:
                    states = states[:, -1:]
                else:
                    states = jax.lax.dynamic_slice_in_dim(states, token, 1, axis=1)
                logits = self.head(states, reverse=True)
            cache = pack_cache(self.pin_cache(outputs["cache"]), self.model)
            return logits[:, 0], cache, outputs.get("captures", {})

        return forward

    def pin_cache(self, cache: Any) -> Any:
        """Hold an unpacked cache where the devices of a mesh have it; inside a program."""
        if self.placement is None:
            return cache
        return map_cache(self.placement.pin_state, cache, self.model)

    def pin_state(self, state: State) -> State:
        """Hold all but the cache where the devices of a mesh have it; inside a program."""
        return {**state, **self.pin_rows({k: x for k, x in state.items() if k != "cache"})}

    def pin_rows(self, values: Any) -> Any:
        """Hold arrays whose first axis counts rows where the rows are; inside a program."""
        return values if self.placement is None else self.placement.pin_rows(values)

    def compiled(self, kind: str) -> list[Any]:
        """Return the programs of a kind that are kept, the latest last."""
        items = [item for programs in self._compiled.values() for item in programs.items()]
        return [program for key, program in items if key[0] == kind]

    def run(
        self,
        kind: str,
        strategy: Strategy,
        run: Callable,
        args: tuple,
        donate: tuple[int, ...],
        *static: int,
    ) -> Any:
        """Run a function, compiled once for each strategy and shape of its arguments.

        Args:
            kind: of the program, as it is counted.
            strategy: how tokens are chosen in it.
            run: the function.
            args: its arguments, trees of arrays.
            donate: which of them it takes over.
            *static: whatever else the program depends on.
        """
        args = jax.tree.map(_array, args) if self.placement is None else self.placement.put(args)
        leaves, structure = jax.tree.flatten(args)
        where = _on_device if self.placement is None else _on_mesh
        key = (kind, *static, structure, *((x.aval, where(x)) for x in leaves))
        programs = self._programs_of(strategy)
        program = programs.get(key)
        if program is None:
            with self._compiling:
                program = programs.get(key)
                if program is None:
                    lowered = jax.jit(run, donate_argnums=donate).lower(*args)
                    if hosts.span(self.model):
                        hosts.agree(self.model, kind, {"edit and sampler": lowered.as_text()})
                    program = lowered.compile()
                    self.compilations[kind] = self.compilations.get(kind, 0) + 1
                    programs[key] = program
        return program(*args)

    def _programs_of(self, strategy: Strategy) -> dict[tuple, Any]:
        """Return the programs of a strategy, and let go of those that were not used for longest."""
        with self._sorting:
            programs = self._compiled.setdefault(strategy.key, {})
            self._compiled.move_to_end(strategy.key)
            while len(self._compiled) > _STRATEGIES:
                self._compiled.popitem(last=False)
        return programs


def _on_device(x: jax.Array) -> Hashable:
    return x.sharding


def _on_mesh(x: jax.Array) -> Hashable:
    """Return where an array lies, alike for shardings that are written in different ways."""
    sharding: Any = x.sharding
    axes = list(sharding.spec)
    while axes and axes[-1] is None:
        axes.pop()
    return (sharding.mesh, *axes)


def _array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _pad(x: jax.Array, length: int, value: Any, axis: int) -> jax.Array:
    """Make room for one entry for each slot of the cache, on the same devices."""
    widths = [(0, length - size if i == axis else 0) for i, size in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=value)


_grow = jax.jit(_pad, static_argnums=(1, 2, 3))


def _prefill(
    programs: Programs,
    weights: list[jax.Array],
    strategy: Strategy,
    cache: Any,
    arguments: State,
    length: int,
    captures: bool,
) -> State:
    token_ids, mask = arguments["token_ids"], arguments["mask"]
    rows, prompt = token_ids.shape
    lengths = mask.sum(axis=1, dtype=jnp.int32)
    cache_mask = jnp.pad(mask, ((0, 0), (0, length - prompt)), constant_values=True)
    positions = jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
    inputs = {
        "token_ids": token_ids,
        "cache": cache,
        "cache_update_index": jnp.int32(0),
        "positions": positions,
        "cache_mask": cache_mask,
        **arguments["controls"],
    }
    size = prefill_chunk(programs.platform, prompt)
    if size == prompt:
        logits, cache, captured = programs.forward(weights)(inputs)
    else:
        logits, cache, captured = _in_chunks(programs.forward(weights), inputs, size)
    state = {
        "tokens": jnp.pad(token_ids, ((0, 0), (0, length - prompt))),
        "cache": cache,
        "cache_mask": cache_mask,
        "lengths": lengths,
        "done": arguments["budget"] <= 0,
    }
    if captures:
        state["captures"] = {k: _pad(x, length, 0, time_axis(k)) for k, x in captured.items()}
    if strategy.width > 1:
        state["cache"] = unpack_cache(cache, programs.model, rows)
        logits, state = jax.tree.map(
            lambda x: jnp.repeat(x, strategy.width, axis=0), (logits, state)
        )
        state["cache"] = pack_cache(state["cache"], programs.model)
    state.update(slot=jnp.int32(prompt), start=jnp.int32(prompt), draws=arguments["draws"])
    return programs.pin_state(_choose(strategy, logits, state, arguments))


def _in_chunks(forward: Callable[..., Any], inputs: State, size: int) -> tuple[Any, Any, State]:
    """Run prompts piece by piece: what attention needs while it runs is that of one piece.

    Args:
        forward: see `Programs.forward`.
        inputs: of the whole prompts.
        size: tokens of a piece; divides those of the prompts.

    Returns:
        The logits of the last token, the cache, and what was captured of all tokens.
    """
    prompt = inputs["token_ids"].shape[1]

    def run(i: Any, cache: Any) -> tuple[Any, Any, State]:
        names = ("token_ids", "positions")
        piece = {
            name: jax.lax.dynamic_slice_in_dim(inputs[name], i * size, size, axis=1)
            for name in names
        }
        return forward({**inputs, **piece, "cache": cache, "cache_update_index": i * size})

    def step(i: Any, done: tuple[Any, Any, State]) -> tuple[Any, Any, State]:
        _, cache, buffers = done
        logits, cache, captured = run(i, cache)
        buffers = {
            k: jax.lax.dynamic_update_slice_in_dim(x, captured[k], i * size, time_axis(k))
            for k, x in buffers.items()
        }
        return logits, cache, buffers

    logits, _, captured = jax.eval_shape(run, jnp.int32(0), inputs["cache"])
    buffers = {
        k: jnp.zeros([prompt if i == time_axis(k) else n for i, n in enumerate(x.shape)], x.dtype)
        for k, x in captured.items()
    }
    first = jnp.zeros(logits.shape, logits.dtype), inputs["cache"], buffers
    return jax.lax.fori_loop(0, prompt // size, step, first)


def _choose(strategy: Strategy, logits: jax.Array, state: State, arguments: State) -> State:
    """Choose the token of the next slot for each row, write it, and note who is done."""
    tokens, parents, draws = strategy.choose(
        logits, state["done"], state["draws"], arguments["settings"]
    )
    per_row = {k: state[k] for k in _PER_ROW if k in state}
    if parents is not None and len(tokens) > 1:
        per_row = jax.tree.map(lambda x: x[parents], per_row)
    state = {**state, **per_row, "draws": draws}
    slot, done = state["slot"], state["done"]
    budget = jnp.repeat(arguments["budget"], strategy.width)
    stopped = (tokens[:, None] == arguments["stop_ids"]).any(axis=1)
    written = jax.lax.dynamic_update_slice(state["tokens"], tokens[:, None], (0, slot))
    out_of_budget = slot + 1 - state["start"] >= budget
    return {**state, "tokens": written, "done": done | stopped | out_of_budget, "slot": slot + 1}


def _decode(
    programs: Programs,
    weights: list[jax.Array],
    strategy: Strategy,
    state: State,
    arguments: State,
    until: jax.Array,
) -> State:
    controls = arguments["controls"]
    if strategy.width > 1:
        controls = jax.tree.map(lambda x: jnp.repeat(x, strategy.width, axis=0), controls)

    def go_on(loop: tuple[State, list[jax.Array]]) -> jax.Array:
        state, _ = loop
        return (state["slot"] < until) & ~state["done"].all()

    def ended(done: jax.Array) -> jax.Array:
        # A beam that met its stop token competes on, so it runs on, until its row has ended.
        width = strategy.width
        return done if width == 1 else jnp.repeat(done.reshape(-1, width).all(axis=1), width)

    def step(loop: tuple[State, list[jax.Array]]) -> tuple[State, list[jax.Array]]:
        state, weights = loop
        slot = state["slot"] - 1
        token_ids = jax.lax.dynamic_slice_in_dim(state["tokens"], slot, 1, axis=1)
        positions = jnp.where(ended(state["done"]), 0, state["lengths"] + slot - state["start"])
        logits, cache, captured = programs.forward(weights)(
            {
                "token_ids": token_ids,
                "cache": state["cache"],
                "cache_update_index": slot,
                "positions": positions[:, None],
                "cache_mask": state["cache_mask"],
                **controls,
            }
        )
        state = {**state, "cache": cache}
        if "captures" in state:
            state["captures"] = {
                k: jax.lax.dynamic_update_slice_in_dim(buffer, captured[k], slot, time_axis(k))
                for k, buffer in state["captures"].items()
            }
        return programs.pin_state(_choose(strategy, logits, state, arguments)), weights

    return jax.lax.while_loop(go_on, step, (state, weights))[0]
