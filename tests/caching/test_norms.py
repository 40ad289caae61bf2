"""A layer normalization in one kernel, against the layer itself."""

import keras
import pytest

import backbone_surgery as bs
from backbone_surgery import target
from backbone_surgery.caching.norms import WholeNorm, is_layer_norm
from tests.helpers import make_gpt2, relative


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("bfloat16", {}), ("float32", {"center": False}), ("float32", {"scale": False})],
)
def test_it_computes_what_the_layer_computes(rng, platform, options, dtype):
    norm = keras.layers.LayerNormalization(dtype=dtype, **options)
    x = keras.ops.cast(100 + 3 * rng.normal(size=(2, 5, 64)), dtype)
    norm(x)
    for variable in norm.variables:
        variable.assign(rng.normal(size=variable.shape))
    with target.made_for(platform):
        got = WholeNorm(norm)(x)
    assert keras.backend.standardize_dtype(got.dtype) == dtype
    got, wanted = (keras.ops.convert_to_numpy(keras.ops.cast(y, "float32")) for y in (got, norm(x)))
    assert relative(got, wanted) <= (1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize(
    "layer",
    [keras.layers.LayerNormalization(axis=1), keras.layers.RMSNormalization()],
)
def test_other_norms_are_left_alone(layer):
    layer.build((2, 3, 4))
    assert not is_layer_norm(layer)


def test_a_cached_graph_holds_it_and_no_weights_of_it():
    backbone = make_gpt2()
    cached = bs.rewire(backbone)
    assert {v.path for v in cached.variables} == {v.path for v in backbone.variables}
    nested = [layer for block in cached.layers for layer in getattr(block, "layers", [])]
    assert sum(isinstance(layer, WholeNorm) for layer in nested) == 4
