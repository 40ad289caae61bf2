"""Run on eight fake devices: where rows, weights and caches lie, on meshes of several kinds.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.meshes.on_layouts
"""

import re
import threading
from unittest import mock

import jax
import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery import graph
from backbone_surgery.caching.experts import ChosenExperts
from backbone_surgery.caching.packing import Packing
from backbone_surgery.generation import run_batch
from backbone_surgery.generation.programs import Programs
from backbone_surgery.opening.predict import predict
from tests.families import ROWS
from tests.helpers import relative
from tests.meshes.on_devices import OPTIONS, make_divisible, make_edited, on, prompts, texts


def greedy(backbone):
    lm = bs.CachedCausalLM(backbone)
    lm.compile(sampler="greedy")
    return lm


def ids(lm, rows, **options):
    return lm.generate(prompts(rows), **{**OPTIONS, **options})["token_ids"]


def share(cache):
    """Return which part of a cache the first device has."""
    arrays = [x for entry in cache for x in entry.values()]
    parts = {x.addressable_shards[0].data.nbytes / x.nbytes for x in arrays}
    assert len(parts) == 1
    return parts.pop()


def check_rows():
    """Rows are filled up to the batch axis, so that each device has its part of the cache."""
    alone = greedy(make_divisible())
    wanted = {rows: ids(alone, rows) for rows in (1, 3, 9)}
    shares, make = [], Packing.new_cache

    def watched(*arguments):
        cache = make(*arguments)
        shares.append(share(cache))
        return cache

    for mesh in ((2, 4), (8, 1)):
        with on(mesh, make_divisible()):
            lm = greedy(make_divisible())
        with mock.patch.object(Packing, "new_cache", watched):
            for rows, own in wanted.items():
                np.testing.assert_array_equal(ids(lm, rows), own)
        paper = bs.plan(lm.backbone, dict(zip(("batch", "model"), mesh, strict=True)), 3, 16)
        assert paper.rows == lm.programs.padded(3)
        cache = bs.new_cache(lm.backbone_with_cache, paper.rows, paper.slots)
        held = sum(x.addressable_shards[0].data.nbytes for e in cache for x in e.values())
        assert paper.cache_bytes == held
        assert bs.Engine(lm, rows=3, length=48).rows == mesh[0] * -(-3 // mesh[0])
    assert shares == [1 / 8] * 6, shares


def check_axes():
    """The axis of the rows is read off the weights: whatever its name, scope and thread."""
    wanted = ids(greedy(make_divisible()), 4)
    for shape, axes, expected in (
        ((4, 2), ("model", "rows"), "rows"),
        ((2, 4), ("data", "model"), "data"),
        ((8,), ("model",), None),
    ):
        lms, shares = [], []

        def make(backbone, lms=lms, shares=shares):
            lms.append(greedy(backbone))
            shares.append(share(bs.new_cache(lms[-1].backbone_with_cache, 4, 16)))

        with on(shape, make_divisible(), axes):
            backbone = make_divisible()
            make(backbone)
        make(backbone)
        thread = threading.Thread(target=make, args=(backbone,))
        thread.start()
        thread.join()
        assert [lm.programs.placement.batch_axis for lm in lms] == [expected] * 3
        assert shares == [1 / 8] * 3, shares
        for lm in lms:
            np.testing.assert_array_equal(ids(lm, 4), wanted)


def check_edit_outside():
    """An edit may be made outside the scope that the weights were made in."""
    wanted = texts(bs.CachedCausalLM(make_edited(make_divisible())), 3, "greedy")
    with on((2, 4), make_divisible()):
        backbone = make_divisible()
    got = texts(bs.CachedCausalLM(make_edited(backbone)), 3, "greedy")
    np.testing.assert_array_equal(got[0], wanted[0])
    for path, value in got[1].items():
        assert relative(value, wanted[1][path]) <= 1e-4, path


def check_predict():
    """Rows of a plain pass are split over the batch axis, where they divide."""
    alone, rng = bs.open_backbone(make_divisible()), np.random.default_rng(3)
    with on((8, 1), make_divisible()):
        model = bs.open_backbone(make_divisible())
    for rows, each in ((16, 2), (3, 3)):
        token_ids = rng.integers(0, 64, (rows, 5), dtype=np.int32)
        inputs = {"token_ids": token_ids, "padding_mask": np.ones_like(token_ids)}
        assert relative(predict(model, inputs), predict(alone, inputs)) <= 1e-5
        made = vars(model)["_made_once"]
        [key] = [key for key in made if "predict" in key]
        run, known = made[key]
        seen = []
        watched = lambda weights, given: seen.append(given) or run(weights, given)  # noqa: E731, B023
        with mock.patch.dict(made, {key: (watched, known)}):
            predict(model, inputs)
        assert seen[0]["token_ids"].addressable_shards[0].data.shape == (each, 5)


def check_growing():
    """A cache that grows stays in its shards, and compiles what it does on one device."""
    results, shares = [], []
    for mesh in (None, (2, 4)):
        with on(mesh, make_divisible()):
            lm = greedy(make_divisible())
        grow = lm.programs.grow

        def watched(state, length, grow=grow):
            state = grow(state, length)
            shares.append(share(state["cache"]))
            return state

        object.__setattr__(lm.programs, "grow", watched)
        with mock.patch.object(run_batch, "_GROWS_FROM", 16):
            once = ids(lm, 4, max_new_tokens=40)
            compiled = dict(lm.programs.compilations)
            np.testing.assert_array_equal(ids(lm, 4, max_new_tokens=40), once)
        assert lm.programs.compilations == compiled
        results.append((once, compiled))
    np.testing.assert_array_equal(results[1][0], results[0][0])
    assert results[1][1] == results[0][1] == {"prefill": 1, "decode": 3}
    assert shares == [1] * 4 + [1 / 8] * 4, shares


def check_inserted():
    """A layer that an edit brings along is on every device, unless the layout map names it."""

    def make():
        keras.utils.set_random_seed(4)
        layer = keras.layers.Dense(64, name="extra")
        return bs.operate(make_divisible(), [bs.Insert("blocks.1.mlp_output", layer)])

    wanted = ids(greedy(make()), 4)
    for more, expected in (
        ((), (None, None)),
        ((("extra/kernel", (None, "model")),), (None, "model")),
    ):
        with on((2, 4), make_divisible(), more=more):
            edited = make()
        (kernel,) = [v for v in edited.variables if v.path == "extra/kernel"]
        spec = [*kernel.value.sharding.spec, None, None][:2]
        assert tuple(spec) == expected
        assert kernel.value.sharding.device_set == set(jax.devices())
        np.testing.assert_array_equal(ids(greedy(edited), 4), wanted)


def check_repeated_heads():
    """Two heads of keys on more devices are kept several times: each device has one."""

    def make():
        return make_divisible("llama", num_key_value_heads=2)

    for sampler in ("greedy", keras_hub.samplers.BeamSampler(num_beams=3)):
        alone = greedy(make())
        alone.compile(sampler=sampler)
        wanted = ids(alone, 5, max_new_tokens=20)
        for mesh, times in (((2, 4), 2), ((1, 8), 4)):
            with on(mesh, make()):
                lm = greedy(make())
            lm.compile(sampler=sampler)
            with mock.patch.object(run_batch, "_GROWS_FROM", 16):
                np.testing.assert_array_equal(ids(lm, 5, max_new_tokens=20), wanted)
            paper = bs.plan(lm.backbone, dict(zip(("batch", "model"), mesh, strict=True)), 2, 16)
            cache = bs.new_cache(lm.backbone_with_cache, paper.rows, paper.slots)
            assert cache[0]["key"].shape == (paper.rows, paper.slots, 2 * times, 8)
            assert share(cache) == 1 / 8
            assert 8 * paper.cache_bytes == sum(x.nbytes for e in cache for x in e.values())


def check_moved():
    """Weights that are moved later are refused; another task of them runs, with other heads."""

    def make():
        return make_divisible("llama", num_key_value_heads=2)

    def move(backbone, mesh):
        devices = keras.distribution.DeviceMesh(mesh, ["batch", "model"])
        layout = bs.layout_map(backbone, devices)
        for v in backbone.variables:
            whole = keras.distribution.TensorLayout([None] * len(v.shape), devices)
            lies = (layout[v.path] or whole).backend_layout
            graph.put_array(v, jax.device_put(v.value, lies))

    backbone = make()
    alone = greedy(backbone)
    wanted = ids(alone, 4)
    last, words = alone, "on one device. Received weights on a mesh {'batch': 2, 'model': 4}"
    for mesh, heads in (((2, 4), 4), ((1, 8), 8)):
        move(backbone, mesh)
        engine = bs.Engine(last, rows=2, length=48)
        for run in (lambda lm=last: ids(lm, 4), lambda: engine.generate(prompts(2), **OPTIONS)):  # noqa: B023
            with pytest.raises(bs.SurgeryError, match=re.escape(words)):
                run()
        last = greedy(backbone)
        assert bs.new_cache(last.backbone_with_cache, 4, 16)[0]["key"].shape[2] == heads
        np.testing.assert_array_equal(ids(last, 4), wanted)
        words = "on a mesh {'batch': 2, 'model': 4}. Received weights on a mesh {'batch': 1"


EXPERTS = {
    "qwen2_moe": ((2, 4), 0, {}),
    "qwen3_moe": ((1, 8), 0, {}),
    "qwen3_5_moe": ((2, 4), 0, {}),
    "mixtral": ((2, 4), 2, {}),
    "gpt_oss": ((2, 4), 2, {}),
    "gemma4": ((2, 4), 2, {
        "enable_moe_block": True, "expert_intermediate_dim": 32, "num_experts_per_token": 2,
        "hidden_size_per_layer_input": 0,
    }),
}  # fmt: skip
"""For each family a mesh, the axis of a kernel that makes features which is shared, and sizes."""


def check_experts():
    """Devices share experts or features: programs of all platforms, run here, give the same.

    A TPU runs alone those that any row chose, and a GPU those of one row.
    """
    by_kernel, run = (ChosenExperts, "_run_used"), ChosenExperts._run_used
    for name, (mesh, axis, sizes) in EXPERTS.items():

        def make(name=name, sizes=sizes):
            return ROWS[name].make(vocabulary_size=64, num_experts=16, num_layers=2, **sizes)

        alone = greedy(make())
        wanted = [ids(alone, rows) for rows in (1, 5)]
        keras.utils.clear_session(free_memory=False)
        with on(mesh, make()):
            lm = greedy(make())
        kernels = [v.value for v in lm.backbone.variables if "expert" in v.path]
        kernel = next(x for x in kernels if x.shape[:-2] == (16,))
        shape = list(kernel.shape)
        shape[axis] //= mesh[1]
        assert kernel.sharding.shard_shape(kernel.shape) == tuple(shape), name
        for platform in ("cpu", "gpu", "tpu"):
            made = Programs(lm.backbone_with_cache, lm.programs.head, platform)
            object.__setattr__(lm, "programs", made)
            calls = mock.patch.object(*by_kernel, autospec=True, side_effect=run)
            with calls as calls:
                for own, rows in zip(wanted, (1, 5), strict=True):
                    np.testing.assert_array_equal(ids(lm, rows), own, err_msg=f"{name} {platform}")
            assert calls.called == (platform == "tpu"), name


def check_heads_first():
    """Programs of a mesh of TPUs, run here: they carry caches heads first, and give the same."""
    for sampler in ("greedy", keras_hub.samplers.BeamSampler(num_beams=3)):
        alone = greedy(make_divisible())
        alone.compile(sampler=sampler)
        wanted = ids(alone, 5, max_new_tokens=20)
        with on((2, 4), make_divisible()):
            lm = greedy(make_divisible())
        lm.compile(sampler=sampler)
        made = Programs(lm.backbone_with_cache, lm.programs.head, "tpu")
        object.__setattr__(lm, "programs", made)
        with mock.patch.object(run_batch, "_GROWS_FROM", 16):
            np.testing.assert_array_equal(ids(lm, 5, max_new_tokens=20), wanted)
        key = made.packing.new_cache(4, 16)[0]["key"]
        assert key.shape[:3] == (4, 8, 16)
        assert tuple(key.sharding.spec)[:2] == ("batch", "model"), key.sharding
    lm.compile(sampler="greedy")
    served = bs.Engine(lm, rows=3, length=48, prefill_chunk=4, chunk_size=4)
    alone.compile(sampler="greedy")
    for _ in range(2):  # the second time out of the prefix cache
        texts = served.generate(prompts(7), **OPTIONS)
        for text, row in zip(texts, ids(alone, 7), strict=True):
            np.testing.assert_array_equal(text, row[: len(text)])


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    for check in (
        check_rows,
        check_axes,
        check_edit_outside,
        check_predict,
        check_growing,
        check_inserted,
        check_repeated_heads,
        check_moved,
        check_experts,
        check_heads_first,
    ):
        keras.utils.clear_session(free_memory=False)
        check()
        print(check.__name__, "passed", flush=True)
