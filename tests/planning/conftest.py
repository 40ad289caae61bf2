"""Fixtures of the tests of plans."""

import keras
import pytest


@pytest.fixture
def half_precision():
    keras.config.set_dtype_policy("bfloat16")
    yield
    keras.config.set_dtype_policy("float32")
