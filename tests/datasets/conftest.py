"""A model without text, and data sets of token ids for it."""

import json

import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs

ROWS = 11
OPTIONS = {"max_new_tokens": 5, "stop_token_ids": None, "batch_size": 4, "verbose": 0}


def make_lm():
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16, max_sequence_length=32)
    direction = np.random.default_rng(3).normal(size=8)
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Steer("mood", {1: direction}, strength=0.5)]))
    lm.compile(sampler="top_k")
    return lm


@pytest.fixture(scope="module")
def lm():
    return make_lm()


@pytest.fixture
def rows():
    rng = np.random.default_rng(4)
    return [
        {
            "name": f"row {i} é",
            "prompt": rng.integers(1, 50, rng.integers(2, 20)).tolist(),
            "strength": float(rng.normal()),
        }
        for i in range(ROWS)
    ]


@pytest.fixture
def lines(tmp_path, rows):
    """The rows in two files of JSON lines, in a folder."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name, part in (("a", rows[:7]), ("b", rows[7:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def read_lines(paths):
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]
