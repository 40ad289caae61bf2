"""`NarrowProjection` computes what the int8 layer it runs computes, in the program of a GPU."""

import keras
import numpy as np
import pytest

from backbone_surgery import target
from backbone_surgery.caching import narrow as narrow_module
from backbone_surgery.caching.narrow import NarrowProjection, is_narrow

TO_HEADS = ("btd,ndh->btnh", (None, 4, 8), (3, 5, 16))
FROM_HEADS = ("btnh,nhd->btd", (None, 16), (3, 5, 4, 8))
TO_SPLIT = ("abc,cde->abde", (None, 4, 8), (3, 5, 16))
BY_VECTOR = (3, 5, 2, 16)
PLAIN = ("btd,df->btf", (None, 8), (3, 5, 16))

pytestmark = pytest.mark.usefixtures("no_collecting")


def make(case, rng, quantise=True, **options):
    """Build a layer of a case, quantised; of a shape alone it is a `Dense`."""
    if not isinstance(case[0], str):
        layer, shape = keras.layers.Dense(8, activation="gelu", **options), case
    else:
        equation, outputs, shape = case
        bias = equation[-1]
        layer = keras.layers.EinsumDense(equation, outputs, "gelu", bias_axes=bias, **options)
    layer.build(shape)
    layer.bias.assign(rng.normal(size=layer.bias.shape))
    if quantise:
        layer.quantize("int8")
    return layer, rng.normal(size=shape).astype("float32")


@pytest.mark.by_default(1)
@pytest.mark.parametrize("case", [TO_HEADS, FROM_HEADS, TO_SPLIT, PLAIN, PLAIN[2], BY_VECTOR])
@pytest.mark.parametrize(
    "dtype",
    ["float32", *(pytest.param(x, marks=pytest.mark.slow) for x in ("bfloat16", "mixed_bfloat16"))],
)
@pytest.mark.parametrize("scaled", [True, False])
def test_it_equals_the_layer(rng, case, dtype, scaled):
    layer, x = make(case, rng, quantise=False, dtype=dtype)
    quantizer = {} if scaled else {"activation_quantizer": None}
    layer.quantize("int8", config=keras.quantizers.Int8QuantizationConfig(**quantizer))
    assert is_narrow(layer)
    wanted = layer(x)
    with target.made_for("gpu"):
        got = NarrowProjection(layer)(x)
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    wanted, got = (np.asarray(y, "float32") for y in (wanted, got))
    np.testing.assert_allclose(got, wanted, rtol=1e-6 if dtype == "float32" else 0.02, atol=1e-6)


def test_elsewhere_the_layer_itself_is_called(rng, monkeypatch):
    layer, x = make(TO_HEADS, rng)
    narrow = NarrowProjection(layer)
    monkeypatch.setattr(narrow_module, "product", None)
    np.testing.assert_array_equal(narrow(x), layer(x))
    with target.made_for("tpu"):
        np.testing.assert_array_equal(narrow(x), layer(x))


@pytest.mark.slow
def test_lora_and_another_quantisation_call_the_layer(rng):
    layer, x = make(PLAIN, rng)
    narrow = NarrowProjection(layer)
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(rng.normal(size=layer.lora_kernel_b.shape))
    with target.made_for("gpu"):
        np.testing.assert_array_equal(narrow(x), layer(x))
    other, x = make(PLAIN, rng, quantise=False)
    other.quantize("int4")
    assert not is_narrow(other)
    with target.made_for("gpu"):
        np.testing.assert_array_equal(NarrowProjection(other)(x), other(x))


def test_other_layers_are_left_alone(rng):
    class Mine(keras.layers.EinsumDense):
        pass

    grouped = keras.layers.EinsumDense("btgi,gio->btgo", (None, 2, 4))
    grouped.build((3, 5, 2, 8))
    grouped.quantize("int8")
    floats = make(PLAIN, rng, quantise=False)[0]
    assert not any(is_narrow(x) for x in (grouped, floats, Mine(*PLAIN[:2]), keras.layers.ReLU()))
