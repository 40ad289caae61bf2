"""Causal tracing: which site, at which token, carries what tells two texts apart."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from backbone_surgery.analysis.question import (
    Metric,
    check_selector,
    count_heads,
    head_of,
    make_metric,
    measured,
    read_pair,
)
from backbone_surgery.analysis.runs import Runs, batches
from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.numbers import check_count, check_flag
from backbone_surgery.opening.predict import predict

_METRIC = "patch_grid at 'metric'"


@dataclass(frozen=True, eq=False)
class PatchGrid:
    """What `patch_grid` measured.

    Attributes:
        values: float[sites, tokens], the metric of the corrupted text with that one activation
            taken from the clean text; float[sites, heads] by head.
        clean: the metric of the clean text.
        corrupted: the metric of the corrupted text.
        sites: paths of the sites.
        tokens: labels of the corrupted text's tokens.
        by_head: whether the columns of `values` are heads, each patched at all tokens.
    """

    values: np.ndarray
    clean: float
    corrupted: float
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
        return f"PatchGrid({size}; clean {self.clean:.4g}, corrupted {self.corrupted:.4g})"

    @property
    def recovered(self) -> np.ndarray:
        """How much of the difference each patch restores: 0 is the corrupted text, 1 the clean.

        Raises:
            SurgeryError: the metric is the same for both texts.
        """
        if self.clean == self.corrupted:
            raise SurgeryError(
                "patch_grid.recovered: expected a metric that tells the texts apart. Received "
                f"{self.clean} for both. Choose another metric, or look at `values`."
            )
        return (self.values - self.corrupted) / (self.clean - self.corrupted)


def patch_grid(
    lm: CachedCausalLM,
    clean: Any,
    corrupted: Any,
    metric: Any,
    at: str = "blocks.*",
    controls: Mapping[str, Any] | None = None,
    batch_size: int = 32,
    by_head: bool = False,
    prompt_length: int | None = None,
) -> PatchGrid:
    """Patch every site and token of one text with the activation of another, one at a time.

    Or every site and head, each at all tokens.

    Source: Meng et al. 2022, https://arxiv.org/abs/2202.05262; Wang et al. 2022,
    https://arxiv.org/abs/2211.00593. Cells are rows of few batches. A patch changes nothing before
    its site, and nothing before its token. So a row begins at the site, and at the token or a
    little before: hidden states and cache are those of the corrupted text there. Before the first
    token that differs, both texts have the same activations: these cells need no pass. Another pair
    of texts of about that length compiles nothing new.

    Args:
        lm: the model, edited or not.
        clean: a text, a string (without a preprocessor, token ids).
        corrupted: another, of as many tokens.
        metric: what to measure of the next token: a token, for its logit; a pair of tokens (right,
            wrong), for the difference of their logits; or a function of logits
            float[batch, vocabulary] that returns float[batch].
        at: site selector, as for `Patch`.
        controls: for the controls of `lm`'s own rewrites.
        batch_size: how many cells to run at once, at most.
        by_head: whether to patch head by head, at sites such as `blocks.*.head_outputs`.
        prompt_length: how many tokens of each text are its prompt, for edits of generated tokens;
            all by default.

    Returns:
        A `PatchGrid`, with `values` float[sites, tokens], or float[sites, heads].

    Raises:
        SurgeryError: texts of different lengths, equal texts, a metric or batch size that is none,
            what `Patch` refuses, sites without heads or of different numbers of them, or NaN or
            Inf.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> bs.patch_grid(lm, [1, 2, 3], [1, 4, 3], metric=(5, 6)).values.shape
        (2, 3)
    """
    check_count("patch_grid", "batch_size", batch_size, "cells")
    check_selector(at, "patch_grid")
    check_flag("patch_grid", "by_head", by_head)
    texts = read_pair(lm, clean, corrupted, "patch_grid")
    measure = make_metric(lm, metric, _METRIC)
    runs = Runs(lm, at, texts[0], controls, prompt_length)
    whole = [runs.whole(text) for text in texts]
    ends = [_measured(lm, measure, runs.last(values))[0] for values in whole]
    shapes = dict(zip(runs.sites, runs.shapes, strict=True))
    columns = count_heads("patch_grid", shapes) if by_head else len(texts[0].labels)
    grid = np.full((len(runs.sites), columns), ends[1], "float32")
    axis = 1 if by_head else 0
    # Tokens before the first that differs have the same activations: there a patch does nothing.
    cells = [
        (s, i) for s, i in np.ndindex(grid.shape) if runs.differ(whole[0], whole[1], (s, i), axis)
    ]
    patched = runs.patched_heads if by_head else partial(runs.patched, texts[1])
    states = dict(patched(whole[1], whole[0], cells, int(batch_size)))
    most = len(runs.sites) * (columns if by_head else runs.width)
    for part, padded in batches(cells, min(int(batch_size), most)):
        rows = np.stack([states[s, t] for s, t in padded])
        for cell, value in zip(part, _measured(lm, measure, rows), strict=False):
            grid[cell] = value
    labels = texts[1].labels
    return PatchGrid(grid, float(ends[0]), float(ends[1]), runs.sites, labels, bool(by_head))


def _measured(lm: CachedCausalLM, measure: Metric, states: np.ndarray) -> np.ndarray:
    """Measure hidden states of last tokens, float[batch, hidden_dim]."""
    return measured(lm, measure, predict(head_of(lm), states), _METRIC)
