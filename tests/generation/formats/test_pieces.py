"""The expression of the whole numbers between two others matches these and no others."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbone_surgery.generation.formats.json_schema import regex_of_schema
from backbone_surgery.generation.formats.pieces import LARGEST, whole_numbers

numbers = st.integers(-LARGEST, LARGEST)


@pytest.mark.parametrize(
    ("least", "most"),
    [(0, 0), (-1, 0), (-7, -7), (1, 999), (-120, 47), (8, 1203), (95, 105), (-1000, -99), (10, 10)],
)
def test_all_between_and_no_others(least, most):
    expression = re.compile(whole_numbers(least, most))
    texts = [str(n) for n in range(-2200, 2200)]
    matched = [int(text) for text in texts if expression.fullmatch(text)]
    assert matched == list(range(least, most + 1))
    assert not any(expression.fullmatch(text) for text in ("", "-", "-0", "00", "007", "+1", "1.0"))


@given(numbers, numbers, numbers)
def test_numbers_of_any_length(first, second, other):
    least, most = sorted((first, second))
    expression = re.compile(whole_numbers(least, most))
    for n in (least, most, least - 1, most + 1, other, (least + most) // 2):
        assert bool(expression.fullmatch(str(n))) == (least <= n <= most)


@pytest.mark.parametrize(
    ("bounds", "least", "most"),
    [
        ({"minimum": 3}, 3, LARGEST),
        ({"maximum": -3}, -LARGEST, -3),
        ({"exclusiveMinimum": 0}, 1, LARGEST),
        ({"exclusiveMaximum": 0}, -LARGEST, -1),
        ({"minimum": 2.5, "maximum": 7.5}, 3, 7),
        ({"exclusiveMinimum": -2.5, "exclusiveMaximum": 2.5}, -2, 2),
        ({"minimum": 1, "exclusiveMinimum": 1, "maximum": 9, "exclusiveMaximum": 9.0}, 2, 8),
        ({"minimum": -1e300, "maximum": 10**400}, -LARGEST, LARGEST),
    ],
)
def test_bounds_of_a_schema(bounds, least, most):
    assert regex_of_schema({"type": "integer", **bounds}) == f"({whole_numbers(least, most)})"
