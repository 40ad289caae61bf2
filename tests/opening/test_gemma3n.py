"""What Gemma 3n has and the other families have not; see also rewriting/test_streams.py."""

import keras
import numpy as np
import pytest
from keras_hub.src.models.gemma3n.gemma3n_audio_encoder import Gemma3nAudioEncoder
from keras_hub.src.models.gemma3n.gemma3n_text_model import Gemma3nTextModel
from keras_hub.src.models.mobilenetv5.mobilenetv5_backbone import MobileNetV5Backbone
from keras_hub.src.models.mobilenetv5.mobilenetv5_builder import convert_arch_def_to_stackwise

import backbone_surgery as bs
from tests.families import ROWS
from tests.helpers import ragged, relative
from tests.reference import run_chunks, tokens

pytestmark = pytest.mark.slow

SMALL = ROWS["gemma3n"].shapes[0]
EXACT = 5e-6
make = ROWS["gemma3n"].make


def logits_by_kerashub(backbone, inputs):
    states = backbone({**inputs, "padding_mask": inputs["padding_mask"].astype(bool)})
    return np.asarray(backbone.language_model.token_embedding(states, reverse=True))


GLOBAL, LOCAL = "full_attention", "sliding_attention"
ODD = {
    "one head of keys, all blocks global": {
        "num_layers": 1,
        "num_key_value_heads": 1,
        "layer_types": [GLOBAL],
        "altup_num_inputs": 2,
        "laurel_rank": 1,
    },
    "blocks that borrow from one": {
        "num_layers": 4,
        "num_kv_shared_layers": 3,
        "layer_types": [LOCAL] * 4,
        "sliding_window": 2,
        "final_logit_soft_cap": 5.0,
    },
    "none borrows from the local block": {
        "num_layers": 4,
        "num_kv_shared_layers": 1,
        "num_key_value_heads": 4,
        "layer_types": [LOCAL, GLOBAL, GLOBAL, GLOBAL],
    },
    "two streams": {
        "altup_num_inputs": 2,
        "altup_correct_scale": False,
        "activation_sparsity_pattern": [0.99, 0.01],
        "rope_local_base_freq": 50.0,
    },
    "no sparse block": {"activation_sparsity_pattern": None, "attention_dropout": 0.5},
}


@pytest.mark.parametrize("shape", ODD.values(), ids=ODD)
def test_odd_shapes(shape, rng):
    backbone = make(**shape)
    inputs = ragged(rng, (14, 5, 1), 14)
    lm = bs.CachedCausalLM(backbone)
    mask = inputs["padding_mask"]
    wanted = logits_by_kerashub(backbone, inputs)
    got = lm.score(inputs["token_ids"], mask.astype("int32"))
    assert relative(got, wanted, mask) <= EXACT
    assert max(bs.check(lm.opened).errors.values()) <= 2e-5


def test_greedy_is_that_of_kerashubs_logits(rng):
    """With a cap and blocks that borrow, by KerasHub's own logits, uncached."""
    backbone = make(seed=1, **SMALL)
    lm = bs.CachedCausalLM(backbone)
    lm.compile(sampler="greedy")
    lengths = (3, 9, 5)
    ids = lm.generate(ragged(rng, lengths, 20), stop_token_ids=None)["token_ids"]
    logits = logits_by_kerashub(backbone, {"token_ids": ids, "padding_mask": np.ones_like(ids)})
    for row, best, length in zip(ids, logits.argmax(-1), lengths, strict=True):
        assert np.array_equal(best[length - 1 : -1], row[length:])
    assert len(np.unique(ids[:, 9:])) > 3


def test_all_weights_are_the_backbones(rng):
    """Blocks that borrow make no keys and values, so they alone leave some out."""
    backbone = make(**SMALL)
    paths = [v.path for v in backbone.variables]
    opened = bs.open_backbone(backbone)
    cached = bs.rewire(opened)
    assert len(cached.output["cache"]) == 3
    assert [v.path for v in backbone.variables] == paths
    own, used = {id(v) for v in backbone.variables}, {id(v) for v in opened.variables}
    assert used < own
    left_out = [v.path for v in backbone.variables if id(v) not in used]
    wanted = ("k_proj/kernel", "v_proj/kernel", "k_norm/scale")
    assert all(path.endswith(wanted) for path in left_out)
    assert len(left_out) == 2 * 3


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_logits_of_a_quantised_table(mode, rng):
    """Against what tokens are looked up as; KerasHub takes the whole numbers for weights."""
    backbone = make(**SMALL)
    lm = bs.CachedCausalLM(backbone)
    lm.compile(sampler="greedy")
    inputs = tokens(rng, 2, 9)
    lm.quantize(mode)
    table = backbone.language_model.embed_tokens.embedding
    rows = np.asarray(table(np.arange(60)))
    states = np.asarray(lm.opened(inputs))  # as `score` runs it: int8 makes rounding coarse
    wanted = 3.0 * np.tanh(states @ rows.T / 3.0)
    assert relative(lm.score(**inputs), wanted) <= EXACT
    assert relative(logits_by_kerashub(backbone, inputs), wanted) > 0.5
    cached = run_chunks(bs.rewire(backbone), inputs, [4, 1, 4])[0]
    assert relative(cached, states) <= {"int8": 1e-2, "int4": 1e-4}[mode]
    ids = lm.generate(inputs, max_new_tokens=4, stop_token_ids=None)["token_ids"]
    best = np.asarray(lm.score(ids, np.ones_like(ids))).argmax(-1)
    assert np.array_equal(best[:, 8:-1], ids[:, 9:])


@pytest.mark.parametrize("mode", [None, "int8", "int4"])
def test_logits_of_a_table_with_lora(mode, rng):
    backbone = make()
    table = backbone.language_model.embed_tokens.embedding
    if mode is not None:
        table.quantize(mode)
    table.enable_lora(2)
    table.lora_embeddings_b.assign(rng.normal(size=table.lora_embeddings_b.shape))
    states = rng.normal(size=(2, 3, 32)).astype("float32")
    wanted = states @ np.asarray(table(np.arange(60))).T
    head = bs.open_backbone(backbone).token_embedding
    assert relative(head(states, reverse=True), wanted) <= EXACT
    assert relative(head(np.arange(60)[None])[0], table(np.arange(60))) <= EXACT


def with_encoders(**kwargs):
    """Make a backbone that takes images and sounds too, as KerasHub's docs do."""
    stacks = convert_arch_def_to_stackwise([["er_r1_k3_s1_e1_c16"]])
    vision = MobileNetV5Backbone(**stacks, num_features=4, image_shape=(32, 32, 3), use_msfa=False)
    audio = Gemma3nAudioEncoder(
        hidden_size=8,
        input_feat_size=32,
        sscp_conv_channel_size=[4, 8],
        sscp_conv_kernel_size=[(3, 3), (3, 3)],
        sscp_conv_stride_size=[(2, 2), (2, 2)],
        sscp_conv_group_norm_eps=1e-5,
        num_hidden_layers=1,
        rms_norm_eps=1e-6,
        gradient_clipping=1.0,
        residual_weight=0.5,
        num_attention_heads=1,
        attention_chunk_size=4,
        num_attention_context_right=5,
        num_attention_context_left=5,
        attention_logit_cap=50.0,
        conv_kernel_size=5,
        reduction_factor=1,
    )
    return make(
        vision_encoder_config=vision.get_config(),
        vision_hidden_size=16,
        audio_encoder_config=audio.get_config(),
        audio_hidden_size=8,
        **kwargs,
    )


@pytest.mark.filterwarnings("ignore")  # of KerasHub, as it builds the encoders
def test_a_backbone_with_encoders_opens_for_text_alone(rng):
    backbone, text = with_encoders(), ragged(rng, (12, 5), 12)
    opened = bs.open_backbone(backbone)
    assert set(opened.input) == {"token_ids", "padding_mask"}
    assert bs.sites(opened) == bs.sites(make())
    more = {
        "images": rng.normal(size=(2, 1, 32, 32, 3)).astype("float32"),
        "input_features": rng.normal(size=(2, 1, 16, 32)).astype("float32"),
        "input_features_mask": np.zeros((2, 1, 16), bool),
    }
    wanted = backbone({**text, **more})
    assert relative(opened.predict_on_batch(text), wanted, text["padding_mask"]) <= EXACT
    assert max(bs.check(opened).errors.values()) <= EXACT
    lm = bs.CachedCausalLM(opened)
    lm.compile(sampler="greedy")
    settings = {"max_new_tokens": 2, "stop_token_ids": None}
    plain = lm.generate(text, **settings)["token_ids"]
    none = {name: value[:, :0] for name, value in more.items()}  # as a preprocessor gives of text
    assert np.array_equal(lm.generate({**text, **none}, **settings)["token_ids"], plain)
    with pytest.raises(bs.SurgeryError, match=r"takes text alone. Received \['images', 'input_f"):
        lm.generate({**text, **more}, **settings)


def test_presets_and_adapters_of_an_edit(tmp_path, rng):
    """KerasHub files the layer that holds the blocks within the one that embeds."""
    backbone, inputs = make(), tokens(rng, 2, 9)
    steer = bs.Steer("mood", {1: rng.normal(size=32)})
    lm = bs.CachedCausalLM(bs.operate(backbone, [steer]))
    lm.save_to_preset(tmp_path / "preset")
    loaded = bs.CachedCausalLM.from_preset(str(tmp_path / "preset"))
    assert np.array_equal(loaded.score(**inputs), lm.score(**inputs))
    backbone.save_weights(tmp_path / "own.weights.h5")
    other = bs.open_backbone(make(seed=3))
    other.load_weights(tmp_path / "own.weights.h5")
    assert np.array_equal(other(inputs), bs.open_backbone(backbone)(inputs))
    with pytest.raises(bs.WeightMismatchError):
        bs.open_backbone(make(num_layers=3)).load_weights(tmp_path / "own.weights.h5")


def test_a_graph_cloned_by_hand(rng):
    backbone, inputs = make(final_logit_soft_cap=4.0), tokens(rng, 2, 9)
    clone = keras.Model(backbone.input, bs.clone_layer_graph(backbone.input, backbone.output))
    lm = bs.CachedCausalLM(clone)
    assert relative(lm.score(**inputs), logits_by_kerashub(backbone, inputs)) <= EXACT


def test_what_is_refused():
    words = (
        r"open at 'decoder_block_0': expected two streams or more. Received `altup_num_inputs=1`"
    )
    with pytest.raises(bs.SurgeryError, match=words):
        bs.open_backbone(make(altup_num_inputs=1))
    backbone = make()
    nested = bs.rewrite_nested(
        backbone, "text_model.decoder_block_0.mlp.gate_proj", lambda layer, x: 2 * layer(x)
    )
    assert any(isinstance(layer, Gemma3nTextModel) for layer in nested.layers)
    with pytest.raises(bs.SurgeryError, match="`rewrite_nested` rewrote inside"):
        bs.open_backbone(nested)
    lm = bs.CachedCausalLM(make(num_layers=3, num_kv_shared_layers=1))
    with pytest.raises(bs.SurgeryError, match="Received block 2 without block 0 before it"):
        bs.operate(lm.opened, [bs.Remove("blocks.0")])
