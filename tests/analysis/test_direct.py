"""Direct logit attribution equals shares computed in NumPy, and its shares make up the logit."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.families import ROWS
from tests.helpers import FAMILIES, make_deep_gpt2, make_gpt2
from tests.numpy_models import Model, weights_of

IDS = [3, 14, 15, 9, 2]
TOKENS = {"token_ids": np.array([IDS]), "padding_mask": np.ones((1, 5), "int32")}
FINAL_NORMS = (
    "output_norm",
    "layer_norm",
    "final_layernorm",
    "final_normalization",
    "sequence_output_layernorm",
)
WITH_BIAS = ("gpt2", "gpt_oss", "opt", "falcon", "bloom", "gpt_neo_x")
"""Whose attention adds a bias, which is no head's."""


class Shares:
    """What parts of the stream at the last token add to one logit minus another."""

    def __init__(self, backbone, right=7, wrong=8):
        self.backbone, self.model = backbone, Model(backbone)
        self.hidden = self.model(np.array([IDS]))[0, -1]
        self.seen = self.model.captures()
        table = weights_of(backbone.token_embedding)[0]
        self.embedded = table[IDS[-1]] * (1 if self.model.gpt2 else np.sqrt(len(self.hidden)))
        if self.model.gpt2:
            self.embedded = self.embedded + weights_of(backbone.position_embedding)[0][len(IDS) - 1]
        self.slope = table[right] - table[wrong]
        self.metric = self.hidden @ self.slope

    def scaled(self, layer, part, whole):
        """Scale a part of a vector as a norm scales the whole of it."""
        if self.model.gpt2:
            part, whole = part - part.mean(), whole - whole.mean()
        gamma = weights_of(layer)[0] + (0 if self.model.gpt2 else 1)
        return part / np.sqrt((whole**2).mean() + layer.epsilon) * gamma

    def of(self, part):
        stream = self.seen[f"blocks.{len(self.model.blocks) - 1}"][0, -1]
        return self.scaled(self.backbone.layer_norm, part, stream) @ self.slope

    def of_head(self, block, head):
        """What a head adds: its rows of the output projection, and the norm after it."""
        layer = self.backbone.transformer_layers[block]
        mixed = self.seen[f"blocks.{block}.head_outputs"][0, -1]
        attention = layer._self_attention_layer if self.model.gpt2 else layer.attention
        kernel = weights_of(attention.output_dense)[0]
        part = mixed[head] @ kernel[head]
        if not self.model.gpt2 and layer.use_post_attention_norm:
            part = self.scaled(layer.post_attention_norm, part, np.einsum("nh,nhd", mixed, kernel))
        return self.of(part)


@pytest.fixture(scope="module", params=["gpt2", "gemma2"])
def lm(request):
    return bs.CachedCausalLM(FAMILIES[request.param](num_layers=2))


def test_shares_are_those_of_numpy(lm):
    got = bs.direct_logit_attribution(lm, IDS, (7, 8))
    shares = Shares(lm.backbone)
    assert abs(got.metric - shares.metric) <= 1e-4
    assert got.sites[0] == "embeddings"
    parts = [shares.embedded, *(shares.seen[path][0, -1] for path in got.sites[1:])]
    assert np.abs(got.values - [shares.of(part) for part in parts]).max() <= 1e-4
    beta = weights_of(lm.backbone.layer_norm)[1] @ shares.slope if shares.model.gpt2 else 0
    assert abs(got.rest - beta) <= 1e-4
    single = bs.direct_logit_attribution(lm, IDS, 7)
    other = bs.direct_logit_attribution(lm, IDS, 8)
    assert np.abs(single.values - other.values - got.values).max() <= 1e-4
    assert repr(got) == (
        f"DirectLogitAttribution(5 sites; metric {got.metric:.4g}, rest {got.rest:.4g})"
    )


@pytest.mark.slow
def test_heads_are_those_of_numpy(lm):
    got = bs.direct_logit_attribution(lm, IDS, (7, 8), by_head=True)
    shares = Shares(lm.backbone)
    assert got.sites == ["blocks.0.head_outputs", "blocks.1.head_outputs"]
    wanted = [[shares.of_head(block, head) for head in range(4)] for block in range(2)]
    assert np.abs(got.values - wanted).max() <= 1e-4
    assert abs(got.metric - shares.metric) <= 1e-4
    assert got.columns == ["0", "1", "2", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [x for x in ROWS if x != "gemma3n"])
def test_shares_of_each_family_make_up_the_logit(name):
    """The rest is what the final norm makes of zeros: its bias, where it has one."""
    lm = bs.CachedCausalLM(ROWS[name].make())
    got = bs.direct_logit_attribution(lm, IDS, (7, 8))
    by_head = bs.direct_logit_attribution(lm, IDS, (7, 8), by_head=True)
    size, embedding = lm.opened.token_embedding.output_dim, lm.opened.token_embedding
    norm = next(layer for layer in lm.opened.layers if layer.name in FINAL_NORMS)
    bias = np.asarray(embedding(norm(np.zeros((1, 1, size), "float32")), reverse=True))[0, 0]
    assert abs(got.rest - (bias[7] - bias[8])) <= 1e-4
    assert np.ptp(got.values) > 0.01
    written = [i for i, path in enumerate(got.sites) if path.endswith("attention_output")]
    differs = np.abs(by_head.values.sum(1) - got.values[written]).max()
    assert (differs > 1e-3) == (name in WITH_BIAS)


@pytest.mark.slow
def test_streams_that_are_mixed_are_refused():
    lm = bs.CachedCausalLM(ROWS["gemma3n"].make())
    with pytest.raises(
        bs.SurgeryError, match=r"the sum of what .* gemma3n, whose .* .`other_streams`"
    ):
        bs.direct_logit_attribution(lm, IDS, (7, 8))


@pytest.mark.slow
def test_what_edits_add_is_in_the_rest(rng):
    """Steered at the last block, after what it wrote: no layer of the model writes that."""
    backbone, direction = make_gpt2(), rng.normal(size=32).astype("float32")
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Steer("mood", {1: direction})]))
    got = bs.direct_logit_attribution(lm, IDS, (7, 8), controls={"mood": 2.0})
    shares = Shares(backbone)
    shares.seen["blocks.1"] = shares.seen["blocks.1"] + 2 * direction
    beta = weights_of(backbone.layer_norm)[1] @ shares.slope
    assert abs(got.rest - shares.of(2 * direction) - beta) <= 1e-4
    assert abs(got.values[0] - shares.of(shares.embedded)) <= 1e-4
    without = bs.direct_logit_attribution(lm, IDS, (7, 8), controls={"mood": 0})
    assert abs(without.rest - beta) <= 1e-4


@pytest.mark.slow
def test_blocks_in_another_order_and_twice():
    edits = [bs.Reorder([2, 0, 1]), bs.Repeat("blocks.1")]
    lm = bs.CachedCausalLM(bs.operate(make_deep_gpt2(), edits))
    got = bs.direct_logit_attribution(lm, IDS, 7)
    beta = bs.direct_logit_attribution(bs.CachedCausalLM(make_deep_gpt2()), IDS, 7).rest
    assert len(got.sites) == 9
    assert abs(got.rest - beta) <= 1e-4
    logits = np.asarray(lm(TOKENS))[0, -1]
    assert abs(got.metric - logits[7]) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["int8", "int4", "bfloat16"])
def test_narrow_models(mode):
    backbone = FAMILIES["gemma2"](num_layers=2, **({"dtype": mode} if "float" in mode else {}))
    lm = bs.CachedCausalLM(backbone)
    if mode != "bfloat16":
        lm.quantize(mode)
    got = bs.direct_logit_attribution(lm, IDS, (7, 8))
    logits = np.asarray(lm(TOKENS), "float32")[0, -1]
    uncapped = 30 * np.arctanh(logits / 30)
    assert abs(got.metric - (uncapped[7] - uncapped[8])) <= 0.05
    assert abs(got.rest) <= 0.02 * np.abs(got.values).sum()


@pytest.mark.slow
def test_a_norm_with_a_large_bias_in_half_precision():
    """It leaves few digits of what the norm scaled."""
    backbone = make_gpt2(dtype="bfloat16")
    beta = backbone.layer_norm.beta
    beta.assign(400 * (np.arange(32) == 3))
    got = bs.direct_logit_attribution(bs.CachedCausalLM(backbone), IDS, 7)
    table = weights_of(backbone.token_embedding)[0]
    assert abs(got.rest - 400 * table[7, 3]) <= 0.02 * abs(400 * table[7, 3]) + 0.1


class TanhNorm(keras.layers.Layer):
    """A norm that is no product with one number."""

    def call(self, x):
        return keras.ops.tanh(3 * x)


@pytest.mark.slow
def test_another_kind_of_norm_is_refused():
    lm = bs.CachedCausalLM(bs.operate(make_gpt2(), [bs.Insert("final_norm", TanhNorm())]))
    with pytest.raises(bs.SurgeryError, match="norms that scale a vector to one length"):
        bs.direct_logit_attribution(lm, IDS, 7)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda lm: bs.direct_logit_attribution(lm, IDS, lambda x: x[:, 7]), "a token or a pair"),
        (lambda lm: bs.direct_logit_attribution(lm, IDS, 99), "an id from 0 to 59"),
        (lambda lm: bs.direct_logit_attribution(lm, IDS, 7, by_head="yes"), "by_head"),
        (lambda lm: bs.direct_logit_attribution(lm, [[1], [2]], 7), "one text. Received 2"),
        (
            lambda lm: bs.direct_logit_attribution(lm, IDS, 7, controls={"x": 1}),
            "direct_logit_attribution at control 'x'",
        ),
        (
            lambda lm: bs.attribution(lm, IDS, 7, by_head=True),
            "attribution with by_head=True: expected sites of as many heads each",
        ),
    ],
)
def test_errors(call, words):
    with pytest.raises(bs.SurgeryError, match=words):
        call(bs.CachedCausalLM(make_gpt2()))
