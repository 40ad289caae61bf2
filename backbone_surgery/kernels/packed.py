"""`Packed`: a matrix of four bits, two numbers in a byte."""

from typing import Any, NamedTuple


class Packed(NamedTuple):
    """A matrix of four bits as Keras packs it: the first of two is in the low half of a byte.

    Attributes:
        numbers: int8[inputs, outputs / 2] where `pairs` is "outputs"; int8[inputs / 2, outputs]
            where it is "inputs"; int8[outputs, inputs / 2] where it is "turned".
        pairs: which numbers lie in one byte.
        inputs: how many.
        outputs: how many.
        group: how many inputs a scale is for, or are multiplied at a time.
        scale: float[groups, outputs], or, "turned", float[outputs, groups]; `None` for none.
        zero: what zero is, int8 or float, of the same shape as `scale`.
        heads: how many matrices [inputs, outputs / heads] follow each other, if there are several.
            Keras takes their numbers for [inputs, outputs] as they lie, and packs that.
    """

    numbers: Any
    pairs: str
    inputs: int
    outputs: int
    group: int
    scale: Any = None
    zero: Any = None
    heads: int = 1
