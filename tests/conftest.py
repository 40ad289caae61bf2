"""What the tests share: the Keras backend, and small random models of both families."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # What one test has compiled, no other test of the same run compiles again, in any process.
    programs = tempfile.mkdtemp(prefix="compiled_by_tests_")
    atexit.register(shutil.rmtree, programs, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import keras
import keras_hub
import numpy as np
import pytest

VOCABULARY = 60


def _spread(backbone, seed):
    """Give the weights values large enough for the greedy choice to be clear."""
    rng = np.random.default_rng(seed)
    for variable in backbone.trainable_variables:
        value = np.asarray(variable)
        if value.ndim > 1:
            value = rng.normal(0, 1 / np.sqrt(np.prod(value.shape[:-1])) + 0.15, value.shape)
        else:
            value = value + rng.normal(0, 0.1, value.shape)
        variable.assign(value.astype(value.dtype))
    return backbone


def make_gpt2(seed=0, **kwargs):
    config = {
        "vocabulary_size": VOCABULARY,
        "num_layers": 3,
        "num_heads": 4,
        "hidden_dim": 32,
        "intermediate_dim": 64,
        "max_sequence_length": 64,
        "dropout": 0.0,
    }
    return _spread(keras_hub.models.GPT2Backbone(**{**config, **kwargs}), seed)


def make_gemma(seed=0, **kwargs):
    config = {
        "vocabulary_size": VOCABULARY,
        "num_layers": 2,
        "num_query_heads": 4,
        "num_key_value_heads": 1,
        "hidden_dim": 32,
        "intermediate_dim": 96,
        "head_dim": 8,
    }
    return _spread(keras_hub.models.GemmaBackbone(**{**config, **kwargs}), seed)


def make_gemma2(seed=0, **kwargs):
    config = {
        "num_layers": 4,
        "num_key_value_heads": 2,
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
        "attention_logit_soft_cap": 50.0,
        "final_logit_soft_cap": 30.0,
        "use_sliding_window_attention": True,
        "sliding_window_size": 6,
    }
    return make_gemma(seed, **{**config, **kwargs})


FAMILIES = {"gpt2": make_gpt2, "gemma": make_gemma, "gemma2": make_gemma2}
TASKS = {
    "gpt2": keras_hub.models.GPT2CausalLM,
    "gemma": keras_hub.models.GemmaCausalLM,
    "gemma2": keras_hub.models.GemmaCausalLM,
}


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return request.param


@pytest.fixture
def backbone(family):
    return FAMILIES[family]()


@pytest.fixture
def upstream(family, backbone):
    """KerasHub's own task over the same backbone: an independent way to generate."""
    task = TASKS[family](backbone=backbone, preprocessor=None)
    task.compile(sampler="greedy")
    return task


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture(autouse=True)
def _fresh_names():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


def ragged(rng, lengths, width, vocabulary=VOCABULARY):
    """Right-padded random prompts of these lengths, as KerasHub takes them."""
    ids = np.zeros((len(lengths), width), "int32")
    mask = np.zeros((len(lengths), width), bool)
    for i, length in enumerate(lengths):
        ids[i, :length] = rng.integers(1, vocabulary, length)
        mask[i, :length] = True
    return {"token_ids": ids, "padding_mask": mask}


def relative(a, b, mask=None):
    """Largest difference, over the largest value."""
    a, b = np.asarray(a, "float32"), np.asarray(b, "float32")
    if mask is not None:
        a, b = a[mask], b[mask]
    return np.abs(a - b).max() / np.abs(b).max()
