"""What is compiled: the graph, prefill over the prompts, and decode, a while-loop over tokens.

Rows are left-padded to one length: every row's last prompt token stands in the same slot, and all
rows write to one slot at each step, whatever their lengths.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras

from backbone_surgery import graph, target
from backbone_surgery.caching.cache import map_cache
from backbone_surgery.caching.model import BackboneWithCache
from backbone_surgery.caching.packed import logits_of
from backbone_surgery.caching.packing import Packing
from backbone_surgery.generation.captures import time_axis
from backbone_surgery.generation.formats.in_loop import OVER, keep_format, next_states, with_stops
from backbone_surgery.generation.lookup import LookUp
from backbone_surgery.generation.penalties import past_of
from backbone_surgery.generation.samplers import Strategy
from backbone_surgery.opening.placement import Placement, placement_of
from backbone_surgery.opening.state import StateSpec
from backbone_surgery.products import with_fast_products

State = dict[str, Any]
Guessed = tuple[State, list[jax.Array], jax.Array, jax.Array]

_PER_ROW = ("tokens", "cache", "cache_mask", "lengths", "done", "captures", "formats")
"""What of the state belongs to a candidate row, and follows it."""


@dataclass(eq=False)
class Forward:
    """A cached graph as a function of its inputs, for the devices on which its weights lie.

    Attributes:
        model: what `rewire` returned.
        head: the layer that makes logits of hidden states.
        platform: what the programs are for; by default where the weights lie.
        placement: where arrays lie on a mesh; by default on that of the weights, if there is one.
        precision: of products of float32, see `target.precision`.
        packing: how the loop carries the cache.
    """

    model: BackboneWithCache
    head: keras.layers.Layer
    platform: str = ""
    placement: Placement | None = None
    precision: str | None = None

    def __post_init__(self) -> None:
        target.check_precision(self.precision)
        self.platform = self.platform or target.platform_of(self.model.variables)
        self.placement = self.placement or placement_of(self.model.variables)
        self.packing = Packing(self.model, self.platform, self.placement)

    def padded(self, rows: int) -> int:
        """Return how many rows to run, so that the devices of a mesh share them evenly."""
        return rows if self.placement is None else self.placement.padded(rows)

    def forward(
        self,
        weights: list[jax.Array],
        token: Any = None,
        every: bool = False,
        whole_prompts: bool = False,
    ) -> Callable[..., Any]:
        """Return the model as a function of its inputs, with these values as its weights.

        The cache goes in and comes out packed.

        Args:
            weights: the values of all variables.
            token: int32[], which of the tokens to take the logits of; the last one by default.
            every: whether to take those of every token, float[rows, time, vocabulary].
            whole_prompts: whether the tokens are the first of their rows, from slot 0 on.
        """

        def forward(inputs: State) -> tuple[jax.Array, Any, State]:
            mapping = zip(graph.variables_of(self.model), weights, strict=True)
            cache = self.packing.unpack(inputs["cache"], inputs["token_ids"].shape[0])
            cache = self.pin_cache(cache)
            made_for = target.made_for(self.platform, self.placement, whole_prompts)
            scope = keras.StatelessScope(state_mapping=mapping)
            with scope, made_for, target.precision(self.precision):
                cache = map_cache(self._in_order, cache, self.model)
                outputs = self.model({**inputs, "cache": cache})
                states = outputs["hidden_states"]
                if token is None and not every:
                    states = states[:, -1:]
                elif not every:
                    states = jax.lax.dynamic_slice_in_dim(states, token, 1, axis=1)
                logits = logits_of(self.head, states)
            cache = self.packing.pack(self.pin_cache(outputs["cache"]))
            logits = logits if every else logits[:, 0]
            return logits, cache, outputs.get("captures", {})

        if self.placement is not None:
            return forward
        return with_fast_products(forward, self.model, self.platform)

    def _in_order(self, spec: StateSpec, array: Any) -> Any:
        whole = self.placement is not None and self.placement.has_all_heads(spec)
        return target.in_order(array, spec.slot_axis, whole=whole)

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


def pad(x: jax.Array, length: int, value: Any, *axes: int) -> jax.Array:
    """Lengthen the axes that count slots, on the same devices."""
    widths = [(0, length - size if i in axes else 0) for i, size in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=value)


def prefill(
    model: Forward,
    weights: list[jax.Array],
    strategy: Strategy,
    cache: Any,
    arguments: State,
    length: int,
    captures: bool,
) -> State:
    """Run the prompts, and choose the first token of each row; see `Programs.prefill`."""
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
    size = target.prefill_chunk(model.platform, rows, prompt)
    if size == prompt:
        logits, cache, captured = model.forward(weights, whole_prompts=True)(inputs)
    else:
        logits, cache, captured = _in_chunks(model.forward(weights), inputs, size)
    state = {
        "tokens": jnp.pad(token_ids, ((0, 0), (0, length - prompt))),
        "cache": cache,
        "cache_mask": cache_mask,
        "lengths": lengths,
        "done": arguments["budget"] <= 0,
    }
    if "formats" in arguments:
        state["formats"] = arguments["formats"]["states"]
    if captures:
        state["captures"] = {k: pad(x, length, 0, time_axis(k)) for k, x in captured.items()}
    if strategy.width > 1:
        state["cache"] = model.packing.unpack(cache, rows)
        logits, state = jax.tree.map(
            lambda x: jnp.repeat(x, strategy.width, axis=0), (logits, state)
        )
        state["cache"] = model.packing.pack(state["cache"])
    state.update(slot=jnp.int32(prompt), start=jnp.int32(prompt), draws=arguments["draws"])
    return model.pin_state(_choose(strategy, logits, state, _ready(strategy, arguments)))


def _ready(strategy: Strategy, arguments: State) -> State:
    """Return the arguments with what is the same at each step made once."""
    if "formats" not in arguments:
        return arguments
    formats = with_stops(arguments["formats"], arguments["stop_ids"], strategy.width)
    return {**arguments, "formats": formats}


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
    settings = arguments["settings"]
    if "penalties" in settings:
        places = (state[name] for name in ("tokens", "lengths", "start", "slot"))
        settings = {**settings, "past": past_of(*places)}
    if "logprobs" in settings:
        settings = {**settings, "logits": logits}
    if "formats" in arguments:
        logits = keep_format(logits, arguments["formats"], state["formats"])
    tokens, parents, draws = strategy.choose(logits, state["done"], state["draws"], settings)
    per_row = {k: state[k] for k in _PER_ROW if k in state}
    if parents is not None and len(tokens) > 1:
        per_row = jax.tree.map(lambda x: x[parents], per_row)
    state = {**state, **per_row, "draws": draws}
    if "formats" in arguments:
        state["formats"] = next_states(arguments["formats"], state["formats"], tokens)
    slot, done = state["slot"], state["done"]
    budget = jnp.repeat(arguments["budget"], strategy.width)
    stopped = (tokens[:, None] == arguments["stop_ids"]).any(axis=1)
    if "formats" in arguments:
        stopped = stopped | (state["formats"] == OVER)
    written = jax.lax.dynamic_update_slice_in_dim(state["tokens"], tokens[:, None], slot, 1)
    out_of_budget = slot + 1 - state["start"] >= budget
    return {**state, "tokens": written, "done": done | stopped | out_of_budget, "slot": slot + 1}


def decode(
    model: Forward,
    weights: list[jax.Array],
    strategy: Strategy,
    state: State,
    arguments: State,
    until: jax.Array,
) -> State:
    """Go on until a slot, or until every row is done; see `Programs.decode`."""
    controls = arguments["controls"]
    if strategy.width > 1:
        controls = jax.tree.map(lambda x: jnp.repeat(x, strategy.width, axis=0), controls)

    inputs = {**arguments, "controls": controls}
    arguments = _ready(strategy, arguments)

    def go_on(state: State) -> jax.Array:
        return (state["slot"] < until) & ~state["done"].all()

    def step(state: State, weights: list[jax.Array]) -> State:
        logits, state = _run_last(model, weights, strategy, state, inputs)
        return model.pin_state(_choose(strategy, logits, state, arguments))

    if not isinstance(strategy, LookUp):
        return jax.lax.while_loop(
            lambda x: go_on(x[0]), lambda x: (step(*x), x[1]), (state, weights)
        )[0]

    def guessed_step(state: State, weights: list[jax.Array], guesses: jax.Array) -> State:
        logits, state = _run_last(model, weights, strategy, state, inputs, guesses)
        return model.pin_state(strategy.choose_all(logits, guesses, state, arguments))

    return _in_turns(strategy, go_on, step, guessed_step, state, weights)


def _in_turns(
    strategy: LookUp,
    go_on: Callable[[State], jax.Array],
    step: Callable[..., State],
    guessed_step: Callable[..., State],
    state: State,
    weights: list[jax.Array],
) -> State:
    """Take steps of one token and of several, each kind in a loop that writes to caches in place.

    Args:
        strategy: guesses once after each step.
        go_on: tells whether to take another step.
        step: of a state and weights.
        guessed_step: of a state, weights and guesses.
        state: before.
        weights: the values of all variables.
    """

    def guess(state: State, weights: list[jax.Array]) -> Guessed:
        return state, weights, *strategy.guess(state)

    def turns(loop: Guessed) -> Guessed:
        loop = jax.lax.while_loop(
            lambda x: go_on(x[0]) & ~x[3], lambda x: guess(step(*x[:2]), x[1]), loop
        )
        return jax.lax.while_loop(
            lambda x: go_on(x[0]) & x[3], lambda x: guess(guessed_step(*x[:3]), x[1]), loop
        )

    return jax.lax.while_loop(lambda x: go_on(x[0]), turns, guess(state, weights))[0]


def _run_last(
    model: Forward,
    weights: list[jax.Array],
    strategy: Strategy,
    state: State,
    arguments: State,
    guesses: jax.Array | None = None,
) -> tuple[jax.Array, State]:
    """Run the last token of each row, and guesses of what follows, int32[guesses]."""
    slot = state["slot"] - 1
    token_ids = jax.lax.dynamic_slice_in_dim(state["tokens"], slot, 1, axis=1)
    positions = jnp.where(
        _ended(strategy, state["done"]), 0, state["lengths"] + slot - state["start"]
    )
    positions = positions[:, None]
    if guesses is not None:
        token_ids = jnp.concatenate([token_ids, jnp.tile(guesses, (len(token_ids), 1))], axis=1)
        # The model may have learned no more positions than the row may have.
        last = state["lengths"] + jnp.maximum(arguments["budget"], 1) - 1
        positions = jnp.minimum(positions + jnp.arange(token_ids.shape[1]), last[:, None])
    logits, cache, captured = model.forward(weights, every=guesses is not None)(
        {
            "token_ids": token_ids,
            "cache": state["cache"],
            "cache_update_index": slot,
            "positions": positions,
            "cache_mask": state["cache_mask"],
            **arguments["controls"],
        }
    )
    state = {**state, "cache": cache}
    if "captures" in state:
        state["captures"] = {
            k: jax.lax.dynamic_update_slice_in_dim(buffer, captured[k], slot, time_axis(k))
            for k, buffer in state["captures"].items()
        }
    return logits, state


def _ended(strategy: Strategy, done: jax.Array) -> jax.Array:
    """Tell which rows have ended: a beam that met its stop token runs on until its row has."""
    width = strategy.width
    return done if width == 1 else jnp.repeat(done.reshape(-1, width).all(axis=1), width)
