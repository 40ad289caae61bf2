"""Programs compiled for chips that are not there; where their compilers are installed."""

import dataclasses
import re
import sys
from pathlib import Path

import jax
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery import graph
from backbone_surgery.planning import compilers
from backbone_surgery.planning.compilers import check_compiler
from backbone_surgery.planning.devices import find_devices
from tests.families import ROWS, make_gemma
from tests.planning import matrix
from tests.planning.matrix import CHIPS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import accelerator_models  # noqa: E402


def needs(chip):
    """Leave a test out where the compiler for a chip is not installed."""
    try:
        check_compiler(find_devices(chip).device)
    except bs.SurgeryError as error:
        pytest.skip(str(error))


def test_a_compiler_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)
    with pytest.raises(bs.SurgeryError, match=r"pip install 'backbone-surgery\[plan-tpu\]'"):
        bs.plan("tiny_gpt2", device="v5e", compile=True)
    with pytest.raises(bs.SurgeryError, match=r"pip install 'backbone-surgery\[plan-gpu\]'"):
        bs.plan("tiny_gpt2", device="h100", compile=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "v5e", "mesh": {"model": 4}}, "expected a slice of 4 chips"),
        ({"device": "v5e:2x2", "mesh": {"model": 2}}, "expected the 4 devices of `device`"),
        ({"device": "h100", "prompt": 2048}, "expected fewer tokens than the 256"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before(monkeypatch, settings, words):
    monkeypatch.setattr(compilers, "find_spec", lambda name: True)
    with pytest.raises(bs.SurgeryError, match=words):
        bs.plan("tiny_gpt2", compile=True, **settings)


def test_what_was_not_compiled_is_not_there():
    with pytest.raises(bs.SurgeryError, match="Pass `compile=True`"):
        bs.plan("tiny_gpt2")["decode"]


def test_the_least_that_a_token_reads_stands_beside_what_it_moves():
    plan = bs.plan("tiny_gpt2")
    compiled = {name: compilers.CompiledProgram() for name in ("prefill", "decode")}
    plan = dataclasses.replace(plan, programs=compiled)
    assert plan["decode"].least_bytes == plan.least_bytes > 0
    assert plan["prefill"].least_bytes is None


def compile_for(chip, backbone, device=None, **settings):
    needs(chip)
    settings |= {"length": 64, "prompt": 16, "compile": True, "verbose": 0}
    return bs.plan(backbone, device=device or chip, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_a_bundled_model(chip):
    plan = compile_for(chip, "tiny_gpt2", batch=8)
    assert set(plan.programs) == {"prefill", "decode"}
    assert plan.fits
    for program in plan.programs.values():
        assert program.argument_bytes >= plan.weight_bytes
        assert program.peak_bytes >= program.argument_bytes + program.temporary_bytes
        assert program.kernels > 20
        assert program.estimated_seconds > 0
        assert "HloModule" in program.hlo
    assert plan["decode"].copied_bytes == 0
    assert "compiled decode" in str(plan)
    assert "estimated" in str(plan)


@pytest.mark.slow
@pytest.mark.usefixtures("half_precision")
@pytest.mark.parametrize(("heads", "size"), [(32, 512), (64, 512)])
def test_wide_heads_that_share_a_key(heads, size):
    """The first ones attend by a kernel. It has no room for the second ones on the chip."""
    backbone = make_gemma(num_query_heads=heads, num_key_value_heads=1, head_dim=size)
    decode = compile_for("l4", backbone, batch=2)["decode"]
    assert decode.error is None
    assert ('name = "attend_one"' in decode.hlo) == (heads == 32)


# Of each family another kind for each chip; `python -m tests.planning.matrix` compiles all.
KIND_OF = [
    (chip, name, matrix.KINDS[(3 * i + j) % len(matrix.KINDS)])
    for i, chip in enumerate(CHIPS)
    for j, name in enumerate(ROWS)
]


@pytest.mark.slow
@pytest.mark.usefixtures("half_precision")
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_kernels_for_a_gpu_where_jax_is_set_to_64_bits(name):
    counts = []
    for bits in (False, True):
        with jax.enable_x64(bits):
            plan = compile_for("h100", ROWS[name].make(), batch=1)
        counts.append(plan["decode"].instructions)
    assert counts[0] == counts[1]
    assert any("custom-call" in instruction for instruction in counts[0])


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "name", "kind"), KIND_OF)
def test_samplers_edits_and_narrow_weights(chip, name, kind):
    needs(chip)
    if not matrix.can_be(name, kind):
        kind = "greedy"
    matrix.check(chip, name, kind)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", list(ROWS))
def test_every_family_with_edits(chip, name):
    """The caches stay where they are: no array of their size is copied in the loop."""
    backbone = ROWS[name].make()
    size = bs.open_backbone(backbone).token_embedding.output_dim
    direction, vector = np.random.default_rng(0).normal(size=(2, size))
    edits = [
        bs.Condition("asked", direction, threshold=0.2, at="blocks.0"),
        bs.Steer("mood", {1: vector}, when="asked"),
        bs.Capture("blocks.*"),
    ]
    plan = compile_for(chip, backbone, batch=4, edits=edits)
    assert plan["decode"].kernels > 20
    assert plan["decode"].collectives == {}
    assert plan["decode"].copied_bytes < plan.cache_bytes / 16


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "mesh"), [("v5e:2x2", (1, 4)), ("h100:2x4", (2, 4))])
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "llama", "mixtral"])
def test_meshes_exchange_what_is_on_paper(chip, mesh, name):
    needs(chip)
    heads = {} if name == "gpt2" else {"num_key_value_heads": 4}
    queries = {"num_heads": 8} if name == "gpt2" else {"num_query_heads": 8}
    sizes = {"vocabulary_size": 64, "num_layers": 3, "hidden_dim": 64, "intermediate_dim": 128}
    plan = bs.plan(
        ROWS[name].make(**sizes, **heads, **queries),
        dict(zip(("batch", "model"), mesh, strict=True)),
        device=chip,
        batch=4,
        length=64,
        prompt=16,
        compile=True,
        verbose=0,
    )
    assert plan.collectives == {"all-reduce": 2 * 3 + 3 + (mesh[0] > 1)}
    # A compiler may ask whether all rows have ended together with something else.
    assert set(plan["decode"].collectives) == {"all-reduce"}
    assert plan["decode"].collectives["all-reduce"] in (2 * 3 + 3, plan.collectives["all-reduce"])


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "mesh"), [("v5e:2x2", (1, 4)), ("h100:2x4", (2, 4))])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_int8_on_a_mesh_exchanges_a_scale_for_each_sum_and_lookup(chip, mesh, name):
    needs(chip)
    heads = {"num_heads": 8} if name == "gpt2" else {"num_query_heads": 8}
    sizes = {"vocabulary_size": 64, "num_layers": 1, "hidden_dim": 1024, "intermediate_dim": 4096}
    backbone = ROWS[name].make(**sizes, **heads)
    tokens = np.ones((8, 2), "int32")
    backbone({"token_ids": tokens, "padding_mask": tokens})  # Keras wants all layers built
    backbone.quantize("int8")
    axes = dict(zip(("batch", "model"), mesh, strict=True))
    plan = bs.plan(
        backbone, axes, device=chip, batch=8, length=64, prompt=16, compile=True, verbose=0
    )
    paper = 4 + 4 + (mesh[0] > 1)
    assert plan.collectives == {"all-reduce": paper}
    # A compiler may exchange two things at once.
    assert set(plan["decode"].collectives) == {"all-reduce"}
    assert paper - 2 <= plan["decode"].collectives["all-reduce"] <= paper


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["a100", "l4", "h200", "v4", "v5p", "v6e"])
def test_other_chips(chip):
    plan = compile_for(chip, "tiny_gpt2", batch=4)
    assert plan.fits
    assert plan["decode"].kernels > 20
    assert (plan["decode"].estimated_seconds is None) == (chip in ("a100", "l4"))


@pytest.mark.slow
@pytest.mark.usefixtures("half_precision")
@pytest.mark.parametrize("chip", CHIPS)
def test_what_prompts_need_grows_with_their_length_and_not_with_its_square(chip):
    """8 prompts through four blocks of the shape of Gemma 2 2B."""
    with graph.without_values():
        backbone = accelerator_models.gemma2()
    needs(chip)
    options = {"device": chip, "batch": 8, "compile": True, "verbose": 0}
    plans = [bs.plan(backbone, prompt=n, length=n + 16, **options) for n in (4096, 8192)]
    first, second = (plan["prefill"].temporary_bytes for plan in plans)
    assert first <= 0.5e9
    assert second <= 2.1 * first


@pytest.mark.slow
@pytest.mark.usefixtures("half_precision")
@pytest.mark.parametrize(("chip", "rows"), [("h100", 1), ("v5e", 1), ("v5e", 2)])
def test_of_a_wide_mixture_the_chosen_experts_are_read_and_none_is_copied(chip, rows):
    """Of the shape of a block of Qwen 3 MoE 30B: for each token 8 of its 128 experts."""
    with graph.without_values():
        backbone = accelerator_models.qwen3_moe(vocabulary_size=512, num_layers=1)
    plan = compile_for(chip, backbone, batch=rows)
    assert plan["decode"].temporary_bytes <= 0.01 * plan.weight_bytes
    others = plan.least_bytes - 128 * 3 * 2048 * 768 * 2
    assert plan["decode"].step_bytes <= others + 1.25 * rows * 8 * 3 * 2048 * 768 * 2


@pytest.mark.slow
@pytest.mark.usefixtures("half_precision")
@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize(("chips", "count"), [("v5e", 1), ("v5e:2x2", 4), ("v5e:2x4", 8)])
@pytest.mark.parametrize("name", ["gemma4", "gpt_oss"])
def test_a_tpu_turns_no_kernels_of_experts(name, chips, count, rows):
    """Their sizes, or what each of several chips has of them, are no multiples of 128."""
    needs("v5e")
    sizes = {"gpt_oss": {"experts": 128}, "gemma4": {"sliding_window_pattern": 1}}[name]
    with graph.without_values():
        backbone = getattr(accelerator_models, name)(vocabulary_size=512, num_layers=1, **sizes)
    settings = {"batch": rows, "length": 256, "prompt": 16, "compile": True, "verbose": 0}
    plan = bs.plan(backbone, {"model": count}, device=chips, **settings)
    assert plan["decode"].temporary_bytes <= 0.03 * plan.weight_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("half_precision")
@pytest.mark.parametrize(("chips", "count"), [("h100:8", 8), ("v5e:2x2", 4)])
def test_on_a_mesh_each_chip_has_experts_of_its_own(chips, count):
    """All 8 that a token chose may be those of one chip; no more are read."""
    needs(chips.split(":")[0])
    with graph.without_values():
        backbone = accelerator_models.qwen3_moe(vocabulary_size=512, num_layers=1)
    sizes = {"batch": 1, "length": 256, "prompt": 16, "compile": True, "verbose": 0}
    plan, whole = (
        bs.plan(backbone, {"model": n}, device=d, **sizes | {"compile": n > 1})
        for n, d in ((count, chips), (1, chips.split(":")[0]))
    )
    expert = 3 * 2048 * 768 * 2
    assert plan.weight_bytes <= whole.weight_bytes - (128 - 128 // count) * expert
    assert plan["decode"].collectives == plan.collectives
    others = plan.least_bytes - 128 // count * expert
    assert plan["decode"].step_bytes <= others + 1.25 * 8 * expert


@pytest.mark.slow
@pytest.mark.usefixtures("half_precision")
@pytest.mark.parametrize("mesh", [{"batch": 2}, {"model": 2}])
def test_on_a_mesh_of_gpus_no_experts_are_gathered(mesh):
    """As many experts that a kernel would be for those that were chosen."""
    backbone = ROWS["mixtral"].make(num_experts=16)
    needs("h100")
    settings = {"batch": 2, "length": 64, "prompt": 16, "compile": True, "verbose": 0}
    plan = bs.plan(backbone, mesh, device="h100:2", **settings)
    assert "all-gather" not in plan["decode"].collectives


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_this_process_is_left_as_it_is(chip):
    import jax

    before = jax.devices()
    compile_for(chip, "tiny_gpt2")
    assert jax.devices() == before
    assert jax.default_backend() == "cpu"


@pytest.mark.slow
def test_the_example_of_the_guide_runs():
    needs("h100")
    text = (ROOT / "docs" / "accelerators.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    names = {}
    exec(block, names)
    assert names["decode"].kernels > 20


@pytest.mark.slow
@pytest.mark.usefixtures("half_precision")
@pytest.mark.parametrize("chip", CHIPS)
def test_a_model_that_does_not_fit_says_what_takes_the_room(chip):
    """No weight of it has a value. XLA tells for a TPU alone that it cannot compile it."""
    wide = {"v5e": 4, "h100": 20}[chip]
    with graph.without_values():
        backbone = keras_hub.models.LlamaBackbone(
            vocabulary_size=128256,
            num_layers=4,
            num_query_heads=32,
            num_key_value_heads=8,
            hidden_dim=4096,
            intermediate_dim=49152 * wide,
        )
    plan = compile_for(chip, backbone, batch=8)
    assert not plan.fits
    assert plan.weight_bytes > plan.device.memory
    assert "fits                 no: " in str(plan)
    assert (plan["decode"].error is not None) == (chip == "v5e")
    if chip == "v5e":
        assert "compiled decode      does not compile: RESOURCE_EXHAUSTED" in str(plan)


@pytest.mark.slow
@pytest.mark.usefixtures("half_precision", "no_collecting")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_four_bits_are_moved_as_they_are_packed(name, chip):
    """GPT-2 moves 1.3 of the least on a v5e and 1.7 on an H100; unpacked first, 1.8 and 8.4."""
    needs(chip)
    backbone = ROWS[name].make(hidden_dim=512, intermediate_dim=2048, vocabulary_size=4096)
    backbone({x.name: np.ones((8, 2), "int32") for x in backbone.inputs})
    backbone.quantize("int4")
    plan = compile_for(chip, backbone, batch=8)
    assert plan.unpacked is None
    most = {"v5e": 1.5, "h100": 2}[chip]
    assert plan["decode"].step_bytes <= most * plan.least_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("half_precision", "no_collecting")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_devices_exchange_nothing_to_read_four_bits(name, chip):
    """Left to XLA, that Llama exchanges an all-reduce and an all-gather more on GPUs."""
    needs(chip)
    sizes = {"hidden_dim": 1024, "intermediate_dim": 4096, "vocabulary_size": 4096}
    if name == "gemma2":
        sizes |= {"num_query_heads": 4, "num_key_value_heads": 4, "head_dim": 256}
    backbone = ROWS[name].make(**sizes)
    backbone({x.name: np.ones((8, 2), "int32") for x in backbone.inputs})
    device = {"v5e": "v5e:2x2", "h100": "h100:4"}[chip]
    wide = bs.plan(backbone, device=device, batch=8, length=64).collectives
    backbone.quantize("int4")
    plan = compile_for(chip, backbone, batch=8, device=device)
    assert plan.unpacked is None
    for program in plan.programs.values():
        assert program.collectives == plan.collectives == wide
