"""Products of four bits on a CPU: what they compute is what NumPy does of the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery import target
from backbone_surgery.generation.programs import Programs
from backbone_surgery.kernels import calls, cpu_int4
from tests.helpers import make_gemma2, make_gpt2, ragged, relative
from tests.kernels.packing import pack

pytest.importorskip("llvmlite")
processor = pytest.importorskip("backbone_surgery.kernels.processor")

WIDTHS = [width for width in (8, 16) if width <= processor.floats_of_vector()]

pytestmark = pytest.mark.skipif(not WIDTHS, reason="no kernels for this processor")

SIZES = {"outputs": (96, 160), "inputs": (96, 80), "turned": (96, 53)}


@pytest.fixture(params=WIDTHS)
def everywhere(request, monkeypatch):
    """Use kernels for whatever can be, as a processor with vectors of some width does."""
    monkeypatch.setattr(processor, "floats_of_vector", lambda: request.param)
    monkeypatch.setattr(calls, "_LEAST", 0)
    with target.made_for("cpu"), calls.in_use():
        yield


@pytest.mark.by_default(6)
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize(
    ("rows", "parts", "dtype"), [(1, 2, "bfloat16"), (3, 3, "float32"), (4, 1, "bfloat16")]
)
@pytest.mark.parametrize("pairs", SIZES)
def test_products(everywhere, monkeypatch, rng, pairs, rows, parts, dtype, group):
    monkeypatch.setattr(calls, "count_parts", lambda: parts)
    packed, matrix = pack(rng, pairs, *SIZES[pairs], group, dtype)
    x = jnp.asarray(rng.normal(size=(rows, SIZES[pairs][0])), dtype)
    assert cpu_int4.takes(rows, packed, dtype)
    received = jax.jit(lambda x: cpu_int4.product(x, packed))(x)
    assert received.dtype == "float32"
    assert relative(received, np.asarray(x, "float64") @ matrix) <= 1e-5


@pytest.mark.by_default(2)
@pytest.mark.parametrize(("rows", "parts", "dtype"), [(1, 2, "bfloat16"), (4, 5, "float32")])
@pytest.mark.parametrize(
    ("heads", "inputs", "head_dim", "group"),
    [(2, 96, 128, 32), (8, 64, 128, 64), (4, 256, 256, 32)],
)
def test_heads_that_come_first(
    everywhere, monkeypatch, rng, heads, inputs, head_dim, group, rows, parts, dtype
):
    """A head has one and a half groups, an eighth of one, or two."""
    monkeypatch.setattr(calls, "count_parts", lambda: parts)
    packed, matrix = pack(rng, "outputs", inputs, heads * head_dim, group, dtype)
    packed = packed._replace(heads=heads)
    x = jnp.asarray(rng.normal(size=(rows, inputs)), dtype)
    assert cpu_int4.takes(rows, packed, dtype)
    received = jax.jit(lambda x: cpu_int4.product(x, packed))(x)
    kernel = matrix.reshape(heads, inputs, head_dim)
    wanted = np.einsum("ri,hid->rhd", np.asarray(x, "float64"), kernel).reshape(rows, -1)
    assert relative(received, wanted) <= 1e-5


@pytest.mark.slow
def test_what_they_are_for(everywhere, rng):
    packed, _ = pack(rng, "outputs", 96, 160, 32, "bfloat16")
    assert cpu_int4.takes(4, packed, "bfloat16")
    assert not cpu_int4.takes(5, packed, "bfloat16")
    for odd in ({"heads": 2}, {"group": 36}, {"inputs": 100}, {"outputs": 150}):
        assert not cpu_int4.takes(4, packed._replace(**odd), "bfloat16")
    wide, _ = pack(rng, "outputs", 96, 512, 32, "bfloat16")
    for heads, taken in ((2, True), (4, True), (6, False), (8, False), (5, False)):
        assert cpu_int4.takes(4, wide._replace(heads=heads), "bfloat16") == taken, heads
    assert not cpu_int4.takes(4, wide._replace(heads=2, scale=None, zero=None), "bfloat16")
    below, _ = pack(rng, "inputs", 128, 512, 32, "bfloat16")
    assert cpu_int4.takes(4, below, "bfloat16")
    assert not cpu_int4.takes(4, below._replace(heads=2), "bfloat16")
    whole, _ = pack(rng, "outputs", 160, 160, None, "bfloat16")
    assert cpu_int4.takes(4, whole._replace(group=128), "bfloat16")
    halves = packed._replace(scale=packed.scale.astype("float16"))
    assert not cpu_int4.takes(4, halves, "bfloat16")
    with target.made_for("gpu"):
        assert not cpu_int4.takes(4, packed, "bfloat16")


def test_small_matrices_and_other_programs_have_none(rng):
    packed, _ = pack(rng, "outputs", 96, 160, 32, "bfloat16")
    with target.made_for("cpu"), calls.in_use():
        assert not cpu_int4.takes(4, packed, "bfloat16")
    packed, _ = pack(rng, "outputs", 512, 512, 32, "bfloat16")
    with target.made_for("cpu"):
        assert not cpu_int4.takes(4, packed, "bfloat16")  # on a mesh, or in training
        with calls.in_use():
            assert cpu_int4.takes(4, packed, "bfloat16")


def make_gemma2_of_wide_heads():
    return make_gemma2(head_dim=128, hidden_dim=32, intermediate_dim=64)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("make", [make_gpt2, make_gemma2_of_wide_heads])
def test_texts_are_those_of_what_is_unpacked(monkeypatch, rng, make, rows):
    lm = bs.CachedCausalLM(make())
    lm.quantize("int4")
    lm.compile(sampler="greedy")
    prompts = ragged(rng, [5, 3, 4][:rows], 16)
    wanted = lm.generate(prompts, stop_token_ids=None)
    run = []
    product = cpu_int4.product
    monkeypatch.setattr(cpu_int4, "product", lambda x, p: run.append(p) or product(x, p))
    monkeypatch.setattr(calls, "_LEAST", 0)
    programs = Programs(lm.backbone_with_cache, lm.programs.head, "cpu")
    object.__setattr__(lm, "programs", programs)
    received = lm.generate(prompts, stop_token_ids=None)
    assert {"outputs", "turned"} <= {packed.pairs for packed in run}
    assert (max(packed.heads for packed in run) > 1) == (make is make_gemma2_of_wide_heads)
    assert np.array_equal(received["token_ids"], wanted["token_ids"])
