"""Rewrites, alone and together, equal the same edits in NumPy, however tokens are cut."""

import itertools
import json

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

import backbone_surgery as bs
from tests.conftest import FAMILIES, relative
from tests.numpy_models import Model, weights_of
from tests.reference import run_chunks, tokens

EXACT = 1e-5
TIME, SIZE = 6, 32


class Edit:
    """One rewrite, the inputs it is given, and the same edit in NumPy."""

    def __init__(self, rewrite, in_numpy, **inputs):
        self.rewrite, self.in_numpy, self.inputs = rewrite, in_numpy, inputs


def steer(rng, _):
    vector = rng.normal(size=SIZE).astype("float32")
    strength = np.array([[1.5], [-0.5]], "float32")

    def in_numpy(model):
        model.blocks[1].at("block", lambda x, _: x + strength[:, :, None] * vector)

    return Edit(bs.Steer("mood", {1: vector}), in_numpy, mood_strength=strength)


def patch(rng, _):
    value = rng.normal(size=(2, 1, SIZE)).astype("float32")

    def hook(x, _):
        x = x.copy()
        x[0, 2], x[1, 4] = value[0, 0], value[1, 0]
        return x

    return Edit(
        bs.Patch("blocks.1"),
        lambda model: model.blocks[1].at("block", hook),
        patch_positions=np.array([[[2]], [[4]]]),
        patch_value_0=value,
    )


def ablate(rng, _):
    mask = np.array([[[1, 0, 0, 1]], [[0, 1, 0, 0]]], "float32")
    keep = 1 - mask[:, 0, None, :, None]
    return Edit(
        bs.Ablate("blocks.0.attention"),
        lambda model: model.blocks[0].at("attention", lambda x, _: x * keep),
        ablate_heads=mask,
    )


def ablate_pattern(rng, _):
    def hook(x, _):
        return x * np.array([1, 1, 0, 1])[None, :, None, None]

    rewrite = bs.Ablate("blocks.1.attention_pattern", heads=[2], name="pattern")
    return Edit(rewrite, lambda model: model.blocks[1].at("attention_pattern", hook))


def skip(rng, _):
    amount = np.array([[0.25], [0.75]], "float32")

    def in_numpy(model):
        share = amount[:, :, None]
        model.blocks[1].at("block", lambda x, before: x + share * (before - x))

    return Edit(bs.Skip("blocks.1"), in_numpy, skip_amount=amount)


def insert(rng, _):
    dense = keras.layers.Dense(SIZE, name="extra")
    dense.build((None, None, SIZE))
    kernel, _ = weights_of(dense)
    return Edit(
        bs.Insert("blocks.1.mlp_output", dense),
        lambda model: model.blocks[1].at("mlp_output", lambda x, _: x @ kernel),
    )


def replace(rng, backbone):
    width = backbone.intermediate_dim // (1 if Model(backbone).gpt2 else 2)
    dense = keras.layers.Dense(width, activation="tanh", name="other_mlp")
    dense.build((None, None, SIZE))
    kernel, _ = weights_of(dense)
    return Edit(
        bs.Replace("blocks.0.mlp_hidden", dense),
        lambda model: model.blocks[0].at("mlp_hidden", lambda _, x: np.tanh(x @ kernel)),
    )


def low_rank(rng, backbone):
    first = bs.operate(backbone, [bs.LowRank("blocks.1.query", rank=2, alpha=4)]).rewrites[0]
    (adapter,) = first.adapters.values()
    adapter.up.assign(rng.normal(size=adapter.up.shape))
    down, up = weights_of(adapter)

    def hook(x, source):
        return x + 2 * (source @ down @ up).reshape(x.shape)

    return Edit(first, lambda model: model.blocks[1].at("query", hook))


class Scaled(keras.layers.Layer):
    def __init__(self, block):
        super().__init__(name=f"scaled_{block.name}")
        self.block = block
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x + self.scale * keras.ops.tanh(self.block(0.5 * x))


def wrap(rng, _):
    def in_numpy(model):
        model.blocks[1].wrap(lambda x, block: x + np.tanh(block(0.5 * x)))

    return Edit(bs.Wrap("blocks.1", Scaled), in_numpy)


def repeat(rng, _):
    def in_numpy(model):
        model.blocks = [model.blocks[0], model.blocks[1], model.blocks[1].copy()]

    return Edit(bs.Repeat("blocks.1", times=2), in_numpy)


def sparse_autoencoder(rng, _, folder=None):
    latents, k = 12, 3
    w = {
        "encoder.weight": rng.normal(size=(latents, SIZE)).astype("float32"),
        "encoder.bias": rng.normal(size=latents).astype("float32"),
        "W_dec": rng.normal(size=(latents, SIZE)).astype("float32"),
        "b_dec": rng.normal(size=SIZE).astype("float32"),
    }
    save_file(w, folder / "sae.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"k": k}))

    def hook(x, _):
        features = np.maximum((x - w["b_dec"]) @ w["encoder.weight"].T + w["encoder.bias"], 0)
        least = np.sort(features, axis=-1)[..., -k, None]
        return np.where(features >= least, features, 0) @ w["W_dec"] + w["b_dec"]

    return Edit(
        bs.SparseAutoencoder("blocks.1", str(folder)),
        lambda model: model.blocks[1].at("block", hook),
    )


EDITS = {
    f.__name__: f
    for f in (
        steer,
        patch,
        ablate,
        ablate_pattern,
        skip,
        insert,
        replace,
        low_rank,
        wrap,
        repeat,
        sparse_autoencoder,
    )
}


@pytest.fixture(scope="module", params=["gpt2", "gemma2"])
def backbone(request):
    return FAMILIES[request.param](num_layers=2)


def make(names, backbone, rng, folder):
    """Make the edits of these names, the edited model, and the same in NumPy."""
    extra = {"sparse_autoencoder": {"folder": folder}}
    edits = [EDITS[name](rng, backbone, **extra.get(name, {})) for name in names]
    rewrites = [edit.rewrite for edit in edits]
    edited = bs.operate(backbone, [*rewrites, bs.Capture("blocks.*", "blocks.*.*")])
    inputs = {k: v for edit in edits for k, v in edit.inputs.items()}
    reference = Model(backbone)
    for edit in edits:
        edit.in_numpy(reference)
    return edited, inputs, reference


def assert_equal(names, backbone, rng, folder, chunked):
    edited, controls, reference = make(names, backbone, rng, folder)
    inputs = tokens(rng, 2, TIME)
    wanted = reference(inputs["token_ids"])
    captures = reference.captures()
    outputs = edited.predict_on_batch({**inputs, **controls})
    results, seen = [outputs["hidden_states"]], [outputs["captures"]]
    for chunks in chunked:
        hidden, captured = run_chunks(bs.rewire(edited), inputs, chunks, **controls)
        results.append(hidden)
        seen.append(captured)
    assert relative(Model(backbone)(inputs["token_ids"]), wanted) > 1e-3
    for hidden, captured in zip(results, seen, strict=True):
        assert relative(hidden, wanted) <= EXACT
        for path, value in captured.items():
            if path in captures:
                assert relative(value, captures[path]) <= EXACT, path


def test_numpy_models_are_the_backbones(backbone, rng):
    inputs = tokens(rng, 2, 12)
    got = backbone.predict_on_batch(inputs)
    assert relative(Model(backbone)(inputs["token_ids"]), got) <= EXACT


@pytest.mark.parametrize("name", list(EDITS))
def test_each_rewrite(backbone, rng, tmp_path, name):
    assert_equal([name], backbone, rng, tmp_path, [[TIME], [3, 1, 1, 1]])


@pytest.mark.slow
@pytest.mark.parametrize("pair", list(itertools.combinations(EDITS, 2)), ids="-".join)
def test_each_pair(backbone, rng, tmp_path, pair):
    assert_equal(pair, backbone, rng, tmp_path, [[3, 1, 1, 1]])


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "in reverse"])
def test_all_together(backbone, rng, tmp_path, order):
    assert_equal(list(EDITS)[::order], backbone, rng, tmp_path, [[3, 1, 1, 1]])
