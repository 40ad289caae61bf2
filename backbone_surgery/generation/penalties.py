"""Penalties: what logits of tokens lose where a text has them, and gain where you say so."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.samplers import Arrays, Strategy
from backbone_surgery.numbers import is_int, read_number

MOST_BIASED = 300
"""How many tokens can have a bias, as OpenAI has it."""

_NONE = np.iinfo(np.int32).max
"""Stands where fewer tokens have a bias: no vocabulary has such a token."""


@dataclass(frozen=True)
class Penalties:
    """Change logits before a token is chosen, against repetition, and for or against tokens.

    The logits l of the tokens become, in this order:

    * l + bias, for a token in `bias`;
    * l / repetition where l > 0 and else l · repetition, for a token of the prompt or the new text;
    * l - frequency · count - presence, for a token that the new text has `count` times.

    Temperature, top k and top p come after that. After the first call with penalties, other numbers
    compile nothing. The start token of a prompt counts as any other: in GPT-2 it is the end token,
    too.

    Sources: `repetition` is that of CTRL, Keskar et al. 2019, arXiv:1909.05858, as Hugging Face's
    `repetition_penalty`; the others are OpenAI's `presence_penalty`, `frequency_penalty` and
    `logit_bias`, in vLLM's order.

    Attributes:
        repetition: from 0.01 to 100; 1 changes nothing, and 1.1 is usual against repetition.
        presence: from -2 to 2; above 0 is against repetition, and below for it.
        frequency: likewise.
        bias: `{token id: number from -100 to 100}`, of at most 300 tokens. -100 all but forbids a
            token, at usual temperatures. It is kept as pairs in the order of the tokens.

    Raises:
        SurgeryError: a number out of its range, or a bias of something else than tokens.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        ranges = {"repetition": (0.01, 100), "presence": (-2, 2), "frequency": (-2, 2)}
        for name, (least, most) in ranges.items():
            number = read_number(getattr(self, name))
            if number is None or not least <= number <= most:
                raise SurgeryError(
                    f"Penalties at '{name}': expected a number from {least} to {most}. Received "
                    f"{shown(getattr(self, name))}. Leave it out to change nothing."
                )
            object.__setattr__(self, name, number)
        object.__setattr__(self, "bias", _read_bias(self.bias))

    @property
    def change_nothing(self) -> bool:
        """Whether logits stay as they are."""
        return self == Penalties()

    def check(self, vocabulary_size: int, where: str) -> None:
        """Refuse a bias of tokens that a vocabulary has not; `where` is named in the error."""
        unknown = [token for token in dict(self.bias) if token >= vocabulary_size]
        if unknown:
            raise SurgeryError(
                f"{where}: expected biases of token ids from 0 to {vocabulary_size - 1}. Received "
                f"{unknown[0]}. Use those of this tokenizer."
            )

    def arrays(self) -> Arrays:
        """Return the penalties as arrays of one row."""
        tokens = np.full(MOST_BIASED, _NONE, np.int32)
        biases = np.zeros(MOST_BIASED, np.float32)
        for i, (token, bias) in enumerate(dict(self.bias).items()):
            tokens[i], biases[i] = token, bias
        numbers = {name: np.float32(getattr(self, name)) for name in _NUMBERS}
        return {**numbers, "biased": tokens, "bias": biases}


_NUMBERS = ("repetition", "presence", "frequency")


def _read_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    """Read the biases of tokens, a dict or what was made of one, without those that are zero."""
    if isinstance(bias, Mapping):
        bias = tuple(bias.items())
    if isinstance(bias, tuple) and len(bias) <= MOST_BIASED:
        pairs = [pair for pair in bias if isinstance(pair, tuple) and len(pair) == 2]
        read = [(token, read_number(x)) for token, x in pairs if is_int(token) and token >= 0]
        numbers = {int(token): x for token, x in read if x is not None and abs(x) <= 100}
        if len(numbers) == len(bias):
            return tuple(sorted((token, x) for token, x in numbers.items() if x))
    raise SurgeryError(
        f"Penalties at 'bias': expected {{token id: number from -100 to 100}} of at most "
        f"{MOST_BIASED} tokens. Received {shown(bias)}. Look ids up by "
        "`lm.preprocessor.tokenizer.token_to_id`."
    )


def read_penalties(penalties: Any, vocabulary_size: int, operation: str) -> Penalties | None:
    """Check penalties; `None` for those that change nothing.

    Raises:
        SurgeryError: they are none, or name a token that the vocabulary has not.
    """
    if penalties is None:
        return None
    if not isinstance(penalties, Penalties):
        raise SurgeryError(
            f"{operation} at 'penalties': expected `bs.Penalties` or None. Received "
            f"{shown(penalties)}. Pass `bs.Penalties(repetition=1.1)`, say."
        )
    penalties.check(vocabulary_size, f"{operation} at 'penalties'")
    return None if penalties.change_nothing else penalties


def past_of(tokens: jax.Array, lengths: jax.Array, start: jax.Array, slot: jax.Array) -> Arrays:
    """Return what rows consist of so far.

    Args:
        tokens: int32[rows, slots].
        lengths: int32[rows], tokens of their prompts.
        start: int32[] or int32[rows], the slot after their prompts.
        slot: int32[], the one of the token that is to be chosen.

    Returns:
        `tokens`, and which of them are of the `prompt` and `new`, bool[rows, slots].
    """
    slots = jnp.arange(tokens.shape[1])[None]
    start = jnp.broadcast_to(start, lengths.shape)[:, None]
    is_prompt = (slots >= start - lengths[:, None]) & (slots < start)
    return {"tokens": tokens, "prompt": is_prompt, "new": (slots >= start) & (slots < slot)}


def seen_in(past: Arrays, vocabulary_size: int) -> jax.Array:
    """Count tokens: int32[rows, vocabulary], how many of each are new; -1 where there is none.

    Those of the prompt alone count as 0.

    Args:
        past: see `past_of`.
        vocabulary_size: how many token ids there are.
    """
    tokens, prompt, new = (past[name] for name in ("tokens", "prompt", "new"))
    rows = jnp.arange(len(tokens))[:, None]
    seen = jnp.full((len(tokens), vocabulary_size), -1, jnp.int32)
    seen = seen.at[rows, tokens].max(jnp.where(prompt | new, 0, -1), mode="drop")
    return seen.at[rows, tokens].add(new.astype(jnp.int32), mode="drop")


def biases_of(penalties: Arrays, vocabulary_size: int) -> jax.Array:
    """Return the bias of each token, float32[rows, vocabulary], or of one row if all have one."""
    biased, bias = (penalties[name].reshape(-1, MOST_BIASED) for name in ("biased", "bias"))
    rows = jnp.arange(len(biased))[:, None]
    zeros = jnp.zeros((len(biased), vocabulary_size), jnp.float32)
    return zeros.at[rows, biased].add(bias, mode="drop")


def penalized(
    logits: jax.Array, penalties: Arrays, seen: jax.Array, biases: jax.Array
) -> jax.Array:
    """Return the logits after penalties, float32[rows, vocabulary]; see `Penalties`.

    Args:
        logits: float[rows, vocabulary].
        penalties: from `Penalties.arrays`, of one row or of all.
        seen: see `seen_in`.
        biases: see `biases_of`.
    """
    logits = jax.lax.optimization_barrier(logits).astype(jnp.float32)
    repetition, presence, frequency = (penalties[name].reshape(-1, 1) for name in _NUMBERS)
    logits = logits + biases
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen >= 0, repeated, logits)
    return logits - frequency * jnp.maximum(seen, 0) - presence * (seen > 0)


def are_asked(penalties: Arrays) -> jax.Array:
    """Tell which rows have penalties, bool[rows]."""
    others = (penalties["presence"] != 0) | (penalties["frequency"] != 0)
    return (penalties["repetition"] != 1) | others | (penalties["bias"] != 0).any(axis=-1)


class Penalized:
    """Choose as another strategy does, of logits after penalties.

    Args:
        strategy: how tokens are chosen.
        penalties: of all rows.
        operation: what was called, for errors.

    Raises:
        SurgeryError: beam search, which compares texts by their logits as they are.
    """

    width = 1
    read: tuple[str, ...] = ()

    def __init__(self, strategy: Strategy, penalties: Penalties, operation: str) -> None:
        if strategy.width > 1:
            raise SurgeryError(
                f"{operation} at 'penalties': expected a sampler that keeps one text. Received "
                "beam search. Compile with another sampler, such as 'greedy', or leave penalties "
                "out."
            )
        self._strategy, self._penalties = strategy, penalties
        self.key = ("penalized", *strategy.key)

    def settings(self) -> Arrays:
        """Return the penalties, and the settings of the strategy."""
        return {"penalties": self._penalties.arrays(), "own": self._strategy.settings()}

    def start(self, seeds: np.ndarray) -> Arrays:
        """Return the state of the strategy. seeds: uint32[batch, 2]."""
        return {"of": self._strategy.start(seeds)}

    def choose(
        self, logits: jax.Array, done: jax.Array, state: Arrays, settings: Arrays
    ) -> tuple[jax.Array, jax.Array | None, Arrays]:
        """Choose a token for each row; `settings` have the `past`, too.

        After the first token the state has what was seen, and the biases: to write single numbers
        to tables of all tokens at each step is slow on a TPU.
        """
        penalties, size = settings["penalties"], logits.shape[-1]
        seen = state["seen"] if "seen" in state else seen_in(settings["past"], size)
        biases = state["biases"] if "biases" in state else biases_of(penalties, size)
        logits = penalized(logits, penalties, seen, biases)
        tokens, parents, own = self._strategy.choose(logits, done, state["of"], settings["own"])
        seen = jnp.where(jnp.arange(size) == tokens[:, None], jnp.maximum(seen, 0) + 1, seen)
        biases = jnp.broadcast_to(biases, logits.shape)
        return tokens, parents, {"of": own, "seen": seen, "biases": biases}
