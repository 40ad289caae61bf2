"""Run on eight fake devices: where rows, weights and caches lie, on meshes of several kinds.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.meshes.on_layouts
"""

import functools
import re
import tempfile
import threading
from unittest import mock

import jax
import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery import graph
from backbone_surgery.caching import packed
from backbone_surgery.caching.experts import ChosenExperts
from backbone_surgery.caching.packed_shares import product_on_mesh
from backbone_surgery.caching.packing import Packing
from backbone_surgery.generation import run_batch
from backbone_surgery.generation.programs import Programs
from backbone_surgery.kernels import gpu_attention, gpu_int4, tpu_int4
from backbone_surgery.opening.predict import predict
from backbone_surgery.weights.paths import variable_paths
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
        run, known = vars(model)["_made_once"]["predict"]
        seen = []
        watched = lambda weights, given: seen.append(given) or run(weights, given)  # noqa: E731, B023
        with mock.patch.dict(vars(model)["_made_once"], predict=(watched, known)):
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


def check_int4():
    """Devices share what is packed as they shared the weights, in the scope and outside of it."""
    for name, block, is_inside, sizes in (
        ("gpt2", 8, True, {}),
        ("gemma2", 8, True, {"num_query_heads": 16}),  # heads come first in its kernels
        ("gemma2", None, False, {}),
        ("llama", None, True, {"num_key_value_heads": 2}),  # it has a table for logits alone
        ("llama", 8, False, {}),
    ):

        def make(name=name, sizes=sizes):
            backbone = make_divisible(name, **sizes)
            tokens = np.ones((8, 2), "int32")
            backbone({"token_ids": tokens, "padding_mask": tokens})  # Keras wants all layers built
            return backbone

        config = keras.quantizers.Int4QuantizationConfig(block_size=block)
        alone = greedy(make())
        alone.quantize("int4", config=config)
        wanted = ids(alone, 3)
        with on((2, 4), make()):
            lm = greedy(make())
            if is_inside:
                lm.quantize("int4", config=config)
        if not is_inside:
            lm.quantize("int4", config=config)
        with mock.patch.object(packed, "product_on_mesh", side_effect=product_on_mesh) as calls:
            np.testing.assert_array_equal(ids(lm, 3), wanted, err_msg=name)
        assert calls.called
        check_shares(lm.backbone, block)


def check_shares(backbone, block):
    """Weights lie as `layout_map` of the packed backbone says, and `plan` counts them so."""
    mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"])
    layout = bs.layout_map(backbone, mesh)
    for v in backbone.variables:
        wanted = layout[v.path]
        whole = keras.distribution.TensorLayout([None] * len(v.shape), mesh)
        spec = (wanted or whole).backend_layout
        assert v.value.sharding.is_equivalent_to(spec, len(v.shape)), (v.path, v.value.sharding)
    shared = {v.path for v in backbone.variables if layout[v.path] is not None}
    names = {path.rpartition("/")[2] for path in shared}
    assert {"embeddings", "embeddings_scale", "kernel", "kernel_scale"} <= names
    assert ("kernel_zero" in names) == (block is not None)
    held = sum(v.value.addressable_shards[0].data.nbytes for v in backbone.weights)
    assert bs.plan(backbone, {"batch": 2, "model": 4}, 3, 16).weight_bytes == held


def check_packed_kernels():
    """Kernels of a GPU and of a TPU run on each device, for its heads and inner units."""
    sizes = {
        "num_layers": 1,
        "hidden_dim": 256,
        "intermediate_dim": 2048,
        "head_dim": 256,
        "vocabulary_size": 1024,
    }

    def make():
        edits = [bs.Capture("blocks.0"), bs.Capture("blocks.0.query")]
        return bs.operate(make_divisible("gemma2", "bfloat16", **sizes), edits)

    def run(lm):
        options = {"max_new_tokens": 3, "stop_token_ids": None, "return_captures": True}
        text, captures = lm.generate(prompts(4), **options)
        return text["token_ids"], captures.values

    config = keras.quantizers.Int4QuantizationConfig(block_size=32)
    alone = greedy(make())
    alone.quantize("int4", config=config)
    wanted = run(alone)
    with on((2, 4), make()):
        lm = greedy(make())
    lm.quantize("int4", config=config)
    for platform, kernels in (("gpu", gpu_int4), ("tpu", tpu_int4)):
        made = Programs(lm.backbone_with_cache, lm.programs.head, platform)
        object.__setattr__(lm, "programs", made)
        taken, product = [], kernels.product

        def count(x, packed, taken=taken, product=product):
            taken.append((packed.pairs, packed.heads, packed.inputs, packed.outputs))
            return product(x, packed)

        with mock.patch.object(kernels, "product", count):
            got = run(lm)
        assert set(taken) == {
            ("outputs", 8, 256, 512),  # two heads of eight
            ("outputs", 1, 512, 256),  # of these
            ("outputs", 1, 256, 256),  # a quarter of the inner units
            ("turned", 1, 256, 256),  # and of the vocabulary
        }, taken
        np.testing.assert_array_equal(got[0], wanted[0])
        for path, value in got[1].items():
            assert relative(value, wanted[1][path]) <= 0.02, (platform, path)


def check_attention_kernel():
    """The kernel of a GPU attends on each device: soft caps, sinks, slopes, heads that repeat."""
    for name, mesh, heads, sizes in (
        ("gemma2", (2, 4), 2, {}),
        ("gpt_oss", (2, 4), 2, {}),
        ("bloom", (1, 8), 1, {"num_heads": 8}),
        ("llama", (2, 4), 1, {"num_key_value_heads": 2}),
        ("llama", (1, 8), 6, {"hidden_dim": 96, "num_query_heads": 12, "num_key_value_heads": 6}),
    ):
        make = functools.partial(make_divisible, name, "bfloat16", **sizes)
        capture = bs.Capture("blocks.0.head_outputs")
        alone = greedy(bs.operate(make_divisible(name, **sizes), [capture]))
        options = {"max_new_tokens": 3, "stop_token_ids": None, "return_captures": True}
        wanted = alone.generate(prompts(5), **options)
        with on(mesh, make()):
            lm = greedy(bs.operate(make(), [capture]))
        made = Programs(lm.backbone_with_cache, lm.programs.head, "gpu")
        object.__setattr__(lm, "programs", made)
        attend = gpu_attention.attend_one
        with mock.patch.object(gpu_attention, "attend_one", side_effect=attend) as calls:
            got = lm.generate(prompts(5), **options)
        assert {call.args[1].shape[2] for call in calls.call_args_list} == {heads}, name
        # Half precision may choose another token, after which all is another text.
        same = np.cumprod(got[0]["token_ids"] == wanted[0]["token_ids"], axis=1).astype(bool)
        assert same.mean() >= 0.8, name
        for path, value in got[1].values.items():
            own = same[:, : value.shape[1]]
            assert relative(value, wanted[1].values[path], own) <= 0.05, (name, path)


def check_copies():
    """A copy that a recipe or `merge` makes outside of the scope lies as the backbone lay."""

    def make():
        return make_divisible(num_layers=1)

    def where(backbone):
        return {path: v.value.sharding for path, v in variable_paths(backbone).items()}

    steer = bs.Steer("mood", {0: np.ones(64, "float32")})
    config = keras.quantizers.Int4QuantizationConfig(block_size=8)
    with tempfile.TemporaryDirectory() as folder:
        alone = make()
        alone.quantize("int4", config=config)
        bs.save_recipe(bs.operate(alone, [steer]), f"{folder}/edit")
        with on((2, 4), make()):
            plain, packed = make(), make()
        greedy(packed).quantize("int4", config=config)  # Keras itself knows no mesh here
        copies = [(packed, bs.load_recipe(f"{folder}/edit", base)) for base in (plain, packed)]
    copies.append((plain, bs.merge(bs.operate(plain, [steer]))))
    for wanted, copy in copies:
        found = where(copy)
        for path, sharding in where(wanted).items():
            rank = len(variable_paths(copy)[path].shape)
            assert sharding.is_equivalent_to(found[path], rank), (path, sharding, found[path])


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
        check_int4,
        check_packed_kernels,
        check_attention_kernel,
        check_copies,
        check_experts,
        check_heads_first,
    ):
        keras.utils.clear_session(free_memory=False)
        check()
        print(check.__name__, "passed", flush=True)
