"""Attribution: gradient times activation, or times the change of it, for each site and token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from backbone_surgery.analysis.gradients import metric_gradients
from backbone_surgery.analysis.question import (
    bind_row,
    check_finite,
    check_selector,
    count_heads,
    make_metric,
    read_pair,
    read_text,
    shapes_at,
)
from backbone_surgery.analysis.ranking import ranked
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.numbers import check_count, check_flag

_OPERATION = "attribution"
_METRIC = "attribution at 'target'"


@dataclass(frozen=True, eq=False)
class Attribution:
    """What `attribution` returns.

    Attributes:
        values: float32[sites, tokens], gradient times activation, summed over features: by how
            much the metric falls, to first order, if that activation is removed. Against a
            corrupted text: by how much the metric of that rises if it gets that activation. By head
            float32[sites, heads], and by feature float32[sites, features], summed over tokens.
        metric: the metric of the text.
        sites: paths of the sites.
        tokens: labels of the text's tokens.
        by_head: whether the columns of `values` are heads.
        by_feature: whether they are features.
        corrupted: the metric of the corrupted text, if there is one.
    """

    values: np.ndarray
    metric: float
    sites: list[str]
    tokens: list[str]
    by_head: bool = False
    by_feature: bool = False
    corrupted: float | None = None

    @property
    def columns(self) -> list[str]:
        """Labels of the columns of `values`: the tokens, or the numbers of heads or features."""
        numbered = self.by_head or self.by_feature
        return [*map(str, range(self.values.shape[1]))] if numbered else self.tokens

    def __repr__(self) -> str:
        kind = "heads" if self.by_head else "features" if self.by_feature else "tokens"
        size = f"{len(self.sites)} sites x {self.values.shape[1]} {kind}"
        other = "" if self.corrupted is None else f", corrupted {self.corrupted:.4g}"
        return f"Attribution({size}; metric {self.metric:.4g}{other})"

    def top(self, count: int = 10) -> list[tuple[str, int, float]]:
        """Return the cells of the greatest values by magnitude: site, number of the column, value.

        Args:
            count: how many, at most.

        Raises:
            SurgeryError: `count` is no positive int.
        """
        check_count("Attribution.top", "count", count, "cells")
        cells = islice(ranked(np.abs(self.values)), int(count))
        return [(self.sites[s], column, float(self.values[s, column])) for s, column in cells]


def attribution(
    lm: CachedCausalLM,
    text: Any,
    target: Any,
    at: str = "blocks.*",
    controls: Mapping[str, Any] | None = None,
    by_head: bool = False,
    prompt_length: int | None = None,
    by_feature: bool = False,
    corrupted: Any = None,
) -> Attribution:
    """Attribute the next-token prediction to the activations at each site and token.

    With `corrupted` this is attribution patching: what `patch_grid` measures by a pass for each
    cell, to first order, for all cells at once. It is the change from the activation in the
    corrupted text to that in `text`, times the gradient in the corrupted text. At whole blocks of
    Gemma 3n it is of the active stream alone, where `patch_grid` takes all streams.

    Source: gradient times input, Shrikumar et al. 2017, https://arxiv.org/abs/1704.02685, applied
    to activations; attribution patching, Nanda 2023,
    https://www.neelnanda.io/mechanistic-interpretability/attribution-patching; by feature of sparse
    autoencoders, Marks et al. 2024, https://arxiv.org/abs/2403.19647.

    Args:
        lm: the model, edited or not. Needs the JAX backend of Keras.
        text: a string (without a preprocessor, token ids).
        target: the metric, as for `patch_grid`: a token, a pair (right, wrong), or a function.
        at: site selector; any site but a pattern.
        controls: for the controls of `lm`'s own rewrites.
        by_head: whether to sum over all tokens, and not over the heads of sites such as
            `blocks.*.head_outputs`.
        prompt_length: how many tokens of a text are its prompt, for edits of generated tokens;
            all by default.
        by_feature: whether to sum over all tokens, and not over features: the neurons of
            `blocks.*.mlp_hidden`, say, or what a `SparseAutoencoder` or `Transcoder` finds.
        corrupted: another text, of as many tokens.

    Returns:
        An `Attribution`, with `values` float32[sites, tokens], float32[sites, heads] or
        float32[sites, features].

    Raises:
        SurgeryError: bad input, texts that are equal or of different lengths, another backend,
            sites without heads or of different numbers of them or of features, or NaN or Inf.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> bs.attribution(lm, [1, 2, 3], target=7, at="blocks.*.head_outputs").values.shape
        (2, 3)
        >>> neurons = bs.attribution(lm, [1, 2, 3], 7, "blocks.*.mlp_hidden", by_feature=True)
        >>> neurons.values.shape, len(neurons.top(5))
        ((2, 16), 5)
    """
    if corrupted is None:
        texts = [read_text(lm, text, _OPERATION)]
    else:
        texts = read_pair(lm, text, corrupted, _OPERATION)
    check_selector(at, _OPERATION)
    check_flag(_OPERATION, "by_head", by_head)
    check_flag(_OPERATION, "by_feature", by_feature)
    measure = make_metric(lm, target, _METRIC)
    _check_shapes(shapes_at(lm, (at,)), bool(by_head), bool(by_feature))
    bound = bind_row(lm, controls, texts[0], _OPERATION, prompt_length)
    # One program for both: the gradients of the first are not needed where there is a second.
    runs = metric_gradients(lm, _OPERATION, texts, bound, (at,), measure, _METRIC)
    first, *others = runs
    moves = first.activations
    if others:
        moves = [a - b for a, b in zip(moves, others[0].activations, strict=True)]
    products = [g * x for g, x in zip(runs[-1].gradients, moves, strict=True)]
    numbers = [*(run.value for run in runs), *(p.sum() for p in products)]
    check_finite(numbers, lm, _OPERATION, "the metric" if callable(target) else "")
    kept = 1 if by_head or by_feature else 0
    summed = [np.moveaxis(p, kept, 0).reshape(p.shape[kept], -1).sum(axis=-1) for p in products]
    return Attribution(
        np.stack(summed),
        first.value,
        first.sites,
        texts[0].labels,
        bool(by_head),
        bool(by_feature),
        others[0].value if others else None,
    )


def _check_shapes(shapes: Mapping[str, Sequence[Any]], by_head: bool, by_feature: bool) -> None:
    """Refuse sites that have no columns of the kind that is asked for.

    Args:
        shapes: what stands at each site, for one token, by its path.
        by_head: see `attribution`.
        by_feature: likewise.
    """
    if by_head and by_feature:
        raise SurgeryError(
            "attribution: expected `by_head` or `by_feature`. Received both. Leave one out."
        )
    if by_head:
        count_heads(_OPERATION, shapes)
    sizes = {tuple(shape) for shape in shapes.values()}
    if by_feature and (len(sizes) > 1 or len(sizes.pop()) > 1):
        listed = {path: list(shape) for path, shape in shapes.items()}
        raise SurgeryError(
            "attribution with by_feature=True: expected sites of one size, without heads, such as "
            f"those of one block. Received {shown(listed)}. Select others by `at`."
        )
