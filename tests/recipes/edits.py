"""What the tests of recipes share: rewrites of their own, and an edit of every kind."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from safetensors.numpy import save_file

import backbone_surgery as bs
from backbone_surgery.recipes.store import read_recipe, write_recipe
from backbone_surgery.rewriting.low_rank import Adapter
from backbone_surgery.weights.paths import variable_paths
from tests.helpers import FAMILIES
from tests.transcoders import arrays, save_gemma_scope

ROWS, SIZE, LATENTS = 2, 32, 12
TOKENS = {
    "token_ids": np.arange(1, 13).reshape(ROWS, 6),
    "padding_mask": np.ones((ROWS, 6), "int32"),
}


@keras.saving.register_keras_serializable("tests")
@dataclass(frozen=True)
class Put(bs.SiteRewrite):
    """Put a layer of the rewrite's own at some sites."""

    at: str
    layer: Any

    def apply(self, x, place, surgery):
        return self.layer(x)


@keras.saving.register_keras_serializable("tests")
class Bias(keras.layers.Layer):
    def build(self, shape):
        self.bias = self.add_weight(shape=(shape[-1],), initializer="ones", name="vector")

    def call(self, x):
        return x + self.bias


@keras.saving.register_keras_serializable("tests")
@dataclass(frozen=True)
class Own(bs.SiteRewrite):
    """Put a new layer at each of some sites, and hold values of every kind."""

    at: str
    values: Any = ()

    def apply(self, x, place, surgery):
        return Bias(dtype=x.dtype)(x)


@keras.saving.register_keras_serializable("tests")
class Scaled(keras.layers.Layer):
    def __init__(self, block):
        super().__init__(name=f"scaled_{block.name}")
        self.block = block
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x + self.scale * keras.ops.tanh(self.block(0.5 * x))


def vector(seed=0):
    return np.random.default_rng(seed).normal(0, 1, SIZE)


def dense(dtype, units=SIZE):
    return keras.layers.Dense(units, activation="gelu", dtype=dtype)


def steering(name="gpt2", dtype="float32"):
    return [
        bs.Steer("mood", {0: vector(), 1: vector(1)}, strength=0.7),
        bs.Steer("tone", {1: vector(2)}, "blocks.*.mlp_output", (1, 4), "ablate", True),
    ]


def layered(name="gpt2", dtype="float32"):
    shared = keras.layers.Dense(SIZE, activation="gelu", dtype=dtype, name="shared")
    inner = [keras.layers.Dense(8, dtype=dtype), keras.layers.Dense(SIZE, dtype=dtype)]
    return [
        Put("blocks.0.mlp_output", shared),
        Own("blocks.*.attention_output", {"a": [1, 2.5, None], 3: (True, np.float32(2))}),
        Put("blocks.1", shared),
        Put("blocks.-1", keras.Sequential(inner)),
    ]


def condition(name, dtype):
    watch = bs.Condition("seen", vector(3), 0.1, "blocks.0")
    return [watch, bs.Steer("mood", {1: vector()}, when="seen")]


def ablated(to, shape):
    values = np.random.default_rng(1).normal(size=shape).astype("float32")
    return bs.Ablate("blocks.0.head_outputs", to=to, values={"blocks.0.head_outputs": values})


def replace(name, dtype):
    width = FAMILIES[name](num_layers=3).intermediate_dim // (1 if name == "gpt2" else 2)
    return [bs.Replace("blocks.1.mlp_hidden", dense(dtype, width))]


def read_from_files(feature, *others, **fields):
    """Make a rewrite of files that are gone when the recipe is loaded."""

    def make(name, dtype):
        rng = np.random.default_rng(2)
        weights = {
            "encoder.weight": rng.normal(size=(LATENTS, SIZE)),
            "encoder.bias": rng.normal(size=LATENTS),
            "W_dec": rng.normal(size=(LATENTS, SIZE)),
            "b_dec": rng.normal(size=SIZE),
        }
        with tempfile.TemporaryDirectory() as folder:
            tensors = {k: v.astype("float32") for k, v in weights.items()}
            save_file(tensors, Path(folder) / "sae.safetensors")
            (Path(folder) / "cfg.json").write_text(json.dumps({"k": 3}))
            rewrite = bs.SparseAutoencoder("blocks.1", folder, feature=feature, **fields)
            return bs.operate(
                FAMILIES[name](dtype=dtype, num_layers=3), [rewrite, *others]
            ).rewrites

    return make


def read_transcoder(name, dtype):
    """Make a rewrite of files that are gone when the recipe is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_gemma_scope(Path(folder), arrays(np.random.default_rng(2)))
        rewrite = bs.Transcoder("blocks.1.mlp_output", path)
        return bs.operate(FAMILIES[name](dtype=dtype, num_layers=3), [rewrite]).rewrites


CASES = {
    "steering": steering,
    "layered": layered,
    "lora": steering,
    "vector": lambda name, dtype: [bs.Steer("v", bs.ControlVector({1: vector()}, {"a": "b"}))],
    "learned": lambda name, dtype: [bs.Steer("mood", {1: vector()}, trainable=True)],
    "condition": condition,
    "capture": lambda name, dtype: [bs.Capture("blocks.*.attention_pattern", "blocks.1")],
    "patch": lambda name, dtype: [bs.Patch("blocks.1")],
    "patch_heads": lambda name, dtype: [bs.Patch("blocks.1.head_outputs", heads=[1])],
    "patch_along": lambda name, dtype: [bs.Patch("blocks.1", directions=[vector(), vector(1)])],
    "ablate": lambda name, dtype: [bs.Ablate("blocks.1.head_outputs", heads=[1, 3])],
    "clamp": lambda name, dtype: [bs.Clamp("blocks.1.mlp_output", (3, 5), (1.0, -2.0))],
    "ablate_mean": lambda name, dtype: [ablated("mean", (4, 8))],
    "ablate_resample": lambda name, dtype: [ablated("resample", (3, 4, 8))],
    "insert": lambda name, dtype: [bs.Insert("blocks.*.mlp_output", dense(dtype))],
    "replace": replace,
    "wrap": lambda name, dtype: [bs.Wrap("blocks.*", Scaled)],
    "skip": lambda name, dtype: [bs.Skip("blocks.1", amount=0.5)],
    "repeat": lambda name, dtype: [bs.Repeat("blocks.0:2", times=2)],
    "reorder": lambda name, dtype: [bs.Reorder([1, 0, 2])],
    "remove": lambda name, dtype: [bs.Remove("blocks.-1")],
    "low_rank": lambda name, dtype: [bs.LowRank("blocks.*.query", rank=2)],
    "low_rank_by_strength": lambda name, dtype: [
        bs.LowRank("blocks.*.value", rank=2, name="tone", strength=0.5)
    ],
    "peft": lambda name, dtype: [
        bs.Lora("tuned", adapters={"blocks.1.query": Adapter(2, 0.5, dtype=dtype, name="tuned_q")})
    ],
    "knockout": lambda name, dtype: [bs.Knockout("cut", queries=(2, None), keys=(0, 2), heads=[1])],
    "project_out": lambda name, dtype: [
        bs.ProjectOut("none", np.eye(SIZE)[:2] + 1, at=("blocks.*",), tokens=(1, 4))
    ],
    "reft": lambda name, dtype: [bs.Reft("tone", rank=2, at="blocks.*", tokens=(1, 4))],
    "autoencoder": read_from_files(None),
    "autoencoder_error": read_from_files(None, bs.Ablate("blocks.1.sae_latents"), error=True),
    "feature": read_from_files(4),
    "transcoder": read_transcoder,
}
"""An edit with each rewrite of the library, and with some of one's own."""

INPUTS = {
    case: {
        "patch_positions": np.array([[[2]], [[4]]]),
        "patch_value_0": np.ones((ROWS, 1, SIZE), "float32"),
    }
    for case in ("patch", "patch_along")
}


def make(name, case, dtype="float32", backbone=None):
    """Make an edited model with weights of its own, of a backbone that stays as it is."""
    if backbone is None or case == "lora":
        backbone = FAMILIES[name](dtype=dtype, num_layers=3)
    edited = bs.operate(backbone, CASES[case](name, dtype))
    if case == "lora":
        backbone.enable_lora(2)
    if not any(kind in case for kind in ("autoencoder", "transcoder", "feature")):
        fill(edited)
    return edited


def fill(edited):
    """Give the weights that an edit added, LoRA included, values of their own."""
    owned = variable_paths(edited.owner)
    rng = np.random.default_rng(5)
    for path, variable in variable_paths(edited).items():
        if "lora" in path or path not in owned:
            variable.assign(rng.normal(0, 0.3, variable.shape))


def outputs(model, **inputs):
    """Return the bytes of all that a model gives, run layer by layer: nothing whole is compiled."""
    arrays = keras.tree.flatten(model({**TOKENS, **inputs}, training=False))
    return np.concatenate([np.ascontiguousarray(x).reshape(-1).view("uint8") for x in arrays])


def rewritten(folder, to=None, **parts):
    """Write a recipe again, with other parts and right digests."""
    document, arrays = read_recipe(folder)
    write_recipe(to or folder, {**document, **parts}, arrays)
