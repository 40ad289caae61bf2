"""Strategies: how the next token of each row is chosen, from a KerasHub sampler.

Every sampler that only maps probabilities to a token is run row by row (`jax.vmap`) on a random
state of the row's own. So a row's text depends on its seed and its prompt and on nothing else in
the batch, and one row with seed s draws exactly what KerasHub's sampler draws with seed s.
Temperature and the like are traced: changing them compiles nothing.
"""

import copy
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np

from backbone_surgery.errors import SurgeryError, closest

NAMES = ("greedy", "random", "top_k", "top_p", "beam")
_TRACED = ("temperature", "p")
_ROWWISE = (
    keras_hub.samplers.RandomSampler,
    keras_hub.samplers.TopKSampler,
    keras_hub.samplers.TopPSampler,
)
_REFUSED = (keras_hub.samplers.ContrastiveSampler, keras_hub.samplers.SpeculativeSampler)

Arrays = dict[str, Any]


class Strategy(Protocol):
    """How tokens are chosen inside the compiled loop.

    Attributes:
        key: hashable; two strategies of one key run the same program.
        width: how many candidate rows (beams) each row has.
    """

    key: tuple
    width: int

    def settings(self) -> Arrays:
        """Return the traced settings, arrays of any shape."""

    def start(self, seeds: np.ndarray) -> Arrays:
        """Return the state before the first token. seeds: uint32[batch, 2]."""

    def choose(
        self, logits: jax.Array, done: jax.Array, state: Arrays, settings: Arrays
    ) -> tuple[jax.Array, jax.Array | None, Arrays]:
        """Choose a token for each candidate row.

        Args:
            logits: float[batch * width, vocabulary].
            done: bool[batch * width], rows whose token does not count any more.
            state: from `start` or the last call.
            settings: from `settings`.

        Returns:
            int32[batch * width] tokens, int32[batch * width] the candidate row that each one
            continues (`None`: each its own), and the new state.
        """


def make_strategy(sampler: Any) -> Strategy:
    """Make the strategy for a KerasHub sampler.

    Raises:
        SurgeryError: a sampler that cannot run here, by name.
    """
    if isinstance(sampler, _REFUSED) or not isinstance(sampler, keras_hub.samplers.Sampler):
        name = type(sampler).__name__ if not isinstance(sampler, type) else sampler.__name__
        raise SurgeryError(
            f"compile with sampler {name}: expected one of {', '.join(NAMES)}, or an instance of a "
            "keras_hub Sampler that maps probabilities to a token. Received one that needs more "
            "than the probabilities of the next token. Choose another sampler."
        )
    _check_settings(sampler)
    if isinstance(sampler, keras_hub.samplers.BeamSampler):
        return BeamSearch(sampler)
    if type(sampler) is keras_hub.samplers.GreedySampler:
        return Greedy()
    if type(sampler).__call__ is not keras_hub.samplers.Sampler.__call__:
        raise SurgeryError(
            f"compile with sampler {type(sampler).__name__}: expected a sampler that overrides "
            "`get_next_token` alone. Received one with a loop of its own (`__call__`). Express it "
            "in `get_next_token(probabilities)`."
        )
    return RowSampling(sampler)


def _check_settings(sampler: Any) -> None:
    """Refuse numbers with which KerasHub's samplers would draw nonsense."""
    samplers = keras_hub.samplers
    _check_number(sampler, "temperature", 1e-6, 1e6)
    if isinstance(sampler, samplers.TopPSampler):
        _check_number(sampler, "p", 0.0, 1.0)
        if sampler.k is not None:
            _check_count(sampler, "k")
    if isinstance(sampler, samplers.TopKSampler):
        _check_count(sampler, "k")
    if isinstance(sampler, samplers.BeamSampler):
        _check_count(sampler, "num_beams")


def _check_number(sampler: Any, name: str, least: float, most: float) -> None:
    value = getattr(sampler, name)
    try:
        fits = least <= float(value) <= most
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise SurgeryError(
            f"compile with sampler {type(sampler).__name__}: expected {name} to be a number from "
            f"{least:g} to {most:g}. Received {value!r}. For the likeliest token each time, use "
            "'greedy'."
        )


def _check_count(sampler: Any, name: str) -> None:
    value = getattr(sampler, name)
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise SurgeryError(
            f"compile with sampler {type(sampler).__name__}: expected {name} to be a whole number "
            f"from 1. Received {value!r}. Pass an int."
        )


def get_sampler(identifier: Any) -> Any:
    """Return a KerasHub sampler by name, config or instance."""
    if isinstance(identifier, str) and identifier not in NAMES:
        raise SurgeryError(
            f"compile with sampler '{identifier}': expected the name of a sampler. "
            f"{closest(identifier, NAMES)} Pass one of these, or an instance of a keras_hub "
            "Sampler."
        )
    return keras_hub.samplers.get(identifier)


class Greedy:
    """Choose the likeliest token of each row: the first of them, where several are.

    That is KerasHub's `GreedySampler`, without the probabilities: they have the same order.
    """

    width = 1
    key = (keras_hub.samplers.GreedySampler,)

    def settings(self) -> Arrays:
        """Return nothing: whatever the temperature is, the likeliest token stays."""
        return {}

    def start(self, seeds: np.ndarray) -> Arrays:
        """Return nothing: nothing is drawn."""
        return {}

    def choose(
        self, logits: jax.Array, done: jax.Array, state: Arrays, settings: Arrays
    ) -> tuple[jax.Array, None, Arrays]:
        """Choose a token for each row."""
        # Two plain reductions: on a CPU, XLA's `argmax` is ten times slower than both.
        logits = jax.lax.optimization_barrier(logits)  # both see the same bits, in half precision
        largest = logits.max(axis=-1, keepdims=True)
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        tokens = jnp.where(logits < largest, logits.shape[-1], ids).min(axis=-1)
        return jnp.where(done, 0, tokens), None, {}


class RowSampling:
    """Choose each row's token by a sampler's `get_next_token`, on a random state of its own."""

    width = 1

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.traced = [name for name in _TRACED if hasattr(sampler, name)]
        if type(sampler) in _ROWWISE:
            config = {k: v for k, v in sampler.get_config().items() if k not in _TRACED}
            config.pop("seed", None)
            self.key = (type(sampler), *sorted(config.items()), *self.traced)
        else:
            self.key = (sampler,)

    def settings(self) -> Arrays:
        """Return the numbers of the sampler that are traced."""
        return {name: np.float32(getattr(self.sampler, name)) for name in self.traced}

    def start(self, seeds: np.ndarray) -> Arrays:
        """Return one random state for each row and seed generator."""
        generators = self.sampler.variables
        return {"seeds": [jnp.asarray(seeds, jnp.uint32)] * len(generators)}

    def choose(
        self, logits: jax.Array, done: jax.Array, state: Arrays, settings: Arrays
    ) -> tuple[jax.Array, None, Arrays]:
        """Choose a token for each row."""
        sampler = copy.copy(self.sampler)
        if type(sampler) in _ROWWISE and (getattr(sampler, "k", 1) or 1) > logits.shape[-1]:
            raise SurgeryError(
                f"generate with sampler {type(sampler).__name__}: expected k to be at most the "
                f"size of the vocabulary, {logits.shape[-1]}. Received {sampler.k}. Pass fewer."
            )
        for name, value in settings.items():
            setattr(sampler, name, value)

        def row(logits: jax.Array, seeds: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
            mapping = list(zip(sampler.variables, seeds, strict=True))
            with keras.StatelessScope(state_mapping=mapping) as scope:
                probabilities = sampler.compute_probabilities(logits[None])
                token = sampler.get_next_token(probabilities)[0]
                seeds = [scope.get_current_value(v) for v in sampler.variables]
            return token.astype(jnp.int32), seeds

        tokens, seeds = jax.vmap(row)(logits, state["seeds"])
        return jnp.where(done, 0, tokens), None, {"seeds": seeds}


class BeamSearch:
    """Beam search as KerasHub's: beams go on after a stop token until all of a row have stopped.

    A row whose beams have all stopped stays as it is, whatever the other rows do.
    """

    def __init__(self, sampler: Any) -> None:
        if sampler.return_all_beams:
            raise SurgeryError(
                "compile with sampler BeamSampler(return_all_beams=True): expected one text for "
                "each row. Received a sampler that returns all beams. Leave `return_all_beams` out."
            )
        self.sampler = sampler
        self.width = sampler.num_beams
        self.key = (type(sampler), self.width)

    def settings(self) -> Arrays:
        """Return the temperature."""
        return {"temperature": np.float32(self.sampler.temperature)}

    def start(self, seeds: np.ndarray) -> Arrays:
        """Return the log-probability of each beam: only the first of each row is alive."""
        first = np.array([0.0] + [-1e9] * (self.width - 1), "float32")
        return {"log_probs": jnp.tile(jnp.asarray(first), len(seeds))}

    def choose(
        self, logits: jax.Array, done: jax.Array, state: Arrays, settings: Arrays
    ) -> tuple[jax.Array, jax.Array, Arrays]:
        """Keep the best continuations of each row."""
        width = self.width
        batch, vocabulary = logits.shape[0] // width, logits.shape[-1]
        logits = logits.astype(jnp.float32) / settings["temperature"]
        log_probs = jnp.log(jax.nn.softmax(logits)) + state["log_probs"][:, None]
        best, flat = jax.lax.top_k(log_probs.reshape(batch, width * vocabulary), width)
        frozen = done.reshape(batch, width).all(axis=-1, keepdims=True)
        tokens = jnp.where(frozen, 0, flat % vocabulary).astype(jnp.int32)
        own = jnp.arange(width, dtype=jnp.int32)[None]
        parents = jnp.where(frozen, own, (flat // vocabulary).astype(jnp.int32))
        parents = (parents + jnp.arange(batch, dtype=jnp.int32)[:, None] * width).reshape(-1)
        best = jnp.where(frozen, state["log_probs"].reshape(batch, width), best)
        return tokens.reshape(-1), parents, {"log_probs": best.reshape(-1)}
