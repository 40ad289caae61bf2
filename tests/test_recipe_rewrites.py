"""Every rewrite comes back from a recipe bit for bit, in a fresh process."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

import backbone_surgery as bs
from tests import test_recipe
from tests.conftest import FAMILIES
from tests.test_recipe import fill, outputs, vector

ROWS, SIZE, LATENTS = 2, 32, 12
NAMES = ("gpt2", "gemma2")
DTYPES = ("float32", "bfloat16")


@keras.saving.register_keras_serializable("tests")
class Scaled(keras.layers.Layer):
    def __init__(self, block):
        super().__init__(name=f"scaled_{block.name}")
        self.block = block
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x + self.scale * keras.ops.tanh(self.block(0.5 * x))


def layer(dtype, units=SIZE):
    return keras.layers.Dense(units, activation="gelu", dtype=dtype)


def learned(name, dtype):
    return [bs.Steer("mood", {1: vector()}, trainable=True)]


def condition(name, dtype):
    watch = bs.Condition("seen", vector(3), 0.1, "blocks.0")
    return [watch, bs.Steer("mood", {1: vector()}, when="seen")]


def capture(name, dtype):
    return [bs.Capture("blocks.*.attention_pattern", "blocks.1")]


def ablated(to, shape):
    values = np.random.default_rng(1).normal(size=shape).astype("float32")
    return bs.Ablate("blocks.0.attention", to=to, values={"blocks.0.attention": values})


def replace(name, dtype):
    width = FAMILIES[name]().intermediate_dim // (1 if name == "gpt2" else 2)
    return [bs.Replace("blocks.1.mlp_hidden", layer(dtype, width))]


def read_from_files(feature):
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
            rewrite = bs.SparseAutoencoder("blocks.1", folder, feature=feature)
            return bs.operate(FAMILIES[name](dtype=dtype), [rewrite]).rewrites

    return make


CASES = {
    **{
        case: lambda name, dtype, make=make: make(dtype) for case, make in test_recipe.CASES.items()
    },
    "learned": learned,
    "condition": condition,
    "capture": capture,
    "patch": lambda name, dtype: [bs.Patch("blocks.1")],
    "ablate": lambda name, dtype: [bs.Ablate("blocks.1.attention", heads=[1, 3])],
    "ablate_mean": lambda name, dtype: [ablated("mean", (4, 8))],
    "ablate_resample": lambda name, dtype: [ablated("resample", (3, 4, 8))],
    "insert": lambda name, dtype: [bs.Insert("blocks.*.mlp_output", layer(dtype))],
    "replace": replace,
    "wrap": lambda name, dtype: [bs.Wrap("blocks.*", Scaled)],
    "skip": lambda name, dtype: [bs.Skip("blocks.1", amount=0.5)],
    "repeat": lambda name, dtype: [bs.Repeat("blocks.0:2", times=2)],
    "reorder": lambda name, dtype: [bs.Reorder([1, 0, 2])],
    "remove": lambda name, dtype: [bs.Remove("blocks.-1")],
    "low_rank": lambda name, dtype: [bs.LowRank("blocks.*.query", rank=2)],
    "autoencoder": read_from_files(None),
    "feature": read_from_files(4),
}
INPUTS = {
    "patch": {
        "patch_positions": np.array([[[2]], [[4]]]),
        "patch_value_0": np.ones((ROWS, 1, SIZE), "float32"),
    }
}


def make(name, case, dtype):
    """Make an edited model with weights of its own."""
    backbone = FAMILIES[name](dtype=dtype)
    edited = bs.operate(backbone, CASES[case](name, dtype))
    if case == "lora":
        backbone.enable_lora(2)
    if case != "autoencoder" and case != "feature":
        fill(edited)
    return edited


def every_case():
    return [
        (f"{name}-{case}-{dtype}", name, case, dtype)
        for name in NAMES
        for case in CASES
        for dtype in DTYPES
    ]


def replay(folder):
    """Load every recipe of a folder and run it: called in a fresh process."""
    found = {}
    backbones = {(name, dtype): FAMILIES[name](dtype=dtype) for name in NAMES for dtype in DTYPES}
    before = {key: bs.weights_digest(backbone) for key, backbone in backbones.items()}
    for key, name, case, dtype in every_case():
        edited = bs.load_recipe(Path(folder) / key, backbones[name, dtype])
        found[key] = outputs(edited, **INPUTS.get(case, {}))
    for key, backbone in backbones.items():
        assert bs.weights_digest(backbone) == before[key]
    np.savez(Path(folder) / "found.npz", **found)


@pytest.fixture(scope="module")
def fresh_process(tmp_path_factory):
    """What came out here, and what came out in another process from the recipes alone."""
    folder = tmp_path_factory.mktemp("recipes")
    wanted = {}
    for key, name, case, dtype in every_case():
        edited = make(name, case, dtype)
        bs.save_recipe(edited, folder / key)
        wanted[key] = outputs(edited, **INPUTS.get(case, {}))
    code = f"from tests.test_recipe_rewrites import replay; replay({str(folder)!r})"
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=root)
    return wanted, dict(np.load(folder / "found.npz"))


def test_every_rewrite_has_a_case():
    """A rewrite that is added to the package needs one here."""
    made = {type(r) for case in CASES.values() for r in case("gpt2", "float32")}
    known = {getattr(bs, name) for name in bs.__all__}
    abstract = {bs.Rewrite, bs.SiteRewrite}
    known = {c for c in known if isinstance(c, type) and issubclass(c, bs.Rewrite)} - abstract
    assert known
    assert known <= made


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key, *_ in every_case()])
def test_bit_equal_in_a_fresh_process(fresh_process, key):
    wanted, found = fresh_process
    np.testing.assert_array_equal(found[key], wanted[key])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_cases_differ_from_the_unedited_model_and_from_one_another(fresh_process, name):
    wanted, _ = fresh_process
    plain = outputs(FAMILIES[name]())
    kinds = [wanted[f"{name}-{case}-float32"] for case in CASES]
    for i, kind in enumerate([plain, *kinds]):
        assert not any(np.array_equal(kind, other) for other in kinds[i:])
