"""Merging refuses weights that do more than write the site, in an architecture of one's own."""

import keras
import keras_hub
import numpy as np
import pytest
from keras import layers, ops

import backbone_surgery as bs
from backbone_surgery.opening import family


class Block(layers.Layer):
    """An MLP whose output is a sum: of what another layer reads too, or of one layer's twice."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind
        heads = ("btd,dhk->bthk", (None, 2, 8))
        self.norm = layers.LayerNormalization(name="norm")
        self.query, self.key, self.value = (
            layers.EinsumDense(*heads, name=name) for name in ("query", "key", "value")
        )
        self.output_dense = layers.EinsumDense("bthk,hkd->btd", (None, 16), name="output")
        self.up, self.down = layers.Dense(16, name="up"), layers.Dense(16, name="down")
        self.act, self.add = layers.ReLU(name="act"), layers.Add(name="mlp_add")

    def build(self, *shapes):
        """Leave that to the first call."""

    def mlp(self, x):
        y = self.up(x)
        if self.kind == "plain":
            return self.down(self.act(y))
        return self.add([y if self.kind == "read" else self.down(y), self.down(self.act(y))])

    def call(self, x, padding_mask):
        h = self.norm(x)
        time = ops.shape(x)[1]
        mask = ops.tril(ops.ones((time, time), "bool"))[None, None]
        mask = ops.logical_and(mask, ops.cast(padding_mask, "bool")[:, None, None])
        mixed = ops.dot_product_attention(self.query(h), self.key(h), self.value(h), mask=mask)
        return x + self.output_dense(mixed) + self.mlp(h)


def open_block(block, hidden_states, padding_mask, positions):
    h = bs.Site("attention_norm")(block.norm(hidden_states))
    heads = (getattr(block, name)(h) for name in ("query", "key", "value"))
    attention = bs.SelfAttention(2, 2, 8, 8**-0.5, dtype=block.dtype_policy, name="attention")
    mixed = attention(*heads, padding_mask)
    made = bs.Site("attention_output")(block.output_dense(mixed))
    mlp = bs.Site("mlp_output")(block.mlp(h))
    return layers.Add(name="residual")([hidden_states, made, mlp])


@keras.saving.register_keras_serializable("test_merge_custom")
class Summed(keras_hub.models.Backbone):
    def __init__(self, kind, dtype=None, **kwargs):
        ids, mask = (
            keras.Input((None,), dtype="int32", name=n) for n in ("token_ids", "padding_mask")
        )
        x = layers.ReversibleEmbedding(60, 16, tie_weights=False, name="token_embedding")(ids)
        x = Block(kind, name="block_0")(x, mask)
        x = layers.LayerNormalization(name="final_norm")(x)
        inputs = {"token_ids": ids, "padding_mask": mask}
        super().__init__(inputs, x, dtype=dtype, **kwargs)
        self.kind = kind

    def get_config(self):
        return {**super().get_config(), "kind": self.kind}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [("plain", None), ("read", "is read by other layers too"), ("twice", "writes at other places")],
)
@pytest.mark.parametrize("ablate", [True, False])
def test_weights_that_do_more_than_write_the_site(kind, words, ablate, rng, monkeypatch):
    monkeypatch.setattr(family, "_families", dict(family._families))
    bs.register_family(bs.Family(name="summed", block=Block, open_block=open_block))
    backbone, inputs = Summed(kind), {"token_ids": rng.integers(0, 60, (2, 6))}
    inputs["padding_mask"] = np.ones((2, 6), "int32")
    rows = rng.normal(size=(3, 16))
    rewrite = bs.ProjectOut("none", rows, at="blocks.*.mlp_output", strength=0.7)
    if not ablate:
        rewrite = bs.Steer("mood", {0: rows[0]}, at="blocks.*.mlp_output")
        words = words and "no layer with a bias"
    edited = bs.operate(backbone, [rewrite])
    if words is None:
        merged = np.asarray(bs.merge(edited).predict_on_batch(inputs))
        wanted = np.asarray(edited.predict_on_batch(inputs))
        assert np.abs(merged - wanted).max() <= 1e-5 * np.abs(wanted).max()
        return
    if kind == "read" and not ablate:  # `down` alone is read by the sum alone, and takes it
        merged = np.asarray(bs.merge(edited).predict_on_batch(inputs))
        wanted = np.asarray(edited.predict_on_batch(inputs))
        assert np.abs(merged - wanted).max() <= 1e-5 * np.abs(wanted).max()
        return
    with pytest.raises(bs.SurgeryError, match=words):
        bs.merge(edited)
