"""The programs as they are for a GPU: lowered for one here, and not run."""

import re
from types import SimpleNamespace
from unittest import mock

import jax
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery import target
from backbone_surgery.generation import programs
from backbone_surgery.generation.programs import Programs
from backbone_surgery.generation.run_batch import Batch, make_arguments
from backbone_surgery.generation.samplers import make_strategy
from backbone_surgery.generation.stopping import Stops
from backbone_surgery.kernels import gpu as kernels
from backbone_surgery.planning.abstract import Sizes, trace

PROMPT, SLOTS = 16, 256
BACKBONES = {
    "gpt2": lambda dtype: keras_hub.models.GPT2Backbone(60, 2, 2, 128, 64, dtype=dtype),
    "gemma": lambda dtype: keras_hub.models.GemmaBackbone(60, 2, 4, 1, 128, 64, 256, dtype=dtype),
}


@pytest.fixture
def gpu(monkeypatch):
    """Let JAX lower for an Ampere GPU with cuDNN, which runs kernels."""
    monkeypatch.setattr(kernels, "is_interpreted", lambda: False)
    monkeypatch.setattr(kernels, "available", lambda: target.program_of() == "gpu")
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
        with kernels.on_paper():
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
    return set(re.findall(r"custom_call @([\w$.]+)", text)) - {"LayoutConstraint"}


@pytest.mark.slow
@pytest.mark.parametrize("family", BACKBONES)
def test_half_precision_runs_prompts_by_cudnn_and_one_donated_loop(gpu, family):
    """And in the loop one kernel in each block, which reads the cache as it lies."""
    prefill, decode, arrays = lowered(BACKBONES[family]("bfloat16"))
    assert calls(prefill) == {"__cudnn$fmhaScaleBiasSoftmax"}
    (called,) = calls(decode)
    assert called in kernels.CALL_TARGETS
    assert decode.count(f"custom_call @{called}") == 2
    assert decode.count("stablehlo.while") == 1
    assert decode.count("tf.aliasing_output") + decode.count("jax.buffer_donor") == arrays


@pytest.mark.slow
def test_float32_calls_nothing_of_cudnn(gpu):
    prefill, decode, _ = lowered(BACKBONES["gpt2"]("float32"))
    assert calls(prefill) == calls(decode) == set()
    prefill, decode = (text.count("stablehlo.optimization_barrier") for text in (prefill, decode))
    assert decode - prefill == 2  # the scores of one query, in each block


@pytest.mark.slow
def test_a_plan_is_the_same_beside_a_gpu(gpu, monkeypatch):
    """Nothing that calls cuDNN can be handed on to be compiled."""
    one = SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda *platform: [one])
    backbone = BACKBONES["gemma"]("bfloat16")
    made = Programs(bs.rewire(backbone), backbone.token_embedding, "gpu")
    sizes = Sizes(rows=2, prompt=PROMPT, length=1024)
    with pytest.raises(ValueError, match="cudnn"), mock.patch.object(target, "is_planned", bool):
        trace(made, make_strategy(keras_hub.samplers.get("greedy")), sizes, 1)
    traced = trace(made, make_strategy(keras_hub.samplers.get("greedy")), sizes, 1)
    assert set(traced) == {"prefill", "decode"}


def on(version, count=1):
    """Return an array that lies on devices of a platform."""
    client = SimpleNamespace(platform_version=version)
    devices = [SimpleNamespace(client=client)] * count
    return [SimpleNamespace(devices=lambda: devices)]


def test_a_gpu_of_nvidia_runs_the_loop_as_one_graph(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    options = programs._compiler_options("decode", on("cuda 13000"))
    assert "WHILE" in options["xla_gpu_enable_command_buffer"].split(",")
    jax.jit(lambda x: x).lower(1).compile(options)  # which knows them
    assert programs._compiler_options("prefill", on("cuda 13000")) == {}
    assert programs._compiler_options("decode", on("cuda 13000", 2)) == {}
    assert programs._compiler_options("decode", on("rocm 60300")) == {}
    assert programs._compiler_options("decode", on("cpu")) == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert programs._compiler_options("decode", on("cuda 13000")) == {}


@pytest.mark.slow
def test_the_loop_alone_is_compiled_with_them(monkeypatch):
    """A compiler that does not know an option refuses it."""
    lm = bs.CachedCausalLM(BACKBONES["gpt2"]("float32"))
    monkeypatch.setattr(programs, "_LOOP_AS_GRAPH", {"no_such_option": 1})
    monkeypatch.setattr(programs, "_is_cuda", lambda device: True)
    inputs = {"token_ids": np.ones((1, 3), "int32"), "padding_mask": np.ones((1, 3), "int32")}
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        lm.generate(inputs, max_new_tokens=2, stop_token_ids=None)
    assert lm.programs.compilations == {"prefill": 1, "decode": 0}
