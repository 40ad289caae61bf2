"""Ranking: the cells of a table, those of the greatest numbers first."""

from collections.abc import Iterator

import numpy as np


def ranked(sizes: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the cells of float[rows, columns], the greatest first, and of equal ones the first.

    Examples:
        >>> list(ranked(np.array([[1, 3], [3, 2]])))
        [(0, 1), (1, 0), (1, 1), (0, 0)]
    """
    for i in np.argsort(-sizes, axis=None, kind="stable"):
        row, column = divmod(int(i), sizes.shape[1])
        yield row, column
