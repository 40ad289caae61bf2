"""Adapters saved for PEFT, new ones and those that PEFT made: their names and products."""

import errno
import json
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery import presets
from backbone_surgery.files import read_arrays
from tests.helpers import relative
from tests.opening.test_text_only import make_gemma3
from tests.rewriting.test_lora import PEFT, as_inputs, load, logits

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CLOSE = 1e-5


def arrays_of(folder):
    return {k: np.asarray(x, "float64") for k, x in read_arrays(folder / WEIGHTS).items()}


def config_of(folder):
    return json.loads((folder / CONFIG).read_text())


def products(folder):
    """Return B A of each module, without its scale, as NumPy computes it."""
    arrays = arrays_of(folder)
    modules = {name.rpartition(".lora_")[0] for name in arrays}
    return {m: arrays[f"{m}.lora_B.weight"] @ arrays[f"{m}.lora_A.weight"] for m in modules}


def perturb(edited, rng):
    for adapter in edited.rewrites[0].adapters.values():
        for variable in adapter.variables:
            variable.assign_add(rng.normal(0, 0.1, variable.shape))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in PEFT.iterdir()))
def test_what_peft_saved_is_saved_again(name, tmp_path, rng):
    """Under the same names; `fit` may then train each layer of a fused module by itself."""
    backbone, ids = load(name)
    edited = bs.operate(backbone, [bs.Lora("tuned", PEFT / name)])
    bs.save_peft(edited, "tuned", tmp_path / "adapter")
    theirs, ours = products(PEFT / name), products(tmp_path / "adapter")
    assert theirs.keys() == ours.keys()
    config = config_of(tmp_path / "adapter")
    if not config_of(PEFT / name)["rank_pattern"]:  # one scale for all
        old = config_of(PEFT / name)
        root = old["r"] ** 0.5 if old["use_rslora"] else old["r"]
        scale = old["lora_alpha"] / root / (config["lora_alpha"] / config["r"])
        assert all(relative(ours[m], theirs[m] * scale) <= CLOSE for m in ours)
    assert config["fan_in_fan_out"] == (name == "gpt2")

    perturb(edited, rng)
    wanted = logits(bs.CachedCausalLM(edited), ids)
    bs.save_peft(edited, "tuned", tmp_path / "adapter")
    ranks = {min(x.shape) for x in arrays_of(tmp_path / "adapter").values()}
    assert ranks == {config_of(tmp_path / "adapter")["r"]}
    again = bs.operate(backbone, [bs.Lora("tuned", tmp_path / "adapter")])
    assert relative(logits(bs.CachedCausalLM(again), ids), wanted) <= CLOSE


def test_ranks_of_a_fused_module_add_up(tmp_path, rng):
    """GPT-2's queries, keys and values are one module: as its blocks, keys without an adapter."""
    backbone, _ = load("gpt2")
    edited = bs.operate(backbone, [bs.Lora("tuned", rank=2, alpha=3)])
    perturb(edited, rng)
    bs.save_peft(edited, "tuned", tmp_path / "adapter")
    adapters = edited.rewrites[0].adapters
    width = backbone.hidden_dim
    parts = [
        (a.down.numpy() @ a.up.numpy() * 1.5).T if a is not None else np.zeros((width, width))
        for a in (adapters.get(f"blocks.1.{x}") for x in ("query", "key", "value"))
    ]
    config = config_of(tmp_path / "adapter")
    assert (config["r"], config["lora_alpha"]) == (4, 4)
    assert config["target_modules"] == [f"transformer.h.{i}.attn.c_attn" for i in range(3)]
    found = products(tmp_path / "adapter")["base_model.model.transformer.h.1.attn.c_attn"]
    assert relative(found, np.concatenate(parts)) <= CLOSE


@pytest.mark.slow
def test_a_new_adapter_is_trained_and_saved(tmp_path):
    backbone, ids = load("gpt2")
    before = bs.weights_digest(backbone)
    modules = ["c_attn", "mlp.c_proj"]
    edited = bs.operate(backbone, [bs.Lora("tuned", rank=2, alpha=4, target_modules=modules)])
    lm = bs.CachedCausalLM(edited)
    plain = logits(bs.CachedCausalLM(backbone), ids)
    assert np.array_equal(logits(lm, ids), plain)
    lm.compile(optimizer=keras.optimizers.Adam(0.01))
    x, y = as_inputs(ids[:, :-1], 4), np.tile(ids[:, 1:], (4, 1))
    losses = lm.fit(x, y, epochs=5, shuffle=False, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert bs.weights_digest(backbone) == before
    wanted = logits(lm, ids)
    assert relative(wanted, plain) > 0.01
    bs.save_peft(lm, "tuned", tmp_path / "adapter")
    config = config_of(tmp_path / "adapter")
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (6, 6, "LORA")
    again = bs.operate(backbone, [bs.Lora("again", tmp_path / "adapter")])
    assert relative(logits(bs.CachedCausalLM(again), ids), wanted) <= CLOSE
    bs.save_recipe(edited, tmp_path / "tuned.recipe")
    loaded = bs.load_recipe(tmp_path / "tuned.recipe", load("gpt2")[0])
    assert np.array_equal(logits(bs.CachedCausalLM(loaded), ids), wanted)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"target_modules": "qproj"},
            r"Received 'qproj', which is none. Linear .*: attention_outp",
        ),
        ({"rank": 99}, r"a rank from 1 to \d+, the smaller of inputs and outputs of 'blocks.0.que"),
        ({"target_modules": "k_proj"}, "Received 'k_proj', which is none"),  # of other models
        (
            {"target_modules": "feedforward_intermediate_dense"},
            r"_intermediate_dense', which has its activation inside. Leave it out.",
        ),
    ],
)
def test_new_adapters_that_do_not_fit(fields, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(load("gpt2")[0], [bs.Lora("tuned", **{"rank": 2, **fields})])


def test_the_usual_layers_of_a_model_that_has_one_for_all():
    edited = bs.operate(load("gpt_neox")[0], [bs.Lora("tuned", rank=2)])
    assert set(edited.rewrites[0].adapters) == {f"blocks.{i}.query_key_value" for i in range(3)}


@pytest.mark.slow
def test_target_modules_by_either_name():
    """Names of `transformers`, of its fused modules, and of KerasHub."""
    backbone, _ = load("gpt2")
    for modules, layers in {
        None: {"query", "value"},
        "c_attn": {"query", "key", "value"},
        ("key", "mlp.c_proj"): {"key", "feedforward_output_dense"},
        "attn.c_proj": {"attention_output"},
        "c_proj": {"attention_output", "feedforward_output_dense"},
    }.items():
        edited = bs.operate(backbone, [bs.Lora("tuned", rank=2, target_modules=modules)])
        paths = edited.rewrites[0].adapters
        assert set(paths) == {f"blocks.{i}.{layer}" for i in range(3) for layer in layers}


def test_modules_are_those_of_the_model():
    """As PEFT finds them: Qwen 3.5 has an `out_proj` in its linear attention alone."""
    edited = bs.operate(load("qwen3_5")[0], [bs.Lora("tuned", rank=1, target_modules="out_proj")])
    assert list(edited.rewrites[0].adapters) == ["blocks.0.out_proj", "blocks.2.out_proj"]


def test_what_the_config_says(tmp_path, monkeypatch):
    backbone, _ = load("gpt2")
    adapter = bs.Lora("tuned", rank=2, alpha=0, target_modules="mlp.c_proj")
    edited = bs.operate(backbone, [adapter])
    bs.save_peft(edited, "tuned", tmp_path / "adapter")
    config = config_of(tmp_path / "adapter")
    assert (config["lora_alpha"], config["base_model_name_or_path"]) == (0, None)
    monkeypatch.setitem(presets._names, backbone, "hf://someone/model")
    bs.save_peft(edited, "tuned", tmp_path / "adapter")
    assert config_of(tmp_path / "adapter")["base_model_name_or_path"] == "someone/model"


def test_a_full_disk_keeps_the_old_folder(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    edited = bs.operate(load("gpt2")[0], [bs.Lora("tuned", rank=2)])
    bs.save_peft(edited, "tuned", tmp_path / "adapter")
    before = arrays_of(tmp_path / "adapter")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(bs.SurgeryError, match=r"save_peft at .*: No space left on device"):
        bs.save_peft(edited, "tuned", tmp_path / "adapter")
    assert before.keys() == arrays_of(tmp_path / "adapter").keys()
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.slow
def test_a_backbone_with_images_is_named_so(tmp_path):
    edited = bs.operate(make_gemma3(), [bs.Lora("tuned", rank=2)])
    bs.save_peft(edited, "tuned", tmp_path / "usual")
    bs.save_peft(edited, "tuned", tmp_path / "text", blocks="model.layers")
    for folder, root in {"usual": "model.language_model.layers", "text": "model.layers"}.items():
        module = f"{root}.0.self_attn.q_proj"
        assert module in config_of(tmp_path / folder)["target_modules"]
        assert f"base_model.model.{module}.lora_A.weight" in arrays_of(tmp_path / folder)


@pytest.mark.slow
def test_what_is_not_saved(tmp_path):
    backbone, _ = load("gpt2")
    edited = bs.operate(backbone, [bs.Lora("tuned", rank=2)])
    path = tmp_path / "adapter"
    for name in ("tune", None):
        with pytest.raises(
            bs.SurgeryError, match=r"expected the name of a Lora. .*tuned\. Name it"
        ):
            bs.save_peft(edited, name, path)
    with pytest.raises(bs.SurgeryError, match=r"name of a Lora.* or put one in by"):
        bs.save_peft(backbone, "tuned", path)
    for blocks in ("", "model..layers", 3):
        with pytest.raises(bs.SurgeryError, match="expected `blocks` to be names with dots"):
            bs.save_peft(edited, "tuned", path, blocks=blocks)
    with pytest.raises(bs.SurgeryError, match="save_peft: expected a path"):
        bs.save_peft(edited, "tuned", "")
    routed = bs.operate(
        load("qwen3_moe")[0],
        [bs.Lora("tuned", rank=1, target_modules="sparse_feedforward_gate_dense")],
    )
    with pytest.raises(bs.SurgeryError, match=r"modules of their own. Received .*gate_dense.*_rec"):
        bs.save_peft(routed, "tuned", path)
    adapter = edited.rewrites[0].adapters["blocks.1.query"]
    kept = adapter.up.numpy()
    adapter.up.assign(np.full(adapter.up.shape, np.nan))
    with pytest.raises(bs.SurgeryError, match=r"h.1.attn.c_attn.lora_B': expected finite numbers"):
        bs.save_peft(edited, "tuned", path)
    assert not path.exists()
    adapter.up.assign(kept)
    shutil.copytree(PEFT / "gpt2", path)
    with pytest.raises(bs.SurgeryError, match=r"one that holds \['expected.npz'\], which would be"):
        bs.save_peft(edited, "tuned", path)
    (path / "expected.npz").unlink()
    bs.save_peft(edited, "tuned", path)
    assert config_of(path)["target_modules"][0] == "transformer.h.0.attn.c_attn"
