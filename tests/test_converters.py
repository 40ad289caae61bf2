"""Models of Hugging Face that KerasHub does not convert: names, settings, tokens, presets.

`tests/opening/test_hf_families.py` compares their logits with those of `transformers`.
"""

import json
import shutil
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import backbone_surgery as bs
from backbone_surgery.families import as_in_hugging_face

FAMILIES = Path(__file__).parent / "fixtures" / "hf_families"
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 40,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
SPACES = [" " * n for n in range(8, 1, -1)]
TEXT = "def f(x):\n        return  x\n\n    # 12345 don't caf\u00e9   <|endoftext|> end"


@pytest.fixture
def copy(tmp_path):
    """Copy the folder of a model, with other settings, without some, and with other names."""

    def copy_folder(source, without=(), rename=lambda name: name, wrap=None, **settings):
        folder = tmp_path / "model"
        shutil.copytree(FAMILIES / source, folder)
        config = json.loads((folder / "config.json").read_text()) | settings
        config = {name: value for name, value in config.items() if name not in without}
        (folder / "config.json").write_text(json.dumps(wrap(config) if wrap else config))
        tensors = load_file(folder / "model.safetensors")
        save_file({rename(k): x for k, x in tensors.items()}, folder / "model.safetensors")
        return folder

    return copy_folder


def load(folder, **kwargs):
    return bs.CachedCausalLM.from_preset(str(folder), **kwargs)


def logits_of(lm):
    ids = np.array([[5, 9, 2, 77, 31, 8, 4, 12]])
    return np.asarray(lm({"token_ids": ids, "padding_mask": np.ones_like(ids)}))


def pythias_tokenizer(vocabulary_size):
    """As that of Pythia: byte pairs of GPT-2's words, and a token for each run of spaces."""
    own = Tokenizer(models.BPE())
    own.normalizer = normalizers.NFC()
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(SPACES),
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    own.train([str(path) for path in sorted(FAMILIES.parents[1].glob("*.py"))], trainer)
    own.add_tokens(SPACES)
    return own


@pytest.fixture
def pythia(copy, tmp_path):
    folder = copy("pythia", vocab_size=600)
    tensors = load_file(folder / "model.safetensors")
    for name in ("gpt_neox.embed_in.weight", "embed_out.weight"):
        tensors[name] = np.tile(tensors[name], (5, 1))[:600].copy()
    save_file(tensors, folder / "model.safetensors")
    pythias_tokenizer(600).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.slow
def test_pythia_reads_and_writes_the_tokens_of_its_tokenizer(pythia, tmp_path):
    reference = Tokenizer.from_file(str(pythia / "tokenizer.json"))
    lm = load(pythia)
    ids = lm.preprocessor.tokenizer(TEXT).tolist()
    assert ids == reference.encode(TEXT).ids
    assert reference.token_to_id(" " * 8) in ids
    assert lm.preprocessor.tokenizer.detokenize(ids) == TEXT
    steer = bs.Steer("mood", {1: np.ones(32, np.float32)})
    edited = bs.CachedCausalLM(bs.operate(lm.backbone, [steer]), lm.preprocessor)
    texts = ["    return", "one two"]
    edited.save_to_preset(tmp_path / "saved")
    again = load(tmp_path / "saved")
    options = {"max_new_tokens": 5, "stop_token_ids": None, "controls": {"mood": 1.0}, "seed": 0}
    assert again.generate(texts, **options) == edited.generate(texts, **options)
    assert again.preprocessor.tokenizer(TEXT).tolist() == ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "task", "own"),
    [
        (
            "pythia",
            keras_hub.models.GPTNeoXCausalLM,
            {"activation": "gelu", "tie_word_embeddings": False},
        ),
        (
            "phi3_mini",
            keras_hub.models.Phi3CausalLM,
            {"sliding_window": 5, "partial_rotary_factor": 1.0},
        ),
        (
            "phi4_mini",
            keras_hub.models.Phi3CausalLM,
            {"tie_word_embeddings": True, "num_layers": 3},
        ),
    ],
)
def test_keras_hub_loads_what_was_saved(source, task, own, tmp_path):
    lm = load(FAMILIES / source)
    lm.save_to_preset(tmp_path / "saved")
    backbone = keras_hub.models.Backbone.from_preset(str(tmp_path / "saved"))
    assert type(backbone) is type(lm.backbone)
    assert type(backbone).__module__ == as_in_hugging_face.__name__
    assert {name: getattr(backbone, name) for name in own} == own
    ids = np.array([[5, 9, 2, 77, 31, 8, 4, 12]])
    theirs = task(backbone)({"token_ids": ids, "padding_mask": np.ones_like(ids)})
    np.testing.assert_allclose(logits_of(lm), theirs, atol=2e-6 * np.abs(theirs).max())
    cloned = keras.models.clone_model(lm.backbone) if source != "pythia" else backbone
    assert cloned.count_params() == backbone.count_params()
    lm.quantize("int8")
    assert backbone.token_embedding.quantization_mode is None
    assert lm.backbone.token_embedding.quantization_mode == "int8"
    np.testing.assert_allclose(logits_of(lm), theirs, atol=0.1 * np.abs(theirs).max())


PHI_3 = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "rope_scaling": None,
    "hidden_act": "silu",
}
MINI_3 = {"vocab_size": 32064, "num_attention_heads": 32, "sliding_window": 2047}
MINI_4 = {
    "vocab_size": 200064,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "max_position_embeddings": 131072,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
}
PHI_4 = {
    "vocab_size": 100352,
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "rope_theta": 250000,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "parameters"),
    [(MINI_3, 3_821_079_552), (MINI_4, 3_836_021_760), (PHI_4, 14_659_507_200)],
)
def test_published_models_have_as_many_parameters(settings, parameters, tmp_path):
    """As their model cards say, of Phi-3 mini, Phi-4 mini and Phi-4."""
    (tmp_path / "config.json").write_text(json.dumps(PHI_3 | settings))
    assert bs.plan(str(tmp_path), length=64).parameters == parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [keras.quantizers.GPTQConfig, keras.quantizers.AWQConfig], ids=["gptq", "awq"]
)
def test_own_backbones_are_calibrated_as_keras_hubs_are(config):
    texts = np.random.default_rng(0).integers(1, 120, (4, 16))
    lm = load(FAMILIES / "phi3_mini")
    before, made = logits_of(lm), config(texts, None, num_samples=4, sequence_length=16)
    lm.quantize(config=made)
    assert lm.backbone.transformer_layers[0].feedforward_gate_dense.quantization_mode == made.mode
    assert 0 < np.abs(logits_of(lm) - before).max() < np.abs(before).max()
    assert max(bs.check(lm.opened).errors.values()) <= 1e-5


@pytest.mark.slow
def test_rope_scaling_goes_before_rope_parameters(copy):
    """As in `transformers`; a wavelength among the latter counts for nothing then."""
    scaled = {name: x for name, x in LONG.items() if name != "rope_theta"}
    scaled |= {"attention_factor": 1.0899092, "factor": None}  # which is rounded
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_scaling": scaled}
    lm = load(copy("phi3", **both))
    assert lm.backbone.rope_max_wavelength == 10_000
    assert lm.backbone.rope_scaling_long_factor == LONG["long_factor"]


@pytest.mark.slow
def test_what_an_unscaled_model_says_of_scaling_counts_for_nothing(copy):
    plain = {"rope_type": "default", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.3}
    lm = load(copy("phi3", rope_parameters=plain))
    assert lm.backbone.rope_scaling_type is None


@pytest.mark.slow
@pytest.mark.parametrize("source", ["phi3", "phi4_mini"])
def test_phi_3_with_long_texts_alone(source):
    """KerasHub's backbone takes the long frequencies for all tokens of a text beyond the short."""
    short = load(FAMILIES / source)
    factors = short.backbone.rope_scaling_long_factor
    long = load(FAMILIES / source, rope_scaling_short_factor=tuple(factors))
    ids = np.random.default_rng(0).integers(2, 120, (1, 50))
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    hidden = short.backbone(inputs)
    wanted = np.asarray(short.backbone.token_embedding(hidden, reverse=True))
    np.testing.assert_allclose(np.asarray(long(inputs)), wanted, atol=1e-5 * np.abs(wanted).max())
    with pytest.raises(bs.SurgeryError, match="at most 40 tokens in a row"):
        short.generate(inputs, max_length=60, stop_token_ids=None)
    long.compile(sampler="greedy")
    answer = long.generate(inputs, max_new_tokens=4, stop_token_ids=None)["token_ids"]
    assert answer[0, 50] == wanted[0, -1].argmax()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["phi3", "phi3_mini", "phi4_mini"])
def test_the_task_of_keras_hub_writes_the_same(source):
    lm = load(FAMILIES / source)
    ids = np.zeros((2, 20), int)
    ids[:, :7] = [[5, 9, 2, 77, 31, 8, 4], [8, 3, 60, 60, 2, 9, 1]]
    prompts = {"token_ids": ids, "padding_mask": (np.arange(20) < 7) * np.ones_like(ids)}
    answers = []
    for each in (keras_hub.models.Phi3CausalLM(lm.backbone), lm):
        each.compile(sampler="greedy")
        answers.append(each.generate(dict(prompts), stop_token_ids=None)["token_ids"])
    np.testing.assert_array_equal(*answers)


@pytest.mark.slow
def test_gpt_neo_x_that_keras_hub_has_is_its_own_class(copy):
    assert type(load(FAMILIES / "gpt_neox").backbone) is keras_hub.models.GPTNeoXBackbone
    tied = load(copy("gpt_neox", hidden_act="gelu")).backbone
    assert (tied.activation, tied.tie_word_embeddings) == ("gelu", True)


@pytest.mark.parametrize(
    ("source", "root"),
    [
        pytest.param("pythia", "gpt_neox.", marks=pytest.mark.slow),
        ("opt", "model."),
        ("bloom", "transformer."),
        ("falcon", "transformer."),
        ("gemma3n_text", "model."),
    ],
)
def test_names_of_a_base_model(copy, source, root):
    """A base model is saved without the name that the others stand under, as BLOOM is published."""
    folder = copy(source, rename=lambda name: name.removeprefix(root))
    np.testing.assert_array_equal(logits_of(load(folder)), logits_of(load(FAMILIES / source)))


@pytest.mark.slow
def test_gemma_3n_as_it_is_published(copy):
    """The text stands within a model of images and sounds, whose tensors are passed over."""
    settings = {"vision_config": {"model_type": "gemma3n_vision"}, "audio_config": {}}
    folder = copy(
        "gemma3n_text",
        rename=lambda name: name.replace("model.", "model.language_model.", 1),
        wrap=lambda text: {"model_type": "gemma3n", "text_config": text, **settings},
    )
    tensors = load_file(folder / "model.safetensors")
    others = ("vision_tower.timm_model.conv_stem.conv.weight", "embed_audio.embedding.weight")
    tensors |= {f"model.{name}": np.ones((2, 2), np.float32) for name in others}
    save_file(tensors, folder / "model.safetensors")
    lm = load(folder)
    np.testing.assert_array_equal(logits_of(lm), logits_of(load(FAMILIES / "gemma3n_text")))
    assert lm.backbone.vision_encoder is None


@pytest.mark.slow
def test_settings_of_gemma_3n_that_are_left_out(copy):
    left = ("rope_parameters", "layer_types", "altup_coef_clip", "activation_sparsity_pattern")
    folder = copy("gemma3n_text", without=left, num_kv_shared_layers=0)
    backbone = load(folder, load_weights=False).backbone
    config = backbone.get_config()
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["layer_types"] == 4 * ["sliding_attention"] + ["full_attention"]
    assert config["altup_coef_clip"] == 120
    assert config["activation_sparsity_pattern"] == 5 * [0.0]


@pytest.mark.slow
def test_names_of_early_configs(copy):
    config = json.loads((FAMILIES / "pythia" / "config.json").read_text())
    rotary = {"rotary_pct": 0.25, "rotary_emb_base": config["rope_parameters"]["rope_theta"]}
    early = load(copy("pythia", without=("rope_parameters", "num_key_value_heads"), **rotary))
    np.testing.assert_array_equal(logits_of(early), logits_of(load(FAMILIES / "pythia")))


@pytest.mark.slow
def test_names_of_early_configs_of_bloom(copy):
    config = json.loads((FAMILIES / "bloom" / "config.json").read_text())
    early = {"n_embed": config["hidden_size"], "num_attention_heads": config["n_head"]}
    lm = load(copy("bloom", without=("hidden_size", "n_head"), **early))
    np.testing.assert_array_equal(logits_of(lm), logits_of(load(FAMILIES / "bloom")))


@pytest.mark.parametrize(
    ("source", "settings", "words"),
    [
        ("pythia", {"use_parallel_residual": False}, "True as `use_parallel_residual`"),
        ("pythia", {"hidden_act": "relu"}, "'gelu' or .* as `hidden_act`.*Received 'relu'"),
        ("pythia", {"attention_bias": False}, "True as `attention_bias`"),
        (
            "pythia",
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
            "'default' as `rope_type`",
        ),
        ("opt", {"word_embed_proj_dim": 16}, "32 as `word_embed_proj_dim`.*Received 16"),
        ("opt", {"do_layer_norm_before": False}, "True as `do_layer_norm_before`"),
        ("opt", {"activation_function": "gelu"}, "'relu' as `activation_function`"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "False as `apply_res"),
        ("falcon", {"alibi": None}, "True as `alibi`.*Received False"),
        ("falcon", {"new_decoder_architecture": True}, "False as `new_decoder_architecture`"),
        ("phi3", {"hidden_act": "gelu"}, "'silu' or 'swish' as `hidden_act`"),
        ("phi3", {"head_dim": 16}, "8 as `head_dim`"),
        ("phi3", {"max_position_embeddings": 160, "rope_parameters": LONG}, "4.0 as `factor`"),
        ("phi3", {"rope_parameters": LONG | {"attention_factor": 1.5}}, "1.08.* as `attention_f"),
        ("phi3", {"rope_parameters": None, "partial_rotary_factor": 0.63}, "0.5 as `partial_rot"),
        ("gemma3n_text", {"hidden_activation": "relu"}, "'gelu_new' or"),
        ("gemma3n_text", {"tie_word_embeddings": False}, "True as `tie_word_embeddings`"),
    ],
)
def test_settings_that_kerashub_has_not(copy, source, settings, words):
    with pytest.raises(bs.SurgeryError, match=f"from_preset at .*model': expected {words}"):
        load(copy(source, **settings), load_weights=False)


def test_weights_that_nothing_reads_are_refused(copy):
    folder = copy("pythia")
    tensors = load_file(folder / "model.safetensors")
    masks = {"gpt_neox.layers.0.attention.bias": np.ones((1, 1, 4, 4), bool)}
    save_file({**tensors, **masks}, folder / "model.safetensors")
    load(folder)  # masks of early files are not learned
    more = {"gpt_neox.layers.9.attention.dense.bias": np.ones(32, np.float32)}
    save_file({**tensors, **more}, folder / "model.safetensors")
    with pytest.raises(bs.SurgeryError, match=r"reads all. Received 1 tensors .*layers\.9"):
        load(folder)


def test_weights_that_are_not_there_are_refused(copy):
    folder = copy("opt", rename=lambda name: name.replace("layers.1.fc1", "layers.1.fc"))
    with pytest.raises(bs.SurgeryError, match=r"converter of 'opt' takes.*layers\.1\.fc1"):
        load(folder)
    save_file({"x": np.ones(1)}, folder / "model.safetensors")
    with pytest.raises(bs.SurgeryError, match=r"0 tensors named 'embed_tokens\.weight'"):
        load(folder)


@pytest.mark.slow
def test_a_head_that_is_the_table(copy):
    """As an untied file of a tied model has it; another head is refused."""
    folder = copy("gpt_neox")
    tensors = load_file(folder / "model.safetensors")
    table = tensors["gpt_neox.embed_in.weight"]
    save_file({**tensors, "embed_out.weight": table}, folder / "model.safetensors")
    np.testing.assert_array_equal(logits_of(load(folder)), logits_of(load(FAMILIES / "gpt_neox")))
    save_file({**tensors, "embed_out.weight": table + 1}, folder / "model.safetensors")
    with pytest.raises(bs.SurgeryError, match=r"expected 'embed_out.weight' to be 'gpt_neox\.emb"):
        load(folder)


@pytest.mark.slow
def test_table_of_positions_of_opt_is_whole():
    """Two rows more than positions are in the file; KerasHub has none for them."""
    lm = load(FAMILIES / "opt")
    tensors = load_file(FAMILIES / "opt" / "model.safetensors")
    table = tensors["model.decoder.embed_positions.weight"]
    own = lm.backbone.embeddings.position_embedding.position_embeddings
    np.testing.assert_array_equal(own, table[2:])


@pytest.mark.slow
def test_opt_with_tokens_that_were_added(copy):
    """A folder of before `tokenizer.json`, whose tokenizer was given tokens."""
    own = pythias_tokenizer(400)
    folder = copy("opt", vocab_size=402)
    ends = {"</s>": 400, "<pad>": 401}
    added = {name: own.token_to_id(name) for name in SPACES}
    plain = {k: i for k, i in own.get_vocab().items() if k not in added}
    (folder / "vocab.json").write_text(json.dumps({**plain, **ends}))
    (folder / "added_tokens.json").write_text(json.dumps(added))
    own.model.save(str(folder), "own")
    shutil.move(folder / "own-merges.txt", folder / "merges.txt")
    tokenizer = load(folder, load_weights=False).preprocessor.tokenizer
    text = TEXT.replace("<|endoftext|>", "").replace("\u00e9", "e")
    assert tokenizer(text).tolist() == own.encode(text).ids
    assert own.token_to_id(" " * 8) in tokenizer(text)


@pytest.mark.slow
def test_parts_that_were_saved_by_themselves(pythia, tmp_path):
    lm = load(pythia)
    lm.backbone.save_to_preset(str(tmp_path / "parts"))
    lm.preprocessor.save_to_preset(str(tmp_path / "parts"))
    again = load(tmp_path / "parts").preprocessor.tokenizer
    assert again(TEXT).tolist() == lm.preprocessor.tokenizer(TEXT).tolist()


@keras.saving.register_keras_serializable("tests")
class OwnBackbone(keras_hub.models.GPT2Backbone):
    """An architecture of a user."""


@keras.saving.register_keras_serializable("tests")
class OwnPreprocessor(keras_hub.models.GPT2CausalLMPreprocessor):
    """Its preprocessor."""

    backbone_cls = OwnBackbone


def test_preset_of_an_architecture_of_a_user(tmp_path):
    tokenizer = load("tiny_gpt2").preprocessor.tokenizer
    OwnBackbone(tokenizer.vocabulary_size(), 1, 2, 8, 16).save_to_preset(str(tmp_path))
    OwnPreprocessor(tokenizer, 64).save_to_preset(str(tmp_path))
    assert type(load(tmp_path).preprocessor) is OwnPreprocessor


def test_file_that_no_tokenizer_needs_is_not_read(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(FAMILIES.parent / "hf_gemma", folder)
    (folder / "tokenizer.json").write_text('{"model": {"type": "Newer"}, "pre_tokenizer": 3}')
    assert type(load(folder).preprocessor.tokenizer) is keras_hub.models.GemmaTokenizer


def test_gpt2_without_vocab_json(tmp_path):
    """`transformers` 5 saves `tokenizer.json` alone."""
    source = FAMILIES.parent / "hf_gpt2"
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path)
    own, whole = (load(x).preprocessor.tokenizer for x in (tmp_path, source))
    assert dict(own.vocabulary) == dict(whole.vocabulary)
    assert own(TEXT).tolist() == whole(TEXT).tolist()
