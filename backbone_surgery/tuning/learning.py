"""Learning: train what an edit brings along on pairs of texts, by their likelihood."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph, hosts
from backbone_surgery.generation.buckets import bucket
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.prompts import pack_right
from backbone_surgery.generation.request import LONGEST
from backbone_surgery.opening.logits import Logits
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.placement import placement_of
from backbone_surgery.opening.training import TrainsOwnLayers
from backbone_surgery.vectors.activations import read_texts

RATE = 0.01
"""The learning rate at first."""


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
    opened: EditedBackbone, controls: Sequence[str] = (), trained: Sequence[keras.layers.Layer] = ()
) -> keras.Model:
    """Derive the model that gives the loss of each next token.

    Args:
        opened: the graph.
        controls: names of inputs of its graph that stay inputs; the others take their defaults.
        trained: the layers that `fit` of the model trains.

    Returns:
        A model of `token_ids`, `padding_mask`, `targets` int32[batch, time] and the controls, to
        float32[batch, time].
    """
    names = {"token_ids", "padding_mask", *controls}
    inputs = {t.name: t for t in opened.inputs if t.name in names}
    targets = keras.Input((None,), dtype="int32", name="targets")
    states = opened.hidden_states(opened(inputs))
    losses = TokenLosses(name="losses")(Logits(opened.token_embedding)(states), targets)
    model = _Losses({**inputs, "targets": targets}, losses, name="losses_of_tokens")
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


@dataclass(frozen=True)
class Pairs:
    """Pairs of texts as rows of tokens, each first text before its second.

    Attributes:
        inputs: `{name: int32[texts, time]}` for `losses_of`.
        counted: float32[texts, time], 1 for the tokens of a text from the first on in which those
            of its pair differ. Those before are the same on both sides.
    """

    inputs: Mapping[str, np.ndarray]
    counted: np.ndarray

    @classmethod
    def read(cls, lm: CachedCausalLM, pairs: Sequence[tuple[Any, Any]]) -> "Pairs":
        """Read pairs of texts, or of token ids, as a model does."""
        rows = read_texts(lm, [text for pair in pairs for text in pair], "tune")
        width = width_of(lm, rows)
        return cls(pack_texts(rows, width), _counted(rows, width))


def learn(
    lm: CachedCausalLM,
    edited: EditedBackbone,
    pairs: Sequence[tuple[Any, Any]],
    strengths: Mapping[str, np.ndarray],
    *,
    steps: int,
    seed: int = 0,
    learning_rate: float = RATE,
    rising: Mapping[str, float] | None = None,
) -> None:
    """Train what rewrites brought along, and nothing else, on the likelihood of texts.

    The first text of a pair is learned at a strength, and the second at its negative: what is
    learned is the way from one to the other. Each row is a text at one of the strengths: so one
    program learns several edits, each by itself.

    Args:
        lm: the model.
        edited: its graph with the rewrites.
        pairs: `[(text for a strength, text for its negative), ...]`.
        strengths: `{input name: float32[strengths, ...]}`, the strengths to learn at.
        steps: how many steps to take.
        seed: of the order.
        learning_rate: of `fit`.
        rising: `{input name: number}`, inputs that rise evenly from zero to a number.
    """
    texts, count = Pairs.read(lm, pairs), len(next(iter(strengths.values())))
    batch_size = texts_of_step(lm)
    chosen = draw(len(texts.counted) * count, steps * batch_size, seed)
    row, which = chosen // count, chosen % count
    x = {name: value[row] for name, value in texts.inputs.items()}
    x |= signed(strengths, which, np.where(row % 2 == 0, 1, -1))
    for name, most in (rising or {}).items():
        x[name] = np.repeat(most * np.arange(steps, dtype="float32") / steps, batch_size)
    model = losses_of(edited, [*strengths, *(rising or {})], new_layers(edited, lm))
    fit(model, x, texts.counted[row], mean_over_rows, steps, learning_rate)


def texts_of_step(lm: CachedCausalLM) -> int:
    """Return how many texts a step takes: two for each pair, the same number on each device."""
    placement = placement_of(lm.backbone.variables)
    return 16 if placement is None else 2 * placement.padded(8)


def new_layers(edited: EditedBackbone, lm: CachedCausalLM) -> list[keras.layers.Layer]:
    """Return the trained layers that an edit added; those of the model's own edits stay."""
    return [x for x in edited.trained_layers if x not in lm.opened.trained_layers]


def draw(count: int, length: int, seed: int) -> np.ndarray:
    """Return numbers below a count in random order, again and again, int[length]."""
    return np.resize(np.random.default_rng(seed).permutation(count), length)


def signed(
    strengths: Mapping[str, np.ndarray], which: np.ndarray, sign: np.ndarray
) -> dict[str, np.ndarray]:
    """Return for each row one of the strengths, times 1 or -1."""
    return {
        name: value[which] * sign.astype("float32").reshape(-1, *[1] * (value.ndim - 1))
        for name, value in strengths.items()
    }


def fit(
    model: keras.Model,
    x: Mapping[str, np.ndarray],
    y: np.ndarray,
    loss: Callable[[Any, Any], Any],
    steps: int,
    learning_rate: float = RATE,
) -> None:
    """Take steps of Adam (Kingma and Ba 2014, arXiv:1412.6980), its rate falling by a cosine."""
    rate = keras.optimizers.schedules.CosineDecay(learning_rate, steps)
    model.compile(optimizer=keras.optimizers.Adam(rate), loss=loss)
    size = len(y) // steps
    if hosts.span(model):
        hosts.agree(model, model.name, {"texts and settings": x, "targets": y})
        import tensorflow as tf  # a dataset of it is what Keras shares among processes

        data = tf.data.Dataset.from_tensor_slices((dict(x), y)).batch(size, drop_remainder=True)
        model.fit(data, verbose=0)
    else:
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0)


def mean_over_rows(counted: Any, losses: Any) -> Any:
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
