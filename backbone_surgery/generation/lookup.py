"""Prompt lookup: guess the next tokens from the text itself, and run them in one pass.

A text that repeats itself, such as a story, a summary or code, often goes on as it did after the
same tokens earlier. What mostly followed them is run together with the last token. Of these guesses
those are kept that the model would have chosen itself, and its own choice follows them. So the text
is the one that it makes token by token.

Source: prompt lookup decoding, Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding;
guesses are checked as in Leviathan et al. 2023, arXiv:2211.17192.
"""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from backbone_surgery import target
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.penalties import Penalized
from backbone_surgery.generation.samplers import Arrays, Strategy
from backbone_surgery.kernels import calls
from backbone_surgery.numbers import is_int
from backbone_surgery.opening.state import StateSpec

MOST = 16
"""Guesses: with the last token they fit into the shortest cache."""

_LONGEST, _PLACES = 8, 8
"""Tokens that are compared with those before, and places where they came that have a vote."""

_DOUBT = 4.0
"""Votes that none of the places has: what they went on with may be new."""

_MARGIN = 1 / 16
"""Right guesses to expect of each that is run, beyond what it costs."""

_TRUST, _REGAIN = 2.0, 1 / 64
"""Trust at first and at most, in right guesses, and what each step of one token gives back."""


def look_up(
    strategy: Strategy,
    tokens: int | None,
    rows: int,
    states: Iterable[Mapping[str, StateSpec]],
    has_format: bool,
    operation: str,
) -> Strategy:
    """Have a strategy choose for guesses too.

    Args:
        strategy: how tokens are chosen.
        tokens: how many to guess at once; `None` leaves the strategy as it is.
        rows: how many are run at once.
        states: of the graph, see `BackboneWithCache`.
        has_format: whether a row has a response format.
        operation: what was called, for errors.

    Raises:
        SurgeryError: these cannot be run with guesses.
    """
    if tokens is None:
        return strategy
    if not is_int(tokens) or not 1 <= tokens <= MOST:
        raise SurgeryError(
            f"{operation} at 'lookup': expected an int from 1 to {MOST}, or None. Received "
            f"{shown(tokens)}. Pass how many tokens to guess at once, such as 4."
        )
    if rows != 1:
        raise SurgeryError(
            f"{operation} at 'lookup': expected one prompt at a time. Received {rows}. Pass one, "
            "or `batch_size=1` to `generate`. Or leave `lookup` out: rows that run together share "
            "the reading of the weights already."
        )
    if strategy.width > 1:
        raise SurgeryError(
            f"{operation} at 'lookup': expected a sampler that keeps one text. Received beam "
            "search. Compile with another sampler, such as 'greedy', or leave `lookup` out."
        )
    if isinstance(strategy, Penalized) or has_format:
        name = "response_format" if has_format else "penalties"
        raise SurgeryError(
            f"{operation} at 'lookup': expected tokens that are chosen by the logits alone. "
            f"Received `{name}` too, which depends on each token before. Leave one out."
        )
    fixed = [s.name for specs in states for s in specs.values() if s.slot_axis is None]
    if fixed:
        raise SurgeryError(
            f"{operation} at 'lookup': expected layers whose state has an entry for each token, so "
            f"that wrong guesses can be taken back. Received one that keeps '{fixed[0]}', one "
            "array for the whole text. Leave `lookup` out."
        )
    return LookUp(strategy, tokens)


def _price(tokens: int) -> float:
    """Return what a pass over some guesses costs more than one of a token, in such passes.

    Measured on a CPU, see docs/performance.md, and on no other chip.
    """
    if target.platform() == "cpu" and not calls.available():
        return 0.5 + tokens / 16
    if target.platform() == "cpu" and tokens > 8:  # arithmetic takes longer than memory
        return (tokens - 4) / 16
    return tokens / 32


class LookUp:
    """Choose by another strategy, for guesses too. For one row: the first one decides.

    Guesses that turn out wrong use up trust, and right ones give it back. Without trust there are
    none, until enough steps were taken: a text that does not repeat itself loses little.

    Args:
        strategy: how tokens are chosen; of width one.
        tokens: how many tokens to guess.
    """

    width = 1
    read: tuple[str, ...] = ()

    def __init__(self, strategy: Strategy, tokens: int) -> None:
        self.strategy, self.tokens = strategy, tokens
        self.key = (LookUp, tokens, strategy.key)
        self._price = _price(tokens)

    def settings(self) -> Arrays:
        """Return the traced settings."""
        return self.strategy.settings()

    def start(self, seeds: np.ndarray) -> Arrays:
        """Return the state before the first token."""
        return {"of": self.strategy.start(seeds), "trust": np.float32(_TRUST)}

    def choose(
        self, logits: jax.Array, done: jax.Array, state: Arrays, settings: Arrays
    ) -> tuple[jax.Array, jax.Array | None, Arrays]:
        """Choose one token for each row."""
        tokens, parents, own = self.strategy.choose(logits, done, state["of"], settings)
        trust = jnp.minimum(state["trust"] + _REGAIN, _TRUST)
        return tokens, parents, {"of": own, "trust": trust}

    def guess(self, state: Arrays) -> tuple[jax.Array, jax.Array]:
        """Guess what follows the last tokens: what mostly followed the same ones earlier.

        Of earlier places those have a vote where the most tokens before are the same, and of these
        the latest. Each of these tokens doubles the vote. Those that go on with another token than
        was guessed have none in the next guess.

        Args:
            state: of a generation.

        Returns:
            int32[tokens], and bool[], whether to run them.
        """
        tokens, known, slot = state["tokens"][0], state["cache_mask"][0], state["slot"]
        equal, places = _most_alike(_count_equal(tokens, known, slot - 1))
        votes = jnp.where(equal > 0, jnp.exp2(equal.astype(jnp.float32)), 0)
        guesses, right, expected = [], jnp.float32(1), jnp.float32(0)
        for ahead in range(self.tokens):
            following = tokens[places + 1 + ahead]
            same = (following[:, None] == following) & (votes > 0)[:, None]
            sums = (same * votes).sum(axis=1)
            best = jnp.argmax(sums)
            right = right * sums[best] / (votes.sum() + _DOUBT)
            expected = expected + right
            guesses.append(following[best])
            votes = jnp.where(following == guesses[-1], 2 * votes, 0)
            # A place close to the end goes on with what is guessed.
            tokens = jax.lax.dynamic_update_slice(tokens, guesses[-1][None], (slot + ahead,))
        room = slot + self.tokens < len(tokens)
        likely = expected > self._price + self.tokens * _MARGIN
        return jnp.stack(guesses), likely & room & (state["draws"]["trust"] > 0)

    def choose_all(
        self, logits: jax.Array, guesses: jax.Array, state: Arrays, arguments: Arrays
    ) -> Arrays:
        """Choose after the last token and after each guess, and keep what is right.

        Args:
            logits: float[rows, 1 + guesses, vocabulary].
            guesses: int32[guesses].
            state: of the generation.
            arguments: of the generation.

        Returns:
            The state, with one token more than guesses were right. Where the row ends earlier, by a
            stop token or its budget, it has those up to there.
        """
        slot, done = state["slot"], state["done"]
        tokens, after = self._choose_each(logits, state, arguments["settings"])
        right = jnp.cumprod(tokens[0, :-1] == guesses).sum(dtype=jnp.int32)
        stops = (tokens[0, :, None] == arguments["stop_ids"]).any(axis=1)
        left = arguments["budget"][0] - (slot - state["start"])
        first_stop = jnp.where(stops.any(), jnp.argmax(stops), self.tokens).astype(jnp.int32)
        kept = jnp.minimum(jnp.minimum(right, first_stop) + 1, left)
        ended = (kept > first_stop) & stops.any() | (kept == left)
        trust = jnp.minimum(state["draws"]["trust"] + right - self._price, _TRUST)
        own = jax.tree.map(lambda x: x[kept - 1], after)
        return {
            **state,
            "tokens": jax.lax.dynamic_update_slice_in_dim(state["tokens"], tokens, slot, 1),
            "done": done | ended,
            "slot": slot + kept,
            "draws": {"of": own, "trust": trust},
        }

    def _choose_each(
        self, logits: jax.Array, state: Arrays, settings: Arrays
    ) -> tuple[jax.Array, Arrays]:
        """Choose after each token: int32[rows, 1 + guesses], and the states after, stacked."""
        done, own = state["done"], state["draws"]["of"]
        if not jax.tree.leaves(own) and len(logits) == 1:  # nothing is drawn: all at once
            tokens, _, own = self.strategy.choose(logits[0], done, own, settings)
            return tokens[None], own
        chosen, after = [], []
        for i in range(1 + self.tokens):
            tokens, _, own = self.strategy.choose(logits[:, i], done, own, settings)
            chosen.append(tokens)
            after.append(own)
        return jnp.stack(chosen, axis=1), jax.tree.map(lambda *x: jnp.stack(x), *after)


def _count_equal(tokens: jax.Array, known: jax.Array, last: jax.Array) -> jax.Array:
    """Count for each slot how many tokens up to it are those up to the last one: int32[slots]."""
    slots = jnp.arange(len(tokens), dtype=jnp.int32)
    alike, equal = slots < last, jnp.zeros(len(tokens), jnp.int32)
    for back in range(min(_LONGEST, len(tokens))):
        there = (slots >= back) & jnp.roll(known, back) & known[last - back]
        alike = alike & there & (jnp.roll(tokens, back) == tokens[last - back])
        equal = equal + alike
    return equal


def _most_alike(equal: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Find the slots with the largest counts, of these the latest: counts and slots, int32[n]."""
    length, found = len(equal), []
    ranks = equal * length + jnp.arange(length, dtype=jnp.int32)
    for _ in range(min(_PLACES, length)):  # on a CPU much faster than `top_k`
        found.append(ranks.max())
        ranks = jnp.where(ranks == found[-1], -1, ranks)
    return jnp.divmod(jnp.stack(found), length)
