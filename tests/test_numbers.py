"""One rule of what a number is: Python's and NumPy's alike, booleans and everything else not."""

import datetime

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from backbone_surgery.errors import closest, shown
from backbone_surgery.numbers import (
    is_int,
    read_array,
    read_finite,
    read_float32,
    read_int32,
    read_mask,
    read_number,
)

INTEGERS = [3, np.int8(3), np.uint64(3), np.int64(3)]
FLOATS = [0.5, np.float16(0.5), np.float64(0.5), ml_dtypes.bfloat16(0.5), jnp.float32(0.5)]
NO_NUMBERS = {
    "nothing": None,
    "boolean": True,
    "boolean of NumPy": np.True_,
    "boolean array": np.array([True]),
    "boolean array of JAX": jnp.array([True]),
    "boolean among numbers": [1, True],
    "boolean in a row": [[1.0, 2.0], [False, 1.0]],
    "text": "3",
    "list of text": ["3"],
    "bytes": b"3",
    "complex": 1j,
    "too large an integer": 10**400,
    "ragged": [[1], [2, 3]],
    "dict": {0: 1},
    "set": {1},
    "generator": (i for i in [1]),
    "object": object(),
    "type": int,
    "span of time": np.timedelta64(3, "s"),
    "date": datetime.date(2020, 1, 1),
}


@pytest.mark.parametrize("value", INTEGERS)
def test_integers_are_taken_alike(value):
    assert is_int(value)
    assert read_number(value) == read_int32(value, 0) == read_array(value) == 3
    assert read_int32([value, value], 0, 3).tolist() == [3, 3]


@pytest.mark.parametrize("value", FLOATS)
def test_floats_are_taken_alike_and_are_no_integers(value):
    assert not is_int(value)
    assert read_int32(value, 0) is None
    assert read_number(value) == read_float32([value])[0] == 0.5


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_what_is_no_number(name):
    value = NO_NUMBERS[name]
    assert name == "too large an integer" or not is_int(value)
    for read in (read_array, read_float32, read_finite, read_number, lambda x: read_int32(x, 0)):
        assert read(value) is None


def test_a_list_in_itself_is_no_array():
    value = []
    value.append(value)
    assert read_array(value) is None


@pytest.mark.parametrize("value", [2**31, 2**32, 2**32 + 5, -1, np.uint64(2**63), np.int64(-9)])
def test_integers_never_wrap(value):
    assert is_int(value)
    assert read_int32([0, value], smallest=0) is None


def test_what_is_too_large_for_float32_is_not_finite():
    assert read_float32([1.0, 1e300]).tolist() == [1.0, np.inf]
    for value in (1e300, np.inf, np.nan, [1.0]):
        assert read_number(value) is None
    for value in ([1.0, 1e300], [np.nan], np.zeros((2, 0))):
        assert read_finite(value) is None
    assert read_finite([[1, 2]]).shape == (1, 2)


def test_a_hint_for_a_name_that_is_none():
    assert closest(3, ["key", 4]) == "Known: key, 4."
    assert closest("kay", ["key"]) == "Did you mean 'key'? Known: key."


def test_what_an_error_shows_is_short():
    class Hidden:
        def __repr__(self):
            raise RuntimeError

    assert shown(10**5000) == "a value of type int"
    assert shown(Hidden()) == "a value of type Hidden"
    assert shown("x" * 5000) == f"'{'x' * 199}..."
    assert shown(np.zeros(9)) == "an array float64[9]"
    assert shown(np.zeros(2)) == "array([0., 0.])"


def test_masks_are_of_booleans_or_of_0_and_1():
    for value in ([True, False], [1, 0], np.array([1.0, 0.0]), np.array([1, 0], "uint8")):
        mask = read_mask(value)
        assert mask.dtype == bool
        assert mask.tolist() == [True, False]
    for value in ([2, 0], [0.5], [np.nan], ["1"], None, [[1], [1, 0]], [-1], [2**40]):
        assert read_mask(value) is None
