"""How devices share what int4 packed: together they give what the layer gives."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras.quantizers import Int4QuantizationConfig

from backbone_surgery.caching.packed_matrix import matrix_of, product
from backbone_surgery.caching.packed_shares import share_of
from backbone_surgery.opening.int4 import kernel_shape, policy_of
from backbone_surgery.opening.packed_axes import packed_axes
from tests.helpers import relative

GROUPS, WHOLE = Int4QuantizationConfig(block_size=8), Int4QuantizationConfig(block_size=None)

pytestmark = pytest.mark.usefixtures("no_collecting")


def dense(shape):
    layer = keras.layers.Dense(shape[1], use_bias=False)
    layer.build((3, 5, shape[0]))
    return layer, "kernel", shape[:1]


def einsum(equation):
    """Return what makes a layer of an equation, of the shape of its kernel."""

    def make(shape):
        read, rest = equation.split(",")
        stored, made = rest.split("->")
        sizes = dict(zip(stored, shape, strict=True))
        outputs = (None, *(sizes[x] for x in made[2:]))
        layer = keras.layers.EinsumDense(equation, outputs)
        inputs = tuple(sizes[x] for x in read[2:])
        layer.build((3, 5, *inputs))
        return layer, "kernel", inputs

    return make


def table(name):
    def make(shape):
        tokens, size = shape if name == "embeddings" else shape[::-1]
        layer = keras.layers.ReversibleEmbedding(tokens, size, tie_weights=name == "embeddings")
        layer.build()
        return layer, name, (size,)

    return make


TO_HEADS, HEADS_FIRST = einsum("btd,dhk->bthk"), einsum("btd,hdk->bthk")
FROM_HEADS = einsum("bthk,hkd->btd")


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("make", "shape", "axis", "config", "parts"),
    [
        (dense, (32, 12), 0, GROUPS, 4),
        (dense, (32, 12), 0, WHOLE, 32),
        (dense, (32, 12), 1, GROUPS, 6),
        (dense, (32, 12), 1, WHOLE, 6),
        (TO_HEADS, (32, 4, 6), 1, GROUPS, 12),
        (TO_HEADS, (32, 4, 6), 1, WHOLE, 12),
        (HEADS_FIRST, (4, 32, 6), 0, GROUPS, 4),
        (FROM_HEADS, (4, 16, 6), 0, GROUPS, 8),
        (FROM_HEADS, (4, 16, 6), 0, WHOLE, 64),
        (table("embeddings"), (12, 32), 0, GROUPS, 12),
        (table("embeddings"), (12, 32), 0, WHOLE, 12),
        (table("reverse_embeddings"), (32, 12), 1, GROUPS, 12),
        (table("reverse_embeddings"), (32, 12), 1, WHOLE, 12),
    ],
)
def test_shares_give_together_what_the_layer_gives(rng, make, shape, axis, config, parts):
    layer, name, inputs = make(shape)
    assert packed_axes(layer, name, axis, config.block_size).parts == parts
    layer.quantize("int4", config=config)
    found = packed_axes(layer, name, axis, policy_of(layer).block_size)
    assert found.parts == parts
    assert name != "kernel" or kernel_shape(layer) == shape
    x = rng.normal(size=(3, 5, *inputs)).astype("float32")
    wanted = layer(x) if name == "kernel" else layer(x, reverse=True)
    whole = matrix_of(layer)
    placement = SimpleNamespace(axis_of=lambda _: found.axes[name], shares_of_heads=2)
    share, stored = share_of(whole, placement), {v.name: np.asarray(v) for v in layer.variables}
    xs, made = [x.reshape(3, 5, -1)] * 2, []
    if share.inputs < whole.inputs:
        xs = np.split(xs[0], 2, axis=2)
    for i, own in enumerate(xs):
        arrays = {
            array: np.split(value, 2, found.axes[array])[i] if array in found.axes else value
            for array, value in stored.items()
        }
        known = {"numbers": name, "scale": f"{name}_scale", "zero": f"{name}_zero"}
        if config is WHOLE:
            known = {"numbers": name, "divisor": f"{name}_scale"}
        made.append(product(own, share._replace(**{k: arrays[v] for k, v in known.items()})))
    got = sum(made) if share.inputs < whole.inputs else np.concatenate(made, axis=-1)
    assert relative(got, np.reshape(wanted, got.shape)) <= 1e-5


@pytest.mark.parametrize(
    ("make", "shape", "axis", "config"),
    [
        (dense, (20, 12), 0, GROUPS),  # the last group is not whole
        (dense, (32, 5), 1, GROUPS),  # a byte would belong to two devices
        (TO_HEADS, (32, 4, 6), 2, GROUPS),
        (HEADS_FIRST, (4, 32, 6), 0, WHOLE),  # a scale is for outputs of several heads
        (HEADS_FIRST, (4, 32, 6), 1, GROUPS),
        (FROM_HEADS, (4, 16, 6), 1, GROUPS),
        (table("embeddings"), (12, 32), 1, GROUPS),
    ],
)
def test_what_devices_cannot_share_is_on_each_whole(make, shape, axis, config):
    layer, name, _ = make(shape)
    found = packed_axes(layer, name, axis, config.block_size)
    assert not found.axes or found.parts == 1
