"""Strategies: how the next token of each row is chosen, from a KerasHub sampler.

Every sampler that only maps probabilities to a token is run row by row (`jax.vmap`) on a random
state of the row's own. So a row's text depends on its seed and its prompt and on nothing else in
the batch, and one row with seed s draws exactly what KerasHub's sampler draws with seed s.
Temperature and `p` are traced: changing them compiles nothing. All else that a sampler depends on
is in the key of its strategy, so that a change is never overlooked.

A row without probabilities to choose by, since its logits are NaN, say, gets `NO_TOKEN`.
"""

import copy
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np

from backbone_surgery.errors import SurgeryError, closest, shown
from backbone_surgery.generation.fingerprint import fingerprint
from backbone_surgery.numbers import is_int, read_number

NO_TOKEN = -1
NAMES = ("greedy", "random", "top_k", "top_p", "beam")
_MOST_BEAMS = 1024
_REFUSED = (keras_hub.samplers.ContrastiveSampler, keras_hub.samplers.SpeculativeSampler)

Arrays = dict[str, Any]


class Strategy(Protocol):
    """How tokens are chosen inside the compiled loop.

    Attributes:
        key: hashable; two strategies of one key run the same program.
        width: how many candidate rows (beams) each row has.
        read: what of the state of the strategy is read between two calls of a program.
    """

    key: tuple
    width: int
    read: tuple[str, ...]

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
            settings: from `settings`; where they have `penalties`, `past` is put beside these, see
                `past_of`, and where they have `logprobs`, the `logits` before a format took some
                away.

        Returns:
            int32[batch * width] tokens, int32[batch * width] the candidate row that each one
            continues (`None`: each its own), and the new state. The token is 0 where a row is done,
            and `NO_TOKEN` where there is nothing to choose by.
        """


def make_strategy(sampler: Any) -> Strategy:
    """Make the strategy for a KerasHub sampler.

    Raises:
        SurgeryError: a sampler that cannot run here, or an attribute of it, by name.
    """
    if isinstance(sampler, _REFUSED) or not isinstance(sampler, keras_hub.samplers.Sampler):
        name = type(sampler).__name__ if not isinstance(sampler, type) else sampler.__name__
        raise SurgeryError(
            f"compile with sampler {name}: expected one of {', '.join(NAMES)}, or an instance of a "
            "keras_hub Sampler that maps probabilities to a token. Received one that needs more "
            "than the probabilities of the next token. Choose another sampler."
        )
    _check_settings(sampler)
    samplers = keras_hub.samplers
    base = samplers.BeamSampler if isinstance(sampler, samplers.BeamSampler) else samplers.Sampler
    if type(sampler).__call__ is not base.__call__:
        raise SurgeryError(
            f"compile with sampler {type(sampler).__name__}: expected a sampler that overrides "
            "`get_next_token` alone. Received one with a loop of its own (`__call__`). Express it "
            "in `get_next_token(probabilities)`."
        )
    if base is samplers.BeamSampler:
        return BeamSearch(sampler)
    if type(sampler) is samplers.GreedySampler and not _overrides(sampler):
        return Greedy()
    return SeededSampling(sampler)


def _overrides(sampler: Any) -> bool:
    """Tell whether an instance has methods of its own."""
    return any(callable(value) for value in vars(sampler).values())


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
        _check_count(sampler, "num_beams", _MOST_BEAMS)


def _check_number(sampler: Any, name: str, least: float, most: float) -> None:
    value = getattr(sampler, name, None)
    number = read_number(value)
    if number is None or not least <= number <= most:
        raise SurgeryError(
            f"compile with sampler {type(sampler).__name__}: expected {name} to be a number from "
            f"{least:g} to {most:g}. Received {shown(value)}. For the likeliest token each time, "
            "use 'greedy'."
        )


def _check_count(sampler: Any, name: str, most: int | None = None) -> None:
    value: Any = getattr(sampler, name, None)
    if not is_int(value) or value < 1 or (most is not None and value > most):
        rule = "from 1" if most is None else f"from 1 to {most}"
        raise SurgeryError(
            f"compile with sampler {type(sampler).__name__}: expected {name} to be a whole number "
            f"{rule}. Received {shown(value)}. Pass an int."
        )


def get_sampler(identifier: Any) -> Any:
    """Return a KerasHub sampler by name, config or instance.

    Raises:
        SurgeryError: there is no such sampler.
    """
    if isinstance(identifier, str) and identifier not in NAMES:
        raise SurgeryError(
            f"compile with sampler {shown(identifier)}: expected the name of a sampler. "
            f"{closest(identifier, NAMES)} Pass one of these, or an instance of a keras_hub "
            "Sampler."
        )
    try:
        return keras_hub.samplers.get(identifier)
    except Exception as error:
        raise SurgeryError(
            "compile with a sampler: expected the name of one, an instance of a keras_hub Sampler, "
            f"or its config. Received {shown(identifier)}, which KerasHub cannot read: "
            f"{type(error).__name__}. Pass an instance."
        ) from error


class Greedy:
    """Choose the likeliest token of each row: the first of them, where several are.

    That is KerasHub's `GreedySampler`, without the probabilities: they have the same order.
    """

    width = 1
    read: tuple[str, ...] = ()
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
        # Two plain reductions: on a CPU, XLA's `argmax` is ten times slower than both. The first
        # may pass over a NaN, the second does not.
        logits = jax.lax.optimization_barrier(logits)  # both see the same bits, in half precision
        largest = logits.max(axis=-1, keepdims=True)
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        ids = jnp.where(logits < largest, logits.shape[-1], ids)
        tokens = jnp.where(jnp.isnan(logits), NO_TOKEN, ids).min(axis=-1)
        tokens = jnp.where(jnp.isfinite(largest[:, 0]), tokens, NO_TOKEN)
        return jnp.where(done, 0, tokens), None, {}


class _Sampling:
    """What strategies share that ask a KerasHub sampler: its settings, traced or in the key."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = copy.copy(sampler)  # what is set on the original now is for the next call
        self.traced = ["temperature"]
        if isinstance(sampler, keras_hub.samplers.TopPSampler):
            self.traced.append("p")
        # KerasHub's own samplers use their seed for nothing but the seed generator.
        is_kerashubs = type(sampler).__module__.startswith("keras_hub.")
        self.left_out = (*self.traced, *(["seed"] if is_kerashubs else ()))
        self.key = (type(self), fingerprint(self.sampler, self.left_out))

    def settings(self) -> Arrays:
        """Return the numbers of the sampler that are traced."""
        return {name: np.float32(getattr(self.sampler, name)) for name in self.traced}

    def with_settings(self, settings: Arrays) -> Any:
        """Return the sampler with traced settings; called while a program is traced."""
        if (type(self), fingerprint(self.sampler, self.left_out)) != self.key:
            raise SurgeryError(
                f"generate with sampler {type(self.sampler).__name__}: expected lists, arrays and "
                "objects in it that stay as they are while a text is made. Received some that were "
                "changed meanwhile. Change them between two calls."
            )
        sampler = copy.copy(self.sampler)
        for name, value in settings.items():
            setattr(sampler, name, value)
        return sampler


class SeededSampling(_Sampling):
    """Choose each row's token by a sampler's `get_next_token`, on a random state of its own."""

    width = 1
    read: tuple[str, ...] = ()

    def start(self, seeds: np.ndarray) -> Arrays:
        """Return one random state for each row and seed generator."""
        generators = self.sampler.variables
        return {"seeds": [np.asarray(seeds, np.uint32)] * len(generators)}

    def choose(
        self, logits: jax.Array, done: jax.Array, state: Arrays, settings: Arrays
    ) -> tuple[jax.Array, None, Arrays]:
        """Choose a token for each row."""
        sampler = self.with_settings(settings)
        draws_from = (keras_hub.samplers.TopKSampler, keras_hub.samplers.TopPSampler)
        if isinstance(sampler, draws_from) and (sampler.k or 1) > logits.shape[-1]:
            raise SurgeryError(
                f"generate with sampler {type(sampler).__name__}: expected k to be at most the "
                f"size of the vocabulary, {logits.shape[-1]}. Received {sampler.k}. Pass fewer."
            )

        def row(logits: jax.Array, seeds: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
            mapping = list(zip(sampler.variables, seeds, strict=True))
            with keras.StatelessScope(state_mapping=mapping) as scope:
                probabilities = sampler.compute_probabilities(logits[None])
                token = sampler.get_next_token(probabilities)[0]
                seeds = [scope.get_current_value(v) for v in sampler.variables]
            unknown = jnp.isnan(probabilities).any()
            return jnp.where(unknown, NO_TOKEN, token.astype(jnp.int32)), seeds

        tokens, seeds = jax.vmap(row)(logits, state["seeds"])
        return jnp.where(done, 0, tokens), None, {"seeds": seeds}


class BeamSearch(_Sampling):
    """Beam search as in KerasHub, with each row as if it were alone.

    A beam that meets a stop token goes on and competes with the others, until all beams of its row
    have met one. Then the row stays as it is, and its text is the likeliest beam, up to the first
    stop token. KerasHub gives the same text for one row. For several it runs every row until all
    have ended, and it forces longer prompts onto beams that began with the shortest one, so that a
    row depends there on the rest of its batch; here it does not.
    """

    read: tuple[str, ...] = ("log_probs",)

    def __init__(self, sampler: Any) -> None:
        returns_all = sampler.return_all_beams
        if not isinstance(returns_all, int | np.bool_) or returns_all:
            raise SurgeryError(
                "compile with sampler BeamSampler(return_all_beams=True): expected one text for "
                "each row. Received a sampler that returns all beams. Leave `return_all_beams` out."
            )
        super().__init__(sampler)
        self.width = int(sampler.num_beams)

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
        probabilities = self.with_settings(settings).compute_probabilities(logits)
        log_probs = jnp.log(probabilities) + state["log_probs"][:, None]
        best, flat = jax.lax.top_k(log_probs.reshape(batch, width * vocabulary), width)
        frozen = done.reshape(batch, width).all(axis=-1, keepdims=True)
        unknown = jnp.isnan(probabilities).reshape(batch, -1).any(axis=-1, keepdims=True)
        tokens = jnp.where(unknown, NO_TOKEN, flat % vocabulary).astype(jnp.int32)
        tokens = jnp.where(frozen, 0, tokens)
        own = jnp.arange(width, dtype=jnp.int32)[None]
        parents = jnp.where(frozen, own, (flat // vocabulary).astype(jnp.int32))
        parents = (parents + jnp.arange(batch, dtype=jnp.int32)[:, None] * width).reshape(-1)
        best = jnp.where(frozen, state["log_probs"].reshape(batch, width), best)
        return tokens.reshape(-1), parents, {"log_probs": best.reshape(-1)}
