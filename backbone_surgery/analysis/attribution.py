"""Attribution: gradient times activation, for each site and token, in one backward pass."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from backbone_surgery.analysis.gradients import metric_gradients
from backbone_surgery.analysis.question import (
    bind_row,
    check_finite,
    check_selector,
    count_heads,
    make_metric,
    read_text,
    shapes_at,
)
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.numbers import check_flag


@dataclass(frozen=True, eq=False)
class Attribution:
    """What `attribution` returns.

    Attributes:
        values: float32[sites, tokens], gradient times activation, summed over features: by how
            much the metric falls, to first order, if that activation is removed. By head
            float32[sites, heads], summed over tokens too.
        metric: the metric of the text.
        sites: paths of the sites.
        tokens: labels of the text's tokens.
        by_head: whether the columns of `values` are heads.
    """

    values: np.ndarray
    metric: float
    sites: list[str]
    tokens: list[str]
    by_head: bool = False

    @property
    def columns(self) -> list[str]:
        """Labels of the columns of `values`: the tokens, or the numbers of the heads."""
        return [*map(str, range(self.values.shape[1]))] if self.by_head else self.tokens

    def __repr__(self) -> str:
        kind = "heads" if self.by_head else "tokens"
        size = f"{len(self.sites)} sites x {len(self.columns)} {kind}"
        return f"Attribution({size}; metric {self.metric:.4g})"


def attribution(
    lm: CachedCausalLM,
    text: Any,
    target: Any,
    at: str = "blocks.*",
    controls: Mapping[str, Any] | None = None,
    by_head: bool = False,
    prompt_length: int | None = None,
) -> Attribution:
    """Attribute the next-token prediction to the activations at each site and token.

    Source: gradient times input, Shrikumar et al. 2017, https://arxiv.org/abs/1704.02685, applied
    to activations as in attribution patching.

    Args:
        lm: the model, edited or not. Needs the JAX backend of Keras.
        text: a string (without a preprocessor, token ids).
        target: the metric, as for `patch_grid`: a token, a pair (right, wrong), or a function.
        at: site selector; any site but a pattern.
        controls: for the controls of `lm`'s own rewrites.
        by_head: whether to sum over all tokens, and not over the heads of sites such as
            `blocks.*.head_outputs`.
        prompt_length: how many tokens of the text are its prompt, for edits of generated tokens;
            all by default.

    Returns:
        An `Attribution`, with `values` float32[sites, tokens], or float32[sites, heads].

    Raises:
        SurgeryError: bad input, another backend, sites without heads or of different numbers of
            them, or NaN or Inf.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> bs.attribution(lm, [1, 2, 3], target=7, at="blocks.*.head_outputs").values.shape
        (2, 3)
    """
    question = read_text(lm, text, "attribution")
    check_selector(at, "attribution")
    check_flag("attribution", "by_head", by_head)
    where = "attribution at 'target'"
    measure = make_metric(lm, target, where)
    if by_head:
        count_heads("attribution", shapes_at(lm, (at,)))
    bound = bind_row(lm, controls, question, "attribution", prompt_length)
    got = metric_gradients(lm, "attribution", question, bound, (at,), measure, where)
    products = [g * x for g, x in zip(got.gradients, got.activations, strict=True)]
    numbers = [got.value, *(p.sum() for p in products)]
    check_finite(numbers, lm, "attribution", "the metric" if callable(target) else "")
    kept = 1 if by_head else 0
    summed = [np.moveaxis(p, kept, 0).reshape(p.shape[kept], -1).sum(axis=-1) for p in products]
    return Attribution(np.stack(summed), got.value, got.sites, question.labels, bool(by_head))
