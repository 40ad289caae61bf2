"""What the tests share: the Keras backend, a cache of compiled programs, and small helpers."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Nearly all time goes into compiling, and nearly no test is about speed.
FLAGS = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):  # another release may not know it, and would not start
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # What was compiled once is not compiled again, by any process or the next run.
    programs = Path(__file__).resolve().parents[1] / ".pytest_cache" / "compiled"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import keras
import numpy as np
import pytest

from tests.families import (  # noqa: F401 - tests take them from here
    FAMILIES,
    ROWS,
    TASKS,
    VOCABULARY,
    make_deep_gpt2,
    make_gemma,
    make_gemma2,
    make_gpt2,
)

HARNESS = "test_families.py"
FIRST = next(iter(ROWS))


def pytest_collection_finish():
    """Spare what was imported from garbage collection, which else looks at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark as slow what runs on another family than the first, outside of the harness.

    The harness runs every family by default: opened, edited, cached and generating. Everything
    else is shown on one family by default, and on the others with the slow tests.
    """
    others = [name for name in ROWS if name != FIRST]
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        # Such as `gemma`, the bundled `tiny_gemma`, and the function `make_gemma`.
        names = [p if isinstance(p, str) else getattr(p, "__name__", "") for p in parameters]
        if item.path.name != HARNESS and any(o in name for o in others for name in names):
            item.add_marker(pytest.mark.slow)


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
