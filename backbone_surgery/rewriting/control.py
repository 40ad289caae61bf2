"""What a call may set of a steering rewrite: strength, directions and tokens, as arrays of rows."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.numbers import is_int, read_finite, read_number
from backbone_surgery.opening.layers import UNKNOWN
from backbone_surgery.rewriting.amounts import bind_amounts
from backbone_surgery.rewriting.directions import check_any_directions

LAST = np.iinfo(np.int32).max
"""A position after every token."""

SCHEDULE_STEPS = 64
"""Schedules up to this many steps share one compiled program; each doubling takes another."""

_MOST_STEPS = 2**20

Tokens = str | tuple[int | None, int | None]


@dataclass(frozen=True)
class Schedule:
    """A strength that changes from one generated token to the next.

    Step i is the i-th generated token; after the last value the last one holds.

    Attributes:
        values: the strength at each step, at least one.
        prompt: the strength over the prompt; `None` takes the first of `values`.

    Raises:
        SurgeryError: `values` are no finite numbers, or too many.

    Examples:
        >>> import backbone_surgery as bs
        >>> bs.Schedule.linear(2.0, 0.0, steps=5).values
        (2.0, 1.5, 1.0, 0.5, 0.0)
    """

    values: Sequence[float]
    prompt: float | None = None

    def __post_init__(self) -> None:
        values = read_finite(self.values)
        prompt = None if self.prompt is None else read_number(self.prompt)
        if (
            values is None
            or values.ndim != 1
            or len(values) > _MOST_STEPS
            or (prompt is None and self.prompt is not None)
        ):
            raise SurgeryError(
                "Schedule: expected a list of finite strengths, one for each generated token, at "
                f"most {_MOST_STEPS}. Received values {shown(self.values)} and prompt "
                f"{shown(self.prompt)}. Pass numbers."
            )
        object.__setattr__(self, "values", tuple(values.tolist()))
        object.__setattr__(self, "prompt", prompt)

    @classmethod
    def linear(
        cls, start: float, stop: float, steps: int, prompt: float | None = None
    ) -> "Schedule":
        """Go from one strength to another in equal steps.

        Args:
            start: the strength of the first generated token.
            stop: that of the last step; it holds from there on.
            steps: how many tokens that takes.
            prompt: as of `Schedule`.

        Raises:
            SurgeryError: a strength is not finite, or `steps` no positive int.
        """
        first, last = read_number(start), read_number(stop)
        counted = is_int(steps) and 1 <= steps <= _MOST_STEPS
        if first is None or last is None or not counted:
            raise SurgeryError(
                f"Schedule.linear: expected two finite strengths, and from 1 to {_MOST_STEPS} "
                f"steps. Received {shown(start)}, {shown(stop)} and {shown(steps)}. Pass numbers."
            )
        return cls(np.linspace(first, last, int(steps)).tolist(), prompt)

    def table(self) -> np.ndarray:
        """Return the strength over the prompt, then that of each step: float32[1 + steps]."""
        prompt = self.values[0] if self.prompt is None else self.prompt
        return np.array([prompt, *self.values], "float32")


@dataclass(frozen=True, eq=False)
class Control:
    """What a call may change of a `Steer`; `None` leaves it as the rewrite was built.

    Of a `ProjectOut` it may change the strength, the directions and the tokens, of a `Reft` the
    strength and the tokens, of a `Condition` the threshold and the tokens.

    Attributes:
        strength: a number, float[batch], float[batch, blocks], a `Schedule`, or a list of a number
            or a `Schedule` for each row.
        directions: a vector for all rows (a `ControlVector` or `{block: array}`), a list of one
            for each row, or float[batch, blocks, hidden_dim]. Blocks that it leaves out are not
            steered; blocks that the rewrite does not steer are an error. Of a `ProjectOut`
            an array float[hidden_dim] or float[directions, hidden_dim] for all rows, a list of one
            for each row, or float[batch, directions, hidden_dim]; they span at most as much as
            those of the rewrite.
        tokens: as of `Steer`, for all rows, or a list of one for each row. A list of two integers,
            such as `[0, 12]`, is one range for all rows.
        threshold: of a `Condition` alone: a number, or one for each row.

    Raises:
        SurgeryError: a field that no model could use.

    Examples:
        >>> import backbone_surgery as bs
        >>> control = bs.Control(strength=[1.0, -1.0], tokens=["prompt", (0, 12)])
        >>> control = bs.Control(strength=1.5, tokens=(-1, None))
    """

    strength: Any = None
    directions: Any = None
    tokens: Any = None
    threshold: Any = None

    def __post_init__(self) -> None:
        # How many rows and blocks there are is not known yet; what could never be used is.
        if self.strength is not None:
            _check_strength(self.strength, "Control")
        if self.directions is not None:
            check_any_directions(self.directions, "Control")
        if self.tokens is not None:
            for tokens in _listed(self.tokens, 1):
                read_tokens(tokens, "Control")
        if self.threshold is not None:
            read_thresholds(self.threshold, "Control")

    def check_only(self, parts: Collection[str], where: str, kind: str) -> None:
        """Refuse fields that a kind of rewrite does not take; `parts` are those that it does."""
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        wrong = [name for name in given if name not in parts]
        if wrong:
            raise SurgeryError(
                f"{where}: expected a Control of {' and '.join(parts)}, which is what a call may "
                f"change of a {kind}. Received {' and '.join(wrong)}. Leave that out."
            )


def read_thresholds(value: Any, where: str) -> np.ndarray:
    """Read thresholds of cosines, one or one for each row."""
    array = read_finite(value)
    if array is None or array.ndim > 1 or (np.abs(array) > 1).any():
        raise SurgeryError(
            f"{where}: expected thresholds from -1 to 1, one or one for each row. Received "
            f"{shown(value)}. Pass cosines."
        )
    return array


def read_tokens(tokens: Any, where: str) -> Tokens:
    """Read which tokens to act on: a word, or a range of positions as a tuple.

    Args:
        tokens: `"all"`, `"prompt"`, `"generated"`, `"last"`, or `(start, stop)`, where `None` is
            open, and negative positions count from the end of the prompt; a list or an array of two
            is taken as the tuple is.
        where: for the error.
    """
    if isinstance(tokens, str) and tokens in _ranges(0):
        return tokens
    if _is_pair(tokens):
        start, stop = (None if x is None else int(x) for x in tokens)
        first, after = start or 0, LAST if stop is None else stop
        is_ordered = first < after if after > 0 else first < after < 0 or after < 0 <= first
        if -LAST <= min(first, after) and max(first, after) <= LAST and is_ordered:
            return start, stop
    raise SurgeryError(
        f"{where}: expected tokens 'all', 'prompt', 'generated', 'last' or (start, stop) with "
        f"{-LAST} <= start < stop <= {LAST}. Received {shown(tokens)}. Choose one of them."
    )


def _is_from_end(tokens: Tokens) -> bool:
    """Tell whether a choice of tokens depends on where the prompt ends, and on nothing else."""
    return tokens == "last" or any(isinstance(x, int) and x < 0 for x in tokens)


def check_trained_tokens(tokens: Tokens, where: str) -> None:
    """Refuse tokens that are in no pass of `fit`, for what has yet to learn."""
    if tokens == "generated" or _is_from_end(tokens):
        raise SurgeryError(
            f"{where}: expected tokens that `fit` knows. Received {tokens!r}: in training all "
            "tokens count as the prompt. Train with tokens='all', and pass "
            f"`Control(tokens={tokens!r})` to `generate`."
        )


def default_tokens(tokens: Tokens) -> np.ndarray:
    """Return a row of `token_rows` for a run of the graph alone, where all tokens are a prompt.

    Where the prompt ends is not known there.
    """
    if _is_from_end(tokens):
        return np.full(3, UNKNOWN)
    return np.array([*_range(tokens, LAST), LAST], np.int32)


def token_rows(tokens: Any, prompt_lengths: np.ndarray, where: str) -> np.ndarray:
    """Return int32[batch, 3]: first position, the one after the last, and the prompt's length."""
    lengths = prompt_lengths.tolist()
    listed = _listed(tokens, len(lengths))
    if len(listed) != len(lengths):
        raise SurgeryError(
            f"{where}: expected tokens for {len(lengths)} rows. Received {len(listed)}. Pass one "
            "choice for all rows, or a list of one for each."
        )
    choices = [read_tokens(tokens, where) for tokens in listed]
    rows = [(*_range(t, n), n) for t, n in zip(choices, lengths, strict=True)]
    return np.array(rows, np.int32)


def is_after(watched: Any, steered: Any) -> bool:
    """Tell whether tokens are watched only after those that are steered, whatever the prompt.

    Args:
        watched: which tokens, for all rows, or a list of one choice for each.
        steered: likewise.
    """
    pairs = [(w, s) for w in _listed(watched, 1) for s in _listed(steered, 1)]
    lengths = (*range(1, 65), LAST // 2)
    return all(_range(w, n)[0] >= _range(s, n)[1] for w, s in pairs for n in lengths)


def range_before(row: np.ndarray, end: int) -> np.ndarray | None:
    """Return first position and stop of a row of `token_rows`, as far as `end`; `None` if empty."""
    start, stop = row[0, :2]
    return np.array([start, min(stop, end)]) if start < min(stop, end) else None


def strength_rows(value: Any, batch: int, blocks: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return strengths float32[batch, blocks] and schedules float32[batch, 1 + steps].

    The strength at a token is the product of the two.
    """
    rows = [value] * batch if isinstance(value, Schedule) else value
    if not _holds_schedule(rows):
        ones = np.ones((batch, 1 + SCHEDULE_STEPS), "float32")
        return bind_amounts(value, where, batch, (blocks,), ", or a Schedule"), ones
    numbers = [1.0 if isinstance(r, Schedule) else r for r in rows]
    tables = [r.table() if isinstance(r, Schedule) else np.ones(2, "float32") for r in rows]
    width = schedule_width(max(len(t) - 1 for t in tables))
    padded = [np.pad(t, (0, width - len(t)), mode="edge") for t in tables]
    strengths = bind_amounts(numbers, where, batch, (blocks,), ", or a Schedule")
    return strengths, np.broadcast_to(np.stack(padded), (batch, width))


def schedule_width(steps: int) -> int:
    """Return how many factors the input of a schedule of so many steps has, with the prompt's."""
    return 1 + (1 << (max(steps, SCHEDULE_STEPS) - 1).bit_length())


def _check_strength(value: Any, where: str) -> None:
    """Refuse what is a strength for no number of rows and blocks."""
    rows = value if _holds_schedule(value) else [value]
    for numbers in (row for row in rows if not isinstance(row, Schedule)):
        array = read_finite(numbers)
        if array is None or array.ndim > 2:
            raise SurgeryError(
                f"{where}: expected a finite strength, one for each row, or a Schedule. Received "
                f"{shown(value)}. Pass one of these."
            )


def _holds_schedule(rows: Any) -> bool:
    return isinstance(rows, list | tuple) and any(isinstance(r, Schedule) for r in rows)


def _ranges(prompt_length: int) -> dict[str, tuple[int, int]]:
    n = prompt_length
    return {"all": (0, LAST), "prompt": (0, n), "generated": (n, LAST), "last": (n - 1, n)}


def _range(tokens: Tokens, prompt_length: int) -> tuple[int, int]:
    """Return the positions `(start, stop)` that a choice of tokens means for one row."""
    if isinstance(tokens, str):
        return _ranges(prompt_length)[tokens]
    start, stop = tokens[0] or 0, LAST if tokens[1] is None else tokens[1]
    start, stop = (max(x + prompt_length, 0) if x < 0 else x for x in (start, stop))
    return start, stop


def _is_pair(tokens: Any) -> bool:
    """Tell whether two integers were passed, either of which may be open.

    A list of two `None` is none: it may be meant as one for each of two rows.
    """
    if isinstance(tokens, np.ndarray):
        return tokens.shape == (2,) and tokens.dtype.kind in "iu"
    listed = isinstance(tokens, tuple | list) and len(tokens) == 2
    rows = isinstance(tokens, list) and all(x is None for x in tokens)
    return listed and not rows and all(x is None or is_int(x) for x in tokens)


def _listed(tokens: Any, batch: int) -> list[Any]:
    """Return a choice of tokens for each row; a list of two integers is one choice for all."""
    by_row = isinstance(tokens, list) or (isinstance(tokens, np.ndarray) and tokens.ndim == 2)
    return list(tokens) if by_row and not _is_pair(tokens) else [tokens] * batch
