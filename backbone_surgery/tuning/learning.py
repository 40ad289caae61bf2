"""Learning: train what an edit brings along on pairs of texts, by their likelihood."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.generation.buckets import bucket
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.prompts import pack_right
from backbone_surgery.generation.request import LONGEST
from backbone_surgery.opening.layers import RowConstant
from backbone_surgery.opening.training import TrainsOwnLayers
from backbone_surgery.vectors.activations import read_texts


class TokenLosses(keras.layers.Layer):
    """Give the cross-entropy of each next token, in nats, in float32.

    Call arguments:
        logits: float[batch, time, vocabulary].
        targets: int32[batch, time].
    """

    def call(self, logits, targets):
        """Take the logarithm of the softmax at the target."""
        logits = ops.cast(logits, "float32")
        chosen = ops.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return ops.logsumexp(logits, axis=-1) - chosen

    def compute_output_spec(self, logits, targets):
        """One number for each token."""
        return keras.KerasTensor(targets.shape, "float32")


class _Losses(TrainsOwnLayers, keras.Model):
    """The loss of each token of an edited graph, without dropout; only some layers are trained."""

    def call(self, inputs, training=None, mask=None):
        """Run as in generation."""
        return super().call(inputs, training=False, mask=mask)


@graph.building()
def losses_of(
    lm: CachedCausalLM, controls: Sequence[str] = (), trained: Sequence[keras.layers.Layer] = ()
) -> keras.Model:
    """Derive the model that gives the loss of each next token.

    Args:
        lm: a model.
        controls: names of inputs of its graph that stay inputs; the others take their defaults.
        trained: the layers that `fit` of the model trains.

    Returns:
        A model of `token_ids`, `padding_mask`, `targets` int32[batch, time] and the controls, to
        float32[batch, time].
    """
    opened = lm.opened
    names = {"token_ids", "padding_mask", *controls}
    inputs = {t.name: t for t in opened.inputs if t.name in names}
    constants = {
        name: RowConstant(default, name=f"default_{name}")(inputs["token_ids"])
        for name, default in opened.defaults.items()
        if name not in inputs
    }
    targets = keras.Input((None,), dtype="int32", name="targets")
    states = opened.hidden_states(opened({**inputs, **constants}))
    losses = TokenLosses(name="losses")(opened.token_embedding(states, reverse=True), targets)
    model = _Losses({**inputs, "targets": targets}, losses)
    object.__setattr__(model, "trained_layers", tuple(trained))
    return model


def width_of(lm: CachedCausalLM, rows: list[np.ndarray]) -> int:
    """Return how wide to pack rows, so that few programs are compiled."""
    return min(bucket(max(map(len, rows)), 16), lm.max_positions or LONGEST)


def pack_texts(rows: list[np.ndarray], width: int) -> dict[str, np.ndarray]:
    """Pack token ids for `losses_of`, all but the last of each row, and those that follow."""
    packed = pack_right(rows, width, 0)
    ids, mask = packed["token_ids"], np.asarray(packed["padding_mask"]).astype("int32")
    return {"token_ids": ids[:, :-1], "padding_mask": mask[:, :-1], "targets": ids[:, 1:]}


def learn(
    lm: CachedCausalLM,
    trained: Sequence[keras.layers.Layer],
    pairs: Sequence[tuple[Any, Any]],
    strengths: Mapping[str, np.ndarray],
    *,
    steps: int,
    batch_size: int = 16,
    learning_rate: float = 0.01,
    seed: int = 0,
) -> None:
    """Train some layers that rewrites of a model brought along, and nothing else.

    The first text of a pair is learned at a strength, and the second at its negative: what is
    learned is the way from one to the other. Only tokens from the first on in which the two differ
    count, since those before are the same at both strengths. Each row is a text at one of the
    strengths: so one program learns several edits, each by itself.

    Args:
        lm: a model with such rewrites.
        trained: the layers.
        pairs: `[(text for a strength, text for its negative), ...]`.
        strengths: `{input name: float32[strengths, ...]}`, the strengths to learn at.
        steps: how many steps to take.
        batch_size: rows of a step.
        learning_rate: of Adam (Kingma and Ba 2014, arXiv:1412.6980), falling to zero by a cosine.
        seed: of the order.
    """
    rows = read_texts(lm, [text for pair in pairs for text in pair], "tune")
    width = width_of(lm, rows)
    inputs, counted = pack_texts(rows, width), _counted(rows, width)
    model = losses_of(lm, list(strengths), trained)
    count = len(next(iter(strengths.values())))
    chosen = np.random.default_rng(seed).permutation(len(rows) * count)
    chosen = np.resize(chosen, steps * batch_size)
    row, which = chosen // count, chosen % count
    x = {name: value[row] for name, value in inputs.items()}
    for name, value in strengths.items():
        sign = np.where(row % 2 == 0, 1, -1).astype("float32")
        x[name] = value[which] * sign.reshape(-1, *[1] * (value.ndim - 1))
    rate = keras.optimizers.schedules.CosineDecay(learning_rate, steps)
    model.compile(optimizer=keras.optimizers.Adam(rate), loss=_mean_over_rows)
    model.fit(x, counted[row], batch_size=batch_size, shuffle=False, verbose=0)


def _mean_over_rows(counted: Any, losses: Any) -> Any:
    """Average over the tokens of a row that count, then Keras does over the rows."""
    return ops.sum(losses * counted, axis=-1) / ops.maximum(ops.sum(counted, axis=-1), 1)


def _counted(rows: list[np.ndarray], width: int) -> np.ndarray:
    """Return which of the next tokens count, float32[rows, time]: those of the text that differ."""
    counted = np.zeros((len(rows), width - 1), "float32")
    for i in range(0, len(rows), 2):
        a, b = rows[i], rows[i + 1]
        shorter = min(len(a), len(b))
        differ = np.flatnonzero(a[:shorter] != b[:shorter])
        first = int(differ[0]) if len(differ) else shorter
        counted[i, max(first - 1, 0) : len(a) - 1] = 1
        counted[i + 1, max(first - 1, 0) : len(b) - 1] = 1
    return counted
