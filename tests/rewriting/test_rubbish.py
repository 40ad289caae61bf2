"""What a rewrite accepts can be used; what cannot be used is refused in words, nothing raw."""

import dataclasses
import json

import keras
import keras_hub
import numpy as np
import pytest
from safetensors.numpy import save_file

import backbone_surgery as bs
from backbone_surgery.generation.controls import bind_controls
from tests.rubbish import RUBBISH, complaints, with_rubbish
from tests.transcoders import arrays, save_gemma_scope_2

ONES = np.ones(8, "float32")
IDS = np.ones((2, 3), "int32")
LENGTHS = np.array([3, 2], "int32")


class Scaled(keras.layers.Layer):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def call(self, x):
        return x + self.block(x)


@pytest.fixture(scope="module")
def backbone():
    return keras_hub.models.GPT2Backbone(20, 2, 2, 8, 16, max_sequence_length=16)


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sae")
    shapes = {"encoder.weight": (6, 8), "encoder.bias": (6,), "W_dec": (6, 8), "b_dec": (8,)}
    save_file({k: np.ones(s, "float32") for k, s in shapes.items()}, folder / "sae.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"k": 2}))
    return str(folder)


@pytest.fixture(scope="module")
def transcoder(tmp_path_factory):
    weights = arrays(np.random.default_rng(0), 8, 6, 8)
    return save_gemma_scope_2(tmp_path_factory.mktemp("transcoder"), weights, layer=0)


GOOD = {
    bs.Ablate: {"at": lambda: "blocks.0.head_outputs", "heads": lambda: [0]},
    bs.Capture: {},
    bs.Condition: {
        "name": lambda: "watched",
        "vector": lambda: ONES,
        "threshold": lambda: 0.5,
        "at": lambda: "blocks.0",
    },
    bs.Insert: {"at": lambda: "blocks.0", "layer": lambda: keras.layers.Dense(8)},
    bs.Lora: {"name": lambda: "tuned", "rank": lambda: 2},
    bs.LowRank: {"at": lambda: "blocks.0.query", "rank": lambda: 2},
    bs.Patch: {"at": lambda: "blocks.0"},
    bs.Knockout: {"name": lambda: "cut"},
    bs.ProjectOut: {"name": lambda: "none", "directions": lambda: ONES},
    bs.Reft: {"name": lambda: "tone", "rank": lambda: 2, "at": lambda: "blocks.0"},
    bs.Remove: {"at": lambda: "blocks.0"},
    bs.Reorder: {"blocks": lambda: [1, 0]},
    bs.Repeat: {"at": lambda: "blocks.0"},
    bs.Replace: {"at": lambda: "blocks.0", "layer": lambda: keras.layers.Dense(8)},
    bs.Skip: {"at": lambda: "blocks.0"},
    bs.SparseAutoencoder: {"at": lambda: "blocks.0"},
    bs.Steer: {"name": lambda: "mood", "vector": lambda: {1: ONES}},
    bs.Transcoder: {"at": lambda: "blocks.0.mlp_output", "source": lambda: "blocks.0.mlp_norm"},
    bs.Wrap: {"at": lambda: "blocks.0", "make_layer": lambda: Scaled},
}


def fields_of(cls, autoencoder, transcoder):
    good = dict(GOOD[cls])
    if cls is bs.Capture:
        return {"at": lambda: ("blocks.0",), "name": lambda: "early"}
    if cls is bs.SparseAutoencoder:
        good["path"] = lambda: autoencoder
    if cls is bs.Transcoder:
        good["path"] = lambda: transcoder
    defaults = {f.name: f for f in dataclasses.fields(cls) if f.name not in good}
    for name, field in defaults.items():
        make = field.default_factory
        good[name] = (lambda f=field: f.default) if make is dataclasses.MISSING else make
    return good


@pytest.mark.slow
@pytest.mark.parametrize("cls", GOOD, ids=lambda cls: cls.__name__)
def test_every_argument_of_every_rewrite(backbone, autoencoder, transcoder, cls):
    """Built, applied, its control bound to its default, and run."""
    fields = fields_of(cls, autoencoder, transcoder)

    def use(**kwargs):
        run(bs.operate(backbone, [cls(**kwargs)]))

    use(**{name: value() for name, value in fields.items()})
    assert not complaints(with_rubbish(use, fields))


def run(edited):
    bound = bind_controls(edited, None, LENGTHS)
    outputs = edited({"token_ids": IDS, "padding_mask": np.ones_like(IDS), **bound})
    assert np.isfinite(np.asarray(edited.hidden_states(outputs))).all()


CONTROLS = {
    "mood": lambda value: value,
    "mood, strength of a row": lambda value: [value, 1.0],
    "mood, strength beside a schedule": lambda value: [value, bs.Schedule([1.0])],
    "mood, strength": lambda value: bs.Control(strength=value),
    "mood, directions": lambda value: bs.Control(directions=value),
    "mood, direction of a block": lambda value: bs.Control(directions={1: value}),
    "mood, directions of a row": lambda value: bs.Control(directions=[value, {1: ONES}]),
    "mood, tokens": lambda value: bs.Control(tokens=value),
    "mood, tokens of a row": lambda value: bs.Control(tokens=[value, "all"]),
    "mood, end of a range": lambda value: bs.Control(tokens=(1, value)),
    "watched": lambda value: value,
    "watched, of a row": lambda value: [value, 0.5],
    "watched, threshold": lambda value: bs.Control(threshold=value),
    "watched, tokens": lambda value: bs.Control(tokens=value),
    "cut": lambda value: value,
    "cut, heads": lambda value: {"heads": value},
    "cut, queries": lambda value: {"queries": value},
    "cut, keys of a row": lambda value: {"keys": [value, "all"]},
    "none": lambda value: value,
    "none, strength": lambda value: bs.Control(strength=value),
    "ablate": lambda value: value,
    "ablate, heads": lambda value: {"heads": value},
    "ablate, start": lambda value: {"start": value},
    "ablate, start of a row": lambda value: {"start": [value, 1]},
    "skip": lambda value: value,
    "sae": lambda value: value,
    "patch": lambda value: value,
    "patch, positions": lambda value: {"positions": value, "values": np.zeros((1, 8))},
    "patch, a position": lambda value: {"positions": [[value], [1]], "values": np.zeros((1, 8))},
    "patch, values": lambda value: {"positions": [1], "values": value},
    "patch, values of a site": lambda value: {"positions": [1], "values": {"blocks.1": value}},
}


@pytest.fixture(scope="module")
def controlled(backbone, autoencoder):
    values = {"blocks.1.head_outputs": np.ones((3, 2, 4))}
    rewrites = [
        bs.Condition("watched", ONES, 0.5, at="blocks.0"),
        bs.Steer("mood", {1: ONES}),
        bs.ProjectOut("none", ONES),
        bs.Knockout("cut"),
        bs.Ablate("blocks.1.head_outputs", to="resample", values=values),
        bs.Skip("blocks.1"),
        bs.SparseAutoencoder("blocks.0", autoencoder),
        bs.Patch("blocks.1"),
    ]
    return bs.operate(backbone, rewrites)


@pytest.mark.slow
def test_every_control(controlled):
    """What is bound has the shape and dtype of the graph's inputs, and only finite values."""
    inputs = {t.name: t for t in controlled.inputs}

    def bind(name, value):
        bound = bind_controls(controlled, {name.partition(",")[0]: value}, LENGTHS)
        for name, array in bound.items():
            shape = inputs[name].shape
            assert array.dtype == inputs[name].dtype
            assert array.ndim == len(shape)
            assert all(a == b or b is None for a, b in zip(array.shape, shape, strict=True))
            assert name.startswith("patch_value") or np.isfinite(array).all()

    calls = {
        f"{name}={what}": lambda name=name, make=make, value=value: bind(name, make(value()))
        for name, make in CONTROLS.items()
        for what, value in RUBBISH.items()
    }
    assert not complaints(calls)


def test_schedules_and_operate(backbone):
    schedule = {"values": lambda: [1.0], "prompt": lambda: 0.5}
    linear = {"start": lambda: 0, "stop": lambda: 1, "steps": lambda: 3, "prompt": lambda: None}
    rewrites = {"backbone": lambda: backbone, "rewrites": lambda: [bs.Capture("blocks.0")]}
    calls = {
        **with_rubbish(lambda **kwargs: bs.Schedule(**kwargs).table(), schedule),
        **with_rubbish(lambda **kwargs: bs.Schedule.linear(**kwargs).table(), linear),
        **with_rubbish(bs.operate, rewrites),
        **with_rubbish(lambda rewrite: bs.operate(backbone, [rewrite]), {"rewrite": lambda: None}),
        **with_rubbish(lambda model: bs.operate(model, [keep]), {"model": lambda: backbone}),
    }
    del calls["rewrites=endless generator"]  # There is no end at which to refuse it.
    del calls["rewrite=function"]  # One that returns no tensors: a `TypeError`, as upstream.
    assert not complaints(calls)


def keep(layer, *args, **kwargs):
    return layer(*args, **kwargs)
