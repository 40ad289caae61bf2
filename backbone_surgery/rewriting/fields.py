"""Fields: what a rewrite checks when it is built, in the same way for every rewrite.

What cannot be used is refused by name; what can is kept in one form, whether it came as an integer
of Python or of NumPy, as a list or a tuple.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from backbone_surgery.errors import SelectorError, SurgeryError, shown
from backbone_surgery.numbers import is_int, read_number
from backbone_surgery.rewriting.directions import read_span


class Fields:
    """The fields of one frozen rewrite, while it is being built.

    Args:
        rewrite: the rewrite.
        place: the field by which errors name the rewrite.
    """

    def __init__(self, rewrite: Any, place: str = "at") -> None:
        self.rewrite = rewrite
        self.where = f"{type(rewrite).__name__} at {shown(getattr(rewrite, place))}"

    def keep(self, field: str, value: Any) -> None:
        """Keep a value in the form in which it is used."""
        object.__setattr__(self.rewrite, field, value)

    def refuse(self, expected: str, value: Any, advice: str) -> SurgeryError:
        """Return the error for a value that cannot be used."""
        return SurgeryError(f"{self.where}: expected {expected}. Received {shown(value)}. {advice}")

    def selector(self) -> None:
        """Check a site selector as far as that is possible without a graph."""
        value = self.rewrite.at
        if not isinstance(value, str):
            raise SelectorError(
                f"{self.where}: expected a site selector such as 'blocks.*.head_outputs'. Received "
                f"{shown(value)} of type {type(value).__name__}. Pass a string."
            )

    def name(self, field: str = "name", optional: bool = False) -> None:
        """Check a name that inputs of the graph begin with."""
        value = getattr(self.rewrite, field)
        fits = isinstance(value, str) and value.isidentifier()
        if not fits and not (optional and value is None):
            raise self.refuse(
                f"`{field}` to be a name of letters, digits and underscores", value, "Rename it."
            )

    def choice(self, field: str, options: Collection[str]) -> None:
        """Check one of a few words."""
        value = getattr(self.rewrite, field)
        if not isinstance(value, str) or value not in options:
            listed = " or ".join(map(repr, options))
            raise self.refuse(f"{field} {listed}", value, "Choose one of them.")

    def flag(self, field: str) -> None:
        """Check a boolean."""
        value = getattr(self.rewrite, field)
        if not isinstance(value, bool | np.bool_):
            raise self.refuse(f"`{field}` to be True or False", value, "Pass a boolean.")
        self.keep(field, bool(value))

    def number(self, field: str, optional: bool = False, advice: str = "Pass one number.") -> None:
        """Check a finite number."""
        value = getattr(self.rewrite, field)
        if value is None and optional:
            return
        number = read_number(value)
        if number is None:
            raise self.refuse(f"`{field}` to be a finite number", value, advice)
        self.keep(field, number)

    def all_or_nothing(self, field: str) -> None:
        """Check a number that is 1 or 0."""
        self.number(field)
        if getattr(self.rewrite, field) not in (0, 1):
            raise self.refuse(f"`{field}` to be 1 or 0", getattr(self.rewrite, field), "Pass one.")

    def integer(self, field: str, smallest: int, optional: bool = False) -> None:
        """Check an integer that is no smaller than the smallest allowed, and fits into int32."""
        value = getattr(self.rewrite, field)
        if value is None and optional:
            return
        if not is_int(value) or not smallest <= value < 2**31:
            rule = f"`{field}` to be an integer of {smallest} or more"
            raise self.refuse(rule, value, "Pass a whole number in that range.")
        self.keep(field, int(value))

    def strings(self, field: str, optional: bool = False) -> None:
        """Check one string or more, none of them empty; kept as a tuple."""
        value = getattr(self.rewrite, field)
        if value is None and optional:
            return
        strings = (value,) if isinstance(value, str) else value
        fits = isinstance(strings, list | tuple) and len(strings) > 0
        if not fits or not all(isinstance(x, str) and x for x in strings):
            raise self.refuse(f"`{field}` to be names", value, "Pass a list of some, none empty.")
        self.keep(field, tuple(strings))

    def span(self, field: str, optional: bool = False) -> None:
        """Check directions that span something; kept as float64[directions, size]."""
        value = getattr(self.rewrite, field)
        if value is None and optional:
            return
        rows = read_span(value)
        if rows is None:
            raise self.refuse(
                f"`{field}` to be finite float[hidden_dim] or float[directions, hidden_dim], none "
                "of them zero",
                value,
                "Pass `vector.directions[3]` of a control vector, say.",
            )
        self.keep(field, rows)

    def layers(self, field: str, kind: type, described: str) -> None:
        """Check a mapping to layers of a class: those that a rewrite made, to be used again."""
        value = getattr(self.rewrite, field)
        layers = value.values() if isinstance(value, Mapping) else [None]
        if not all(isinstance(layer, kind) for layer in layers):
            raise self.refuse(
                f"`{field}` to be {described}",
                value,
                f"Take those of `edited.rewrites[i].{field}`, or leave them out.",
            )

    def instance(self, field: str, kind: type, described: str, optional: bool = False) -> None:
        """Check an object of a class."""
        value = getattr(self.rewrite, field)
        if not isinstance(value, kind) and not (optional and value is None):
            received = f"{shown(value)} of type {type(value).__name__}"
            raise SurgeryError(
                f"{self.where}: expected {described}. Received {received}. Pass an instance."
            )
