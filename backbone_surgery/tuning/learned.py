"""Learned directions: one for each block, trained on pairs of texts, in two ways."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.rewriting import Steer
from backbone_surgery.rewriting.operate import operate
from backbone_surgery.tuning.learning import learn
from backbone_surgery.tuning.preferences import prefer
from backbone_surgery.vectors.vector import ControlVector

LEARNED: dict[str, Callable[..., None]] = {"learned": learn, "bipo": prefer}
"""By the likelihood of each text alone, and by that of one text over the other."""

_LONGEST = 0.5
"""Of a learned direction, in units of the residual norm of its block."""


def learned_vector(
    method: str,
    lm: CachedCausalLM,
    pairs: Any,
    size: Mapping[int, float],
    options: Mapping[str, Any],
) -> ControlVector:
    """Learn a direction for each block, by itself, no longer than a share of the hidden states.

    Args:
        method: one of `LEARNED`.
        lm: the model.
        pairs: `[(positive text, negative text), ...]`.
        size: how long the hidden states of each block are, `{block: norm}`.
        options: for the method: `steps` and `seed`.

    Returns:
        The directions, in units of `size`.
    """
    start = {block: np.zeros(lm.opened.token_embedding.output_dim) for block in size}
    edited = operate(lm.backbone, [Steer("learned", start, trainable=True, max_norm=_LONGEST)])
    # At the strength of the residual norm, directions are in units of it.
    apart = np.diag(np.array(list(size.values()), "float32"))
    LEARNED[method](lm, edited, pairs, {"learned_strength": apart}, **options)
    return ControlVector(edited.rewrites[-1].directions)
