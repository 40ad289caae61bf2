"""Figures of analyses, by matplotlib: axes carry tokens and sites."""

from typing import Any

import numpy as np

from backbone_surgery.analysis.attribution import Attribution
from backbone_surgery.analysis.direct import DirectLogitAttribution
from backbone_surgery.analysis.edges import Edges
from backbone_surgery.analysis.logit_lens import LogitLens
from backbone_surgery.analysis.patch_grid import PatchGrid
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.extras import import_extra
from backbone_surgery.generation.captures import GeneratedActivations
from backbone_surgery.numbers import is_int
from backbone_surgery.opening.site import is_pattern

_CELL = 0.42
"""Inches for one row or column of a grid."""
_LOWEST = 4.0
"""Inches, so that the label of the colour bar has room."""


def plot_grid(
    grid: PatchGrid | Attribution | DirectLogitAttribution | Edges, ax: Any = None
) -> Any:
    """Draw a grid of sites by tokens or by heads, or of senders by receivers.

    Of a patch grid, the share of the way from the corrupted to the clean text is drawn. Red is
    towards the clean text, or for the target; blue is against it. Of edges, and of an attribution
    against a corrupted text, the change of the metric is drawn, and grey where no edge is.

    Args:
        grid: what `patch_grid`, `attribution`, `direct_logit_attribution`, `edge_attribution` or
            `edge_patching` returned.
        ax: matplotlib axes to draw into; new ones by default.

    Returns:
        The axes. `ax.figure.savefig(...)` keeps the picture.

    Raises:
        SurgeryError: matplotlib is missing, the result is none of these, or an attribution by
            feature, or `ax` is none.
    """
    if isinstance(grid, PatchGrid):
        values, label = grid.recovered, "share of the metric recovered"
    elif isinstance(grid, Attribution):
        if grid.by_feature:
            raise SurgeryError(
                "plot_grid: expected a grid of sites by tokens or heads. Received one by feature, "
                "of too many columns to draw. List the greatest by its `top`."
            )
        label = "gradient times activation"
        values = grid.values
        if grid.corrupted is not None:
            label = "change of the metric, to first order"
    elif isinstance(grid, DirectLogitAttribution):
        values, label = grid.values.reshape(len(grid.sites), -1), "added to the logit"
    elif isinstance(grid, Edges):
        values, label = grid.values, "change of the metric"
    else:
        kinds = "a `PatchGrid`, an `Attribution`, a `DirectLogitAttribution` or `Edges`"
        raise _unknown("plot_grid", kinds, grid)
    ax = _axes(ax, "plot_grid", values.shape, extra=1.2)
    limit = float(np.nanmax(np.abs(values))) or 1.0
    image = ax.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    ax.figure.colorbar(image, ax=ax, label=label)
    if isinstance(grid, Edges):
        ax.set_facecolor("lightgrey")
        _label(ax, grid.senders, grid.receivers)
        ax.set(xlabel="receiver", ylabel="sender")
        return ax
    _label(ax, grid.sites, grid.columns)
    if grid.by_head:
        ax.set_xlabel("head", fontsize=8)
    return ax


def plot_lens(lens: LogitLens, ax: Any = None) -> Any:
    """Draw a logit lens: the likeliest next token after each block, coloured by its probability.

    Args:
        lens: what `logit_lens` returned.
        ax: matplotlib axes to draw into; new ones by default.

    Returns:
        The axes.

    Raises:
        SurgeryError: matplotlib is missing, the result is none, or `ax` is none.
    """
    if not isinstance(lens, LogitLens):
        raise _unknown("plot_lens", "a `LogitLens`", lens)
    ax = _axes(ax, "plot_lens", lens.probabilities.shape, extra=1.2, wide=2.0)
    image = ax.imshow(lens.probabilities, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for row, labels in enumerate(lens.labels):
        for column, label in enumerate(labels):
            light = lens.probabilities[row, column] < 0.6
            ax.text(
                column,
                row,
                label,
                ha="center",
                va="center",
                fontsize=7,
                color="white" if light else "black",
                parse_math=False,
            )
    ax.figure.colorbar(image, ax=ax, label="probability of the token shown")
    _label(ax, lens.sites, lens.tokens)
    ax.invert_yaxis()
    return ax


def plot_attention(
    captures: GeneratedActivations,
    site: str,
    row: int = 0,
    head: int | None = None,
    tokens: list[str] | None = None,
    ax: Any = None,
) -> Any:
    """Draw an attention pattern: who (down) looks at whom (across).

    Args:
        captures: from `lm.generate(..., return_captures=True)`.
        site: path of a captured pattern, such as `blocks.0.attention_pattern`.
        row: which row of the batch.
        head: which head; the mean over heads by default.
        tokens: labels of the row's tokens; their ids by default.
        ax: matplotlib axes to draw into; new ones by default.

    Returns:
        The axes.

    Raises:
        SurgeryError: matplotlib is missing, an argument is of another kind, the site is no captured
            pattern, or there is no such row or head.
    """
    if not isinstance(captures, GeneratedActivations):
        raise _unknown("plot_attention", "`GeneratedActivations`", captures)
    rows = len(captures[site])
    if not is_int(row) or row not in range(rows):
        raise SurgeryError(
            f"plot_attention at '{site}': expected a row from 0 to {rows - 1}. Received {row!r}. "
            "Count the rows of the batch from 0."
        )
    pattern = captures.row(row)[site]
    labels = [str(i) for i in captures.token_ids[row]] if tokens is None else tokens
    labels = labels[: len(pattern[0])]
    heads = pattern.shape[0]
    right = is_pattern(site) and (head is None or (is_int(head) and 0 <= head < heads))
    if not right or len(labels) != pattern.shape[-1]:
        raise SurgeryError(
            f"plot_attention at '{site}': expected a captured attention pattern, a head from 0 to "
            f"{heads - 1} and a label for each of {pattern.shape[-1]} tokens. Received head "
            f"{head!r} and {len(labels)} labels. Capture `blocks.0.attention_pattern`, say."
        )
    shown = pattern.mean(axis=0) if head is None else pattern[head]
    ax = _axes(ax, "plot_attention", shown.shape, extra=1.2)
    image = ax.imshow(shown, cmap="magma", vmin=0, vmax=1, aspect="auto")
    ax.figure.colorbar(image, ax=ax, label="attention")
    _label(ax, labels, labels)
    which = "mean of heads" if head is None else f"head {head}"
    ax.set_title(f"{site}, {which}", fontsize=9)
    return ax


def _axes(ax: Any, operation: str, shape: tuple[int, ...], extra: float, wide: float = 1.0) -> Any:
    if hasattr(ax, "imshow"):
        return ax
    if ax is not None:
        raise SurgeryError(
            f"{operation} at 'ax': expected axes of matplotlib, or None. Received {shown(ax)}. To "
            f"write a file, call `{operation}(...).figure.savefig(path)`."
        )
    pyplot = import_extra(operation, "matplotlib.pyplot")
    size = (_CELL * wide * shape[1] + 2 + extra, max(_CELL * shape[0] + 1.5, _LOWEST))
    return pyplot.subplots(figsize=size, layout="constrained")[1]


def _label(ax: Any, rows: list[str], columns: list[str]) -> None:
    plain = {"fontsize": 8, "parse_math": False}
    ax.set_xticks(range(len(columns)), columns, rotation=60, ha="right", **plain)
    ax.set_yticks(range(len(rows)), rows, **plain)


def _unknown(operation: str, wanted: str, received: Any) -> SurgeryError:
    return SurgeryError(
        f"{operation}: expected {wanted}. Received {type(received).__name__}. Pass what the "
        "analysis returned."
    )
