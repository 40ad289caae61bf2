"""Merging: a plain backbone that computes what the edited one did, or an error that names why."""

from dataclasses import dataclass

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.families import ROWS
from tests.helpers import FAMILIES, TASKS, make_gemma, make_gemma2, make_gpt2, relative

EXACT = 5e-6
TOKENS = {"token_ids": np.arange(1, 25).reshape(3, 8), "padding_mask": np.ones((3, 8), "int32")}


def run(model):
    return np.asarray(model.predict_on_batch(TOKENS), "float32")


def vector(seed=0):
    return np.random.default_rng(seed).normal(0, 1, 32)


def with_lora(backbone, rank=2):
    backbone.enable_lora(rank)
    rng = np.random.default_rng(3)
    for variable in backbone.trainable_variables:
        if "lora" in variable.name:
            variable.assign(rng.normal(0, 0.4, variable.shape))
    return backbone


def add(at, **kwargs):
    return bs.Steer("add", {0: vector(), 1: vector(1)}, at, strength=0.6, **kwargs)


def ablate(at, **kwargs):
    return bs.Steer("ablate", {0: vector(2), 1: vector(3)}, at, mode="ablate", **kwargs)


GPT2 = {
    "add to the stream": [add("blocks.*")],
    "add in the middle": [add("blocks.*.residual_mid")],
    "add to what attention writes": [add("blocks.*.attention_output")],
    "add to what a norm gives the MLP": [add("blocks.*.mlp_output")],
    "add at all positions": [add("blocks.*", tokens=(0, None))],
    "take out": [ablate("blocks.*.mlp_output"), ablate("blocks.*.attention_output", strength=0.4)],
    "in order": [add("blocks.*"), add("blocks.*.mlp_output"), ablate("blocks.*.mlp_output")],
    "in another order": [ablate("blocks.*.mlp_output"), add("blocks.*.mlp_output")],
}


def named(rewrites):
    """Give each rewrite a name of its own."""
    settings = [{f: getattr(r, f) for f in r.__dataclass_fields__} for r in rewrites]
    return [bs.Steer(**{**s, "name": f"s{i}"}) for i, s in enumerate(settings)]


@pytest.mark.by_default(1)
@pytest.mark.parametrize("case", GPT2)
def test_steering_of_gpt2(case):
    backbone = make_gpt2()
    before = bs.weights_digest(backbone)
    edited = bs.operate(backbone, named(GPT2[case]))
    merged = bs.merge(edited)
    assert type(merged) is type(backbone)
    assert relative(run(merged), run(edited)) <= EXACT
    assert relative(run(merged), run(backbone)) > 1e-2
    assert bs.weights_digest(backbone) == before


@pytest.mark.slow
def test_directions_are_taken_out_of_gemma():
    backbone = make_gemma()
    edited = bs.operate(
        backbone, named([ablate("blocks.*.mlp_output"), ablate("blocks.*.attention_output")])
    )
    merged = bs.merge(edited)
    assert relative(run(merged), run(edited)) <= EXACT
    assert relative(run(merged), run(backbone)) > 1e-2
    # Done again by hand, for one kernel.
    unit = (vector(3) / np.linalg.norm(vector(3))).astype("float32")
    kernel = np.array(backbone.transformer_layers[1].ffw_linear.kernel)
    wanted = kernel @ (np.eye(32) - np.outer(unit, unit))
    np.testing.assert_allclose(merged.transformer_layers[1].ffw_linear.kernel, wanted, atol=1e-6)
    assert np.abs(np.array(merged.transformer_layers[1].ffw_linear.kernel) @ unit).max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_lora_is_folded_as_kerashub_does_on_saving(family, tmp_path):
    backbone = with_lora(FAMILIES[family]())
    before = bs.weights_digest(backbone)
    merged = bs.merge(backbone)
    assert bs.weights_digest(backbone) == before
    assert not any("lora" in v.path for v in merged.weights)
    assert relative(run(merged), run(backbone)) <= EXACT
    assert relative(run(merged), run(FAMILIES[family]())) > 1e-2
    backbone.save_weights(str(tmp_path / "a.weights.h5"))
    upstream = FAMILIES[family](seed=4)
    upstream.load_weights(str(tmp_path / "a.weights.h5"))
    for a, b in zip(merged.weights, upstream.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=a.path)


@pytest.mark.slow
def test_lora_and_steering_together_generate_the_same_text():
    """KerasHub's own task over the merged backbone writes what the edited one did."""
    edited = bs.operate(with_lora(make_gpt2()), [add("blocks.*")])
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler="greedy")
    prompt = {k: v[:, :4] for k, v in TOKENS.items()}
    wanted = lm.generate(prompt, max_new_tokens=8, stop_token_ids=None)["token_ids"]
    task = TASKS["gpt2"](backbone=bs.merge(edited), preprocessor=None)
    task.compile(sampler="greedy")
    padded = {k: np.pad(v, ((0, 0), (0, 8))) for k, v in prompt.items()}
    found = task.generate(padded, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(found, wanted)


def test_a_direction_is_taken_out_of_a_kernel_with_lora():
    """By value: the LoRA is folded first, and the direction then taken out of the sum."""
    backbone = make_gpt2()
    backbone.enable_lora(2, target_layer_names=["attention_output"])
    rng = np.random.default_rng(3)
    dense = [b._self_attention_layer._output_dense for b in backbone.transformer_layers]
    for layer in dense:
        assert layer.lora_enabled
        for factor in (layer.lora_kernel_a, layer.lora_kernel_b):
            factor.assign(rng.normal(0, 0.4, factor.shape))
    edited = bs.operate(backbone, [ablate("blocks.*.attention_output")])
    merged = bs.merge(edited)
    assert relative(run(merged), run(edited)) <= EXACT
    summed = np.array(dense[1].kernel)
    unit = (vector(3) / np.linalg.norm(vector(3))).astype("float32")
    found = np.array(merged.transformer_layers[1]._self_attention_layer._output_dense.kernel)
    np.testing.assert_allclose(found, summed @ (np.eye(32) - np.outer(unit, unit)), atol=1e-6)
    assert np.abs(summed @ unit).max() > 0.1


def test_directions_that_are_not_finite_are_refused():
    edited = bs.operate(make_gpt2(), [add("blocks.*", trainable=True)])
    learned = next(v for v in edited.trainable_variables if tuple(v.shape)[-1:] == (32,))
    learned.assign(np.full(learned.shape, np.nan))
    with pytest.raises(bs.SurgeryError, match=r"'add'\): a direction is not finite \(at bl"):
        bs.merge(edited)


@pytest.mark.slow
def test_bfloat16():
    edited = bs.operate(make_gpt2(dtype="bfloat16"), [add("blocks.*")])
    merged = bs.merge(edited)
    assert {str(v.dtype) for v in merged.weights} == {"bfloat16"}
    assert relative(run(merged), run(edited)) <= 5e-2


def test_nothing_to_fold_gives_a_copy():
    backbone = make_gpt2()
    merged = bs.merge(bs.operate(backbone, []))
    assert bs.weights_digest(merged) == bs.weights_digest(backbone)
    assert not {id(v) for v in merged.weights} & {id(v) for v in backbone.weights}


def test_what_a_config_leaves_out_is_kept():
    """KerasHub's `LlamaBackbone.get_config` does not say that the head is tied."""
    backbone = ROWS["llama"].make(num_layers=1, tie_word_embeddings=True)
    merged = bs.merge(backbone)
    assert merged.tie_word_embeddings
    assert np.array_equal(merged.predict_on_batch(TOKENS), backbone.predict_on_batch(TOKENS))


@pytest.mark.by_default(1)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_tied_embeddings_are_untied(family, tmp_path):
    """Directions are taken out of what goes in, and the logits stay as they are."""
    backbone = ROWS[family].make(tie_word_embeddings=True)
    if family == "llama":
        backbone.token_embedding.enable_lora(2)
        for variable in backbone.token_embedding.trainable_variables[-2:]:
            variable.assign(np.random.default_rng(4).normal(0, 0.4, variable.shape))
    edited = bs.operate(backbone, [bs.ProjectOut("out", np.stack([vector(1), vector(2)]))])
    with pytest.raises(bs.SurgeryError, match=r"make the logits too: .* untie_embeddings=True"):
        bs.merge(edited)
    before = bs.weights_digest(backbone)
    merged = bs.merge(edited, untie_embeddings=True)
    assert relative(run(merged), run(edited)) <= EXACT
    assert relative(run(merged), run(backbone)) > 1e-2
    logits = np.asarray(merged.token_embedding(run(merged), reverse=True))
    wanted = np.asarray(backbone.token_embedding(run(edited), reverse=True))
    assert relative(logits, wanted) <= EXACT
    assert bs.weights_digest(backbone) == before
    merged.save_to_preset(tmp_path)
    again = type(merged).from_preset(str(tmp_path))
    assert not again.tie_word_embeddings
    assert np.array_equal(run(again), run(merged))


@pytest.mark.parametrize("make", [make_gpt2, lambda: ROWS["llama"].make()])
def test_what_is_not_tied_by_an_argument_stays(make):
    with pytest.raises(bs.SurgeryError, match="expected a backbone with `tie_word_embeddings=Tr"):
        bs.merge(make(), untie_embeddings=True)


@dataclass(frozen=True)
class Double(bs.SiteRewrite):
    at: str = "blocks.0"

    def apply(self, x, place, surgery):
        return x + x


def clone_fn(layer, *args, **kwargs):
    x = layer(*args, **kwargs)
    return keras.layers.Dense(32)(x) if layer.name == "transformer_layer_0" else x


@pytest.mark.parametrize(
    ("make", "rewrite", "words"),
    [
        (make_gemma, add("blocks.*"), r"Steer 'add'\): no layer with a bias .* \(at blocks\.0"),
        (make_gemma, add("blocks.*.mlp_output"), r"no layer with a b.* blocks\.1\.mlp_output\)"),
        (make_gemma2, ablate("blocks.*.mlp_output"), "'post_ffw_norm' writes that site, or a part"),
        (
            make_gpt2,
            ablate("blocks.*"),
            r"'ablate'\): a part of it is read by other layers too.* \(at b",
        ),
        (make_gpt2, add("blocks.*.attention_norm"), "no layer with a bias writes that site"),
        (make_gpt2, add("blocks.*", tokens="prompt"), "acts on tokens 'prompt' only"),
        (make_gpt2, add("blocks.*", tokens=(0, 9)), r"acts on tokens \(0, 9\) only"),
        (make_gpt2, add("blocks.*", renormalize=True), "renormalises what it steers"),
        (make_gpt2, Double(), r"rewrites\.0 \(Double\): is neither steering nor an"),
        (make_gpt2, clone_fn, r"rewrites\.0 \(function 'clone_fn'\): is neither steering nor an"),
    ],
)
def test_what_weights_cannot_hold_is_named(make, rewrite, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.merge(bs.operate(make(), [rewrite]))


def test_everything_that_is_refused_is_named_at_once():
    edited = bs.operate(make_gpt2(), [Double(), add("blocks.*"), ablate("blocks.*")])
    with pytest.raises(bs.SurgeryError, match=r"rewrites\.0 .*; rewrites\.2 .* blocks\.1\)"):
        bs.merge(edited)


@pytest.mark.slow
def test_a_plain_graph_and_a_quantised_backbone_are_refused():
    backbone = make_gpt2(num_layers=1)
    plain = keras.Model(
        backbone.input, bs.clone_layer_graph(backbone.input, backbone.output, clone_fn)
    )
    with pytest.raises(bs.SurgeryError, match="Received one of a Functional"):
        bs.merge(plain)
    backbone.quantize("int8")
    with pytest.raises(bs.SurgeryError, match="Received a quantised one"):
        bs.merge(backbone)
