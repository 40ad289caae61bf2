"""Finding a condition: the block and the threshold by which a vector tells texts apart best."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.numbers import check_count, is_int
from backbone_surgery.opening.site import places, select
from backbone_surgery.rewriting import Condition
from backbone_surgery.rewriting.control import Tokens, read_tokens, token_rows
from backbone_surgery.rewriting.steering import in_range
from backbone_surgery.vectors.activations import check_task, measure, read_texts
from backbone_surgery.vectors.vector import ControlVector, check_fits

_OPERATION = "find_condition"


@dataclass(frozen=True, eq=False)
class FoundCondition:
    """What `find_condition` found.

    Attributes:
        at: the site that is watched, such as `blocks.3`.
        vector: float32[hidden_dim], the direction there; turned round, where texts that are to meet
            the condition have the smaller similarity.
        threshold: what the similarity has to exceed.
        signed: whether that is the cosine, or its absolute value.
        tokens: which tokens are watched.
        f1: how well the condition tells the texts apart that it was found with, from 0 to 1: the
            harmonic mean of the share of texts that meet it rightly among those that meet it, and
            among those that should.
        f1_by_site: the best `f1` of each site that was tried.
    """

    at: str
    vector: np.ndarray = field(repr=False)
    threshold: float
    signed: bool
    tokens: Tokens
    f1: float
    f1_by_site: Mapping[str, float]

    def condition(self, name: str) -> Condition:
        """Return the `Condition`, under a name of yours."""
        return Condition(name, self.vector, self.threshold, self.at, self.tokens, self.signed)


def find_condition(
    lm: Any,
    vector: ControlVector,
    positives: Iterable[Any],
    negatives: Iterable[Any],
    at: str = "blocks.*",
    tokens: Tokens = "prompt",
    before: int | None = None,
    batch_size: int = 32,
    controls: Mapping[str, Any] | None = None,
) -> FoundCondition:
    """Find where a `Condition` should watch for a vector, and with what threshold.

    Of each site, and of cos, -cos and |cos|, every threshold between two texts is tried; that of
    the largest F1 wins, and of equal ones that in the widest gap. Keep some texts of both kinds
    aside, to see how well it does with others.

    Source: the search of conditional activation steering, Lee et al. 2024, arXiv:2409.05907.

    Args:
        lm: a `CachedCausalLM`.
        vector: a control vector that points from one kind of texts to the other.
        positives: prompts that are to meet the condition; sequences of token ids for a model
            without a preprocessor.
        negatives: prompts that are not.
        at: selector of the sites to try, one in each block; those of blocks that the vector has a
            direction for are tried.
        tokens: which tokens are watched, as of `Condition`.
        before: the first block that is to be steered; a condition steers later blocks than its own.
            By default all but the last block are tried.
        batch_size: how many texts to run at once.
        controls: values for the controls of the model, as of `generate`.

    Returns:
        A `FoundCondition`.

    Raises:
        SurgeryError: no texts, texts without a token in the range, a vector for another model, no
            block to watch, or no threshold that a text of the first kind is above.

    Examples:
        >>> import backbone_surgery as bs, keras_hub, numpy as np
        >>> lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(50, 3, 2, 8, 16))
        >>> vector = bs.ControlVector({0: np.ones(8), 1: np.ones(8)})
        >>> found = bs.find_condition(lm, vector, [[1, 2], [1, 3]], [[4, 5], [6, 5]])
        >>> edits = [found.condition("seen"), bs.Steer("mood", {2: np.ones(8)}, when="seen")]
        >>> type(bs.operate(lm.backbone, edits)).__name__
        'EditedBackbone'
    """
    check_task(lm, _OPERATION)
    check_count(_OPERATION, "batch_size", batch_size, "texts")
    if not isinstance(vector, ControlVector):
        raise SurgeryError(
            f"{_OPERATION}: expected a ControlVector. Received {shown(vector)}. Train one by "
            "`ControlVector.train`, or load one."
        )
    tokens = read_tokens(tokens, _OPERATION)
    check_fits(lm, vector, _OPERATION)
    watched = _watched(lm, vector, at, before)
    first, second = (read_texts(lm, texts, _OPERATION) for texts in (positives, negatives))
    ranges = _ranges([*first, *second], tokens)
    directions = np.stack([vector.directions[block] for block in watched.values()])
    measured = measure(
        lm,
        [*first, *second],
        Similarities,
        _OPERATION,
        at=at,
        asked=(directions[None], ranges),
        batch_size=batch_size,
        controls=controls,
    )
    tried = [_best(measured[path][:, :, i], len(first)) for i, path in enumerate(watched)]
    if not any(tried):
        raise SurgeryError(
            f"{_OPERATION}: expected texts that differ along the vector, some of the first kind "
            "more similar to it than some of the second. Received none. Pass other texts, or watch "
            "other tokens."
        )
    scores = {path: cut.f1 if cut else 0.0 for path, cut in zip(watched, tried, strict=True)}
    cuts = [(cut, path) for cut, path in zip(tried, watched, strict=True) if cut is not None]
    cut, path = max(cuts, key=lambda pair: (pair[0].f1, pair[0].gap))
    direction = vector.directions[watched[path]] * (-1 if cut.turned else 1)
    return FoundCondition(path, direction, cut.threshold, not cut.absolute, tokens, cut.f1, scores)


def _watched(lm: Any, vector: ControlVector, at: str, before: Any) -> dict[str, int]:
    """Return the sites to try, with their blocks: those with a direction, and blocks behind."""
    found = places(lm.opened)
    last = max((p.block for p in found if p.block is not None), default=0)
    if before is not None and not (is_int(before) and 1 <= before <= last):
        raise SurgeryError(
            f"{_OPERATION} at 'before': expected a block from 1 to {last}. Received "
            f"{shown(before)}. Pass the first one that is to be steered."
        )
    paths = select(at, [place.path for place in found])
    limit = last if before is None else before
    blocks = {place.path: place.block for place in found if place.path in paths}
    chosen = {path: block for path, block in blocks.items() if block is not None and block < limit}
    watched = {path: block for path, block in chosen.items() if block in vector.directions}
    for place in found:
        if place.path in watched and place.shape[2:] != (vector.hidden_dim,):
            raise SurgeryError(
                f"{_OPERATION} at '{place.path}': expected sites of hidden states of the size of "
                f"the vector, [{vector.hidden_dim}]. Received {list(place.shape[2:])}. Select "
                "others by `at`."
            )
    if not watched or len({*watched.values()}) < len(watched):
        raise SurgeryError(
            f"{_OPERATION} at '{at}': expected one site in each block, and a direction for one of "
            f"the blocks before {limit}. Received sites {[*chosen]} and directions "
            f"for blocks {list(vector.directions)}. Select other sites, or pass another vector."
        )
    return watched


def _ranges(rows: list[np.ndarray], tokens: Tokens) -> np.ndarray:
    """Return the tokens of each text that are watched, int32[texts, 3]."""
    lengths = np.array([len(row) for row in rows])
    ranges = token_rows(tokens, lengths, _OPERATION)
    empty = ranges[:, 0] >= np.minimum(ranges[:, 1], lengths)
    if empty.any():
        raise SurgeryError(
            f"{_OPERATION} at 'tokens': expected a range that each text has tokens in. Received "
            f"{tokens!r}, and a text of {lengths[empty.argmax()]} tokens, all of them a prompt. "
            "Pass longer texts, or another range."
        )
    return ranges


class _Cut(NamedTuple):
    """A threshold between texts.

    Attributes:
        f1: how well it tells them apart.
        gap: how far apart the two similarities are that it lies between.
        threshold: the middle of them.
        turned: whether the direction is turned round.
        absolute: whether absolute values are compared.
    """

    f1: float
    gap: float
    threshold: float
    turned: bool
    absolute: bool


def _best(similarities: np.ndarray, count: int) -> _Cut | None:
    """Return the best cut at one site; `None` if no cut is met by a text that should meet it.

    Args:
        similarities: float[texts, 2], the largest -cos and cos of each text.
        count: how many texts are to meet the condition, the first ones.
    """
    ways = {
        (False, False): similarities[:, 1],
        (True, False): similarities[:, 0],
        (False, True): similarities.max(axis=1),
    }
    cuts = []
    for (turned, absolute), values in ways.items():
        steps = np.unique(np.asarray(values, "float64"))
        middles, gaps = (steps[1:] + steps[:-1]) / 2, steps[1:] - steps[:-1]
        met = values[None] > middles[:, None]
        right = met[:, :count].sum(axis=1)
        scores = 2 * right / (met.sum(axis=1) + count)
        cuts += [
            _Cut(float(score), float(gap), float(middle), turned, absolute)
            for score, gap, middle in zip(scores, gaps, middles, strict=True)
            if score > 0
        ]
    return max(cuts, key=lambda cut: (cut.f1, cut.gap), default=None)


class Similarities(keras.layers.Layer):
    """Give the smallest and the largest cosine of some tokens with some directions.

    Call arguments:
        x: float[batch, time, hidden_dim].
        positions: int32[batch, time].
        padding_mask: int or bool[batch, time].
        directions: float32[batch, directions, hidden_dim].
        tokens: int32[batch, 3], as of `SteeringScale`.

    Returns:
        float32[batch, 2, directions]: of -cos and of cos, the largest; -inf without such tokens.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)

    def call(self, x, positions, padding_mask, directions, tokens):
        """Compare as `Condition` does; accelerators round this product otherwise."""
        h = ops.cast(x, "float32")
        norms = ops.sum(ops.square(h), axis=-1)[:, :, None]
        norms = norms * ops.sum(ops.square(directions), axis=-1)[:, None]
        along = ops.matmul(h, ops.swapaxes(directions, 1, 2))
        cosines = along / ops.maximum(ops.sqrt(norms), 1e-12)
        watched = ops.logical_and(in_range(positions, tokens), ops.cast(padding_mask, "bool"))
        both = ops.stack([-cosines, cosines], axis=1)
        return ops.max(ops.where(watched[:, None, :, None], both, -np.inf), axis=2)

    def compute_output_spec(self, x, positions, padding_mask, directions, tokens):
        """Two numbers for each row and direction."""
        batch, count, _ = directions.shape
        return keras.KerasTensor((batch, 2, count), "float32")
