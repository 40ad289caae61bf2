"""`PackedProjection` computes what the int4 layer it runs computes, in the program of a GPU."""

import keras
import numpy as np
import pytest
from keras.quantizers import Int4QuantizationConfig

from backbone_surgery import graph, target
from backbone_surgery.caching.packed import (
    PackedEmbedding,
    PackedProjection,
    is_packed_table,
    logits_of,
    reads_packed,
)
from backbone_surgery.caching.packed_matrix import is_packed
from backbone_surgery.caching.rewire import _Rewirer
from backbone_surgery.kernels import gpu_int4, tpu_int4
from tests.caching.test_narrow import FROM_HEADS, PLAIN, TO_SPLIT
from tests.helpers import relative

SIZES = (3, 5, 64)
DENSE = SIZES
CASES = {
    "dense": DENSE,
    "plain": (*PLAIN[:2], SIZES),
    "to heads": (*TO_SPLIT[:2], SIZES),
    "from heads": (*FROM_HEADS[:2], (3, 5, 4, 16)),
}

pytestmark = pytest.mark.usefixtures("no_collecting")


@pytest.fixture
def calls(monkeypatch):
    """Count the products that the kernels take."""
    counted = []

    def count(product):
        return lambda *args: counted.append(1) or product(*args)

    for module in (gpu_int4, tpu_int4):
        monkeypatch.setattr(module, "product", count(module.product))
    return counted


def check_equal(layer, x, calls, platform="gpu"):
    wanted = layer(x)
    with target.made_for(platform):
        got = PackedProjection(layer)(x)
    assert calls
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert relative(got, wanted) <= 0.02


def make(case, rng, block=32, dtype="bfloat16"):
    """Build a layer of a case, quantised; of a shape alone it is a `Dense`."""
    if isinstance(case[0], str):
        equation, outputs, shape = case
        layer = keras.layers.EinsumDense(
            equation, outputs, "gelu", bias_axes=equation[-1], dtype=dtype
        )
    else:
        layer, shape = keras.layers.Dense(9, activation="gelu", dtype=dtype), case
    layer.build(shape)
    layer.bias.assign(rng.normal(size=layer.bias.shape))
    layer.quantize("int4", config=Int4QuantizationConfig(block_size=block))
    return layer, rng.normal(size=shape).astype("float32")


@pytest.mark.by_default(1)
@pytest.mark.parametrize("block", [32, 128, None])
@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_layer(rng, calls, case, block):
    layer, x = make(CASES[case], rng, block)
    assert is_packed(layer)
    check_equal(layer, x, calls)


@pytest.mark.slow
def test_else_the_layer_itself_is_called(rng, calls):
    """Elsewhere, for many tokens, in float32, with LoRA, and quantised in another way."""
    layer, x = make(DENSE, rng)
    packed = PackedProjection(layer)
    np.testing.assert_array_equal(packed(x), layer(x))
    with target.made_for("tpu"):
        np.testing.assert_array_equal(packed(x), layer(x))
    whole, _ = make(DENSE, rng, dtype="float32")
    narrow = keras.layers.Dense(9, dtype="bfloat16")
    narrow.build(DENSE)
    narrow.quantize("int8")
    with target.made_for("gpu"):
        many = np.repeat(x, 5, axis=0)
        np.testing.assert_array_equal(packed(many), layer(many))
        for other in (whole, narrow):
            np.testing.assert_array_equal(PackedProjection(other)(x), other(x))
        layer.enable_lora(2)
        layer.lora_kernel_b.assign(rng.normal(size=layer.lora_kernel_b.shape))
        np.testing.assert_array_equal(packed(x), layer(x))
    assert not calls


@pytest.mark.slow
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_kernels_whose_heads_come_first(rng, calls, heads, block):
    """Groups end within a head, and heads within a group: 64, 32 and 16 inputs at a time."""
    layer, x = make(("abc,dce->abde", (None, heads, 128), SIZES), rng, block)
    check_equal(layer, x, calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "inputs", "block"), [(2, 192, 32), (2, 192, 64), (4, 384, 128), (4, 128, 128)]
)
def test_kernels_whose_heads_come_first_on_a_tpu(rng, calls, heads, inputs, block):
    """A head has several groups, or parts of some; or a group has several heads."""
    case = ("abc,dce->abde", (None, heads, 256), (3, 5, inputs))
    layer, x = make(case, rng, block)
    check_equal(layer, x, calls, "tpu")


def test_without_groups_heads_first_are_run_by_the_layer(rng, calls):
    """Then a scale is for some inputs of all heads, and not for an output."""
    layer, x = make(("abc,dce->abde", (None, 2, 128), SIZES), rng, None)
    with target.made_for("gpu"):
        np.testing.assert_array_equal(PackedProjection(layer)(x), layer(x))
    assert not calls


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 32), (2, 1, 4, 32)])
def test_a_dense_layer_of_another_rank_is_called_itself(rng, calls, shape):
    layer, x = make(shape, rng)
    with target.made_for("gpu"):
        np.testing.assert_array_equal(PackedProjection(layer)(x), layer(x))
    assert not calls


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "mixed_bfloat16", "float32"])
@pytest.mark.parametrize("block", [32, 48, None])
@pytest.mark.parametrize("kind", [keras.layers.Embedding, keras.layers.ReversibleEmbedding])
def test_what_was_looked_up_is_unpacked(rng, kind, block, dtype):
    table = kind(75, 63, mask_zero=True, dtype=dtype)
    table.build()
    assert not is_packed_table(table)
    table.quantize("int4", config=Int4QuantizationConfig(block_size=block))
    assert is_packed_table(table)
    tokens = rng.integers(0, 75, (3, 5))
    looked_up, wanted = PackedEmbedding(table), table(tokens)
    got = looked_up(tokens)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(got, wanted)
    mask = table.compute_mask(tokens)
    np.testing.assert_array_equal(looked_up.compute_mask(tokens), mask)
    assert kind is not keras.layers.Embedding or not np.all(mask)


@pytest.mark.parametrize("reverse", [True, False])
def test_a_table_that_is_told_which_way_is_called_itself(reverse):
    table = keras.layers.ReversibleEmbedding(75, 64)
    table.build()
    table.quantize("int4")
    given = keras.KerasTensor((2, 3, 64) if reverse else (2, 3))
    assert _Rewirer("float32", None, 1).visit(table, given, reverse=reverse) is graph.KEEP


def test_a_table_with_lora_is_called_itself(rng):
    table, tokens = keras.layers.Embedding(75, 64), rng.integers(0, 75, (3, 5))
    table.build()
    table.quantize("int4")
    looked_up = PackedEmbedding(table)
    table.enable_lora(2)
    table.lora_embeddings_b.assign(rng.normal(size=table.lora_embeddings_b.shape))
    np.testing.assert_array_equal(looked_up(tokens), table(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("block", [32, None])
@pytest.mark.parametrize("rounds", [True, False])
def test_logits(rng, calls, tied, cap, block, rounds):
    """Of a table that is turned, or of one of its own; of rounded states, as of a loaded model."""
    head = keras.layers.ReversibleEmbedding(
        75, 64, tie_weights=tied, logit_soft_cap=cap, dtype="bfloat16"
    )
    head.build()
    states = keras.ops.cast(rng.normal(size=(3, 1, 64)), "bfloat16")
    np.testing.assert_array_equal(logits_of(head, states), head(states, reverse=True))
    head.quantize("int4", config=Int4QuantizationConfig(block_size=block))
    head.inputs_quantizer = keras.quantizers.AbsMaxQuantizer(axis=-1) if rounds else None
    wanted = head(states, reverse=True)
    np.testing.assert_array_equal(logits_of(head, states), wanted)
    assert not calls
    with target.made_for("gpu"):
        assert reads_packed(head, 3)
        got = logits_of(head, states)
    assert calls
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert relative(got, wanted) <= 0.02
