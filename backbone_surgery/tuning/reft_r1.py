"""ReFT-r1: directions of unit length that are learned to detect and to steer at once.

Source: AxBench, Wu et al. 2025, arXiv:2501.17148, section 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.opening.site import Place
from backbone_surgery.rewriting.operate import operate
from backbone_surgery.rewriting.rewrite import SiteRewrite, Surgery
from backbone_surgery.rewriting.site_layer import SiteLayer
from backbone_surgery.tuning.learning import learn
from backbone_surgery.vectors.vector import ControlVector

LARGEST = 8
"""So many detections of a text say how far it is steered: k."""

SPARSITY = 0.005
"""What the other detections cost at the end of training; it rises from zero."""


def reft_r1_vector(
    lm: CachedCausalLM, pairs: Any, size: Mapping[int, float], options: Mapping[str, Any]
) -> ControlVector:
    """Learn the direction of ReFT-r1 for each block, by itself.

    The source learns a direction w for texts that show a concept. Each token of hidden state h has
    a detection a = ReLU(h · w); in training, h becomes h + (mean of the k largest a of the text) w;
    and the loss is the cross-entropy of the text, plus a cost for the mean of its other a. Later
    one steers by any multiple of w.

    Here both sides of a pair are such texts: the first is learned with w, and the second with -w.
    So w is detected in the first texts, its opposite in the second, and it steers both ways. As in
    the source, w has unit length, there is no bias, and the first token detects nothing. Its epochs
    and its linear decay are the steps and the cosine of `learn`.

    Args:
        lm: the model.
        pairs: `[(positive text, negative text), ...]`.
        size: `{block: norm}`; its norms are not used.
        options: for `learn`: `steps` and `seed`.

    Returns:
        The directions, of unit length.
    """
    names = {block: f"reft_r1_{block}" for block in size}
    rewrites = [
        _RankOne(f"blocks.{block}", name, options["seed"] + block) for block, name in names.items()
    ]
    edited = operate(lm.backbone, rewrites)
    apart = np.eye(len(names), dtype="float32")
    strengths = {f"{name}_strength": apart[:, i] for i, name in enumerate(names.values())}
    rising = {f"{name}_sparsity": SPARSITY for name in names.values()}
    learn(lm, edited, pairs, strengths, rising=rising, **options)
    layers = {layer.name: layer for layer in edited.trained_layers}
    return ControlVector(
        {block: np.asarray(layers[name].direction) for block, name in names.items()}
    )


@dataclass(frozen=True)
class _RankOne(SiteRewrite):
    """Put a `RankOne` at a site, with a strength and a sparsity as inputs, both zero by default."""

    at: str
    name: str
    seed: int

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put the layer at the site."""
        inputs = [
            surgery.control(f"{self.name}_{part}", np.float32(0))
            for part in ("strength", "sparsity")
        ]
        layer = RankOne(self.seed, name=self.name)
        surgery.train(layer)
        return layer(x, surgery.positions, surgery.padding_mask, *inputs)


class RankOne(SiteLayer):
    """Add a direction as far as a text shows it already, and let it show at few tokens alone.

    Args:
        seed: of the direction at first.

    Call arguments:
        x: float[batch, time, hidden_dim].
        positions: int32[batch, time].
        padding_mask: int or bool[batch, time].
        strength: float32[batch]: 1 or -1, the side of a row; 0 leaves it alone.
        sparsity: float32[batch], the cost of detections beyond the largest.
    """

    def __init__(self, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seed = seed

    def build(self, x_shape, *others):
        """Create the direction, random at first."""
        self.direction = self.add_weight(
            shape=(x_shape[-1],),
            initializer=keras.initializers.RandomNormal(stddev=x_shape[-1] ** -0.5, seed=self.seed),
            constraint=keras.constraints.UnitNorm(axis=0),
            dtype="float32",
            name="direction",
        )

    def call(self, x, positions, padding_mask, strength, sparsity):
        """Detect and steer, and add the cost of the row to the loss."""
        h = ops.cast(x, "float32")
        # Divided by its norm, so that its gradient is at right angles to it, as in the source.
        unit = self.direction / ops.sqrt(ops.sum(ops.square(self.direction)))
        counted = ops.logical_and(ops.cast(padding_mask, "bool"), positions > 0)
        shown = ops.relu(strength[:, None] * ops.matmul(h, unit))
        shown = ops.where(counted, shown, 0.0)
        largest = ops.top_k(shown, LARGEST)[0]
        others = ops.sum(shown, axis=-1) - ops.sum(largest, axis=-1)
        tokens = ops.maximum(ops.sum(ops.cast(counted, "float32"), axis=-1), 1)
        self.add_loss(ops.mean(sparsity * others / tokens))
        change = (strength * ops.mean(largest, axis=-1))[:, None, None] * unit
        return ops.where(ops.equal(strength, 0)[:, None, None], x, ops.cast(h + change, x.dtype))
