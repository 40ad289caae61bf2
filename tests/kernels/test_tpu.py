"""Kernels for a TPU, interpreted on a CPU: what they compute is what NumPy does, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backbone_surgery import target
from backbone_surgery.kernels import tpu, tpu_experts
from backbone_surgery.kernels.tpu_choice import used_experts
from backbone_surgery.kernels.tpu_experts import product_of_used
from backbone_surgery.opening.experts import among_largest, largest
from tests.helpers import relative


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("each", "tokens", "inputs", "outputs", "dtype", "stored"),
    [
        (1, 2, 256, 384, "bfloat16", "bfloat16"),
        (4, 3, 100, 300, "float32", "float32"),
        (4, 1, 384, 200, "bfloat16", "float32"),  # the inputs come last
        (1, 5, 128, 130, "float32", "bfloat16"),
        (1, 1, 8, 12, "float32", "float32"),
    ],
)
def test_products_with_used_experts(rng, monkeypatch, each, tokens, inputs, outputs, dtype, stored):
    """Several blocks of each of two experts; all others are no numbers, nor is what follows."""
    monkeypatch.setattr(tpu_experts, "_BLOCK_BYTES", 128 * inputs * np.dtype(stored).itemsize)
    x = jnp.asarray(rng.normal(size=(each, tokens, inputs)), dtype)
    x = x.at[2:].set(jnp.nan) if each > 1 else x
    bank = jnp.full((5, inputs, outputs), jnp.nan, stored)
    bank = bank.at[np.array([4, 1])].set(jnp.asarray(rng.normal(size=(2, inputs, outputs)), stored))
    order, used = jnp.array([4, 1, 0, 0]), jnp.array([2])
    with target.made_for("tpu"):
        assert tpu_experts.takes(tokens, bank, dtype)
        received = jax.jit(product_of_used)(x, bank, order, used)
    factors = (np.broadcast_to(x, (max(each, 2), *x.shape[1:]))[:2], bank[order[:2]].astype(dtype))
    wanted = np.einsum("eti,eio->eto", *(np.asarray(a, "float64") for a in factors))
    assert received.dtype == dtype
    assert relative(received[:2], wanted) <= (1e-5 if dtype == "float32" else 5e-3)
    assert not received[2:].any()


def test_what_products_with_used_experts_are_for():
    """Of what a TPU has room for."""

    def takes(tokens=8, inputs=4096, stored="bfloat16", dtype="bfloat16"):
        bank = jax.ShapeDtypeStruct((8, inputs, 4096), stored)
        return tpu_experts.takes(tokens, bank, dtype)

    assert takes()
    assert takes(inputs=16384)
    assert takes(stored="float32", dtype="float32")
    for refused in ({"tokens": 1024}, {"inputs": 32768}, {"stored": "int8"}, {"dtype": "float16"}):
        assert not takes(**refused)


@pytest.mark.parametrize(("own", "first"), [(9, 0), (3, 3), (3, 6)])
def test_which_experts_any_token_uses(rng, own, first):
    """Of all, and of a part; two tokens are of use, and one that is lost, but not the last one."""
    weights = np.zeros((4, 9), "float32")
    weights[0, [7, 2]], weights[1, [3, 2]], weights[3, 4] = (0.25, 0.7), (1.5, -0.1), 1.0
    weights[2] = np.nan
    with target.made_for("tpu"):
        run = jax.jit(lambda x, i: used_experts(x, lambda x: x, min(6, own), 3, own, i))
        order, count, shares = map(np.asarray, run(weights, first))
    used = [i for i in (2, 3, 7) if first <= i < first + own]
    (count,) = count
    assert count == len(used)
    assert list(order[:count] + first) == used
    assert (order[count:] == order[count - 1]).all()
    np.testing.assert_array_equal(shares[:count, [0, 1, 3]], weights[[0, 1, 3]][:, used].T)
    assert not shares[count:, [0, 1, 3]].any()
    assert np.isnan(shares[:, 2]).all()


def test_a_device_whose_experts_nobody_uses_runs_none():
    weights = np.zeros((2, 8), "float32")
    weights[0, 1], weights[1, 0] = 1.0, np.nan
    with target.made_for("tpu"):
        used = used_experts(weights, lambda x: x, 2, 2, 4, 4)
    assert used.count == 0
    assert ((used.order >= 0) & (used.order < 4)).all()
    assert not used.shares[:, 0].any()
    assert np.isnan(used.shares[:, 1]).all()


def test_the_largest_are_found_without_sorting(rng):
    """The first ones of those that are equal."""
    x = rng.integers(0, 5, size=(20, 9)).astype("float32")
    x[3, 2:] = -np.inf
    index = np.asarray(largest(x, 4)[1])
    wanted = np.zeros(x.shape, bool)
    np.put_along_axis(wanted, index, True, axis=1)
    np.testing.assert_array_equal(among_largest(x, 4), wanted)


def test_kernels_of_a_tpu_are_for_what_runs_on_one():
    assert not tpu.available()  # outside of a generation
    for settings, there in ((("cpu",), False), (("tpu",), True), (("tpu", "a mesh"), False)):
        with target.made_for(*settings):
            assert tpu.available() == there
