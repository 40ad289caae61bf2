"""The programs as they are for a GPU: lowered for one here, and not run."""

import re

import jax
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.engine import Batch, make_arguments
from backbone_surgery.generation.programs import Programs
from backbone_surgery.generation.samplers import make_strategy
from backbone_surgery.generation.stopping import Stops

PROMPT, SLOTS = 16, 256
BACKBONES = {
    "gpt2": lambda dtype: keras_hub.models.GPT2Backbone(60, 2, 2, 128, 64, dtype=dtype),
    "gemma": lambda dtype: keras_hub.models.GemmaBackbone(60, 2, 4, 1, 128, 64, 256, dtype=dtype),
}


@pytest.fixture
def gpu(monkeypatch):
    """Let JAX lower for an Ampere GPU with cuDNN."""
    cudnn = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda wanted: True)


def lowered(backbone):
    """Return prefill and decode as StableHLO for CUDA, and how many arrays the state has."""
    made = Programs(bs.rewire(backbone), backbone.token_embedding, "gpu")
    strategy, rows = make_strategy(keras_hub.samplers.get("greedy")), [np.arange(1, 9)]
    batch = Batch(rows, np.array([100], np.int32), np.zeros((1, 2), np.uint32), {}, Stops([]))
    arguments = make_arguments(strategy, batch, 1, PROMPT)
    cache = made.packing.new_cache(1, SLOTS)
    weights = made.weights()
    prefill, donated = made.prefill_program(strategy, SLOTS, False)
    decode, taken = made.decode_program(strategy)

    def text(function, donate, *args):
        traced = jax.jit(function, donate_argnums=donate).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    state = jax.eval_shape(prefill, weights, cache, arguments)
    return (
        text(prefill, donated, weights, cache, arguments),
        text(decode, taken, weights, state, arguments, np.int32(100)),
        len(jax.tree.leaves(state)),
    )


def calls(text):
    """Return what is called; a layout that is asked for is no call."""
    return set(re.findall(r"custom_call @([\w$]+)", text)) - {"LayoutConstraint"}


@pytest.mark.parametrize("family", BACKBONES)
def test_half_precision_runs_prompts_by_cudnn_and_one_donated_loop(gpu, family):
    prefill, decode, arrays = lowered(BACKBONES[family]("bfloat16"))
    assert calls(prefill) == {"__cudnn$fmhaScaleBiasSoftmax"}
    assert calls(decode) == set()  # which reads the cache as it lies
    assert decode.count("stablehlo.while") == 1
    assert decode.count("tf.aliasing_output") + decode.count("jax.buffer_donor") == arrays


def test_float32_calls_nothing_of_cudnn(gpu):
    prefill, decode, _ = lowered(BACKBONES["gpt2"]("float32"))
    assert calls(prefill) == calls(decode) == set()
