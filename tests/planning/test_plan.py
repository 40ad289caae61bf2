"""`plan`: what is on paper is what there is; `on_devices.py` compares it on a mesh."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import jax
import keras
import keras_hub
import pytest
from jax import export

import backbone_surgery as bs
from backbone_surgery import graph
from backbone_surgery.generation.programs import Programs
from backbone_surgery.generation.samplers import make_strategy
from backbone_surgery.planning.abstract import Sizes, abstract_placement, trace
from backbone_surgery.planning.compilers import CompiledProgram
from tests.families import ROWS, make_gpt2


@pytest.mark.parametrize("name", list(ROWS))
def test_on_one_device_it_is_all_weights_and_the_cache(name):
    backbone = ROWS[name].make()
    paper = bs.plan(backbone, batch=3, length=20)
    assert paper.parameters == sum(math.prod(v.shape) for v in backbone.weights)
    assert paper.weight_bytes == sum(v.value.nbytes for v in backbone.weights)
    assert (paper.rows, paper.slots) == (3, 32)
    caches = (bs.new_cache(bs.rewire(backbone), 3, slots) for slots in (32, 20))
    sizes = [sum(x.nbytes for entry in cache for x in entry.values()) for cache in caches]
    assert [paper.cache_bytes, paper.used_cache_bytes] == sizes
    assert paper.collectives == {}
    assert paper.fits


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "llama", "mixtral", "gpt_oss", "qwen3_moe"])
def test_a_block_takes_two_sums(name):
    """Though the attention of GPT-OSS, for its sinks, holds the layer that owns all projections."""
    backbone = ROWS[name].make(vocabulary_size=64)
    paper = bs.plan(backbone, mesh={"model": 2}, batch=3, length=20)
    assert paper.collectives == {"all-reduce": 2 * backbone.num_layers + 3}


@pytest.mark.slow
def test_what_an_edit_brings_along_is_on_every_device_and_all_else_as_before():
    backbone, shared = ROWS["llama"].make(), {"mesh": {"model": 2}, "batch": 3, "length": 20}
    plain = bs.plan(backbone, **shared)
    factors = [bs.LowRank(f"blocks.*.{site}", rank=2) for site in ("query", "mlp_hidden")]
    layer = bs.Insert("blocks.1.mlp_hidden", keras.layers.Dense(backbone.intermediate_dim))
    paper = bs.plan(backbone, edits=[*factors, layer], **shared)
    assert paper.collectives == plain.collectives
    assert paper.weight_bytes - plain.weight_bytes == 4 * (paper.parameters - plain.parameters)
    repeated = bs.plan(backbone, edits=[bs.Repeat("blocks.1", times=3)], **shared)
    assert repeated.collectives == bs.plan(ROWS["llama"].make(num_layers=4), **shared).collectives
    shorter = bs.plan(backbone, edits=[bs.Remove("blocks.1")], **shared)
    assert shorter.collectives == bs.plan(ROWS["llama"].make(num_layers=1), **shared).collectives


@pytest.mark.slow
def test_channels_of_linear_attention_are_gathered():
    """Two blocks of three have them: two sums a block, and three more, as in other models."""
    backbone = ROWS["qwen3_5"].make(num_layers=3, vocabulary_size=64, dtype="bfloat16")
    plain, shared = (bs.plan(backbone, {"model": n}, batch=4, length=20) for n in (1, 2))
    assert shared.collectives == {"all-reduce": 2 * 3 + 3, "all-gather": 2}
    channels = 2 * (2 * 6) + 4 * 10
    assert shared.collective_bytes == 4 * (7 * 2 * backbone.hidden_dim + 2 * 4 + 2 * 2 * channels)
    kernels = sum(v.value.nbytes for v in backbone.weights if "in_proj_qkv" in v.path)
    assert plain.weight_bytes - shared.weight_bytes > kernels // 2
    whole = bs.plan(backbone, {"model": 3}, batch=4, length=20)
    assert "all-gather" not in whole.collectives  # 64 channels on three devices


@pytest.mark.slow
def test_a_model_of_70_billion_parameters_is_planned_from_its_config(tmp_path):
    """Of the shape of Llama 3 70B; nothing but `config.json` is there."""
    sizes = {
        "vocabulary_size": 128256,
        "num_layers": 80,
        "num_query_heads": 64,
        "num_key_value_heads": 8,
        "hidden_dim": 8192,
        "intermediate_dim": 28672,
    }
    tiny = keras_hub.models.Llama3Backbone(
        **{**sizes, "vocabulary_size": 8, "num_layers": 1, "hidden_dim": 64, "intermediate_dim": 64}
    )
    config = {
        "module": "keras_hub.src.models.llama3.llama3_backbone",
        "class_name": "Llama3Backbone",
        "registered_name": "keras_hub>Llama3Backbone",
        "config": {**tiny.get_config(), **sizes},
    }
    config["config"].pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "metadata.json").write_text(json.dumps({"keras_version": "3"}))
    paper = bs.plan(str(tmp_path), {"batch": 1, "model": 8}, batch=8, length=8192)
    assert 70e9 < paper.parameters < 71e9
    assert paper.fits
    assert not bs.plan(str(tmp_path), {"model": 2}, batch=8, length=8192).fits
    assert paper.weight_bytes == pytest.approx(2 * paper.parameters / 8, rel=1e-3)
    assert paper.cache_bytes == 2 * 80 * 8 * 8192 * 8 * 128 * 2 // 8
    assert paper.collectives == {"all-reduce": 2 * 80 + 3}
    assert "161" not in str(paper)
    assert "163 all-reduce" in str(paper)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "H10"}, "Did you mean 'H100'"),
        ({"mesh": {"rows": 2}}, "axes `batch` and `model`"),
        ({"mesh": {"model": 0}}, "axes `batch` and `model`"),
        ({"batch": 0}, "at 'batch': expected a positive int"),
        ({"prompt": 0}, "at 'prompt': expected a positive int"),
        ({"length": 1.5}, "at 'length': expected a positive int"),
        ({"length": 257}, "at 'length': expected at most 256 tokens in a row"),
        ({"length": 16, "prompt": 16}, "at 'prompt': expected fewer tokens than the 16"),
        ({"dtype": "int8"}, "at 'dtype': expected a float.* quantise a backbone"),
        ({"edits": bs.Capture("blocks.*")}, "expected a list of rewrites"),
        ({"device": "v5e:3x5"}, "expected a slice that there is"),
        ({"sampler": "gredy"}, "Did you mean 'greedy'"),
        ({"sampler": 3}, "expected the name of one, an instance of a keras_hub Sampler"),
    ],
)
def test_bad_arguments_are_refused(settings, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.plan("tiny_gpt2", **settings)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./nowhere", "expected a folder that exists"),
        (5, "expected a path"),
        ("./docs", "without `config.json`"),
        ("docs/config.json", "expected a config in JSON"),
    ],
)
def test_models_that_are_not_there_are_refused(model, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.plan(model)


def test_a_config_is_enough(tmp_path):
    wanted = bs.plan("tiny_gpt2")
    assert wanted.length == 256  # as many positions as it has
    file = tmp_path / "config.json"
    file.write_bytes(Path("models/tiny_gpt2/config.json").read_bytes())
    for model in (str(file), file, json.loads(file.read_text())):
        found = bs.plan(model)
        assert dataclasses.replace(found, name=wanted.name) == wanted


def test_it_is_a_table_wherever_it_is_shown():
    paper = bs.plan("tiny_gpt2", batch=3, length=40)
    assert repr(paper) == str(paper)
    assert "3 x 48 slots for 3 x 40 tokens" in str(paper)
    assert "<td>1,325,952</td>" in paper._repr_html_()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"batch": 1}, 2),
        pytest.param({"batch": 5}, 6, marks=pytest.mark.slow),
        ({"batch": 3, "sampler": "beam"}, 15),
    ],
)
def test_what_goes_into_the_programs_is_what_is_on_paper(monkeypatch, settings, rows):
    planning = sys.modules["backbone_surgery.planning.plan"]
    traced = {}
    monkeypatch.setattr(planning, "check_compiler", lambda device: None)
    monkeypatch.setattr(
        planning, "compile_programs", lambda programs, *_: traced.update(programs) or {}
    )
    paper = bs.plan("tiny_gpt2", length=250, prompt=100, compile=True, **settings)
    assert paper.rows == rows
    arrays = export.deserialize(bytearray(traced["decode"].program)).in_avals
    sizes = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    held = paper.weight_bytes + paper.cache_bytes
    assert held <= sizes <= held + rows * 4096  # tokens, masks and the random state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "heads", "asked"),
    [((1, 4), 6, 4), ((2, 2), 5, 4), ((4, 1), 6, 4), ((1, 2), 6, 0), ((1, 1), 6, 4)],
)
def test_a_tpu_lays_slots_last_in_narrow_caches_that_it_has_whole(mesh, heads, asked):
    """Two caches in each of two blocks; of those that chips share a chip has few heads."""
    backbone = ROWS["gpt2"].make(num_layers=2, num_heads=heads, hidden_dim=8 * heads)
    cached, sizes = bs.rewire(backbone), dict(zip(("batch", "model"), mesh, strict=True))
    placement = abstract_placement(sizes, {})
    programs = Programs(cached, cached.source.token_embedding, "tpu", placement)
    greedy = make_strategy(keras_hub.samplers.get("greedy"))
    traced = trace(programs, greedy, Sizes(rows=4, prompt=8, length=16), 4)
    text = str(export.deserialize(bytearray(traced["decode"].program)).mlir_module())
    assert text.count("@LayoutConstraint") == asked


def test_what_does_not_fit_and_what_is_not_known():
    paper = bs.plan("tiny_gpt2")
    room = paper.device.memory
    for share, words in ((0.95, "of 80 GiB, a tenth of which is left free"), (2, "no: 160.00 GiB")):
        heavy = dataclasses.replace(paper, weight_bytes=int(share * room))
        assert not heavy.fits
        assert words in str(heavy)
    for error, words in (("RESOURCE_EXHAUSTED", "no, by the compiler"), ("NOT_FOUND", "not known")):
        broken = {"decode": CompiledProgram(error=error)}
        assert words in str(dataclasses.replace(paper, programs=broken))


def test_weights_that_are_unpacked_at_each_token_are_named(no_collecting):
    backbone = ROWS["gpt2"].make()
    wide = bs.plan(backbone)
    assert "beware" not in str(wide)
    backbone.quantize("int4")
    plan = bs.plan(backbone)
    assert plan.parameters == wide.parameters == 21120
    assert plan.unpacked == "int4"
    assert "each token unpacks 100% of the int4 weights first" in str(plan)


@pytest.mark.slow
def test_one_chip_reads_four_bits_as_they_are_packed(no_collecting):
    sizes = {"hidden_dim": 256, "intermediate_dim": 256, "vocabulary_size": 256}
    backbone = ROWS["gpt2"].make(**sizes, dtype="bfloat16")
    backbone.quantize("int4")
    for device in ("h100", "v5e"):
        for batch, unpacked in ((8, None), (80, "int4")):
            assert bs.plan(backbone, device=device, batch=batch).unpacked == unpacked
    for batch, unpacked in ((16, None), (140, "int4")):  # half of them on each device
        mesh = {"batch": 2, "model": 1}
        assert bs.plan(backbone, mesh, batch=batch, device="h100:2").unpacked == unpacked
    narrow = ROWS["gemma2"].make(dtype="bfloat16")  # heads of less than 128
    narrow.quantize("int4")
    plan = bs.plan(narrow, device="h100")
    assert (plan.unpacked, 0.1 < plan.unpacked_share < 0.5) == ("int4", True)


@pytest.mark.slow
def test_a_table_that_is_looked_up_alone_is_read_as_it_is_packed(no_collecting):
    """Gemma 4's of each block, on every chip, for any number of rows."""
    sizes = {"hidden_dim": 256, "intermediate_dim": 256, "hidden_size_per_layer_input": 32}
    backbone = ROWS["gemma4"].make(**sizes, head_dim=128, global_head_dim=128, dtype="bfloat16")
    backbone.quantize("int4")
    assert bs.plan(backbone, device="h100").unpacked is None
    assert bs.plan(backbone, device="h100", batch=80).unpacked_share < 1


@pytest.mark.slow
def test_weights_get_no_values_while_programs_are_traced(monkeypatch):
    planning = sys.modules["backbone_surgery.planning.plan"]
    traced = {}
    monkeypatch.setattr(planning, "check_compiler", lambda device: None)
    monkeypatch.setattr(
        planning, "compile_programs", lambda programs, *_: traced.update(programs) or {}
    )
    with graph.without_values():
        backbone = ROWS["llama"].make()

    def watched(make):
        def initialize(self, *args, **kwargs):
            value = make(self, *args, **kwargs)
            assert isinstance(value, jax.core.Tracer), "a weight got a value"
            return value

        return initialize

    for name in ("RandomNormal", "VarianceScaling", "Ones", "Zeros"):
        kind = getattr(keras.initializers, name)
        monkeypatch.setattr(kind, "__call__", watched(kind.__call__))
    bs.plan(backbone, length=32, compile=True)
    assert set(traced) == {"prefill", "decode"}


@pytest.mark.parametrize(("name", "of"), [("gpt2", "position"), ("llama", "token"), ("gemma2", "")])
def test_a_table_is_not_read_whole(name, of):
    """GPT-2 has one of positions, Llama one of tokens, and Gemma takes its logits from it."""
    backbone = ROWS[name].make()
    tables = [v for v in backbone.variables if of and of in v.path and "reverse" not in v.path]
    paper = bs.plan(backbone, batch=3, length=20)
    assert paper.looked_up_bytes == sum(v.value.nbytes for v in tables)
    used = paper.used_cache_bytes
    assert paper.least_bytes == paper.weight_bytes + used - paper.looked_up_bytes
    assert paper.device_bytes == paper.weight_bytes + paper.cache_bytes


@pytest.mark.slow
def test_a_preset_that_was_saved_quantised_is_planned_as_it_is(tmp_path):
    backbone = make_gpt2()
    bs.CachedCausalLM(backbone).quantize("int8")
    backbone.save_to_preset(str(tmp_path / "narrow"))
    wanted = bs.plan(backbone, verbose=0)
    for preset in (tmp_path / "narrow", tmp_path / "narrow" / "config.json"):
        got = bs.plan(str(preset), verbose=0)
        assert (got.weight_bytes, got.parameters) == (wanted.weight_bytes, wanted.parameters)
    with pytest.raises(bs.SurgeryError, match="expected none for a preset that was saved quant"):
        bs.plan(str(tmp_path / "narrow"), dtype="bfloat16")
    with pytest.raises(bs.SurgeryError, match=r"weights already, float32. Received bfloat16"):
        bs.plan(make_gpt2(), dtype="bfloat16")
    assert bs.plan(make_gpt2(), dtype="float32", verbose=0).weight_bytes > wanted.weight_bytes


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 8])
def test_parameters_of_gptq_are_counted_in_any_bits(bits):
    backbone = make_gpt2()
    count = bs.plan(backbone, verbose=0).parameters
    sizes = {"num_samples": 4, "sequence_length": 8, "group_size": 8, "weight_bits": bits}
    config = keras.quantizers.GPTQConfig([[1, 2, 3]], None, **sizes)
    bs.CachedCausalLM(backbone).quantize("gptq", config=config)
    assert bs.plan(backbone, verbose=0).parameters == count


@pytest.mark.parametrize(
    "config", [{}, {"registered_name": "x"}, {"registered_name": "keras_hub>Nope", "config": {}}]
)
def test_a_config_that_no_backbone_is_made_of(config):
    with pytest.raises(bs.SurgeryError, match=r"at 'the config': expected a (config|model) that"):
        bs.plan(config)
