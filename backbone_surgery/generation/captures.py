"""Captures: what `generate(return_captures=True)` returns, aligned with the tokens of each row."""

from collections.abc import ItemsView, Iterator, KeysView, Mapping
from dataclasses import dataclass

import numpy as np

from backbone_surgery.errors import SurgeryError, closest, shown
from backbone_surgery.numbers import is_int
from backbone_surgery.opening.site import is_pattern


@dataclass(frozen=True, eq=False)
class GeneratedActivations:
    """The activations at some sites while texts were generated.

    They are read as a dict of arrays by site path: `captures["blocks.3"]`, `for site in captures`,
    `dict(captures)`. They cover the tokens that were run through the model: the prompt, and all
    generated tokens but the last, which was chosen and never run. Rows are padded with zeros on the
    right.

    Attributes:
        token_ids: int32[batch, tokens], the tokens that the activations belong to.
        lengths: int32[batch], how many tokens of each row are no padding.
        values: `{site path: float32[batch, tokens, ...]}`; an attention pattern is
            float32[batch, heads, tokens, tokens].
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    values: dict[str, np.ndarray]

    def __getitem__(self, path: str) -> np.ndarray:
        """Return the array of one site."""
        if path not in self.values:
            raise SurgeryError(
                f"captures at '{path}': expected a site that was captured. "
                f"{closest(path, self.values)} Add it to the `Capture`."
            )
        return self.values[path]

    # No `Mapping`: `values` is the dict itself, not a method.

    def __iter__(self) -> Iterator[str]:
        """Go through the paths of the sites."""
        return iter(self.values)

    def __len__(self) -> int:
        """Return how many sites there are."""
        return len(self.values)

    def keys(self) -> KeysView[str]:
        """Return the paths of the sites."""
        return self.values.keys()

    def items(self) -> ItemsView[str, np.ndarray]:
        """Return the path and the array of each site."""
        return self.values.items()

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Return the activations of one row, without padding: float32[length, ...] for each site.

        Raises:
            SurgeryError: there is no such row.
        """
        rows = len(self.lengths)
        if not is_int(index) or not -rows <= index < rows:
            raise SurgeryError(
                f"captures at 'row': expected an int from {-rows} to {rows - 1}, as there are "
                f"{rows} rows. Received {shown(index)}. Pass the number of one row."
            )
        tokens = slice(0, int(self.lengths[index]))
        return {path: cut(path, value[index], tokens) for path, value in self.values.items()}

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in self.values.items())
        return f"GeneratedActivations({len(self.lengths)} rows: {shapes})"

    def mean(self) -> dict[str, np.ndarray]:
        """Return the mean of each site over all tokens of all rows, as mean ablation takes it.

        Attention patterns, which have no common columns, are left out.
        """
        rows = [self.row(i) for i in range(len(self.lengths))]
        names = [name for name in self.values if time_axis(name) == 1]
        return {n: np.concatenate([row[n] for row in rows]).mean(axis=0) for n in names}


def time_axis(name: str) -> int:
    """Return which axis of a captured array counts tokens, rows being axis 0."""
    return 2 if is_pattern(name) else 1


def cut(name: str, row: np.ndarray, tokens: slice) -> np.ndarray:
    """Cut some tokens out of the captured array of one row; out of a pattern, its columns too."""
    return row[:, tokens, tokens] if time_axis(name) == 2 else row[tokens]


def pack(token_ids: list[np.ndarray], rows: list[Mapping[str, np.ndarray]]) -> GeneratedActivations:
    """Pad rows to the longest one.

    Args:
        token_ids: for each row the tokens that were run.
        rows: for each row its captures, without padding.
    """
    lengths = np.array([len(ids) for ids in token_ids], np.int32)
    ids = np.stack([_pad(ids, lengths.max(), (0,)) for ids in token_ids])
    values = {}
    for name in rows[0]:
        axes = (1, 2) if time_axis(name) == 2 else (0,)
        values[name] = np.stack([_pad(row[name], lengths.max(), axes) for row in rows])
    return GeneratedActivations(ids, lengths, values)


def _pad(row: np.ndarray, length: int, axes: tuple[int, ...]) -> np.ndarray:
    widths = [(0, length - size if i in axes else 0) for i, size in enumerate(row.shape)]
    return np.pad(row, widths)
