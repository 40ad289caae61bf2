"""Preferences: train an edit until it makes one text of a pair likelier than the other, both ways.

Source: BiPO, Cao et al. 2024, arXiv:2406.00045, equation 3, after DPO, Rafailov et al. 2023,
arXiv:2305.18290.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from keras import ops

from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.predict import predict
from backbone_surgery.tuning.learning import (
    Pairs,
    draw,
    fit,
    losses_of,
    new_layers,
    signed,
    texts_of_step,
)

BETA = 0.1
"""How much of the difference in likelihood counts, as in the source."""


def prefer(
    lm: CachedCausalLM,
    edited: EditedBackbone,
    pairs: Sequence[tuple[Any, Any]],
    strengths: Mapping[str, np.ndarray],
    *,
    steps: int,
    seed: int = 0,
) -> None:
    """Train what rewrites brought along, and nothing else, on which text of a pair is likelier.

    With r(y) = log p(y at strength d) - log p(y unedited), of the tokens from the first on in which
    the two texts differ, the loss of a pair (y₁, y₂) and a sign d of 1 or -1 is

        -log sigmoid(d · β · (r(y₁) - r(y₂)))

    The source draws d for each batch; here each pair is learned at both. Its optimizer and length
    of training are those of `learn`.

    Args:
        lm: the model.
        edited: its graph with the rewrites.
        pairs: `[(text preferred at a strength, text preferred at its negative), ...]`.
        strengths: `{input name: float32[strengths, ...]}`, the strengths to learn at.
        steps: how many steps to take.
        seed: of the order.
    """
    texts, count = Pairs.read(lm, pairs), len(next(iter(strengths.values())))
    batch_size = texts_of_step(lm)
    model = losses_of(edited, list(strengths), new_layers(edited, lm))
    unedited = _unedited(model, texts, strengths, batch_size)
    chosen = draw(2 * len(pairs) * count, steps * batch_size // 2, seed)
    pair, which, sign = chosen // 2 // count, chosen // 2 % count, 1 - 2 * (chosen % 2)
    row = np.stack([2 * pair, 2 * pair + 1], axis=1).reshape(-1)
    which, sign = np.repeat(which, 2), np.repeat(sign, 2)
    x = {name: value[row] for name, value in texts.inputs.items()}
    x |= signed(strengths, which, sign)
    weights = (BETA * sign * np.where(row % 2 == 0, 1, -1))[:, None] * texts.counted[row]
    offset = (weights * unedited[row]).sum(axis=1, keepdims=True)
    y = np.concatenate([weights, offset], axis=1).astype("float32")
    fit(model, x, y, preference_losses, steps)


def preference_losses(target: Any, losses: Any) -> Any:
    """Return the loss of each pair.

    Args:
        target: float32[2 · pairs, time + 1]: d · β for each token that counts of a first text, its
            negative for those of a second; and last the sum of these times the unedited losses.
        losses: float32[2 · pairs, time], of each token, in nats.

    Returns:
        float32[pairs].
    """
    margins = target[:, -1] - ops.sum(target[:, :-1] * losses, axis=-1)
    return ops.softplus(-ops.sum(ops.reshape(margins, (-1, 2)), axis=-1))


def _unedited(
    model: Any, texts: Pairs, strengths: Mapping[str, np.ndarray], batch_size: int
) -> np.ndarray:
    """Return the losses of the tokens of each text at strength 0, float32[texts, time]."""
    zero = {k: np.zeros((batch_size, *v.shape[1:]), "float32") for k, v in strengths.items()}
    count, parts = len(texts.counted), []
    for start in range(0, count, batch_size):
        index = np.arange(start, start + batch_size) % count
        parts.append(predict(model, {**{k: v[index] for k, v in texts.inputs.items()}, **zero}))
    return np.concatenate(parts)[:count]
