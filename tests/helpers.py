"""Fixtures and small helpers that the tests share."""

import gc
import importlib.util
import io

import keras
import numpy as np
import pytest
import sentencepiece

import backbone_surgery as bs
from backbone_surgery.extras import import_extra
from tests.families import (  # noqa: F401 - tests take them from here
    FAMILIES,
    TASKS,
    VOCABULARY,
    make_deep_gpt2,
    make_gemma,
    make_gemma2,
    make_gpt2,
)


@pytest.fixture
def half_precision():
    """Have all that is made be computed and stored in bfloat16."""
    keras.config.set_dtype_policy("bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


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


@pytest.fixture(scope="session")
def graphviz():
    """Leave out what draws where pygraphviz is installed, and the system lacks its libraries."""
    if importlib.util.find_spec("pygraphviz"):
        try:
            import_extra("drawing", "pygraphviz")
        except bs.SurgeryError as error:
            pytest.skip(str(error))


@pytest.fixture
def no_collecting(monkeypatch):
    """Spare a test the garbage collection that Keras asks for at every layer it quantises."""
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)


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


def train_pieces(symbols, **settings):
    """Return a small SentencePiece model with these symbols."""
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog"] * 9),
        model_writer=proto,
        model_type="bpe",
        user_defined_symbols=symbols,
        minloglevel=2,
        **settings,
    )
    return proto.getvalue()
