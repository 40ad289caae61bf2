"""Run on eight fake devices: what is packed, and what a GPU attends to, is shared.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.meshes.on_shares
"""

import functools
import tempfile
from unittest import mock

import jax
import keras
import numpy as np

import backbone_surgery as bs
from backbone_surgery.caching import packed
from backbone_surgery.caching.packed_shares import product_on_mesh
from backbone_surgery.generation.programs import Programs
from backbone_surgery.kernels import gpu_attention, gpu_int4, tpu_int4
from backbone_surgery.weights.paths import variable_paths
from tests.helpers import relative
from tests.meshes.on_devices import OPTIONS, make_divisible, on, prompts
from tests.meshes.on_layouts import greedy, ids


def check_int4():
    """Devices share what is packed as they shared the weights, in the scope and outside of it."""
    for name, block, is_inside, sizes in (
        ("gpt2", None, True, {}),
        ("gemma2", 8, True, {"num_query_heads": 16}),  # heads come first in its kernels
        ("llama", 8, False, {"num_key_value_heads": 2}),  # it has a table for logits alone
    ):

        def make(name=name, sizes=sizes):
            backbone = make_divisible(name, num_layers=2, **sizes)
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
        engine = bs.Engine(lm, rows=4, length=48, prefill_chunk=8, chunk_size=4)
        for text, row in zip(engine.generate(prompts(3), **OPTIONS), wanted, strict=True):
            assert len(text) > OPTIONS["max_new_tokens"]
            np.testing.assert_array_equal(text, row[: len(text)], err_msg=name)


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


def check_calibrated():
    """What AWQ makes on a mesh, or a recipe brings to one, is what one device has; so is GPTQ's.

    GPTQ itself goes through columns one by one, which takes minutes on eight fake devices.
    """
    texts = [np.arange(1, 9, dtype="int32")[None]] * 2
    settings = {"num_samples": 2, "sequence_length": 8, "group_size": 8}
    configs = {
        "gptq": keras.quantizers.GPTQConfig(texts, lambda x: x, **settings),
        "awq": keras.quantizers.AWQConfig(texts, lambda x: x, num_grid_points=4, **settings),
    }

    def make():
        backbone = make_divisible(num_layers=1)
        backbone({"token_ids": texts[0], "padding_mask": np.ones_like(texts[0])})
        return backbone

    def quantized(mode):
        lm = greedy(make())
        lm.quantize(mode, config=configs[mode])
        return lm

    for mode in configs:
        keras.utils.clear_session(free_memory=False)
        alone = quantized(mode)
        wanted = ids(alone, 3)
        assert not np.array_equal(wanted, ids(greedy(make()), 3))
        with tempfile.TemporaryDirectory() as folder, on((2, 4), make()):
            bs.save_recipe(bs.operate(alone.backbone, [bs.Capture("blocks.0")]), f"{folder}/edit")
            lms = [greedy(bs.load_recipe(f"{folder}/edit", make()))]
            lms += [quantized(mode)] if mode == "awq" else []
            for lm in lms:
                np.testing.assert_array_equal(ids(lm, 3), wanted, err_msg=mode)


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
        sizes = {"num_layers": 1, **sizes}
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
            plain, narrow = make(), make()
        greedy(narrow).quantize("int4", config=config)  # Keras itself knows no mesh here
        copies = [(narrow, bs.load_recipe(f"{folder}/edit", base)) for base in (plain, narrow)]
    copies.append((plain, bs.merge(bs.operate(plain, [steer]))))
    for wanted, copy in copies:
        found = where(copy)
        for path, sharding in where(wanted).items():
            rank = len(variable_paths(copy)[path].shape)
            assert sharding.is_equivalent_to(found[path], rank), (path, sharding, found[path])
    with on((2, 4), make_divisible("llama", num_layers=1)):
        tied = make_divisible("llama", num_layers=1, tie_word_embeddings=True)
    head = bs.merge(tied, untie_embeddings=True).token_embedding.reverse_embeddings
    table = tied.token_embedding.embeddings.value
    assert not table.sharding.is_fully_replicated
    assert head.value.sharding.is_equivalent_to(table.T.sharding, 2), head.value.sharding
    assert np.array_equal(head, table.T)


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    kernels = (check_packed_kernels, check_attention_kernel)
    for check in (check_int4, check_calibrated, *kernels, check_copies):
        keras.utils.clear_session(free_memory=False)
        check()
        print(check.__name__, "passed", flush=True)
