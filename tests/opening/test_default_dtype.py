"""With another default dtype of Keras, graphs compute what they compute with that dtype given."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.families import ROWS
from tests.helpers import relative


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt2", "qwen3", "gemma2", "bloom", "gpt_oss", "qwen3_5", "rwkv7"]
)
def test_a_default_of_half_precision(name):
    ids = {"token_ids": np.array([[3, 4, 5, 6, 0], [7, 8, 9, 10, 11]])}
    ids["padding_mask"] = (ids["token_ids"] > 0).astype("int32")
    found = []
    try:
        for default in ("float32", "bfloat16"):
            keras.config.set_floatx(default)
            backbone = ROWS[name].make(dtype="bfloat16")
            size = bs.open_backbone(backbone).token_embedding.output_dim
            edits = [
                bs.Steer("mood", {1: np.ones(size)}),
                bs.Ablate("blocks.0", to="resample", values={"blocks.0": np.eye(3, size)}),
                bs.Capture("blocks.*"),
            ]
            lm = bs.CachedCausalLM(bs.operate(backbone, edits))
            lm.compile(sampler="greedy")
            text = lm.generate(ids, max_new_tokens=4, stop_token_ids=None)["token_ids"]
            found.append((text, np.asarray(lm.score(text), "float32")))
    finally:
        keras.config.set_floatx("float32")
    (text, scores), (own, got) = found
    np.testing.assert_array_equal(own, text)
    assert relative(got, scores) <= 0.02
