"""Cached equals uncached equals the backbone, over the same variables."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery import target
from backbone_surgery.opening import attention
from tests.helpers import FAMILIES, VOCABULARY, relative
from tests.reference import run_chunks

EXACT = 5e-6


def left_padded(rng, lengths, width):
    ids = rng.integers(1, VOCABULARY, (len(lengths), width)).astype("int32")
    mask = np.arange(width)[None] >= width - np.array(lengths)[:, None]
    return {"token_ids": ids, "padding_mask": mask.astype("int32")}


def run(model, inputs):
    return np.asarray(model.predict_on_batch(inputs), "float32")


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request):
    """One backbone of each family and its cached graph, compiled once for all tests here."""
    backbone = FAMILIES[request.param]()
    return backbone, bs.rewire(backbone)


def run_cached(model, inputs, chunks, **controls):
    return run_chunks(model, inputs, chunks, **controls)[0]


SHAPES = {
    "gpt2": [{}, {"num_heads": 2, "num_layers": 1, "hidden_dim": 24}],
    "gemma": [{}, {"num_key_value_heads": 4, "head_dim": 16}],
    "gemma2": [{}, {"sliding_window_size": 3, "num_key_value_heads": 1}],
}


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("name", "shape"), [(n, s) for n, shapes in SHAPES.items() for s in shapes], ids=str
)
def test_opened_graph_is_the_backbone(name, shape, rng):
    backbone = FAMILIES[name](**shape)
    ids = rng.integers(1, VOCABULARY, (3, 20))
    mask = np.arange(20)[None] < np.array([20, 11, 3])[:, None]
    inputs = {"token_ids": ids, "padding_mask": mask.astype("int32")}
    wanted, got = run(backbone, inputs), run(bs.open_backbone(backbone), inputs)
    assert relative(got, wanted) <= EXACT


@pytest.mark.parametrize("chunks", [[20], [1] * 20, [7, 1, 7, 1, 4]], ids=["one", "each", "cut"])
def test_cached_equals_backbone_however_tokens_are_cut(pair, rng, chunks):
    backbone, model = pair
    inputs = left_padded(rng, [20, 20, 20], 20)
    got = run_cached(model, inputs, chunks)
    wanted = run(backbone, inputs)
    assert relative(got, wanted) <= EXACT
    assert np.array_equal(got.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("chunks", [[20], [1] * 20, [7, 1, 7, 1, 4]], ids=["one", "each", "cut"])
def test_left_padded_rows_equal_each_row_alone(pair, rng, chunks):
    backbone, model = pair
    lengths = [20, 13, 4]
    inputs = left_padded(rng, lengths, 20)
    got = run_cached(model, inputs, chunks)
    for i, length in enumerate(lengths):
        alone = inputs["token_ids"][i : i + 1, 20 - length :]
        wanted = run(backbone, {"token_ids": alone, "padding_mask": np.ones_like(alone)})
        assert relative(got[i, 20 - length :], wanted[0]) <= EXACT


def test_uncached_opened_graph_takes_padding_on_the_left_too(pair, rng):
    backbone, _ = pair
    inputs = left_padded(rng, [12, 5], 12)
    got = run(bs.open_backbone(backbone), inputs)
    alone = inputs["token_ids"][1:, 7:]
    wanted = run(backbone, {"token_ids": alone, "padding_mask": np.ones_like(alone)})
    assert relative(got[1, 7:], wanted[0]) <= EXACT


@pytest.mark.slow
def test_query_scale_is_that_of_the_backbone(rng):
    backbone = FAMILIES["gemma2"](query_head_dim_normalize=False, head_dim=16)
    inputs = left_padded(rng, [9, 9], 9)
    with pytest.warns(UserWarning, match="does not pass the setting on"):
        opened = bs.open_backbone(backbone)
    assert relative(run(opened, inputs), run(backbone, inputs)) <= EXACT
    for block in backbone.transformer_layers:
        block.attention.query_head_dim_normalize = False
    wanted = np.asarray(backbone(inputs))
    assert relative(run(bs.open_backbone(backbone), inputs), wanted) <= EXACT
    assert relative(run(opened, inputs), wanted) > 1e-3


@pytest.mark.slow
def test_bfloat16(family, rng):
    backbone = FAMILIES[family](dtype="bfloat16")
    inputs = left_padded(rng, [16, 16], 16)
    wanted = run(backbone, inputs)
    assert relative(run(bs.open_backbone(backbone), inputs), wanted) <= 2e-2
    model = bs.rewire(backbone)
    assert {t.dtype for pair in model.input["cache"] for t in pair.values()} == {"bfloat16"}
    assert relative(run_cached(model, inputs, [9, 1, 6]), wanted) <= 2e-2


@pytest.mark.slow
def test_the_fused_attention_of_a_gpu_computes_the_same(family, rng, monkeypatch):
    """Keras runs the op without cuDNN here; what it is given is the same on a GPU."""
    calls = []
    fused = keras.ops.dot_product_attention
    backbone = FAMILIES[family](dtype="bfloat16")
    inputs = left_padded(rng, [16, 11], 16)
    wanted = run_cached(bs.rewire(backbone), inputs, [9, 1, 6])
    monkeypatch.setattr(
        attention.ops, "dot_product_attention", lambda *a, **k: calls.append(k) or fused(*a, **k)
    )
    with target.made_for("gpu"):
        got = run_cached(bs.rewire(backbone), inputs, [9, 1, 6])
    assert np.isfinite(got).all()
    assert relative(got, wanted, inputs["padding_mask"].astype(bool)) <= 2e-2
    assert relative(got[:1], run(backbone, inputs)[:1]) <= 2e-2
    assert bool(calls) == (family != "gemma2")  # which caps its scores
    calls.clear()
    with target.made_for("gpu"):
        run_cached(bs.rewire(FAMILIES[family]()), inputs, [16])
    assert not calls  # float32 stays as it is


def test_same_variables_at_every_stage(backbone):
    opened = bs.open_backbone(backbone)
    steer = bs.Steer("mood", {0: np.ones(32)})
    edited = bs.operate(backbone, [steer])
    own = [id(v) for v in backbone.variables]
    for stage in (opened, edited, bs.rewire(edited), bs.CachedCausalLM(edited)):
        assert {id(v) for v in stage.variables} == set(own)


def test_no_rewrites_and_zero_strength_are_bit_equal(backbone, rng):
    inputs = left_padded(rng, [14, 9], 14)
    opened = run(bs.open_backbone(backbone), inputs)
    assert np.array_equal(run(bs.operate(backbone, []), inputs), opened)
    steer = bs.Steer("mood", {i: rng.normal(size=32) for i in range(2)})
    edited = bs.operate(backbone, [steer])
    zero = {"mood_strength": np.zeros((2, 2), "float32")}
    assert np.array_equal(run(edited, {**inputs, **zero}), opened)
    assert not np.array_equal(run(edited, inputs), opened)
    cached = run_cached(bs.rewire(backbone), inputs, [7, 7])
    assert np.array_equal(run_cached(bs.rewire(edited), inputs, [7, 7], **zero), cached)


def test_zero_vector_is_bit_equal(backbone, rng):
    inputs = left_padded(rng, [14, 9], 14)
    edited = bs.operate(backbone, [bs.Steer("mood", {1: np.zeros(32)})])
    assert np.array_equal(run(edited, inputs), run(bs.open_backbone(backbone), inputs))


def test_shape_of_the_rewired_model(backbone):
    model = bs.rewire(backbone)
    assert model.name == "backbone_with_cache"
    assert set(model.input) == {
        "token_ids",
        "cache",
        "cache_update_index",
        "positions",
        "cache_mask",
    }
    assert set(model.output) == {"hidden_states", "cache"}
    assert len(model.input["cache"]) == backbone.num_layers
    assert model.input["cache_update_index"].shape == ()
    heads = getattr(backbone, "num_key_value_heads", None) or backbone.num_heads
    assert model.input["cache"][0]["key"].shape == (None, None, heads, 8)


def test_new_cache(backbone):
    model = bs.rewire(backbone)
    cache = bs.new_cache(model, 2, 11)
    heads = model.input["cache"][0]["key"].shape[2]
    shapes = {tuple(x.shape) for pair in cache for x in pair.values()}
    assert shapes == {(2, 11, heads, 8)}
    assert all(not np.asarray(x).any() for pair in cache for x in pair.values())
    with pytest.raises(bs.SurgeryError, match="'length': expected a positive int"):
        bs.new_cache(model, 2, 0)
    with pytest.raises(bs.SurgeryError, match="has no cache inputs"):
        bs.new_cache(backbone, 2, 4)


@pytest.mark.slow
def test_a_block_used_twice_gets_two_caches(family, rng):
    backbone = FAMILIES[family]()

    def twice(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        return layer(result, **kwargs) if layer is backbone.transformer_layers[1] else result

    edited = bs.operate(backbone, [twice])
    model = bs.rewire(edited)
    assert len(model.output["cache"]) == backbone.num_layers + 1
    inputs = left_padded(rng, [12, 8], 12)
    mask = inputs["padding_mask"].astype(bool)
    got = run_cached(model, inputs, [5, 1, 6])
    assert relative(got, run(edited, inputs), mask) <= EXACT


def test_a_dropped_block_has_no_cache(family, rng):
    backbone = FAMILIES[family]()

    def drop(layer, *args, **kwargs):
        return args[0] if layer is backbone.transformer_layers[0] else layer(*args, **kwargs)

    edited = bs.operate(backbone, [drop])
    model = bs.rewire(edited)
    assert len(model.output["cache"]) == backbone.num_layers - 1
    inputs = left_padded(rng, [10, 10], 10)
    assert relative(run_cached(model, inputs, [3, 7]), run(edited, inputs)) <= EXACT


class Square(keras.layers.Layer):
    def call(self, x):
        return x * x


@pytest.mark.slow
def test_attention_pattern_can_be_rewritten_and_still_be_cached(backbone, rng):
    class Soften(bs.SiteRewrite):
        at = "blocks.*.attention_pattern"

        def apply(self, x, place, surgery):
            return Square(name="square")(x)

    edited = bs.operate(backbone, [Soften()])
    inputs = left_padded(rng, [12, 7], 12)
    mask = inputs["padding_mask"].astype(bool)
    got = run_cached(bs.rewire(edited), inputs, [11, 1])
    assert relative(got, run(edited, inputs), mask) <= EXACT
    assert relative(got, run(backbone, inputs), mask) > 1e-3


@pytest.mark.slow
def test_gradients_reach_the_weights_through_the_opened_graph(backbone, rng):
    import jax

    opened = bs.open_backbone(backbone)
    inputs = left_padded(rng, [6, 6], 6)
    values = [v.value for v in backbone.trainable_variables]
    variables = backbone.trainable_variables

    def loss(model, values):
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return (model(inputs) ** 2).mean()

    wanted = jax.grad(lambda v: loss(backbone, v))(values)
    got = jax.grad(lambda v: loss(opened, v))(values)
    for a, b in zip(got, wanted, strict=True):
        assert np.abs(a - b).max() <= 1e-5 * max(np.abs(b).max(), 1e-3)
