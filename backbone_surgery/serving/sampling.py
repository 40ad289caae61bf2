"""Sampling with settings of its own for each row, drawn as KerasHub's samplers draw."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.penalties import (
    Penalties,
    are_asked,
    biases_of,
    penalized,
    seen_in,
)
from backbone_surgery.generation.samplers import NO_TOKEN, Arrays, Greedy
from backbone_surgery.numbers import is_int, read_number

_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen.

    Attributes:
        temperature: what logits are divided by; 0 takes the likeliest token each time.
        top_k: how many of the likeliest tokens to draw from; 0 for all.
        top_p: draw from the likeliest tokens that have this probability together; infinity for all,
            where 1 leaves out tokens that rounding takes past it.
        logprobs: whether log-probabilities are noted.
        penalties: what logits are changed by before.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = math.inf
    logprobs: bool = False
    penalties: Penalties = field(default_factory=Penalties)

    def arrays(self) -> Arrays:
        """Return the settings as arrays of one row."""
        return {
            "temperature": np.float32(self.temperature),
            "top_k": np.int32(self.top_k),
            "top_p": np.float32(self.top_p),
            "logprobs": np.bool_(self.logprobs),
            "penalties": self.penalties.arrays(),
        }


def read_sampling(sampler: Any, temperature: Any, top_k: Any, top_p: Any) -> Sampling:
    """Read the settings of a request; those that are `None` are those of the model's sampler.

    Where any of them is passed, the others are those of plain sampling: temperature 1, all tokens.

    Raises:
        SurgeryError: a setting is no such number, or all are left to a sampler that an engine
            cannot run.
    """
    if temperature is None and top_k is None and top_p is None:
        return _of_sampler(sampler)
    where = "submit at"
    number = 1.0 if temperature is None else read_number(temperature)
    if number is None or not (number == 0 or 1e-6 <= number <= 1e6):
        raise SurgeryError(
            f"{where} 'temperature': expected 0, for the likeliest token each time, or a number "
            f"from 1e-6 to 1e6. Received {shown(temperature)}. Pass 1 to leave logits as they are."
        )
    k = 0 if top_k is None else top_k
    if not is_int(k) or not 0 <= k <= _LARGEST:
        raise SurgeryError(
            f"{where} 'top_k': expected a whole number from 0 to {_LARGEST}. Received "
            f"{shown(top_k)}. Pass 0 to draw from all tokens."
        )
    p = 1.0 if top_p is None else read_number(top_p)
    if p is None or not 0 <= p <= 1:
        raise SurgeryError(
            f"{where} 'top_p': expected a number from 0 to 1. Received {shown(top_p)}. Pass 1 to "
            "draw from all tokens."
        )
    return Sampling(number, int(k), math.inf if p == 1 else p)


def _of_sampler(sampler: Any) -> Sampling:
    """Return the settings of a sampler of KerasHub."""
    samplers = keras_hub.samplers
    temperature = float(getattr(sampler, "temperature", 1.0))
    kind = type(sampler)
    if kind is samplers.GreedySampler:
        return Sampling()
    if kind is samplers.RandomSampler:
        return Sampling(temperature)
    if kind is samplers.TopKSampler:
        return Sampling(temperature, int(sampler.k))
    if kind is samplers.TopPSampler:
        return Sampling(temperature, int(sampler.k or 0), float(sampler.p))
    raise SurgeryError(
        f"submit with sampler {kind.__name__}: expected a model that is compiled with 'greedy', "
        "'random', 'top_k' or 'top_p', which each row of a batch can have settings of its own for. "
        "Received another. Pass `temperature`, `top_k` or `top_p`, or use `generate`."
    )


class RequestSampling:
    """Choose the token of each row by its own settings.

    A row draws what KerasHub's sampler of these settings draws with the same seed: `TopKSampler`
    with `top_k` alone, `TopPSampler` with `top_p`, and `RandomSampler` with neither. Its random
    numbers do not depend on how many tokens it draws from, since JAX numbers them.
    """

    width = 1
    read: tuple[str, ...] = ()
    key = ("rows",)

    def settings(self) -> Arrays:
        """Return nothing: each request brings its own."""
        return {}

    def start(self, seeds: np.ndarray) -> Arrays:
        """Return the random state of each row. seeds: uint32[batch, 2]."""
        return {"seeds": np.asarray(seeds, np.uint32)}

    def choose(
        self, logits: jax.Array, done: jax.Array, state: Arrays, settings: Arrays
    ) -> tuple[jax.Array, None, Arrays]:
        """Choose a token for each row. What no row asks for is not computed.

        `settings` have the `past` of the rows, too; see `penalized`.
        """
        penalties, seeds = settings["penalties"], state["seeds"]

        def of_penalized() -> jax.Array:
            seen = seen_in(settings["past"], logits.shape[-1])
            changed = penalized(logits, penalties, seen, biases_of(penalties, logits.shape[-1]))
            return _choose(changed, done, seeds, settings)

        tokens = jax.lax.cond(
            (are_asked(penalties) & ~done).any(),
            of_penalized,
            lambda: _choose(logits, done, seeds, settings),
        )
        return tokens, None, {"seeds": seeds + jnp.array([0, 1], jnp.uint32)}


def _choose(logits: jax.Array, done: jax.Array, seeds: jax.Array, settings: Arrays) -> jax.Array:
    likeliest, _, _ = Greedy().choose(logits, done, {}, {})
    sampled = ~done & (settings["temperature"] > 0)

    def sample() -> jax.Array:
        return jnp.where(sampled, _sample(logits, sampled, seeds, settings), likeliest)

    return jax.lax.cond(sampled.any(), sample, lambda: likeliest)


def _sample(logits: jax.Array, sampled: jax.Array, seeds: jax.Array, settings: Arrays) -> jax.Array:
    temperature = jnp.where(sampled, settings["temperature"], 1.0)[:, None]
    probabilities = keras.activations.softmax(logits.astype(jnp.float32) / temperature)
    from_all = (settings["top_k"] == 0) & jnp.isinf(settings["top_p"])

    def of_all() -> jax.Array:
        return jax.vmap(_draw)(probabilities, seeds)

    def of_likeliest() -> jax.Array:
        count = logits.shape[-1]
        ordered, ids = jax.lax.top_k(probabilities, count)
        limit = jnp.where(settings["top_k"] == 0, count, settings["top_k"])[:, None]
        within = jnp.cumsum(ordered, axis=-1) <= settings["top_p"][:, None]
        # The first token that goes past `top_p` is among those to draw from.
        within = jnp.pad(within[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        kept = within & (jnp.arange(count)[None] < limit)
        drawn = jax.vmap(_draw)(jnp.where(kept, ordered, 0.0), seeds)
        tokens = jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]
        return jnp.where(from_all, of_all(), tokens)

    tokens = jax.lax.cond((sampled & ~from_all).any(), of_likeliest, of_all)
    return jnp.where(jnp.isnan(probabilities).any(axis=-1), NO_TOKEN, tokens)


def _draw(probabilities: jax.Array, seed: jax.Array) -> jax.Array:
    drawn = keras.random.categorical(jnp.log(probabilities)[None], 1, seed=seed, dtype="int32")
    return drawn[0, 0]
