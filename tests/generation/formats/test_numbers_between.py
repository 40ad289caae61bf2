"""Numbers between two others, against Python's arithmetic."""

import math
import random
import re
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbone_surgery.generation.formats.json_schema import regex_of_schema
from backbone_surgery.generation.formats.numbers_between import (
    DIGITS,
    LARGEST,
    Bound,
    decimals,
    whole_numbers,
)
from tests.generation.formats.automata import random_texts

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


DECIMALS = st.decimals(-2000, 2000, places=4) | st.sampled_from(
    [Decimal(0), Decimal("0.1"), Decimal(-1)]
)
BOUNDS = st.builds(Bound, DECIMALS, st.booleans())


def is_within(value, low, high):
    above = low.value <= value if low.included else low.value < value
    return above and (value <= high.value if high.included else value < high.value)


@settings(deadline=None, max_examples=80)
@given(BOUNDS, BOUNDS, st.lists(st.decimals(-2001, 2001, places=5), max_size=8))
def test_decimals_between_and_no_others(one, other, others):
    low, high = sorted((one, other), key=lambda bound: bound.value)
    found = decimals(low, high)
    step = Decimal("0.00000001")
    near = [bound.value + change * step for bound in (low, high) for change in (-1, 0, 1)]
    middle = (low.value + high.value) / 2
    for value in [*near, middle, *others, round(middle), round(middle, 1), -middle]:
        text = f"{Decimal(value).normalize() + 0:f}"  # without a sign of zero
        fits = is_within(Decimal(text), low, high)
        assert (found is not None and bool(re.fullmatch(found, text))) == fits, text
    if found is None:
        assert low.value == high.value
        return
    assert not any(re.fullmatch(found, text) for text in ("", "-", "00.5", ".5", "1.", "1e2", "+1"))
    for text in random_texts(found, 20, random.Random(0)):
        assert is_within(Decimal(text), low, high)
        assert sum(map(str.isdigit, text)) <= DIGITS
        assert text == "0" or re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", text)


def test_zeros_may_follow():
    found = decimals(Bound(Decimal(2), True), Bound(Decimal("2.50"), True))
    for text in ("2", "2.0", "2.00", "2.5", "2.500", "2.49999"):
        assert re.fullmatch(found, text)
    for text in ("2.51", "2.5001", "1.999", "3"):
        assert not re.fullmatch(found, text)


@pytest.mark.parametrize(
    ("bounds", "fit", "others"),
    [
        (
            {"minimum": 0.1},
            ["0.1", "0.10", "999999999.999999", "999999999999999"],
            ["0.0999", "-1"],
        ),
        ({"maximum": 10**12}, ["1000000000000", "-999999999999999"], ["1000000000000.1"]),
        (
            {"exclusiveMinimum": 0, "maximum": 1},
            ["1", "1.0", "0.00000000000001"],
            ["0", "0.0", "1.1"],
        ),
        ({"minimum": -1e-5, "exclusiveMaximum": 0}, ["-0.00001", "-0.000001"], ["0", "-0", "-0.1"]),
        ({"minimum": 1, "exclusiveMinimum": 1, "maximum": 9.5}, ["1.1", "9.5"], ["1", "9.6"]),
        ({"minimum": 5, "maximum": 5}, ["5", "5.0"], ["5.01", "4.99"]),
        ({"minimum": 1e-20, "maximum": 1e300}, ["1", "3.5"], ["0", "-1"]),
    ],
)
def test_bounds_of_numbers_in_a_schema(bounds, fit, others):
    regex = regex_of_schema({"type": "number", **bounds})
    assert all(re.fullmatch(regex, text) for text in fit)
    assert not any(re.fullmatch(regex, text) for text in others)


@given(st.floats(-1e6, 1e6), st.integers(-3, 3))
def test_a_float_that_is_excluded_is_not_written(bound, ulps):
    """Not even by a text that is read as it."""
    regex = regex_of_schema({"type": "number", "exclusiveMinimum": bound})
    near = bound
    for _ in range(abs(ulps)):
        near = math.nextafter(near, math.copysign(math.inf, ulps))
    for digits in range(1, 16):
        text = f"{Decimal(f'{near:.{digits}g}'):f}"
        if re.fullmatch(regex, text):
            assert float(text) > bound
