"""Folders of Hugging Face: nothing that a converter of KerasHub passes over is lost in silence."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import backbone_surgery as bs
from tests.helpers import relative

FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = FIXTURES / "hf_families"


@pytest.fixture
def copy(tmp_path):
    """Copy the folder of a model, with other settings."""

    def copy_folder(source, **settings):
        folder = tmp_path / "model"
        shutil.copytree(source, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **settings}))
        return folder

    return copy_folder


def load(folder, **kwargs):
    return bs.CachedCausalLM.from_preset(str(folder), **kwargs).backbone


def rope(kind="default", theta=1000.0, **kwargs):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **kwargs}}


def yarn(**kwargs):
    """Rotary positions as those of the published GPT-OSS, with other settings."""
    usual = {"factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    return rope("yarn", **{**usual, **kwargs})


@pytest.mark.parametrize(
    ("source", "settings", "words"),
    [
        (FIXTURES / "hf_gpt2", {"activation_function": "relu"}, "'gelu_new' or .*Received 'relu'"),
        (FIXTURES / "hf_gpt2", {"layer_norm_epsilon": 0.01}, "1e-05 as `layer_norm_epsilon`"),
        (FIXTURES / "hf_gpt2", {"tie_word_embeddings": False}, "True as `tie_word_embeddings`"),
        (FIXTURES / "hf_gemma", rope(theta=500.0), "10000.0 as `rope_theta`.*Received 500.0"),
        (FIXTURES / "hf_gemma2", {"rms_norm_eps": 0.01}, "1e-06 as `rms_norm_eps`"),
        (FIXTURES / "hf_gemma2", {"layer_types": ["full_attention"] * 3}, ".* as `layer_types`"),
        (FAMILIES / "gemma3_text", {"attn_logit_softcapping": 3.0}, "null as `attn_logit_soft"),
        (FAMILIES / "gemma3_text", {"rope_local_base_freq": 5.0, "rope_parameters": None}, "10000"),
        (FAMILIES / "gpt_oss", {"sliding_window": 1}, "null as `sliding_window` .*Received 1"),
        (FAMILIES / "gpt_oss", {"swiglu_limit": 70.0}, "7.0 as `swiglu_limit`"),
        (FAMILIES / "gpt_oss", rope("yarn", beta_fast=16.0), "32.0 as `beta_fast`"),
        (FAMILIES / "gemma4_text", {"hidden_activation": "relu"}, "'gelu_new' or"),
        (FAMILIES / "llama", {"attention_bias": True}, "False as `attention_bias`"),
        (FAMILIES / "llama", {"head_dim": 16}, "8 as `head_dim`.*Received 16"),
        (FAMILIES / "llama", rope("linear"), "'default' or 'llama3' as `rope_type`"),
        (FAMILIES / "llama", rope(partial_rotary_factor=0.5), "1.0 as `partial_rotary_factor`"),
        (FAMILIES / "mistral", {"rope_scaling": {"type": "yarn"}}, "'default' as `rope_type`"),
        (FAMILIES / "mixtral", {"hidden_act": "gelu"}, "'silu' or 'swish' as `hidden_act`"),
        (FAMILIES / "qwen2", {"use_sliding_window": True}, "False as `use_sliding_window`"),
        (FAMILIES / "qwen2", {"quantization_config": {}}, "null as `quantization_config`"),
        (
            FAMILIES / "gpt_oss",
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "'mxfp4' as `quant_method` .*Received 'bitsandbytes'",
        ),
        (FAMILIES / "qwen3_moe", {"mlp_only_layers": [0]}, r"\[\] as `mlp_only_layers`"),
        (FAMILIES / "qwen3_moe", {"rms_norm_eps": 1e-5}, "1e-06 as `rms_norm_eps`"),
        (FAMILIES / "qwen3", {"rms_norm_eps": 1e-2}, "1e-06 or 1e-05 as `rms_norm_eps`"),
        (FAMILIES / "smollm3", {"layer_types": ["sliding_attention"]}, ".* as `layer_types`"),
        (FAMILIES / "mistral", {"layer_types": ["full_attention"]}, ".* as `layer_types`"),
        (FIXTURES / "hf_gemma", {"hidden_act": "silu"}, ".* or 'gelu' as `hidden_act`"),
        (
            FAMILIES / "gemma3_text",
            {"layer_types": None, "sliding_window_pattern": 2},
            "6 as `sliding_window_pattern`.*Received 2",
        ),
        (
            FAMILIES / "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_type": "default", "factor": 8.0}}},
            "1.0 as `factor`.*Received 8.0",
        ),
        (FAMILIES / "gemma4_text", {"attn_logit_softcapping": 2.0}, "null as `attn_logit_soft"),
        (
            FAMILIES / "gemma4_text",
            {"use_bidirectional_attention": "all"},
            "'vision' or False as `use_bi",
        ),
        (FAMILIES / "gemma4_text", rope(), "'proportional' as `rope_type`"),
        (FAMILIES / "gemma4_text", {"per_layer_config": {"1": {"head_dim": 4}}}, "null as `per_l"),
        (FAMILIES / "gpt_oss", yarn(truncate=None), "False as `truncate`.*Received True"),
        (FAMILIES / "gpt_oss", yarn(attention_factor=1.7), "1.34657.* as `attention_factor`"),
        (FAMILIES / "gpt_oss", yarn(mscale=1.0), "null as `mscale`"),
        (
            FAMILIES / "gpt_oss",
            yarn(original_max_position_embeddings=None),
            "4096 as `original_max_position_embeddings`",
        ),
        (
            FAMILIES / "gpt_oss",
            {**yarn(), "original_max_position_embeddings": 64},
            "4096 as `original_max_position_embeddings`.*Received 64",
        ),
    ],
)
def test_settings_that_kerashub_has_not(copy, source, settings, words):
    folder = copy(source, **settings)
    with pytest.raises(bs.SurgeryError, match=f"from_preset at .*model': expected {words}"):
        load(folder, load_weights=False)


def test_settings_that_are_given_to_the_backbone(copy):
    assert load(copy(FAMILIES / "llama", rms_norm_eps=1e-3)).layer_norm_epsilon == 1e-3


def test_frequencies_as_transformers_5_saves_them():
    config = load(FAMILIES / "llama", load_weights=False).get_config()
    scaled = json.loads((FAMILIES / "llama" / "config.json").read_text())
    assert "rope_scaling" not in scaled
    assert config["rope_frequency_adjustment_factor"] == scaled["rope_parameters"]["factor"] == 8


def without(folder, *names):
    """Take settings out of a folder's config."""
    config = json.loads((folder / "config.json").read_text())
    for name in names:
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_settings_that_early_folders_leave_out(copy):
    """`LlamaConfig()` of `transformers` has a theta of 10,000, an epsilon of 1e-6, heads alike."""
    names = ("rope_parameters", "tie_word_embeddings", "rms_norm_eps", "num_key_value_heads")
    backbone = load(without(copy(FAMILIES / "llama"), *names), load_weights=False)
    assert backbone.rope_max_wavelength == 10_000
    assert backbone.layer_norm_epsilon == 1e-6
    assert backbone.num_key_value_heads == backbone.num_query_heads == 4
    assert not backbone.tie_word_embeddings


def test_settings_that_are_null_are_those_that_are_left_out(copy):
    settings = dict.fromkeys(("rope_parameters", "rope_theta", "num_key_value_heads"))
    backbone = load(copy(FAMILIES / "llama", **settings), load_weights=False)
    assert (backbone.rope_max_wavelength, backbone.num_key_value_heads) == (10_000, 4)


def test_settings_that_published_folders_leave_out(copy):
    folder = without(copy(FAMILIES / "gemma3_text"), "head_dim", "query_pre_attn_scalar")
    backbone = load(folder, load_weights=False)
    assert (backbone.head_dim, backbone.query_head_dim_normalize) == (256, True)
    shutil.rmtree(folder)
    load(without(copy(FAMILIES / "mixtral"), "output_router_logits"))


def test_positions_before_the_long_ones_as_transformers_takes_them(copy):
    """What stands beside the others goes before what is among them; else it is all positions."""
    scaled = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    for settings, wanted in (({"original_max_position_embeddings": 16}, 16), ({}, 64)):
        folder = copy(FAMILIES / "llama", max_position_embeddings=64, **scaled, **settings)
        config = load(folder, load_weights=False).get_config()
        assert config["rope_pretraining_sequence_length"] == wanted
        shutil.rmtree(folder)


@pytest.mark.slow
def test_gpt_oss_without_settings_of_positions(copy):
    folder = copy(FAMILIES / "gpt_oss", rope_parameters=None, rope_scaling=None)
    config = load(folder, load_weights=False).get_config()
    assert (config["rope_scaling_factor"], config["rope_max_wavelength"]) == (32.0, 150_000)


@pytest.mark.slow
def test_heads_of_gemma_4_as_transformers_5_saves_them(copy):
    """By block, as published for all of those that attend to all tokens, or none for none."""
    whole = load(FAMILIES / "gemma4_text")
    folder = without(copy(FAMILIES / "gemma4_text"), "global_head_dim")
    backbone = load(folder)
    assert backbone.get_config()["global_head_dim"] == 16
    logits = [np.asarray(bs.CachedCausalLM(x).score([[5, 6, 7, 8]])) for x in (backbone, whole)]
    np.testing.assert_array_equal(*logits)
    shutil.rmtree(folder)
    folder = without(copy(FAMILIES / "gemma4_text", per_layer_config={}), "global_head_dim")
    assert load(folder, load_weights=False).get_config()["global_head_dim"] is None
    without(folder, "per_layer_config")
    assert load(folder, load_weights=False).get_config()["global_head_dim"] == 512


@pytest.mark.parametrize("name", ["mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "smollm3"])
def test_settings_that_are_left_out_are_those_of_transformers(copy, name):
    """As `MistralConfig()` of `transformers` has them, and so on."""
    folder = copy(FAMILIES / name)
    config = json.loads((folder / "config.json").read_text())
    names = {"rms_norm_eps", "rope_parameters", "use_sliding_window", "router_aux_loss_coef"}
    names |= {"tie_word_embeddings", "norm_topk_prob", "no_rope_layers", "layer_types"}
    backbone = load(without(folder, *(names & set(config))), load_weights=False)
    made = backbone.get_config()
    theta = made.get("rope_max_wavelength", made.get("rope_theta"))
    assert theta == {"mixtral": 1e6, "smollm3": 2e6}.get(name, 1e4)
    assert made["layer_norm_epsilon"] == (1e-5 if name == "mixtral" else 1e-6)


def test_a_width_of_the_mlp(copy):
    folder = copy(FIXTURES / "hf_gpt2", n_inner=40)
    assert load(folder, load_weights=False).intermediate_dim == 40


def test_tensors_that_nothing_reads(copy):
    folder = copy(FAMILIES / "llama")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, "float32"),  # not learned
        "model.layers.1.self_attn.q_proj.bias": np.ones(32, "float32"),
    }
    save_file({**tensors, **extra}, file)
    words = (
        r"reads all. Received 1 tensors that it leaves out, such as 'model.layers.1.*q_proj.bias"
    )
    with pytest.raises(bs.SurgeryError, match=words):
        load(folder)


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_a_head_of_its_own_in_a_model_that_ties_it(copy, name):
    """`transformers` 5 uses the head then; KerasHub the table."""
    source = FIXTURES / "hf_gpt2" if name == "gpt2" else FAMILIES / name
    folder = copy(source, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    table = next(x for n, x in tensors.items() if n.endswith(("embed_tokens.weight", "wte.weight")))
    save_file({**tensors, "lm_head.weight": table.copy()}, folder / "model.safetensors")
    load(folder)
    save_file({**tensors, "lm_head.weight": table * 2}, folder / "model.safetensors")
    with pytest.raises(bs.SurgeryError, match=r"expected 'lm_head.weight' to be '.*weight', since"):
        load(folder)


def test_two_sets_of_weights_in_a_folder(copy):
    folder = copy(FAMILIES / "llama")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(bs.SurgeryError, match="Received both, of which `transformers` reads the"):
        load(folder)


def test_a_type_of_model_that_kerashub_has_not(copy):
    folder = copy(FAMILIES / "llama", model_type="llama9")
    with pytest.raises(bs.SurgeryError, match=r"a model that KerasHub loads.*'llama9'.* Convert"):
        load(folder)


def test_weights_are_not_rounded_to_float16(copy):
    folder = copy(FAMILIES / "mistral")
    file = folder / "model.safetensors"
    tensors = {name: value.astype("float32") for name, value in load_file(file).items()}
    tensors["model.norm.weight"] += np.float32(1e-5)
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = 1e5
    save_file(tensors, file)
    backbone = load(folder)
    np.testing.assert_array_equal(backbone.layer_norm.scale, tensors["model.norm.weight"])
    kernel = backbone.transformer_layers[0]._self_attention_layer._query_dense.kernel
    kernel = np.asarray(kernel).reshape(32, -1)
    np.testing.assert_array_equal(kernel.T, tensors["model.layers.0.self_attn.q_proj.weight"])
    rounded = load(FAMILIES / "mistral", dtype="float16").layer_norm.scale
    assert rounded.dtype == np.asarray(rounded).dtype == "float16"


def test_a_folder_that_a_converter_stops_at(copy):
    folder = copy(FAMILIES / "llama")
    (folder / "model.safetensors").write_bytes(b"none")
    with pytest.raises(bs.SurgeryError, match=r"`.safetensors` files that .* 'llama' takes"):
        load(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(bs.SurgeryError, match=r"expected weights in model.safetensors, or .*anew"):
        load(folder)


@pytest.mark.slow
def test_windows_of_gpt_oss_on_the_other_blocks(copy):
    """As all published ones have them; also in a copy, a preset and a recipe."""
    folder = copy(FAMILIES / "gpt_oss", layer_types=None)
    backbone = load(folder)
    windows = [block.sliding_window for block in backbone.transformer_layers]
    assert windows == [5, None, 5, None][: len(windows)]  # KerasHub's are one token wider
    usual = load(FAMILIES / "gpt_oss")
    ids = np.arange(1, 41)[None] % 60
    wanted = np.asarray(bs.CachedCausalLM(backbone).score(ids))
    assert relative(bs.CachedCausalLM(usual).score(ids), wanted) > 1e-2
    task = bs.CachedCausalLM(bs.operate(backbone, [bs.Steer("mood", {0: np.ones(32)})]))
    task.save_to_preset(folder.parent / "preset")
    again = bs.CachedCausalLM.from_preset(folder.parent / "preset")
    for lm in (again, bs.CachedCausalLM(bs.merge(bs.operate(backbone, [])))):
        off = {"controls": {"mood": 0.0}} if lm is again else {}
        np.testing.assert_array_equal(lm.score(ids, **off), wanted)
        bs.check(lm.backbone)
    bs.save_recipe(task.backbone, folder.parent / "recipe")
    assert bs.load_recipe(folder.parent / "recipe", load(folder)).report
    with pytest.raises(bs.RecipeError, match="expected a backbone with layer_types"):
        bs.load_recipe(folder.parent / "recipe", usual)


@pytest.mark.slow
def test_experts_of_gpt_oss_in_floats(copy):
    """As a fine-tuned one is saved; KerasHub's converter reads MXFP4 alone."""
    folder = copy(FAMILIES / "gpt_oss", quantization_config=None)
    wanted = load(FAMILIES / "gpt_oss")
    tensors = load_file(folder / "model.safetensors")
    for i, block in enumerate(wanted.transformer_layers):
        for name in ("gate_up_proj", "down_proj"):
            path = f"model.layers.{i}.mlp.experts.{name}"
            del tensors[f"{path}_blocks"], tensors[f"{path}_scales"]
            tensors[path] = np.array(getattr(block.sparse_moe_block.experts, name))
    save_file(tensors, folder / "model.safetensors")
    for weight, same in zip(load(folder).weights, wanted.weights, strict=True):
        np.testing.assert_array_equal(weight, same, err_msg=weight.path)
    del tensors[path]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(bs.SurgeryError, match=r"converter of 'gpt_oss' takes.*down_proj"):
        load(folder)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text"])
def test_queries_scaled_by_the_width(copy, name):
    """As those of Gemma 2 and 3 of 27B parameters; others than these two are refused."""
    source = FIXTURES / "hf_gemma2" if name == "gemma2" else FAMILIES / name
    config = json.loads((source / "config.json").read_text())
    width = config["hidden_size"] // config["num_attention_heads"]
    folder = copy(source, query_pre_attn_scalar=width, head_dim=2 * width)
    backbone = load(folder, load_weights=False)
    blocks = backbone.transformer_layers
    assert not any(block.attention.query_head_dim_normalize for block in blocks)
    shutil.rmtree(folder)
    folder = copy(source, query_pre_attn_scalar=3)
    with pytest.raises(bs.SurgeryError, match=r"as `query_pre_attn_scalar`.*Received 3\."):
        load(folder, load_weights=False)


def test_a_model_that_takes_images_too(copy):
    config = json.loads((FAMILIES / "gemma3_text" / "config.json").read_text())
    text = {**config, "rms_norm_eps": 0.01}
    folder = copy(FAMILIES / "gemma3_text", model_type="gemma3", text_config=text)
    with pytest.raises(bs.SurgeryError, match=r"1e-06 as `rms_norm_eps`.*of type 'gemma3_text'"):
        load(folder)


def vision_tensors(rng, width, text_width):
    """Make the tensors of a vision tower of one block, by the names of `transformers` 5."""
    block = "encoder.layers.0"
    shapes = {
        "embeddings.patch_embedding.weight": (width, 3, 4, 4),
        "embeddings.patch_embedding.bias": (width,),
        "embeddings.position_embedding.weight": (16, width),
        f"{block}.mlp.fc1.weight": (24, width),
        f"{block}.mlp.fc1.bias": (24,),
        f"{block}.mlp.fc2.weight": (width, 24),
        f"{block}.mlp.fc2.bias": (width,),
    }
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        shapes[f"{block}.self_attn.{name}.weight"] = (width, width)
        shapes[f"{block}.self_attn.{name}.bias"] = (width,)
    for name in (f"{block}.layer_norm1", f"{block}.layer_norm2", "post_layernorm"):
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    shapes = {f"vision_tower.{name}": shape for name, shape in shapes.items()}
    shapes["multi_modal_projector.mm_input_projection_weight"] = (width, text_width)
    shapes["multi_modal_projector.mm_soft_emb_norm.weight"] = (width,)
    return {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}


def test_a_vision_tower_by_the_names_of_transformers_5(copy, rng):
    config = json.loads((FAMILIES / "gemma3_text" / "config.json").read_text())
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    vision |= {"image_size": 16, "num_hidden_layers": 1, "patch_size": 4}
    folder = copy(
        FAMILIES / "gemma3_text", model_type="gemma3", text_config=config, vision_config=vision
    )
    file = folder / "model.safetensors"
    text = {f"language_{name}": x for name, x in load_file(file).items()}
    text = {name.replace("language_model.", "language_model.model."): x for name, x in text.items()}
    vision = vision_tensors(rng, 16, config["hidden_size"])
    save_file({**text, **vision}, file)
    backbone = load(folder)
    encoder = backbone.vision_encoder.get_layer("image_encoder")
    position = encoder.vision_embeddings.position_embedding.embeddings
    np.testing.assert_array_equal(
        position, vision["vision_tower.embeddings.position_embedding.weight"]
    )
    kernel = backbone.transformer_layers[5].attention.query_dense.kernel
    query = text["language_model.model.layers.5.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(np.moveaxis(kernel, 1, 0).reshape(32, -1), query.T)


def test_an_adapter_beside_the_model(copy):
    folder = copy(FAMILIES / "llama")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(
        bs.SurgeryError, match=r"without an adapter. Received `adapter_config.json`"
    ):
        load(folder)


def test_keys_and_values_that_blocks_take_from_earlier_ones(copy):
    """Published files of Gemma 4 hold them; `transformers` and KerasHub leave them out."""
    folder = copy(FAMILIES / "gemma4_text")
    file = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    shared = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    names = {i: f"model.layers.{i}.self_attn.k_proj.bias" for i in (shared - 1, shared)}
    tensors = load_file(file)
    save_file({**tensors, names[shared]: np.ones(3, "float32")}, file)
    load(folder)
    save_file({**tensors, names[shared - 1]: np.ones(3, "float32")}, file)
    with pytest.raises(bs.SurgeryError, match=f"1 tensors that .* such as '{names[shared - 1]}'"):
        load(folder)
