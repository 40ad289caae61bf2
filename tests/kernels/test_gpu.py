"""Kernels for a GPU, interpreted on a CPU: what they compute is what NumPy does, in float64."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backbone_surgery import target
from backbone_surgery.kernels import gpu, gpu_attention, gpu_int4
from backbone_surgery.kernels.gpu_attention import Scoring, Seen, attend_one
from backbone_surgery.kernels.gpu_experts import product_of_chosen
from backbone_surgery.kernels.packed import Packed
from tests.helpers import relative
from tests.kernels.packing import pack

CASES = {
    "a query for each key": ((2, 200, 2, 1, 32), (0, 150), {}),
    "shared keys, slots that are no multiple": ((2, 333, 2, 3, 80), (33, 299), {"soft_cap": 20.0}),
    "one block": ((3, 16, 1, 2, 8), (0, 15), {"slopes": True}),
    "many queries, a window": ((1, 700, 1, 17, 64), (500, 698), {"sinks": True}),
    "all": ((2, 300, 2, 2, 16), (-5, 131), {"soft_cap": 5.0, "slopes": True, "sinks": True}),
}


def by_hand(query, keys, values, mask, slot, scoring):
    """Attend in NumPy; query float[batch, key heads, groups, size]."""
    query, keys, values = (np.asarray(x, "float64") for x in (query, keys, values))
    soft_cap, slopes, sinks = (None if x is None else np.asarray(x, "float64") for x in scoring)
    scores = np.einsum("bhgd,bshd->bhgs", query, keys)
    if soft_cap is not None:
        scores = np.tanh(scores / soft_cap) * soft_cap
    if slopes is not None:
        scores -= slopes[..., None] * (slot - np.arange(keys.shape[1]))
    shares = np.where(mask[:, None, None], np.exp(scores), 0.0)
    total = shares.sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks)[..., None]
    mixed = np.einsum("bhgs,bshd->bhgd", shares / np.where(total > 0, total, 1.0), values)
    return mixed.reshape(len(mixed), -1, mixed.shape[-1])


@pytest.fixture(params=CASES)
def case(request, rng):
    """Return arrays, what is seen, and what is done to scores; the last row sees nothing."""
    (batch, slots, heads, groups, size), (first, slot), options = CASES[request.param]
    shapes = (batch, heads, groups, size), *[(batch, slots, heads, size)] * 2
    query, keys, values = (jnp.asarray(rng.normal(size=s) * 0.6, "bfloat16") for s in shapes)
    mask = np.zeros((batch, slots), bool)
    begin = max(first, 0)
    mask[: max(batch - 1, 1), begin : slot + 1] = rng.random(slot + 1 - begin) > 0.2
    of_heads = [
        rng.random((heads, groups)).astype("float32") if options.get(name) else None
        for name in ("slopes", "sinks")
    ]
    return (
        (query, keys, values),
        Seen(mask, first, slot),
        Scoring(options.get("soft_cap"), *of_heads),
    )


def run(query, keys, values, seen, scoring, *new):
    batch, heads, groups, size = query.shape
    token = jnp.concatenate([query.reshape(batch, heads * groups, size), *new], axis=1)

    def attend(slot):
        with target.made_for("gpu"):
            return attend_one(
                token, keys, values, seen._replace(slot=slot), scoring, heads * groups
            )

    return jax.jit(attend)(seen.slot)


@pytest.fixture(params=[1, 3], ids="up to {} parts".format)
def most_parts(request, monkeypatch):
    monkeypatch.setattr(gpu_attention, "_MOST_PARTS", request.param)
    monkeypatch.setattr(gpu_attention, "_LEAST_BLOCKS", 1)
    monkeypatch.setattr(gpu_attention, "_NUMBERS", 64 * 32)


@pytest.mark.by_default(2)
@pytest.mark.usefixtures("most_parts")
def test_attention_of_one_query(case):
    arrays, seen, scoring = case
    mixed, keys, values = run(*arrays, seen, scoring)
    assert relative(mixed, by_hand(*arrays, seen.mask, seen.slot, scoring)) <= 5e-3
    assert (keys == arrays[1]).all()
    assert (values == arrays[2]).all()


@pytest.mark.by_default(1)
@pytest.mark.usefixtures("most_parts")
def test_a_token_is_written_before_its_query_attends(case):
    """The keys and values behind the queries; no other slot changes."""
    (query, keys, values), seen, scoring = case
    new = keys[:, seen.slot], values[:, seen.slot]
    old = keys.at[:, seen.slot].set(jnp.nan), values.at[:, seen.slot].set(1e4)
    mixed, *written = run(query, *old, seen, scoring, *new)
    wanted = by_hand(query, keys, values, seen.mask, seen.slot, scoring)
    assert relative(mixed, wanted) <= 5e-3
    assert (written[0] == keys).all()
    assert (written[1] == values).all()


def test_what_is_not_seen_is_not_read(rng):
    """Blocks before the first slot and after the last, which may hold anything."""
    query, keys = jnp.ones((1, 1, 1, 64), "bfloat16"), np.full((1, 1024, 1, 64), np.nan)
    keys[:, 256:512] = rng.normal(size=(1, 256, 1, 64))
    mask = np.zeros((1, 1024), bool)
    mask[:, 300:500] = True
    keys = jnp.asarray(keys, "bfloat16")
    mixed, _, _ = run(query, keys, keys, Seen(mask, 300, 499), Scoring())
    assert np.isfinite(np.asarray(mixed, "float32")).all()


@pytest.mark.parametrize("slot", [-1, 40])
def test_a_slot_past_the_end_writes_within_the_cache(slot):
    """As `slice_update` does."""
    keys, new = jnp.zeros((1, 32, 1, 16), "bfloat16"), jnp.ones((1, 1, 16), "bfloat16")
    mask = np.ones((1, 32), bool)
    query = jnp.ones((1, 1, 1, 16), "bfloat16")
    _, written, _ = run(query, keys, keys, Seen(mask, 0, slot), Scoring(), new, new)
    assert written.sum() == 16
    assert written[0, 31 if slot > 0 else 0].all()


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("chosen", "experts", "inputs", "outputs", "dtype"),
    [
        (3, 5, 256, 128, "bfloat16"),
        (2, 4, 40, 72, "float32"),
        (9, 16, 100, 300, "bfloat16"),
        (2, 3, 288, 136, "bfloat16"),
        (1, 1, 8, 8, "float32"),
    ],
)
def test_products_with_chosen_experts(rng, chosen, experts, inputs, outputs, dtype):
    x = jnp.asarray(rng.normal(size=(chosen, inputs)), dtype)
    bank = jnp.asarray(rng.normal(size=(experts, inputs, outputs)), dtype)
    index = rng.integers(0, experts, chosen)
    wanted = np.einsum("ci,cio->co", *(np.asarray(a, "float64") for a in (x, bank[index])))
    with target.made_for("gpu"):
        received = jax.jit(product_of_chosen)(x, bank, index)
    assert received.dtype == "float32"
    assert relative(received, wanted) <= 1e-5


@pytest.mark.by_default(1)
@pytest.mark.parametrize("pairs", ["outputs", "inputs", "turned"])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group", "dtype"),
    [
        (8, 512, 300, 128, "bfloat16"),
        (3, 192, 101, 64, "bfloat16"),
        (20, 128, 130, 32, "float16"),
        (2, 256, 64, None, "bfloat16"),
        (8, 1152, 256, 32, "bfloat16"),
    ],
)
def test_products_of_four_bits(rng, pairs, rows, inputs, outputs, group, dtype):
    packed, matrix = pack(rng, pairs, inputs, outputs, group, dtype)
    x = jnp.asarray(rng.normal(size=(rows, inputs)), dtype)
    with target.made_for("gpu"):
        assert gpu_int4.takes(rows, packed, dtype)
        received = jax.jit(lambda x: gpu_int4.product(x, packed))(x)
    assert received.dtype == "float32"
    assert relative(received, np.asarray(x, "float64") @ matrix) <= 1e-4


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", (8, 7)), ("float16", (8, 10))])
def test_products_of_four_bits_add_up_what_was_rounded(rng, dtype, kept):
    """Which a compiler for a GPU does not, unless it is told; one for a CPU does."""
    packed, _ = pack(rng, "outputs", 64, 32, 32, dtype)
    with target.made_for("gpu"):
        made = jax.make_jaxpr(lambda x: gpu_int4.product(x, packed))(jnp.ones((8, 64), dtype))
    steps = {step.primitive.name: step for step in made.eqns}
    rounding, adding = steps["reduce_precision"], steps["reduce_sum"]
    assert adding.invars == rounding.outvars
    assert (rounding.params["exponent_bits"], rounding.params["mantissa_bits"]) == kept


def test_products_of_four_bits_by_small_inputs(rng):
    """Some of which float16 keeps by fewer bits; none is left out of the sums."""
    packed, matrix = pack(rng, "outputs", 128, 64, 32, "float16")
    x = jnp.asarray(rng.normal(size=(8, 128)) * 3e-5, "float16")
    with target.made_for("gpu"):
        received = jax.jit(lambda x: gpu_int4.product(x, packed))(x)
    assert relative(received, np.asarray(x, "float64") @ matrix) <= 1e-3


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "wanted"),
    [
        (8, 4096, 14336, (256, 32, 8)),  # a wave of 264 programs
        (8, 4096, 1024, (256, 32, 2)),  # as many sums as half of the matrix
        (2, 16384, 256, (256, 128, 4)),  # 32 parts
        (64, 768, 3072, (128, 6, 1)),
        (8, 4096, 128256, (256, 32, 32)),
    ],
)
def test_how_products_of_four_bits_are_shared_out(rows, inputs, outputs, wanted):
    sizes = gpu_int4._sizes_of(rows, Packed(None, "outputs", inputs, outputs, 128))
    assert (sizes.width, sizes.times, sizes.steps) == wanted


def test_what_products_of_four_bits_are_for(rng):
    packed, _ = pack(rng, "outputs", 256, 64, 64, "bfloat16")
    assert not gpu_int4.takes(8, packed, "bfloat16")  # no program of a GPU
    with target.made_for("gpu"):
        assert gpu_int4.takes(64, packed, "float16")
        assert not gpu_int4.takes(65, packed, "bfloat16")
        assert not gpu_int4.takes(0, packed, "bfloat16")
        assert not gpu_int4.takes(8, packed, "float32")
        for group in (16, 48, 100, 512):
            assert not gpu_int4.takes(8, packed._replace(group=group), "bfloat16")


@pytest.mark.parametrize(
    ("capability", "there"),
    [
        ("9.0", True),
        ("8.0", True),
        ("12.0", True),
        ("7.5", False),
        ("gfx90a", False),
        (None, False),
    ],
)
def test_which_gpus_run_them(monkeypatch, capability, there):
    one = SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda platform: [one])
    assert not gpu.available()  # outside of a generation
    with target.made_for("cpu"):
        assert not gpu.available()
    with target.made_for("gpu"):
        assert gpu.available() == there
        with target.planned():
            assert gpu.available()
    with target.made_for("gpu", placement="a mesh"), target.planned():
        assert not gpu.available()


def test_without_triton_there_are_none(monkeypatch):
    """As in a later version of JAX."""
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    with target.made_for("gpu"):
        assert not gpu.available()


def test_what_attention_is_for():
    def takes(time=1, slots=16, dtype="bfloat16", other="bfloat16", heads=4, size=8, **options):
        shapes = (2, time, heads, size), (2, slots, 2, size)
        arrays = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, (dtype, other), strict=True)]
        with target.made_for("gpu", **options):
            return gpu_attention.takes(*arrays)

    assert takes()
    assert takes(dtype="float16", other="float16")
    assert takes(placement="a mesh")  # each device by itself
    refused = ({"time": 2}, {"slots": 15}, {"dtype": "float32", "other": "float32"})
    for options in (*refused, {"other": "float32"}):
        assert not takes(**options)


def test_attention_is_for_what_a_program_can_keep():
    """The shared memory of an L4 is enough for the first ones alone."""

    def takes(groups, size):
        query, keys = (
            jax.ShapeDtypeStruct((2, *shape, size), "bfloat16")
            for shape in ((1, groups), (4096, 1))
        )
        with target.made_for("gpu"):
            return gpu_attention.takes(query, keys)

    assert all(takes(*sizes) for sizes in [(32, 512), (64, 256), (71, 64), (1, 16), (20, 8)])
    assert not any(takes(*sizes) for sizes in [(33, 512), (65, 256), (129, 64), (1, 520)])
