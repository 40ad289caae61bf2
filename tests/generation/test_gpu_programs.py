"""The programs as they are for a GPU: lowered for one here, and not run."""

import re

import jax
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.caching.cache import new_packed_cache
from backbone_surgery.generation import programs
from backbone_surgery.generation.engine import Batch, make_arguments
from backbone_surgery.generation.samplers import make_strategy
from backbone_surgery.generation.stopping import Stops
from backbone_surgery.opening import attention

PROMPT, SLOTS = 16, 256
BACKBONES = {
    "gpt2": lambda dtype: keras_hub.models.GPT2Backbone(60, 2, 2, 128, 64, dtype=dtype),
    "gemma": lambda dtype: keras_hub.models.GemmaBackbone(60, 2, 4, 1, 128, 64, 256, dtype=dtype),
}


@pytest.fixture
def gpu(monkeypatch):
    """Let JAX lower for an Ampere GPU with cuDNN, and this package believe that it is on one."""
    cudnn = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda wanted: True)
    monkeypatch.setattr(attention, "on_gpu", lambda: True)


def lowered(backbone):
    """Return prefill and decode as StableHLO for CUDA, and how many arrays the state has."""
    lm = bs.CachedCausalLM(backbone)
    lm.compile(sampler="greedy")
    strategy, rows = make_strategy(lm.sampler), [np.arange(1, 9, dtype=np.int32)]
    batch = Batch(rows, np.array([100], np.int32), np.zeros((1, 2), np.uint32), {}, Stops([]))
    arguments = make_arguments(strategy, batch, 1, PROMPT)
    cache = new_packed_cache(lm.backbone_with_cache, 1, SLOTS)
    weights = lm.programs.weights()

    def prefill(weights, cache, arguments):
        return programs._prefill(lm.programs, weights, strategy, cache, arguments, SLOTS, False)

    def decode(weights, state, arguments, until):
        return programs._decode(lm.programs, weights, strategy, state, arguments, until)

    def text(function, *args):
        traced = jax.jit(function, donate_argnums=(1,)).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    state = jax.eval_shape(prefill, weights, cache, arguments)
    return (
        text(prefill, weights, cache, arguments),
        text(decode, weights, state, arguments, np.int32(100)),
        len(jax.tree.leaves(state)),
    )


def calls(text):
    return set(re.findall(r"custom_call @([\w$]+)", text))


@pytest.mark.parametrize("family", BACKBONES)
def test_half_precision_runs_the_attention_of_cudnn_in_one_donated_loop(gpu, family):
    prefill, decode, arrays = lowered(BACKBONES[family]("bfloat16"))
    assert calls(prefill) == calls(decode) == {"__cudnn$fmhaScaleBiasSoftmax"}
    assert decode.count("stablehlo.while") == 1
    assert decode.count("tf.aliasing_output") + decode.count("jax.buffer_donor") == arrays


def test_float32_calls_nothing_of_cudnn(gpu):
    prefill, decode, _ = lowered(BACKBONES["gpt2"]("float32"))
    assert calls(prefill) == calls(decode) == set()
