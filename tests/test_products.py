"""Products of narrow numbers: the same numbers, and weights that are not widened in memory."""

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.kernels import calls
from backbone_surgery.opening.predict import predict
from backbone_surgery.products import product, with_fast_products

DIMENSIONS = {
    "one row": ((1, 8), (8, 3), (((1,), (0,)), ((), ()))),
    "one token of one row": ((1, 1, 8), (8, 2, 3), (((2,), (0,)), ((), ()))),
    "several rows": ((4, 8), (8, 3), (((1,), (0,)), ((), ()))),
    "one column": ((5, 8), (1, 8), (((1,), (1,)), ((), ()))),
    "heads, one query": ((2, 7, 3, 8), (2, 1, 3, 8), (((3,), (3,)), ((0, 2), (0, 2)))),
    "heads, one key": ((2, 1, 3, 8), (2, 7, 3, 8), (((3,), (3,)), ((0, 2), (0, 2)))),
    "two vectors": ((8,), (8,), (((0,), (0,)), ((), ()))),
    "a vector": ((8,), (8, 3), (((0,), (0,)), ((), ()))),
    "one of each": ((1, 8), (8, 1), (((1,), (0,)), ((), ()))),
}


@pytest.mark.by_default(6)
@pytest.mark.parametrize("name", DIMENSIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "float32"])
def test_products_are_those_of_wide_numbers(name, dtype, rng):
    shape, other, axes = DIMENSIONS[name]
    x, y = (jnp.asarray(rng.integers(-3, 4, s), dtype) for s in (shape, other))
    wide = jax.lax.dot_general(x.astype("float32"), y.astype("float32"), axes)
    for wanted in (None, "float32"):
        received = product(x, y, axes, preferred_element_type=wanted and jnp.dtype(wanted))
        assert received.dtype == (wanted or dtype)
        assert received.shape == wide.shape
        np.testing.assert_array_equal(received, wide.astype(received.dtype))


def test_factors_of_two_dtypes_stay_as_they_are(rng):
    x, y = jnp.ones((1, 8), "bfloat16"), jnp.ones((8, 3), "float32")
    received = product(x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(received, np.full((1, 3), 8, "float32"))


class Model(keras.Model):
    """Narrow, and nothing else."""

    compute_dtype = "bfloat16"


def test_whatever_else_a_function_does_stays(rng):
    """Calls, loops, branches, functions with gradients of their own, constants, and trees."""
    kernel = jnp.asarray(rng.standard_normal((8, 8)), "bfloat16")

    @jax.jit
    def inner(x):
        return jax.nn.relu(x @ kernel), {"sum": x.sum()}

    def function(x, options):
        y, extra = inner(x)
        y = jax.lax.fori_loop(0, options["steps"], lambda _, z: z @ kernel * 0.1, y)
        y = jax.lax.cond(options["turn"], lambda z: -z, lambda z: z, y)
        return {"y": y, "extra": extra, "two": 2.0}, [x]

    x, options = jnp.ones((1, 8), "bfloat16"), {"steps": 3, "turn": True}
    wanted = jax.jit(function)(x, options)
    received = jax.jit(with_fast_products(function, Model(), "cpu"))(x, options)
    assert jax.tree.structure(received) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(received), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2e-2)


def test_what_is_computed_of_the_same_arrays_is_computed_once():
    """Also in calls of their own; zeros of either sign are two numbers, and so are dtypes."""

    def function(x):
        turned = [jnp.cos(x), jax.jit(lambda y: jnp.cos(y) * 0.0)(x), jnp.cos(x) * -0.0]
        table = jnp.arange(8.0)
        found = [table[x.astype("int32")], table[x.astype("int32")], x.astype("int8")]
        drawn = [jax.lax.rng_uniform(0.0, 1.0, (3,)) for _ in range(2)]
        return [*turned, *found, x.astype("int32") + 1, x.astype("float16") + 1], drawn

    x = jnp.arange(4.0)
    once = with_fast_products(function, Model(), "cpu")
    results, (a, b) = once(x)
    assert not np.array_equal(a, b)
    for received, wanted in zip(results, function(x)[0], strict=True):
        assert received.dtype == wanted.dtype
        assert received.tobytes() == wanted.tobytes()
    text = str(jax.make_jaxpr(once)(x))
    assert text.count(" cos ") == text.count(" gather[") == 1
    assert str(jax.make_jaxpr(function)(x)).count(" cos ") == 3


def test_nothing_changes_where_nothing_is_narrow_or_on_a_chip(monkeypatch):
    monkeypatch.setattr(calls, "available", lambda: False)

    def function(x):
        return x

    assert with_fast_products(function, Model(), "gpu") is function
    assert (
        with_fast_products(function, keras.Sequential([keras.layers.Dense(2)]), "cpu") is function
    )


SIZES = {
    "vocabulary_size": 4000,
    "num_layers": 1,
    "num_heads": 4,
    "hidden_dim": 256,
    "intermediate_dim": 1024,
    "max_sequence_length": 64,
}
KERNEL = 4 * 256 * 1024
"""Bytes of the largest kernel of a block, in float32."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_no_weight_is_widened_in_memory(dtype, rows, no_collecting):
    is_int8 = dtype == "int8"
    backbone = keras_hub.models.GPT2Backbone(**SIZES, dtype="float32" if is_int8 else dtype)
    lm = bs.CachedCausalLM(backbone)
    if is_int8:
        lm.quantize("int8")
    prompts = {"token_ids": np.ones((rows, 4), "int32"), "padding_mask": np.ones((rows, 4))}
    lm.generate(prompts, max_new_tokens=2, stop_token_ids=None)
    for kind in ("prefill", "decode"):
        [program] = lm.programs.compiled(kind)
        assert program.memory_analysis().temp_size_in_bytes < KERNEL


@pytest.mark.slow
def test_predictions_read_narrow_weights_too():
    backbone = keras_hub.models.GPT2Backbone(**SIZES, dtype="bfloat16")
    inputs = {"token_ids": np.arange(8)[None], "padding_mask": np.ones((1, 8), "int32")}
    wanted = backbone(inputs)
    received = predict(backbone, inputs)
    np.testing.assert_allclose(np.float32(received), np.float32(wanted), atol=0.1)
    [run] = [made[0] for key, made in vars(backbone)["_made_once"].items() if "predict" in key]
    weights = [v.value for v in backbone.variables]
    program = run.lower(weights, inputs).compile()
    assert program.memory_analysis().temp_size_in_bytes < KERNEL
