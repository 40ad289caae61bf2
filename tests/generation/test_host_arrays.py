"""Arrays of the host that go to an accelerator as one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.host_arrays import bundle
from tests.families import ROWS
from tests.helpers import ragged

ARRAYS = {
    "flags": np.array([[True, False, True]]),
    "bytes": np.array([-3, 5, 127], "int8"),
    "halves": jnp.asarray([1.5, -2.0, 3.25], "bfloat16").__array__(),
    "wide": np.array([2**40 + 3, 7]),  # which JAX makes 32 bits of
    "numbers": np.linspace(-1, 1, 6, dtype="float32").reshape(2, 1, 3),
    "none": np.zeros((0, 4), "float32"),
    "scalar": np.int32(-7),
    "unsigned": np.array([2**32 - 1], "uint32"),
}


def test_every_array_is_as_it_was():
    args = ([jnp.arange(3)], {**ARRAYS, "there": jnp.ones(2)}, np.float32(0.5))
    bundled, (numbers, *arrays) = bundle(args)
    assert numbers.dtype == "uint8"
    assert [len(x) for x in arrays] == [1, 1, 0]
    got = jax.jit(bundled.opened(lambda *args: args))(numbers, *arrays)
    wanted = jax.jit(lambda *args: args)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)


def test_a_large_array_goes_by_itself():
    large, small = np.arange(2**18, dtype="int32"), np.arange(3)
    bundled, (numbers, *arrays) = bundle(([jnp.ones(1)], {"large": large, "small": small}))
    assert [len(x) for x in arrays] == [1, 1]
    assert numbers.nbytes == 3 * 4
    got = jax.jit(bundled.opened(lambda *args: args))(numbers, *arrays)[1]
    assert np.array_equal(got["large"], large)
    assert np.array_equal(got["small"], small)


def test_what_is_donated_is_used_up():
    bundled, args = bundle(({"a": jnp.ones(3), "b": np.float32(2)}, jnp.ones(3)))
    jax.jit(bundled.opened(lambda x, y: x["a"] * x["b"] + y), donate_argnums=1)(*args)
    assert args[1][0].is_deleted()
    assert not args[2][0].is_deleted()


def test_another_shape_is_another_bundle():
    assert bundle((np.ones(2),))[0] == bundle((np.zeros(2),))[0]
    assert bundle((np.ones(2),))[0] != bundle((np.ones(3),))[0]
    assert bundle((np.ones(2),))[0] != bundle((np.ones(2, int),))[0]


@pytest.fixture
def lms():
    """Return a model whose programs are made for a TPU, run here, and the same for a CPU."""
    backbone = ROWS["gpt2"].make(num_layers=1)
    edits = [bs.Steer("mood", {0: np.linspace(-1, 1, backbone.hidden_dim)}), bs.Capture("blocks.0")]
    made = [bs.CachedCausalLM(bs.operate(backbone, edits)) for _ in range(2)]
    for lm in made:
        lm.compile(sampler="top_p")
    made[0].programs.platform = "tpu"
    return made


@pytest.mark.slow
def test_generation_and_engines_give_the_same(lms, rng):
    prompts = ragged(rng, [9, 5], 9)
    options = {"max_new_tokens": 6, "stop_token_ids": [3], "seed": [4, 5], "controls": {"mood": 2}}
    texts, served = [], []
    for lm in lms:
        texts.append(lm.generate(prompts, **options)["token_ids"])
        engine = bs.Engine(lm, rows=2, length=64, prefill_chunk=4, chunk_size=3)
        served.append(engine.generate(prompts, temperature=0.8, top_k=5, **options))
        assert lm.programs.compilations["decode"] == 2
    np.testing.assert_array_equal(*texts)
    for one, other in zip(*served, strict=True):
        np.testing.assert_array_equal(one, other)
