"""What a transfer found: what was copied, and every difference, as a table."""

from dataclasses import astuple, dataclass

KINDS = ("missing", "unexpected", "shape", "dtype", "tied")


@dataclass(frozen=True)
class Difference:
    """One weight that does not match.

    Attributes:
        kind: `missing` from the source, `unexpected` in it, another `shape` or `dtype`, or `tied`
            in one of the two models and not in the other.
        path: of the weight, in the destination.
        expected: what the destination has.
        received: what the source has.
    """

    kind: str
    path: str
    expected: str
    received: str


@dataclass(frozen=True)
class TransferReport:
    """What `transfer_weights` did.

    Attributes:
        copied: paths of the weights that were copied.
        zeroed: paths of biases that the source does not have, which is to have zeros.
        left: paths of weights that the source says to leave as they are.
        differences: what does not match; empty after a strict transfer.
    """

    copied: tuple[str, ...] = ()
    zeroed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        counts = f"{len(self.copied)} weights copied"
        counts += f", {len(self.zeroed)} biases set to zero" if self.zeroed else ""
        counts += f", {len(self.left)} left as they were" if self.left else ""
        return "\n".join([counts, *self.table()])

    def table(self, most: int = 40) -> list[str]:
        """Return the differences as lines of a table, at most so many."""
        if not self.differences:
            return []
        rows = sorted(self.differences, key=lambda d: (KINDS.index(d.kind), d.path))
        cells = [("difference", "weight", "destination", "source"), *map(astuple, rows[:most])]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        return [*lines, f"and {len(rows) - most} more"] if len(rows) > most else lines
