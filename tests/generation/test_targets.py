"""Programs written for a GPU or a TPU, run on a CPU: they compute what those of a CPU compute."""

import jax
import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery import target
from backbone_surgery.caching.experts import ChosenExperts
from backbone_surgery.generation.programs import Programs
from backbone_surgery.kernels import gpu_attention, gpu_int4, tpu_int4
from backbone_surgery.opening.attention import _Attention
from tests.families import ROWS
from tests.helpers import VOCABULARY, ragged, relative

ATTENDING = [name for name in ROWS if name != "rwkv7"]
SLOW_BUT_SOME = [
    name if name in ("gemma2", "gpt_oss") else pytest.param(name, marks=pytest.mark.slow)
    for name in ATTENDING
]
OPTIONS = {"max_new_tokens": 6, "stop_token_ids": None, "seed": 3, "return_captures": True}


def make_lm(name, sampler="greedy", **sizes):
    backbone = ROWS[name].make(**sizes)
    rng = np.random.default_rng(3)
    size = getattr(backbone, "hidden_dim", None) or backbone.hidden_size
    direction, vector = rng.normal(size=(2, size))
    edits = [
        bs.Condition("asked", direction, threshold=0.1, at="blocks.0"),
        bs.Steer("mood", {1: vector}, when="asked", strength=1.0),
        bs.Capture("blocks.*"),
    ]
    lm = bs.CachedCausalLM(bs.operate(backbone, edits))
    lm.compile(sampler=sampler)
    return lm


def have_made_for(lm, platform):
    programs = Programs(lm.backbone_with_cache, lm.programs.head, platform)
    object.__setattr__(lm, "programs", programs)


def compare(lm, platform, prompts):
    """Compare tokens and captures with those of the programs of a CPU."""
    wanted, captured = lm.generate(prompts, **OPTIONS)
    have_made_for(lm, platform)
    got, others = lm.generate(prompts, **OPTIONS)
    np.testing.assert_array_equal(got["token_ids"], wanted["token_ids"])
    for path, value in captured.values.items():
        assert relative(others.values[path], value) <= 1e-5, path


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("name", list(ROWS))
def test_every_family_gives_the_same_text(name, platform, rng, monkeypatch):
    """Two prompts, run in pieces of four tokens."""
    monkeypatch.setitem(target._TOKENS_AT_ONCE, platform, 8)
    compare(make_lm(name), platform, ragged(rng, [11, 5], 11))


def compare_new_tokens(monkeypatch, lm, rng, module, kernel, platform="gpu"):
    """Compare what is captured of a new token that is equal: two ways to round, one by a kernel."""
    calls, run = [], getattr(module, kernel)
    monkeypatch.setattr(module, kernel, lambda *args: calls.append(1) or run(*args))
    prompts = ragged(rng, [28, 17], 28)
    wanted, captured = lm.generate(prompts, **OPTIONS)
    assert not calls
    have_made_for(lm, platform)
    got, others = lm.generate(prompts, **OPTIONS)
    assert calls
    same = wanted["token_ids"][:, 28] == got["token_ids"][:, 28]
    assert same.any()
    for path, value in captured.values.items():
        assert relative(others.values[path][same, 28], np.array(value)[same, 28]) <= 0.05, path


@pytest.mark.usefixtures("half_precision")
@pytest.mark.parametrize("name", SLOW_BUT_SOME)
def test_one_query_in_half_precision_attends_by_a_kernel(name, rng, monkeypatch):
    compare_new_tokens(monkeypatch, make_lm(name), rng, gpu_attention, "attend_one")


@pytest.mark.slow
@pytest.mark.usefixtures("half_precision", "no_collecting")
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "llama", "mixtral"])
def test_four_bits_are_read_by_a_kernel(name, rng, monkeypatch):
    lm = make_lm(name)
    lm.quantize("int4")
    compare_new_tokens(monkeypatch, lm, rng, gpu_int4, "product")


@pytest.mark.slow
@pytest.mark.usefixtures("half_precision", "no_collecting")
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "llama"])
def test_four_bits_are_read_by_a_kernel_of_a_tpu(name, rng, monkeypatch):
    sizes = {"hidden_dim": 256, "intermediate_dim": 256, "vocabulary_size": 300}
    lm = make_lm(name, **sizes)
    lm.quantize("int4")
    compare_new_tokens(monkeypatch, lm, rng, tpu_int4, "product", "tpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENDING)
def test_on_a_cpu_the_queries_of_a_prompt_attend_in_pieces(name, rng, monkeypatch):
    prompts = ragged(rng, [15, 6], 15)
    lm = make_lm(name)
    wanted, captured = lm.generate(prompts, **OPTIONS)
    lm = make_lm(name)
    monkeypatch.setattr(target, "_SHORTEST_PIECE", 3)
    monkeypatch.setattr(target, "_MOST_PIECES", 4)
    pieces, attend = [], _Attention._attend_before
    monkeypatch.setattr(
        _Attention,
        "_attend_before",
        lambda self, *piece: pieces.append(piece[:2]) or attend(self, *piece),
    )
    got, others = lm.generate(prompts, **OPTIONS)
    assert set(pieces) == {(0, 4), (4, 8), (8, 12), (12, 16)}
    np.testing.assert_array_equal(got["token_ids"], wanted["token_ids"])
    for path, value in captured.values.items():
        assert relative(others.values[path], value) <= 1e-5, path


def test_a_later_chunk_of_a_prompt_attends_at_once():
    with target.made_for("cpu"):
        assert target.pieces_of_prompt(4096) == [(0, 4096)]
    with target.made_for("gpu", whole_prompts=True):
        assert target.pieces_of_prompt(4096) == [(0, 4096)]
    assert target.pieces_of_prompt(4096) == [(0, 4096)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "llama", "mixtral"])
def test_int8(name, rng, no_collecting):
    lm = make_lm(name)
    lm.quantize("int8")
    kinds = [type(x).__name__ for x in lm.backbone_with_cache._flatten_layers()]
    assert kinds.count("NarrowProjection") >= 4 * lm.opened.owner.num_layers
    compare(lm, "gpu", ragged(rng, [11, 5], 11))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler", ["greedy", *(pytest.param(x, marks=pytest.mark.slow) for x in ("top_k", "beam"))]
)
def test_one_row_has_an_empty_one_beside_it(family, rng, sampler, monkeypatch):
    monkeypatch.setitem(target._TOKENS_AT_ONCE, "gpu", 12)
    lm = make_lm(family, sampler)
    compare(lm, "gpu", ragged(rng, [7], 7))
    (decode,) = lm.programs.compiled("decode")
    state = decode.in_avals[0][2]
    (tokens,) = (x for x in state if x.ndim == 2 and x.dtype == "int32")
    assert tokens.shape[0] == {"beam": 2 * getattr(lm.sampler, "num_beams", 1)}.get(sampler, 2)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("sampler", ["greedy", "beam"])
def test_a_lone_row_has_its_experts_run_alone(rng, sampler, platform):
    """In a program of its own; two rows have another."""
    lm = make_lm("mixtral", sampler)
    programs = lm.programs
    compare(lm, platform, ragged(rng, [7], 7))
    assert lm.programs.compilations["decode"] == 1
    object.__setattr__(lm, "programs", programs)
    compare(lm, platform, ragged(rng, [7, 3], 7))
    made_for = Programs(lm.backbone_with_cache, lm.programs.head, platform)
    assert [made_for.one_of(1, 2), made_for.one_of(2, 2)] == [2, 1]
    assert Programs(lm.backbone_with_cache, lm.programs.head, "cpu").one_of(1, 1) == 1


@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_on_a_tpu_the_experts_run_that_any_of_several_rows_weighs(rng, monkeypatch, name):
    calls, run = [], ChosenExperts._run_used
    monkeypatch.setattr(
        ChosenExperts, "_run_used", lambda self, *args: calls.append(1) or run(self, *args)
    )
    lm = make_lm(name, num_experts=16)
    compare(lm, "tpu", ragged(rng, [7, 3], 7))
    assert len(calls) >= lm.opened.owner.num_layers


@pytest.mark.slow
def test_without_a_mixture_one_row_and_two_have_the_same_program(rng):
    lm = make_lm("gpt2")
    have_made_for(lm, "tpu")
    for lengths in ([7], [7, 3]):
        lm.generate(ragged(rng, lengths, 7), **OPTIONS)
    assert lm.programs.compilations["decode"] == 1


@pytest.mark.slow
def test_an_attention_pattern_is_captured_in_pieces(rng, monkeypatch):
    monkeypatch.setitem(target._TOKENS_AT_ONCE, "gpu", 8)
    backbone = ROWS["gemma2"].make()
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Capture("blocks.*.attention_pattern")]))
    lm.compile(sampler="greedy")
    compare(lm, "gpu", ragged(rng, [9, 4], 9))


@pytest.mark.parametrize(
    ("platform", "rows", "prompt", "piece"),
    [
        ("cpu", 8, 4096, 4096),
        ("gpu", 2, 1024, 1024),
        ("tpu", 2, 1536, 512),
        ("gpu", 2, 1536, 768),
        ("gpu", 8, 384, 192),
        ("tpu", 4096, 16, 1),
    ],
)
def test_pieces_divide_the_prompt(platform, rows, prompt, piece):
    assert target.prefill_chunk(platform, rows, prompt) == piece


def test_what_is_made_for_a_platform_is_known_inside_alone():
    before = target.platform()
    with target.made_for("tpu"):
        assert target.platform() == "tpu"
        with target.made_for("gpu"):
            assert target.platform() == "gpu"
        assert target.platform() == "tpu"
    assert target.platform() == before == "cpu"


@pytest.mark.parametrize(
    ("platform", "shape", "order"),
    [
        ("tpu", (2, 256, 12, 64), (0, 2, 3, 1)),  # a head of 64 would leave half the lanes empty
        ("tpu", (2, 256, 8, 128), (0, 1, 2, 3)),
        ("tpu", (2, 256, 64), (0, 2, 1)),
        ("tpu", (2, 256), (0, 1)),
        ("gpu", (2, 256, 12, 64), (0, 1, 2, 3)),
    ],
)
def test_a_cache_lies_as_the_chip_lays_it(platform, shape, order):
    with target.made_for(platform):
        made = jax.make_jaxpr(lambda x: target.in_order(x, slots=1))(np.zeros(shape))
    (equation,) = made.eqns
    assert equation.params["layout"].major_to_minor == order


def test_a_cache_is_left_alone_on_a_cpu_and_a_mesh():
    for settings in (("cpu",), ("tpu", True)):
        with target.made_for(*settings):
            made = jax.make_jaxpr(lambda x: target.in_order(x, slots=1))(np.zeros((2, 256, 1, 64)))
        assert not made.eqns


def make_wide_llama(head_dim):
    sizes = {"hidden_dim": 2 * head_dim, "intermediate_dim": 32}
    backbone = keras_hub.models.LlamaBackbone(VOCABULARY, 2, 2, num_key_value_heads=1, **sizes)
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Capture("blocks.*")]))
    lm.compile(sampler="greedy")
    return lm


def orders_of(lm):
    return {v.path: v.value.format.layout.major_to_minor for v in lm.backbone.variables}


@pytest.mark.slow
def test_a_tpu_has_the_kernels_of_wide_heads_laid_heads_first(rng):
    lm = make_wide_llama(128)
    before, lay = [v.numpy() for v in lm.backbone.variables], orders_of(lm)
    compare(lm, "tpu", ragged(rng, [11, 5], 11))
    turned = {path for path, order in orders_of(lm).items() if order != lay[path]}
    names = [f"/self_attention/{name}/kernel" for name in ("query", "key", "value")]
    assert turned == {f"transformer_layer_{i}{name}" for i in (0, 1) for name in names}
    assert {orders_of(lm)[path] for path in turned} == {(1, 0, 2)}
    for variable, value in zip(lm.backbone.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    values = lm.programs.weights()
    assert all(a is b for a, b in zip(lm.programs.weights(), values, strict=True))  # laid once


@pytest.mark.slow
def test_weights_that_were_laid_are_trained_saved_and_laid_again(rng, tmp_path):
    lm = make_wide_llama(128)
    prompts = ragged(rng, [11, 5], 11)
    compare(lm, "tpu", prompts)
    lm.backbone.save_weights(tmp_path / "before.weights.h5")
    first = lm.generate(prompts, **OPTIONS)[0]["token_ids"]
    ids = rng.integers(1, 50, (4, 8))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    lm.compile(optimizer=keras.optimizers.Adam(0.1), loss=loss, sampler="greedy")
    lm.fit({"token_ids": ids, "padding_mask": np.ones_like(ids)}, ids, shuffle=False, verbose=0)
    trained = orders_of(lm)["transformer_layer_0/self_attention/key/kernel"]
    have_made_for(lm, "cpu")
    compare(lm, "tpu", prompts)
    assert trained == (0, 1, 2)
    assert orders_of(lm)["transformer_layer_0/self_attention/key/kernel"] == (1, 0, 2)
    lm.backbone.load_weights(tmp_path / "before.weights.h5")
    np.testing.assert_array_equal(lm.generate(prompts, **OPTIONS)[0]["token_ids"], first)


@pytest.mark.slow
@pytest.mark.parametrize("platform", [pytest.param("cpu", marks=pytest.mark.slow), "tpu"])
@pytest.mark.parametrize("change", ["lora", pytest.param("int8", marks=pytest.mark.slow)])
def test_variables_may_come_and_go_after_a_text(rng, platform, change):
    lm = make_wide_llama(128)
    prompts = ragged(rng, [11, 5], 11)
    have_made_for(lm, platform)
    lm.generate(prompts, **OPTIONS)
    if change == "int8":
        lm.backbone.quantize("int8")
    else:
        lm.backbone.enable_lora(2)
        for variable in lm.backbone.trainable_variables:
            variable.assign(rng.normal(0, 0.3, variable.shape))
    text = lm.generate(prompts, **OPTIONS)[0]["token_ids"]
    laid = orders_of(lm)["transformer_layer_0/self_attention/key/kernel"]
    assert laid == ((1, 0, 2) if platform == "tpu" else (0, 1, 2))
    fresh = bs.CachedCausalLM(lm.backbone)
    fresh.compile(sampler="greedy")
    np.testing.assert_array_equal(fresh.generate(prompts, **OPTIONS)[0]["token_ids"], text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "head_dim"),
    [("tpu", 64), *(pytest.param(x, 128, marks=pytest.mark.slow) for x in ("gpu", "cpu"))],
)
def test_other_kernels_lie_as_they_come(rng, platform, head_dim):
    lm = make_wide_llama(head_dim)
    lay = orders_of(lm)
    compare(lm, platform, ragged(rng, [7], 7))
    assert orders_of(lm) == lay
