"""Load weights to a mesh of the last four of eight devices, and watch what they hold meanwhile.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.meshes.on_loading FOLDER
"""

import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import jax
import keras
import keras_hub
import numpy as np
import safetensors.numpy
from keras import distribution

import backbone_surgery as bs

SHARES = 4


class Watch:
    """Notes the most bytes that each device held at once, and arrays that one held whole."""

    def __init__(self, devices, shapes):
        self.devices, self.shapes = set(devices), shapes
        self.most, self.whole, self.looks = Counter(), set(), 0
        self.thread = threading.Thread(target=self.run)
        self.ended = threading.Event()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        self.thread.join()

    def run(self):
        while not self.ended.is_set():
            self.look()
            time.sleep(0.001)

    def look(self):
        buffers = {}
        for array in jax.live_arrays():
            try:
                shards = [s.data for s in array.addressable_shards]
                found = {(*x.devices(), x.unsafe_buffer_pointer()): x for x in shards}
            except (RuntimeError, ValueError):  # deleted meanwhile
                continue
            buffers |= {key: (x.shape, x.nbytes) for key, x in found.items()}
        self.looks += 1
        held = Counter()
        for (device, _), (shape, count) in buffers.items():
            held[device] += count
            if device in self.devices and shape in self.shapes:
                self.whole.add(shape)
        for device, count in held.items():
            self.most[device] = max(self.most[device], count)


def make():
    keras.utils.set_random_seed(0)
    return keras_hub.models.GPT2Backbone(16384, 4, 8, 256, 1024, max_sequence_length=64)


def save(folder):
    """Save a model in one file and in many, for Keras and as Hugging Face does."""
    backbone = make()
    backbone.save_to_preset(str(folder / "one"))
    (folder / "many").mkdir()
    backbone.save_to_preset(str(folder / "many"), max_shard_size=0.017)
    arrays = dict(_flat(bs.weight_tree(backbone)))
    safetensors.numpy.save_file(arrays, folder / "weights.safetensors")
    return backbone


def save_hf(folder):
    """Save another model as Hugging Face does, in two files."""
    rng = np.random.default_rng(2)
    size, inner, blocks = 256, 1024, 4
    shapes = {"wte.weight": (16384, size), "wpe.weight": (64, size)}
    shapes |= {f"ln_f.{name}": (size,) for name in ("weight", "bias")}
    for i in range(blocks):
        shapes |= {f"h.{i}.ln_{n}.{name}": (size,) for n in (1, 2) for name in ("weight", "bias")}
        for layer, (rows, columns) in {
            "attn.c_attn": (size, 3 * size),
            "attn.c_proj": (size, size),
            "mlp.c_fc": (size, inner),
            "mlp.c_proj": (inner, size),
        }.items():
            shapes[f"h.{i}.{layer}.weight"] = (rows, columns)
            shapes[f"h.{i}.{layer}.bias"] = (columns,)
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        **{"vocab_size": 16384, "n_layer": blocks, "n_head": 8, "n_embd": size, "n_inner": inner},
        **{"n_positions": 64, "layer_norm_epsilon": 1e-5},
        **{name: 0.1 for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(shapes)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        arrays = {name: rng.normal(0, 0.1, shapes[name]).astype("float32") for name in part}
        safetensors.numpy.save_file(arrays, folder / file, {"format": "np"})
    index = {name: file for file, part in halves.items() for name in part}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def _flat(tree, at=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def load(folder, kind, backbone):
    """Load a model; into one that is there already by the last two kinds."""
    if kind in ("one", "many", "hf"):
        return bs.CachedCausalLM.from_preset(str(folder / kind)).backbone
    if kind == "transfer":
        bs.transfer_weights(backbone, folder / "weights.safetensors")
    else:
        bs.open_backbone(backbone).load_weights(str(folder / "one" / "model.weights.h5"))
    return backbone


def main(folder):
    source = save(folder)
    digests = dict.fromkeys(("one", "many", "load_weights", "transfer"), bs.weights_digest(source))
    save_hf(folder / "hf")
    digests["hf"] = bs.weights_digest(load(folder, "hf", None))
    devices = jax.devices()[-SHARES:]
    names = distribution.list_devices()[-SHARES:]
    mesh = distribution.DeviceMesh((1, SHARES), ["batch", "model"], devices=names)
    layout = bs.layout_map(source, mesh)
    shared = {tuple(v.shape): layout[v.path].axes for v in source.variables if layout[v.path]}
    shards = {
        tuple(size // SHARES if axis else size for size, axis in zip(shape, axes, strict=True))
        for shape, axes in shared.items()
    }
    shapes = set(shared) - shards
    del source
    # As on accelerators, arrays are made on the first device of the mesh unless told otherwise.
    jax.config.update("jax_default_device", devices[0])
    for kind, digest in digests.items():
        keras.utils.clear_session()
        parallel = distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
        distribution.set_distribution(parallel)
        backbone = make() if kind in ("load_weights", "transfer") else None
        with Watch(devices, shapes) as watch:
            backbone = load(folder, kind, backbone)
        distribution.set_distribution(None)
        values = [v.value for v in backbone.variables]
        shards = Counter()
        for value in values:
            for shard in value.addressable_shards:
                shards[shard.device] += shard.data.nbytes
        total, largest = sum(v.nbytes for v in values), max(v.nbytes for v in values)
        own = max(shards[d] for d in devices)
        most = max(watch.most[d] for d in devices)
        print(json.dumps([kind, total, largest, own, most, watch.looks, sorted(watch.whole)]))
        assert bs.weights_digest(backbone) == digest
        del backbone, values


if __name__ == "__main__":
    main(Path(sys.argv[1]))
