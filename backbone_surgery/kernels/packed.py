"""`Packed`: a matrix of four bits, two numbers in a byte."""

from typing import Any, NamedTuple

from keras import ops


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
        heads: how many matrices [inputs, head_dim] follow each other, if there are several. Keras
            takes their numbers for [inputs, heads * head_dim] as they lie, and packs that. Devices
            that share heads have some of its rows, and as many outputs.
        divisor: float[outputs], by which what a kernel gives is to be divided, without `scale`.
    """

    numbers: Any
    pairs: str
    inputs: int
    outputs: int
    group: int
    scale: Any = None
    zero: Any = None
    heads: int = 1
    divisor: Any = None

    def tensors(self) -> dict[str, Any]:
        """Return the values of its arrays, by name, if they are variables."""
        arrays = {name: getattr(self, name) for name in ("numbers", "scale", "zero", "divisor")}
        return {k: ops.convert_to_tensor(v) for k, v in arrays.items() if v is not None}

    @property
    def columns(self) -> int:
        """Outputs that are next to each other: with several heads, those of a row."""
        return self.outputs if self.heads == 1 else 2 * self.numbers.shape[1]

    @property
    def head_dim(self) -> int:
        """Outputs of a head, if there are several."""
        return self.columns // self.heads

    @property
    def rows_of_head(self) -> int:
        """Rows that hold the numbers of a head, if there are several."""
        return self.inputs // self.heads

    @property
    def rows(self) -> int:
        """Rows that hold all of these heads, if there are several."""
        return self.outputs // self.head_dim * self.rows_of_head
