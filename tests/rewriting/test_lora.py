"""Adapters of PEFT: logits equal those that PEFT gives; rows differ; bad folders are refused.

The adapters and the expected logits were made by `scripts/make_peft_fixtures.py`.
"""

import json
import shutil
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import backbone_surgery as bs
from tests.families import ROWS
from tests.helpers import relative

FIXTURES = Path(__file__).parents[1] / "fixtures"
PEFT = FIXTURES / "peft"
EXACT = 1e-5
ROUNDED_MORE = {"gemma4_text": 3e-5}
"""Seen: 8.6e-6 and 1.6e-5. PEFT's logits are 7.4e-6 from those in float64, and ours 3.1e-6."""


def load(name):
    own = FIXTURES / f"hf_{name}"
    folder = own if own.is_dir() else FIXTURES / "hf_families" / name
    with np.load(folder / "expected.npz") as arrays:
        ids = arrays["token_ids"][arrays["lengths"].argmax()][None]
    return bs.CachedCausalLM.from_preset(str(folder)).backbone, ids


def as_inputs(ids, rows=1):
    ids = np.tile(ids, (rows, 1))
    return {"token_ids": ids, "padding_mask": np.ones_like(ids)}


def logits(lm, ids):
    return np.asarray(lm(as_inputs(ids)))


@pytest.mark.by_default(1)
@pytest.mark.parametrize("name", sorted(path.name for path in PEFT.iterdir()))
def test_logits_are_those_of_peft(name):
    backbone, ids = load(name)
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Lora("tuned", PEFT / name)]))
    expected = np.load(PEFT / name / "expected.npz")["logits"]
    assert relative(logits(lm, ids)[0], expected) <= ROUNDED_MORE.get(name, EXACT)
    merged = bs.CachedCausalLM(bs.merge(lm))
    assert relative(logits(merged, ids)[0], expected) <= ROUNDED_MORE.get(name, EXACT)


@pytest.fixture
def llama():
    return load("llama")


@pytest.fixture
def copy(tmp_path):
    """Copy an adapter, with other settings, and arrays in the place of others or beside them."""

    def copy_folder(name, arrays=(), **settings):
        folder = Path(tempfile.mkdtemp(dir=tmp_path)) / "adapter"
        shutil.copytree(PEFT / name, folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
        file = folder / "adapter_model.safetensors"
        save_file({**load_file(file), **dict(arrays)}, file)
        return folder

    return copy_folder


def greedy(graph, inputs, **kwargs):
    lm = bs.CachedCausalLM(graph)
    lm.compile(sampler="greedy")
    options = {"max_new_tokens": 8, "stop_token_ids": None, "strip_prompt": True}
    return np.asarray(lm.generate(inputs, **options, **kwargs)["token_ids"])[:, :8]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_rows_with_strengths_of_their_own(name):
    """Each row generates what a pass over its text predicts; without adapters, as the base does."""
    backbone, ids = load(name)
    other = bs.Lora("other", PEFT / name, strength=-0.5)
    edited = bs.operate(backbone, [bs.Lora("tuned", PEFT / name), other])
    strengths = {"tuned": [0.0, 1.0, 0.5, 0.0], "other": [0.0, 0.0, -1.0, 2.0]}
    new = greedy(edited, as_inputs(ids, 4), controls=strengths)
    assert np.array_equal(new[0], greedy(backbone, as_inputs(ids))[0])
    text = np.concatenate([np.tile(ids, (4, 1)), new], axis=1)
    scored = np.asarray(bs.CachedCausalLM(edited).score(text, controls=strengths))
    assert np.array_equal(scored.argmax(-1)[:, ids.shape[1] - 1 : -1], new)
    assert len({tuple(row) for row in new.tolist()}) == 4


@pytest.mark.slow
def test_a_strength_of_zero_is_no_edit(llama):
    backbone, ids = llama
    edited = bs.operate(backbone, [bs.Lora("tuned", PEFT / "llama", strength=0.0)])
    lm, plain = bs.CachedCausalLM(edited), bs.CachedCausalLM(backbone)
    assert np.array_equal(logits(lm, ids), logits(plain, ids))
    assert np.array_equal(greedy(edited, as_inputs(ids)), greedy(backbone, as_inputs(ids)))


@pytest.mark.slow
def test_a_recipe_holds_the_adapter_and_no_path(llama, tmp_path):
    backbone, ids = llama
    folder = shutil.copytree(PEFT / "llama", tmp_path / "adapter")
    edited = bs.operate(backbone, [bs.Lora("tuned", folder), bs.Repeat("blocks.0", 2)])
    bs.save_recipe(edited, tmp_path / "tuned.recipe")
    shutil.rmtree(folder)
    assert str(folder) not in (tmp_path / "tuned.recipe" / "recipe.json").read_text()
    loaded = bs.load_recipe(tmp_path / "tuned.recipe", load("llama")[0])
    wanted = logits(bs.CachedCausalLM(edited), ids)
    assert np.array_equal(logits(bs.CachedCausalLM(loaded), ids), wanted)
    again = bs.operate(load("llama")[0], edited.rewrites)
    assert np.array_equal(logits(bs.CachedCausalLM(again), ids), wanted)


@pytest.mark.slow
def test_fit_trains_the_adapter_alone(llama):
    backbone, ids = llama
    before = bs.weights_digest(backbone)
    edited = bs.operate(backbone, [bs.Lora("tuned", PEFT / "llama")])
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler="greedy", optimizer=keras.optimizers.Adam(0.01))
    own = {id(v) for x in edited.rewrites[0].adapters.values() for v in x.variables}
    assert {id(v) for v in lm.trainable_variables} == own
    x = as_inputs(ids[:, :-1], 4)
    y = np.tile(ids[:, 1:], (4, 1))
    losses = lm.fit(x, y, epochs=5, shuffle=False, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert bs.weights_digest(backbone) == before


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_beside_a_quantised_layer(mode, llama):
    backbone, ids = llama
    backbone.quantize(mode)
    edited = bs.operate(backbone, [bs.Lora("tuned", PEFT / "llama")])
    new = greedy(edited, as_inputs(ids, 2), controls={"tuned": [1.0, 0.0]})
    assert np.array_equal(new[1], greedy(backbone, as_inputs(ids))[0])
    assert not np.array_equal(new[0], new[1])
    text = np.concatenate([np.tile(ids, (2, 1)), new], axis=1)
    scored = np.asarray(bs.CachedCausalLM(edited).score(text, controls={"tuned": [1.0, 0.0]}))
    assert np.array_equal(scored.argmax(-1)[:, ids.shape[1] - 1 : -1], new)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision(dtype):
    _, ids = load("llama")
    folder = str(FIXTURES / "hf_families" / "llama")
    backbone = bs.CachedCausalLM.from_preset(folder, dtype=dtype).backbone
    edited = bs.operate(backbone, [bs.Lora("tuned", PEFT / "llama")])
    expected = np.load(PEFT / "llama" / "expected.npz")["logits"]
    found = logits(bs.CachedCausalLM(edited), ids)[0].astype("float32")
    assert relative(found, expected) < 0.08
    assert {v.dtype for v in edited.trainable_variables} == {"float32"}


@pytest.mark.slow
def test_blocks_in_another_order(llama):
    """An adapter goes with the layers it was trained for, wherever these run."""
    backbone, ids = llama
    adapter = bs.Lora("tuned", PEFT / "llama")
    before = bs.operate(backbone, [adapter, bs.Reorder([1, 0, 2])])
    after = bs.operate(backbone, [bs.Reorder([1, 0, 2]), adapter])
    wanted = logits(bs.CachedCausalLM(before), ids)
    assert np.array_equal(logits(bs.CachedCausalLM(after), ids), wanted)
    with pytest.raises(bs.SurgeryError, match=r"expected a graph with all layers .* by `bs.merge`"):
        bs.operate(backbone, [bs.Remove("blocks.0"), adapter])
    edited = bs.operate(backbone, [adapter])
    removed = bs.operate(bs.merge(edited), [bs.Remove("blocks.0")])
    kept = {k: x for k, x in edited.rewrites[0].adapters.items() if not k.startswith("blocks.0.")}
    same = bs.operate(backbone, [bs.Remove("blocks.0"), bs.Lora("tuned", adapters=kept)])
    found = logits(bs.CachedCausalLM(removed), ids)
    assert relative(found, logits(bs.CachedCausalLM(same), ids)) <= EXACT


@pytest.mark.parametrize(
    ("name", "usual", "queries"),
    [
        ("rwkv7", ("receptance", "value"), ("receptance",)),
        ("qwen3_5", ("in_proj_qkv", "query", "value"), ("query",)),
        ("gemma3n", ("q_proj", "v_proj"), ("q_proj",)),
    ],
)
def test_a_new_adapter_goes_into_each_block_by_default(name, usual, queries):
    backbone = ROWS[name].make()
    for targets, layers in ((None, usual), (["query"], queries)):
        edited = bs.operate(backbone, [bs.Lora("tuned", rank=2, target_modules=targets)])
        places = [path.split(".") for path in edited.rewrites[0].adapters]
        assert {layer for _, _, layer in places} == set(layers)
        if targets is None:
            assert {block for _, block, _ in places} == {"0", "1"}


@pytest.mark.slow
def test_a_new_adapter_goes_beside_the_layers_that_are_left(llama):
    backbone, _ = llama
    for edit in (bs.Remove("blocks.1"), bs.Replace("blocks.1", keras.layers.Rescaling(0.5))):
        edited = bs.operate(backbone, [edit, bs.Lora("tuned", rank=2)])
        assert {path.split(".")[1] for path in edited.rewrites[1].adapters} == {"0", "2"}
    empty = bs.operate(backbone, [bs.Replace("blocks.*", keras.layers.Rescaling(0.5))])
    with pytest.raises(bs.SurgeryError, match=r"as `target_modules`. Received 'up_proj', .*: none"):
        bs.operate(empty, [bs.Lora("tuned", rank=2, target_modules="up_proj")])
    with pytest.raises(bs.SurgeryError, match=r"Received none of queries and values. Name others"):
        bs.operate(empty, [bs.Lora("tuned", rank=2)])


@pytest.mark.by_default(3)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, r"LoRA beside linear layers, .* Received `use_dora` True\. Merge"),
        ({"bias": "all"}, "`bias` 'all'"),
        ({"peft_type": "IA3"}, "`peft_type` 'IA3'"),
        ({"init_lora_weights": "pissa"}, "`init_lora_weights` 'pissa'"),
        ({"alora_invocation_tokens": [1]}, "`alora_invocation_tokens`"),
        ({"modules_to_save": ["lm_head"]}, "`modules_to_save`"),
        ({"a_setting_to_come": 1}, "`a_setting_to_come` 1"),
        ({"lora_alpha": "much"}, "expected an adapter that PEFT saved"),
        ({"use_rslora": "false"}, "`use_rslora` 'false'"),
    ],
)
def test_more_than_lora_is_refused(settings, words, copy, llama):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(llama[0], [bs.Lora("tuned", copy("llama", **settings))])


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("lm_head", (2, 32), "factors of linear layers in blocks. Received 'base_model.model.lm_h"),
        ("model.layers.0.mlp.experts.1.gate_proj", (2, 32), "lora_A .rank, inputs. and lora_B"),
        ("model.layers.0.self_attn.q_proj", (3, 32), r"Received lora_A \[3, 32\], lora_B \[32, 2"),
        ("model.layers.0.self_attn.q_proj", (2, 31), "from 32 to 32 numbers. .* from 31 to 32"),
        ("model.layers.0.self_attn.q_proj", (2,), "expected finite matrices"),
        ("language_model.layers.0.self_attn.q_proj", (2, 32), "Received two of 'self_attn.q_proj'"),
        ("model.layers.0.mlp.q_proj", (2, 32), "lora_A .rank, inputs. and lora_B"),
    ],
)
def test_arrays_that_do_not_fit(name, array, words, copy, llama):
    arrays = {f"base_model.model.{name}.lora_A.weight": np.ones(array, "float32")}
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(llama[0], [bs.Lora("tuned", copy("llama", arrays))])


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"alpha_pattern": {"^model.layers.0.mlp.down_proj": 70}}, 70 / 5),
        ({"alpha_pattern": {"base_model.model.model.layers.0.mlp.down_proj": 70}}, 1),
        ({"alpha_pattern": {}, "use_rslora": True}, 2**0.5),
        ({"alpha_pattern": {"mlp.*": 10, "down_proj": 70}}, 2),
    ],
)
def test_scales(settings, factor, copy, llama):
    """As `get_pattern_key` of PEFT finds them, in names without `base_model.model`."""
    first, second = (
        bs.operate(llama[0], [bs.Lora("tuned", folder)]).rewrites[0].adapters
        for folder in (copy("llama", alpha_pattern={}), copy("llama", **settings))
    )
    path = "blocks.0.feedforward_output_dense"
    assert second[path].scale == pytest.approx(first[path].scale * factor)


def test_layers_that_the_model_has_not(copy, llama):
    def arrays(module, outputs=48):
        name = f"base_model.model.model.layers.{module}"
        return {
            f"{name}.lora_A.weight": np.ones((2, 32), "float32"),
            f"{name}.lora_B.weight": np.ones((outputs, 2), "float32"),
        }

    words = "Received some of 'mlp.gate' in block 1, which is none. .* Linear layers here: bl"
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(llama[0], [bs.Lora("tuned", copy("llama", arrays("1.mlp.gate")))])
    with pytest.raises(bs.SurgeryError, match=r"'mlp.experts.1.up_proj' in block 0, which is none"):
        bs.operate(llama[0], [bs.Lora("tuned", copy("llama", arrays("0.mlp.experts.1.up_proj")))])
    with pytest.raises(bs.SurgeryError, match=r"in block 7, which is none. .* here: none"):
        bs.operate(llama[0], [bs.Lora("tuned", copy("llama", arrays("7.mlp.up_proj")))])
    gpt2, folder = load("gpt2")[0], copy("gpt2", arrays("1.mlp.c_fc", 128))
    with pytest.raises(bs.SurgeryError, match=r"'blocks.1.feedforward_intermediate_dense', which"):
        bs.operate(gpt2, [bs.Lora("tuned", folder)])


@pytest.mark.slow
def test_fields(copy, llama, tmp_path):
    for fields in ({}, {"path": "x", "rank": 2}):
        with pytest.raises(bs.SurgeryError, match=r"one of `path`, `adapters` and `rank`. Rec"):
            bs.Lora("tuned", **fields)
    with pytest.raises(bs.SurgeryError, match=r"`adapters` to be {layer path: adapter}"):
        bs.Lora("tuned", adapters={"blocks.0.query": keras.layers.Dense(2)})
    for fields in ({"alpha": 2}, {"target_modules": "q_proj"}):
        with pytest.raises(bs.SurgeryError, match=r"with a `rank` alone. Received 'path'. Leave"):
            bs.Lora("tuned", "x", **fields)
    for modules in (["q_proj", 1], [], ""):
        with pytest.raises(bs.SurgeryError, match="`target_modules` to be names"):
            bs.Lora("tuned", rank=2, target_modules=modules)
    with pytest.raises(bs.SurgeryError, match="`strength` to be a finite number"):
        bs.Lora("tuned", "x", strength=float("nan"))
    with pytest.raises(bs.SurgeryError, match="`name` to be a name of letters, digits and"):
        bs.Lora("my adapter", "x")
    with pytest.raises(bs.SurgeryError, match=r"without adapter_config.json and adapter_model.saf"):
        bs.operate(llama[0], [bs.Lora("tuned", tmp_path)])
    edited = bs.operate(llama[0], [bs.Lora("tuned", PEFT / "llama")])
    with pytest.raises(
        bs.SurgeryError, match=r"linear layers of this model. Received one of 'bloc"
    ):
        bs.operate(load("smollm3")[0], edited.rewrites)
    with pytest.raises(bs.SurgeryError, match=r"'blocks.0.key' from .* numbers. Received one"):
        bs.operate(load("mistral")[0], edited.rewrites)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(bs.SurgeryError, match=r"Received adapter_model.bin, which may run code"):
        bs.operate(llama[0], [bs.Lora("tuned", tmp_path)])


@pytest.mark.slow
def test_requests_of_an_engine(llama):
    backbone, ids = llama
    edited = bs.operate(backbone, [bs.Lora("tuned", PEFT / "llama", strength=0.0)])
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler="greedy")
    with bs.Engine(lm, rows=2, length=64) as engine:
        strengths = [0.0, 1.0, 0.5, -2.0]
        options = {"max_new_tokens": 8, "stop_token_ids": None, "strip_prompt": True}
        requests = [
            engine.submit(as_inputs(ids), controls={"tuned": s}, **options) for s in strengths
        ]
        found = [np.asarray(r.result()).reshape(-1)[:8] for r in requests]
    wanted = greedy(edited, as_inputs(ids, 4), controls={"tuned": strengths})
    assert np.array_equal(found, wanted)


@pytest.mark.slow
def test_a_direction_is_taken_out_of_what_the_adapter_adds_too(llama, rng):
    backbone, ids = llama
    adapter = bs.Lora("tuned", PEFT / "llama", strength=0.5)
    direction = rng.normal(0, 1, backbone.hidden_dim)
    ablate = bs.Steer("gone", {1: direction}, at="blocks.*.mlp_output", mode="ablate")
    for edits in ([adapter, ablate], [ablate, adapter]):
        edited = bs.operate(backbone, edits)
        wanted = logits(bs.CachedCausalLM(edited), ids)
        merged = logits(bs.CachedCausalLM(bs.merge(edited)), ids)
        assert relative(merged, wanted) <= EXACT
    assert relative(logits(bs.CachedCausalLM(backbone), ids), wanted) > 0.01
