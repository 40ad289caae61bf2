"""Rewrites, alone and together, equal the same edits in NumPy, however tokens are cut."""

import itertools
import json

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

import backbone_surgery as bs
from backbone_surgery.generation.controls import bind_controls
from tests.conftest import FAMILIES, ragged, relative
from tests.numpy_models import Model, weights_of
from tests.reference import run_chunks, tokens
from tests.test_recipe_rewrites import Scaled

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


def wrap(rng, _):
    def in_numpy(model):
        model.blocks[1].wrap(lambda x, block: x + np.tanh(block(0.5 * x)))

    return Edit(bs.Wrap("blocks.1", Scaled), in_numpy)


def repeat(rng, _):
    def in_numpy(model):
        model.blocks.insert(2, model.blocks[1].copy())

    return Edit(bs.Repeat("blocks.1", times=2), in_numpy)


def reorder(rng, _):
    def in_numpy(model):
        model.blocks = [model.blocks[1], model.blocks[0], model.blocks[-1].copy()]

    return Edit(bs.Reorder([1, 0, -1]), in_numpy)


def remove(rng, _):
    return Edit(bs.Remove("blocks.-1"), lambda model: model.blocks.pop())


def learned(rng, _):
    vector = rng.normal(size=SIZE).astype("float32")

    def in_numpy(model):
        model.blocks[0].at("mlp_output", lambda x, _: x + 0.5 * vector)

    steer = bs.Steer("taste", {0: vector}, "blocks.*.mlp_output", strength=0.5, trainable=True)
    return Edit(steer, in_numpy)


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
        reorder,
        learned,
        sparse_autoencoder,
        remove,
    )
}


@pytest.fixture(scope="module", params=["gpt2", "gemma2"])
def backbone(request):
    return FAMILIES[request.param](num_layers=3)


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


@pytest.mark.slow
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


CONTROLS = {
    "mood": [1.5, -0.5],
    "patch": {"positions": [[2], [5]], "values": np.ones((2, 1, SIZE))},
    "ablate": [1.0, 0.0],
    "skip": [0.25, 0.0],
}


def test_all_together_in_generation(backbone, rng, tmp_path):
    """Every token follows from an uncached pass over the text, and so do the captures."""
    edited, _, _ = make(list(EDITS), backbone, rng, tmp_path)
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler="greedy")
    prompts = ragged(rng, (4, 7), 7)
    options = {"max_new_tokens": 6, "stop_token_ids": None, "controls": CONTROLS}
    text, captures = lm.generate(prompts, return_captures=True, **options)
    controls = bind_controls(edited, CONTROLS, np.array([4, 7]))
    for i, length in enumerate((4, 7)):
        ids = text["token_ids"][i : i + 1, : length + 5]
        inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
        row = {name: value[i : i + 1] for name, value in controls.items()}
        outputs = edited.predict_on_batch({**inputs, **row})
        logits = lm.opened.token_embedding(outputs["hidden_states"], reverse=True)
        new = text["token_ids"][i, length : length + 6]
        assert np.array_equal(np.asarray(logits)[0, length - 1 :].argmax(-1), new)
        for path, value in captures.row(i).items():
            wanted = np.asarray(outputs["captures"][path][0])
            assert np.abs(value - wanted).max() <= EXACT * max(np.abs(wanted).max(), 1), path


def test_all_together_in_bfloat16_with_lora(rng, tmp_path):
    backbone = FAMILIES["gemma2"](num_layers=3, dtype="bfloat16")
    backbone.enable_lora(2)
    for variable in backbone.trainable_variables:
        variable.assign(rng.normal(0, 0.05, variable.shape))
    edited, controls, _ = make(list(EDITS), backbone, rng, tmp_path)
    inputs = tokens(rng, 2, TIME)
    wanted = edited.predict_on_batch({**inputs, **controls})["hidden_states"]
    cached = bs.rewire(edited)
    assert {t.dtype for pair in cached.input["cache"] for t in pair.values()} == {"bfloat16"}
    got = run_chunks(cached, inputs, [3, 1, 1, 1], **controls)[0]
    assert relative(got, wanted) <= 3e-2


def fingerprint(backbone, inputs):
    """Everything about a backbone that an edit could have changed."""
    layers = list(backbone._flatten_layers())
    return {
        "outputs": np.asarray(backbone.predict_on_batch(inputs)).tobytes(),
        "config": json.dumps(backbone.get_config(), default=str),
        "graph": graph_of(backbone),
        "calls": [(layer.name, layer.call.__func__, layer.trainable) for layer in layers],
        "attributes": [sorted(vars(layer)) for layer in layers],
        "weights": [(v.path, v.trainable, np.asarray(v).tobytes()) for v in backbone.variables],
    }


def graph_of(model):
    return [
        (op.name, [t.name for t in node.input_tensors], [id(t) for t in node.outputs])
        for depth in sorted(model._nodes_by_depth)
        for node in model._nodes_by_depth[depth]
        for op in [node.operation]
    ]


def test_the_source_stays_what_it_was(backbone, rng, tmp_path):
    inputs = tokens(rng, 2, TIME)
    before = fingerprint(backbone, inputs)
    edited, controls, _ = make(list(EDITS), backbone, rng, tmp_path)
    edited.predict_on_batch({**inputs, **controls})
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler="greedy", optimizer=keras.optimizers.SGD(0.1))
    ids = inputs["token_ids"]
    x = {"token_ids": ids[:, :-1], "padding_mask": np.ones_like(ids[:, :-1])}
    lm.fit(x, ids[:, 1:], epochs=1, shuffle=False, verbose=0)
    lm.generate(ragged(rng, (4, 7), 7), max_new_tokens=2, stop_token_ids=None)
    plain = bs.CachedCausalLM(backbone)
    bs.patch_grid(plain, ids[0], ids[1], metric=(1, 2))
    bs.logit_lens(plain, ids[0])
    bs.attribute(plain, ids[0], target=1)
    layer = backbone.transformer_layers[1]
    inside = next(
        x.name
        for x in layer._layers
        if isinstance(x, keras.layers.EinsumDense | keras.layers.Dense)
    )
    nested = bs.rewrite_nested(backbone, f"{layer.name}.{inside}", lambda x, *args: 2 * x(*args))
    assert relative(nested.predict_on_batch(inputs), backbone.predict_on_batch(inputs)) > 1e-3
    after = fingerprint(backbone, inputs)
    for what, value in before.items():
        assert after[what] == value, what
