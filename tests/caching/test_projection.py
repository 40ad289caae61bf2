"""`HeadProjection` computes what the layer it runs computes, whatever becomes of that layer."""

from dataclasses import dataclass

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.caching.projection import HeadProjection, projects_heads, works_by_token
from tests.helpers import make_gemma

TO_HEADS = ("btd,ndh->btnh", (None, 4, 8), (3, 5, 16))
FROM_HEADS = ("btnh,nhd->btd", (None, 16), (3, 5, 4, 8))


def dense(equation, output_shape, input_shape, **options):
    layer = keras.layers.EinsumDense(equation, output_shape, **options)
    layer.build(input_shape)
    return layer


@pytest.mark.parametrize("case", [TO_HEADS, FROM_HEADS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed_bfloat16"])
def test_it_equals_the_layer(rng, case, dtype):
    layer = dense(*case, activation="gelu", bias_axes=case[0][-1], dtype=dtype)
    layer.bias.assign(rng.normal(size=layer.bias.shape))
    assert projects_heads(layer, layer.compute_dtype)
    x = rng.normal(size=case[2]).astype("float32")
    wanted, got = layer(x), HeadProjection(layer)(x)
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    wanted, got = (np.asarray(y, "float32") for y in (wanted, got))
    np.testing.assert_allclose(got, wanted, atol=1e-6 if dtype == "float32" else 0.02)


def test_other_layers_are_left_alone(rng):
    class Mine(keras.layers.EinsumDense):
        pass

    others = [
        dense("btd,dnh->btnh", (None, 4, 8), (3, 5, 16)),
        dense("btd,df->btf", (None, 8), (3, 5, 16)),
        dense(*TO_HEADS, dtype="bfloat16"),
        dense(*TO_HEADS, autocast=False),
        Mine(TO_HEADS[0], TO_HEADS[1]),
        keras.layers.Dense(4),
    ]
    assert not any(projects_heads(layer, "float32") for layer in others)


@pytest.mark.parametrize(
    ("equation", "outputs"),
    [
        ("btd,df->btf", (5, 8)),
        ("btnh,nhd->btd", (5, 8)),
        ("btd,tdf->btf", (5, 8)),  # each token has a kernel of its own
        ("btd,ts->bsd", (6, 16)),  # mixes tokens
        ("btd,tdf->bf", (8,)),
        ("btd,df->bft", (8, 5)),
    ],
)
def test_a_layer_that_mixes_tokens_is_known_by_its_equation(rng, equation, outputs):
    shape = (3, 5, 4, 4) if "n" in equation else (3, 5, 16)
    layer, x = dense(equation, outputs, shape), rng.normal(size=shape).astype("float32")
    whole, alone = np.asarray(layer(x)), dense_alone(layer, x[1:2, 2:3])
    is_same = alone is not None and np.allclose(whole[1:2, 2:3], alone, atol=1e-5)
    assert works_by_token(layer) == is_same


def dense_alone(layer, x):
    """Run one token of one row, if the kernel allows it."""
    try:
        return np.einsum(layer.equation, x, np.asarray(layer.kernel))
    except ValueError:
        return None


@pytest.mark.slow
def test_a_layer_of_ones_own_may_run_twice_and_be_called_by_name(rng):
    split = dense("btd,ndh->btnh", (None, 1, 32), (3, 5, 32), name="mine")

    @dataclass(frozen=True)
    class Twice(bs.SiteRewrite):
        at: str = "final_norm"

        def apply(self, x, place, surgery):
            by_name = split(inputs=x)
            return x + keras.ops.squeeze(split(x) + split(x * 2) + by_name, 2)

    bs.check(bs.operate(make_gemma(), [Twice()]))


@pytest.mark.slow
@pytest.mark.parametrize("change", ["lora", "int8"])
def test_what_becomes_of_the_layer_later_is_seen(rng, change):
    backbone = make_gemma()
    cached = bs.rewire(backbone)
    projections = [x for x in cached._flatten_layers() if isinstance(x, HeadProjection)]
    assert len(projections) == 4 * backbone.num_layers
    if change == "int8":
        backbone.quantize("int8")
    else:
        backbone.enable_lora(2)
        for layer in backbone._flatten_layers():
            if getattr(layer, "lora_enabled", False):
                layer.lora_kernel_b.assign(rng.normal(size=layer.lora_kernel_b.shape))
    bs.check(backbone)
    tokens = {"token_ids": np.ones((2, 5), int), "padding_mask": np.ones((2, 5), int)}
    wanted = backbone.predict_on_batch(tokens)
    got = cached(
        {
            "token_ids": tokens["token_ids"],
            "positions": np.tile(np.arange(5), (2, 1)),
            "cache_mask": np.ones((2, 8), bool),
            "cache_update_index": 0,
            "cache": bs.new_cache(cached, 2, 8),
        }
    )["hidden_states"]
    np.testing.assert_allclose(got, wanted, atol=2e-5)
