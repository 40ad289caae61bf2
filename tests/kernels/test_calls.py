"""Kernels: what they compute is what NumPy does, for every shape, processor and number of parts."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backbone_surgery.kernels import calls

pytest.importorskip("llvmlite")
processor = pytest.importorskip("backbone_surgery.kernels.processor")

WIDTHS = [width for width in (8, 16) if width <= processor.floats_of_vector()]

SHAPES = {
    "columns": ((64,), (64, 48), (1, 0)),
    "columns and some": ((24,), (24, 464), (1, 0)),
    "to heads": ((64,), (64, 3, 16), (1, 0)),
    "a matrix as it is turned": ((64,), (51, 64), (1, 1)),
}

pytestmark = pytest.mark.skipif(not WIDTHS, reason="no kernels for this processor")


NARROWER = [pytest.param(width, marks=pytest.mark.slow) for width in WIDTHS[:-1]]


@pytest.fixture(params=[*NARROWER, *WIDTHS[-1:]])
def everywhere(request, monkeypatch):
    """Use kernels for whatever can be, as a processor with vectors of some width does."""
    monkeypatch.setattr(processor, "floats_of_vector", lambda: request.param)
    monkeypatch.setattr(calls, "_LEAST", 0)


def close(received, x, y, axes):
    """Compare a product with one in float64."""
    wanted = np.tensordot(np.asarray(x, "float64"), np.asarray(y, "float64"), axes)
    assert received.shape == wanted.shape
    np.testing.assert_allclose(received, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.by_default(6)
@pytest.mark.parametrize(
    ("dtype", "parts"), [("float32", 1), ("float32", 8), ("bfloat16", 2), ("int8", 2)]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("name", SHAPES)
def test_products(everywhere, monkeypatch, rng, name, rows, dtype, parts):
    own, matrix, axes = SHAPES[name]
    monkeypatch.setattr(calls, "count_parts", lambda: parts)
    x, y = (jnp.asarray(9 * rng.standard_normal(s), dtype) for s in ((rows, *own), matrix))
    run = jax.jit(lambda x, y: calls.product(x, y, (((axes[0],), (axes[1],)), ((), ()))))
    close(run(x, y), x, y, axes)


@pytest.mark.by_default(2)
@pytest.mark.parametrize(("dtype", "parts"), [("float32", 2), ("bfloat16", 3), ("int8", 8)])
@pytest.mark.parametrize("name", ["columns", "columns and some", "to heads"])
def test_products_of_one_row_and_a_wide_matrix(everywhere, monkeypatch, rng, name, dtype, parts):
    """Several rows of the matrix at once; the same sums in the same order as one after another."""
    own, matrix, axes = SHAPES[name]
    monkeypatch.setattr(calls, "count_parts", lambda: parts)
    x, y = (jnp.asarray(9 * rng.standard_normal(s), dtype) for s in ((1, *own), matrix))
    received = []
    for most in (0, 1000):
        monkeypatch.setattr(calls, "_MOST_SUMS", most)
        run = jax.jit(lambda x, y: calls.product(x, y, (((axes[0],), (axes[1],)), ((), ()))))
        received.append(run(x, y))
    close(received[0], x, y, axes)
    np.testing.assert_array_equal(*received)


@pytest.mark.by_default(2)
@pytest.mark.parametrize("rows", [20, 45])
@pytest.mark.parametrize("name", ["columns", "a matrix as it is turned"])
def test_products_of_many_rows(everywhere, monkeypatch, rng, name, rows):
    own, matrix, axes = SHAPES[name]
    monkeypatch.setattr(calls, "count_parts", lambda: 2)
    x, y = (jnp.asarray(rng.standard_normal(s), "float32") for s in ((rows, *own), matrix))
    run = jax.jit(lambda x, y: calls.product(x, y, (((axes[0],), (axes[1],)), ((), ()))))
    close(run(x, y), x, y, axes)


def test_products_from_heads_of_several_rows_and_of_a_matrix_that_comes_first(everywhere, rng):
    x, y = (jnp.asarray(rng.standard_normal(s), "float32") for s in ((2, 3, 4, 16), (4, 16, 80)))
    run = jax.jit(lambda x, y: calls.product(x, y, (((2, 3), (0, 1)), ((), ()))))
    close(run(x, y), x, y, ((2, 3), (0, 1)))
    x, y = (jnp.asarray(rng.standard_normal(s), "float32") for s in ((64, 48), (5, 64)))
    run = jax.jit(lambda x, y: calls.product(x, y, (((0,), (1,)), ((), ()))))
    close(run(x, y), x, y, (0, 1))


@pytest.mark.parametrize("heads", [1, 6])
def test_a_matrix_for_each_head(everywhere, rng, heads):
    shapes = (heads, 3, 64), (heads, 64, 32)
    x, y = (jnp.asarray(rng.standard_normal(s), "float32") for s in shapes)
    run = jax.jit(lambda x, y: calls.product(x, y, (((2,), (1,)), ((0,), (0,)))))
    np.testing.assert_allclose(run(x, y), x @ y, atol=1e-4)


@pytest.mark.parametrize(
    ("x", "y", "axes"),
    [
        ((49, 64), (64, 64), (1, 0)),  # so many rows
        ((2, 64), (64, 50), (1, 0)),  # columns that fill no vectors
        ((2, 60), (60, 48), (1, 0)),  # rows of a matrix that make no groups
        ((2, 64), (3, 64, 16), (1, 1)),  # a matrix that lies in another order
        ((65, 64), (90, 64), (1, 1)),
        ((2, 40), (51, 40), (1, 1)),
    ],
)
def test_what_is_left_to_xla(everywhere, x, y, axes):
    x, y = jnp.ones(x), jnp.ones(y)
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    assert calls.product(x, y, dimensions) is None


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float16", "float16")])
def test_dtypes_that_are_left_to_xla(everywhere, dtypes):
    x, y = jnp.ones((2, 64), dtypes[0]), jnp.ones((64, 48), dtypes[1])
    assert calls.product(x, y, (((1,), (0,)), ((), ()))) is None


def test_small_matrices_are_left_to_xla(rng):
    assert calls.product(jnp.ones((2, 64)), jnp.ones((64, 48)), (((1,), (0,)), ((), ()))) is None


@pytest.mark.by_default(2)
@pytest.mark.parametrize(("dtype", "parts"), [("float32", 1), ("float32", 3), ("bfloat16", 2)])
@pytest.mark.parametrize(
    ("batch", "heads", "queries", "size", "slots", "first", "stop"),
    [
        (1, 3, 1, 16, 40, 0, 33),
        (2, 2, 4, 32, 50, 7, 50),
        (3, 1, 5, 64, 9, -4, 9),
        (1, 2, 3, 32, 150, 9, 140),  # several blocks of slots for each part, and some slots more
    ],
)
def test_attention_reads_the_slots_that_are_seen(
    everywhere, monkeypatch, rng, batch, heads, queries, size, slots, first, stop, dtype, parts
):
    monkeypatch.setattr(calls, "count_parts", lambda: parts)
    rows, cache = (batch, heads, queries, size), (batch, slots, heads, size)
    shapes = (rows, cache, (*rows[:3], slots))
    query, key, shares = (jnp.asarray(rng.standard_normal(s), dtype) for s in shapes)
    seen = slice(max(first, 0), stop)
    wide = [np.asarray(x, "float32") for x in (query, key, shares)]
    wanted = np.zeros(wide[2].shape)
    wanted[..., seen] = np.einsum("bhqd,bshd->bhqs", *wide[:2])[..., seen]
    key = key.at[:, : seen.start].set(np.nan).at[:, seen.stop :].set(np.nan)  # is not read
    tolerance = {"rtol": 1e-2 if dtype == "bfloat16" else 0, "atol": 1e-4}
    received = jax.jit(calls.scores)(query, key, first, stop)
    assert received.dtype == dtype
    np.testing.assert_allclose(received.astype("float32"), wanted, **tolerance)
    received = jax.jit(calls.mix)(shares, key, first, stop)
    wanted = np.einsum("bhqs,bshd->bhqd", wide[2][..., seen], wide[1][:, seen])
    assert received.dtype == dtype
    np.testing.assert_allclose(received.astype("float32"), wanted, **tolerance)


def test_many_calls_from_several_threads(monkeypatch, rng):
    """Threads that come late, or to a call that is over, do no harm."""
    monkeypatch.setattr(calls, "_LEAST", 0)
    monkeypatch.setattr(calls, "count_parts", lambda: 7)
    y = jnp.asarray(rng.standard_normal((64, 48)), "float32")

    @jax.jit
    def run(x):
        return jax.lax.fori_loop(
            0, 500, lambda i, x: jnp.tanh(calls.product(x, y, (((1,), (0,)), ((), ()))) @ y.T), x
        )

    rows = [jnp.asarray(rng.standard_normal((2, 64)), "float32") for _ in range(8)]
    alone = [np.asarray(run(x)) for x in rows]
    with ThreadPoolExecutor(4) as threads:
        for received, wanted in zip(threads.map(run, rows * 4), alone * 4, strict=True):
            np.testing.assert_array_equal(received, wanted)


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "lack", [("importlib.util.find_spec", None), (f"{calls.__name__}.version", "0.44.0")]
)
def test_without_llvmlite_or_with_an_old_one_there_are_none(monkeypatch, lack):
    monkeypatch.setattr(lack[0], lambda name: lack[1])
    calls.available.cache_clear()
    try:
        assert not calls.available()
        assert (
            calls.product(jnp.ones((2, 512)), jnp.ones((512, 512)), (((1,), (0,)), ((), ())))
            is None
        )
    finally:
        calls.available.cache_clear()


def test_where_no_kernels_are_in_use_nothing_is_asked_of_arrays():
    """Those of TensorFlow may have no known number of rows."""
    assert not calls.attends(None, None)
