"""Products of four bits by a kernel for a TPU, interpreted on a CPU: NumPy's, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backbone_surgery import target
from backbone_surgery.kernels import tpu_int4
from tests.helpers import relative
from tests.kernels.packing import pack


@pytest.mark.by_default(2)
@pytest.mark.parametrize("pairs", ["outputs", "inputs", "turned"])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group"),
    [
        (3, 256, 602, 128),
        pytest.param(9, 512, 1280, 64, marks=pytest.mark.slow),
        pytest.param(20, 768, 2050, 32, marks=pytest.mark.slow),
        pytest.param(64, 1280, 256, 256, marks=pytest.mark.slow),
        (2, 256, 300, None),
    ],
)
def test_products_of_four_bits(rng, pairs, rows, inputs, outputs, group):
    """Several programs, pieces, chunks, and groups of a chunk; some outputs fill no piece."""
    packed, matrix = pack(rng, pairs, inputs, outputs, group, "bfloat16")
    x = jnp.asarray(rng.normal(size=(rows, inputs)), "bfloat16")
    with target.made_for("tpu"):
        assert tpu_int4.takes(rows, packed, "bfloat16")
        received = jax.jit(lambda x: tpu_int4.product(x, packed))(x)
    assert received.dtype == "float32"
    assert relative(received, np.asarray(x, "float64") @ matrix) <= 1e-4


def test_a_row_that_is_lost_spoils_no_other(rng):
    packed, matrix = pack(rng, "outputs", 256, 256, 128, "bfloat16")
    x = jnp.asarray(rng.normal(size=(3, 256)), "bfloat16").at[1, 7].set(np.nan)
    with target.made_for("tpu"):
        received = np.asarray(tpu_int4.product(x, packed))
    assert np.isnan(received[1]).all()
    others = [0, 2]
    assert relative(received[others], np.asarray(x, "float64")[others] @ matrix) <= 1e-4


@pytest.mark.parametrize("precision", target.PRECISIONS)
@pytest.mark.parametrize("heads", [1, 4])
def test_precision_is_for_float32_alone(rng, heads, precision):
    """Mosaic multiplies bfloat16 by the default alone."""
    packed, _ = pack(rng, "outputs", 256, 256 * heads, 128, "bfloat16")
    packed, x = packed._replace(heads=heads), jnp.zeros((2, 256), "bfloat16")
    with target.made_for("tpu"), target.precision(precision):
        made = str(jax.make_jaxpr(lambda x: tpu_int4.product(x, packed))(x))
    default = "precision=(Precision.DEFAULT, Precision.DEFAULT)"
    assert made.count("precision=") == made.count(default) > 0


def test_what_they_are_for(rng):
    packed, _ = pack(rng, "outputs", 256, 256, 64, "bfloat16")
    assert not tpu_int4.takes(8, packed, "bfloat16")  # no program of a TPU
    with target.made_for("tpu"):
        assert tpu_int4.takes(64, packed, "bfloat16")
        assert not tpu_int4.takes(65, packed, "bfloat16")
        assert not tpu_int4.takes(8, packed, "float16")
        for odd in ({"group": 16}, {"group": 48}, {"inputs": 200}, {"outputs": 254}):
            assert not tpu_int4.takes(8, packed._replace(**odd), "bfloat16")
        assert tpu_int4.takes(8, packed._replace(inputs=768, group=256), "bfloat16")
        for rest in ({"inputs": 384, "group": 256}, {"inputs": 512, "group": 384}):
            assert not tpu_int4.takes(8, packed._replace(**rest), "bfloat16")
        numbers = np.zeros((256, 512), "int8")
        split = packed._replace(numbers=numbers, inputs=256, outputs=1024, heads=4)
        assert tpu_int4.takes(8, split, "bfloat16")
        for odd in ({"heads": 3}, {"heads": 8}, {"heads": 2}, {"inputs": 192}, {"group": 96}):
            assert not tpu_int4.takes(8, split._replace(**odd), "bfloat16")
    with target.made_for("tpu", placement="a mesh"):
        assert not tpu_int4.takes(64, packed, "bfloat16")


def test_where_groups_are_many_a_program_has_fewer_outputs(rng):
    packed, _ = pack(rng, "outputs", 256, 256, 32, "bfloat16")
    packed = packed._replace(inputs=36864, outputs=4608)
    sizes = [tpu_int4._sizes(packed._replace(group=group)) for group in (32, 128)]
    assert [x.pieces for x in sizes] == [1, 4]
