"""What can be given at run time for a steering rewrite, and how it becomes one array a row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError

LAST = np.iinfo(np.int32).max
"""A position after every token."""

SCHEDULE_STEPS = 64
"""Schedules up to this many steps share one compiled program; each doubling takes another."""

Tokens = str | tuple[int | None, int | None]


@dataclass(frozen=True)
class Schedule:
    """A strength that changes from one generated token to the next.

    Step i is the i-th generated token; after the last value the last one holds.

    Attributes:
        values: the strength at each step, at least one.
        prompt: the strength over the prompt; `None` takes the first of `values`.

    Example:
        >>> import backbone_surgery as bs
        >>> bs.Schedule.linear(2.0, 0.0, steps=5).values
        (2.0, 1.5, 1.0, 0.5, 0.0)
    """

    values: Sequence[float]
    prompt: float | None = None

    def __post_init__(self) -> None:
        values = np.asarray(self.values, "float32")
        prompt = np.float32(0 if self.prompt is None else self.prompt)
        if values.ndim != 1 or not len(values) or not np.isfinite([*values, prompt]).all():
            raise SurgeryError(
                "Schedule: expected a list of finite strengths, one for each generated token. "
                f"Received values {self.values!r} and prompt {self.prompt!r}. Pass numbers."
            )
        object.__setattr__(self, "values", tuple(values.tolist()))

    @classmethod
    def linear(cls, start: float, stop: float, steps: int, prompt: float | None = None):
        """Go from one strength to another in equal steps."""
        return cls(tuple(np.linspace(start, stop, steps).tolist()), prompt)

    def table(self) -> np.ndarray:
        """Return the strength over the prompt, then that of each step: float32[1 + steps]."""
        prompt = self.values[0] if self.prompt is None else self.prompt
        return np.array([prompt, *self.values], "float32")


@dataclass(frozen=True)
class Control:
    """Everything about a `Steer` that a call may change; what is `None` stays as it was made.

    Attributes:
        strength: a number, [batch], [batch, blocks], a `Schedule`, or a list of a number or a
            `Schedule` for each row.
        directions: a vector for all rows (a `ControlVector` or `{block: array}`), a list of one
            for each row, or float[batch, blocks, hidden_dim]. Blocks that it leaves out are not
            steered; blocks that the rewrite does not steer are an error.
        tokens: as of `Steer`, for all rows, or a list of one for each row.

    Example:
        >>> import backbone_surgery as bs
        >>> control = bs.Control(strength=[1.0, -1.0], tokens=["prompt", (0, 12)])
    """

    strength: Any = None
    directions: Any = None
    tokens: Any = None


def token_range(tokens: Any, prompt_length: int, where: str) -> tuple[int, int]:
    """Return the positions `(start, stop)` that a choice of tokens means for one row.

    Args:
        tokens: `"all"`, `"prompt"`, `"generated"`, or `(start, stop)`, where `None` is open.
        prompt_length: number of prompt tokens of the row.
        where: for the error.
    """
    named = {"all": (0, LAST), "prompt": (0, prompt_length), "generated": (prompt_length, LAST)}
    if isinstance(tokens, str) and tokens in named:
        return named[tokens]
    pair = list(tokens) if isinstance(tokens, tuple | list | np.ndarray) else []
    if len(pair) == 2 and all(x is None or _is_int(x) for x in pair):
        start, stop = (0 if pair[0] is None else pair[0]), (LAST if pair[1] is None else pair[1])
        if 0 <= start < stop <= LAST:
            return int(start), int(stop)
    raise SurgeryError(
        f"{where}: expected tokens 'all', 'prompt', 'generated' or (start, stop) with 0 <= start < "
        f"stop. Received {tokens!r}. Choose one of them."
    )


def token_rows(tokens: Any, prompt_lengths: np.ndarray, where: str) -> np.ndarray:
    """Return int32[batch, 3]: first position, the one after the last, and the prompt's length."""
    batch = len(prompt_lengths)
    per_row = isinstance(tokens, list) or (isinstance(tokens, np.ndarray) and tokens.ndim == 2)
    listed = list(tokens) if per_row else [tokens] * batch
    if len(listed) != batch:
        raise SurgeryError(
            f"{where}: expected tokens for {batch} rows. Received {len(listed)}. Pass one choice "
            "for all rows, or a list of one for each."
        )
    rows = [
        (*token_range(t, int(n), where), int(n))
        for t, n in zip(listed, prompt_lengths, strict=True)
    ]
    return np.array(rows, np.int32)


def strength_rows(value: Any, batch: int, blocks: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return strengths float32[batch, blocks] and schedules float32[batch, 1 + steps].

    The strength at a token is the product of the two.
    """
    rows = [value] * batch if isinstance(value, Schedule) else value
    scheduled = isinstance(rows, list | tuple) and any(isinstance(r, Schedule) for r in rows)
    if not scheduled:
        ones = np.ones((batch, 1 + SCHEDULE_STEPS), "float32")
        return _strengths(value, batch, blocks, where), ones
    numbers = [1.0 if isinstance(r, Schedule) else r for r in rows]
    tables = [r.table() if isinstance(r, Schedule) else np.ones(2, "float32") for r in rows]
    steps = max(SCHEDULE_STEPS, *(len(t) - 1 for t in tables))
    width = 1 + (1 << (steps - 1).bit_length())
    padded = [np.pad(t, (0, width - len(t)), mode="edge") for t in tables]
    return _strengths(numbers, batch, blocks, where), np.stack(padded)


def _strengths(value: Any, batch: int, blocks: int, where: str) -> np.ndarray:
    try:
        strength = np.asarray(value, "float32")
    except (TypeError, ValueError):
        strength = np.full(1, np.nan)
    if strength.ndim == 1:
        strength = strength[:, None]
    allowed = strength.ndim in (0, 2) and all(
        size in (1, wanted) for size, wanted in zip(strength.shape, (batch, blocks), strict=False)
    )
    if not allowed or not np.isfinite(strength).all():
        raise SurgeryError(
            f"{where}: expected a finite strength, a number, [{batch}] (one for each row), "
            f"[{batch}, {blocks}] (for each row and steered block), or a Schedule. Received "
            f"{value!r}. Pass one of these."
        )
    return np.broadcast_to(strength, (batch, blocks))


def direction_rows(
    value: Any, batch: int, blocks: Sequence[int], hidden_dim: int, where: str
) -> np.ndarray:
    """Return directions float32[batch, blocks, hidden_dim]."""
    wanted = (len(blocks), hidden_dim)
    if isinstance(value, np.ndarray) or hasattr(value, "__array__"):
        array = np.asarray(value, "float32")
        if array.shape in (wanted, (batch, *wanted)) and np.isfinite(array).all():
            return np.broadcast_to(array, (batch, *wanted))
    elif isinstance(value, Sequence) and len(value) == batch:
        return np.stack([_one_vector(v, blocks, hidden_dim, where) for v in value])
    elif hasattr(value, "directions") or isinstance(value, Mapping):
        one = _one_vector(value, blocks, hidden_dim, where)
        return np.broadcast_to(one, (batch, *wanted))
    received = getattr(value, "shape", value if not isinstance(value, Sequence) else len(value))
    raise SurgeryError(
        f"{where}: expected directions as a control vector, a list of {batch} (one for each row), "
        f"or finite float[{batch}, {wanted[0]}, {hidden_dim}]. Received {received!r}. Pass one of "
        "these."
    )


def read_directions(vector: Any, where: str) -> dict[int, np.ndarray]:
    """Read a control vector as `{block: float32[hidden_dim]}`: finite, and all of one size."""
    directions = getattr(vector, "directions", vector)
    if not isinstance(directions, Mapping) or not directions:
        raise SurgeryError(
            f"{where}: expected a vector that maps blocks to directions. Received {vector!r}. Pass "
            "a ControlVector or {block: array}."
        )
    arrays = {int(k): np.array(v, "float32") for k, v in directions.items()}
    shapes = {v.shape for v in arrays.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise SurgeryError(
            f"{where}: expected a vector that maps blocks to directions float[hidden_dim], all of "
            f"one size. Received shapes {sorted(shapes)}. Pass {{block: array}}."
        )
    broken = [k for k, v in arrays.items() if not np.isfinite(v).all()]
    if broken:
        raise SurgeryError(
            f"{where}: expected finite directions. Received NaN or Inf in those of blocks "
            f"{broken}. Train the vector again."
        )
    return dict(sorted(arrays.items()))


def _one_vector(value: Any, blocks: Sequence[int], hidden_dim: int, where: str) -> np.ndarray:
    directions = read_directions(value, where)
    size = len(next(iter(directions.values())))
    extra = sorted(set(directions) - set(blocks))
    if extra or size != hidden_dim:
        raise SurgeryError(
            f"{where}: expected directions of size {hidden_dim} for the steered blocks "
            f"{list(blocks)}. Received size {size}, for blocks {list(directions)}. Use a vector "
            "made for this model, and drop the other blocks."
        )
    rows = np.zeros((len(blocks), hidden_dim), "float32")
    for i, block in enumerate(blocks):
        rows[i] = directions.get(block, 0)
    return rows


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
