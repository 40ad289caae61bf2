"""Causal tracing: which site, at which token, carries what tells two texts apart."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops, tree

from backbone_surgery import hosts
from backbone_surgery.analysis.question import (
    Metric,
    Text,
    bind_rows,
    derived,
    head_of,
    make_metric,
    read_text,
    rewired,
)
from backbone_surgery.caching.cache import new_cache
from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.predict import predict
from backbone_surgery.rewriting import Capture, Patch
from backbone_surgery.vectors.activations import check_batch_size

_NAME = "patch_grid"

_PIECES, _LEAST_PIECE = 4, 8
"""Rows begin at so many places at most: for each of them a program is compiled."""


@dataclass(frozen=True, eq=False)
class PatchGrid:
    """What `patch_grid` measured.

    Attributes:
        values: float[sites, tokens], the metric of the corrupted text with that one activation
            taken from the clean text.
        clean: the metric of the clean text.
        corrupted: the metric of the corrupted text.
        sites: paths of the sites.
        tokens: labels of the corrupted text's tokens.
    """

    values: np.ndarray
    clean: float
    corrupted: float
    sites: list[str]
    tokens: list[str]

    @property
    def recovered(self) -> np.ndarray:
        """How much of the difference each patch restores: 0 is the corrupted text, 1 the clean.

        Raises:
            SurgeryError: the metric is the same for both texts.
        """
        if self.clean == self.corrupted:
            raise SurgeryError(
                "patch_grid.recovered: expected a metric that tells the texts apart. Received "
                f"{self.clean} for both. Choose another metric, or look at `values`."
            )
        return (self.values - self.corrupted) / (self.clean - self.corrupted)


def patch_grid(
    lm: CachedCausalLM,
    clean: Any,
    corrupted: Any,
    metric: Any,
    at: str = "blocks.*",
    controls: Mapping[str, Any] | None = None,
    batch_size: int = 32,
) -> PatchGrid:
    """Patch every site and token of one text with the activation of another, one at a time.

    Source: Meng et al. 2022, https://arxiv.org/abs/2202.05262; Wang et al. 2022,
    https://arxiv.org/abs/2211.00593. Cells are rows of few batches. A patch changes nothing before
    its token, so a row begins there, or a little before, from the cache of the corrupted text.
    Before the first token that differs, both texts have the same activations: these cells need no
    pass. Another pair of texts of that length compiles nothing new.

    Args:
        lm: the model, edited or not.
        clean: a text, a string (without a preprocessor, token ids).
        corrupted: another, of as many tokens.
        metric: what to measure of the next token: a token, for its logit; a pair of tokens (right,
            wrong), for the difference of their logits; or a function of logits
            float[batch, vocabulary] that returns float[batch].
        at: site selector, as for `Patch`.
        controls: for the controls of `lm`'s own rewrites.
        batch_size: how many cells to run at once.

    Raises:
        SurgeryError: texts of different lengths, equal texts, a metric or batch size that is none,
            or what `Patch` refuses.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> bs.patch_grid(lm, [1, 2, 3], [1, 4, 3], metric=(5, 6)).values.shape
        (2, 3)
    """
    check_batch_size(batch_size, "patch_grid")
    texts = [read_text(lm, text, "patch_grid") for text in (clean, corrupted)]
    lengths = [len(text.token_ids) for text in texts]
    if lengths[0] != lengths[1] or np.array_equal(texts[0].token_ids, texts[1].token_ids):
        raise SurgeryError(
            "patch_grid: expected two different texts of as many tokens. Received "
            f"{texts[0].labels} and {texts[1].labels}. Change words for others of as many tokens."
        )
    measure = make_metric(lm, metric, "patch_grid")
    patching = derived(lm, Patch(at, name=_NAME))
    sites = list(patching.report[-1].sites)
    runs = [_run(lm, text, at, sites, measure, controls) for text in texts]
    (clean_end, values), (corrupted_end, others) = runs
    grid = np.full((len(sites), lengths[0]), corrupted_end, "float32")
    # Tokens before the first that differs have the same activations: there a patch does nothing.
    cells = [
        (s, t) for s, t in np.ndindex(grid.shape) if not np.array_equal(values[s][t], others[s][t])
    ]
    rows = min(int(batch_size), grid.size)
    patched = _Patched(lm, texts[1], patching, values, controls)
    for start in patched.starts:
        own = [cell for cell in cells if patched.start_of(cell) == start]
        for first in range(0, len(own), rows):
            part = own[first : first + rows]
            hidden_states = patched.run(start, part + [part[-1]] * (rows - len(part)))
            for cell, value in zip(part, _measured(lm, measure, hidden_states), strict=False):
                grid[cell] = value
    return PatchGrid(grid, clean_end, corrupted_end, sites, texts[1].labels)


def _run(
    lm: CachedCausalLM, text: Text, at: str, sites: list[str], measure: Metric, controls: Any
) -> tuple[float, list[np.ndarray]]:
    """Run one text: its metric, and for each site float32[tokens, ...]."""
    capturing = derived(lm, Capture(at, name=_NAME))
    outputs = predict(capturing, {**text.inputs(), **bind_rows(lm, controls, text, 1)})
    captured = outputs["captures"]
    values = [np.asarray(captured[f"{_NAME}/{site}"][0], "float32") for site in sites]
    return float(_measured(lm, measure, outputs["hidden_states"])[0]), values


class _Patched:
    """Rows of one text, each with one activation of another, from the last place before it.

    Args:
        lm: the model.
        text: the text.
        patching: the model with a `Patch`.
        values: of the other text, for each site float32[tokens, ...].
        controls: for the controls of the model's own rewrites.

    Attributes:
        starts: the places at which rows can begin.
    """

    def __init__(
        self,
        lm: CachedCausalLM,
        text: Text,
        patching: EditedBackbone,
        values: list[np.ndarray],
        controls: Any,
    ) -> None:
        self.text, self.values = text, values
        self.bind = functools.partial(bind_rows, lm, controls, text)
        self.model = rewired(patching)
        length = len(text.token_ids)
        self.piece = max(-(-length // _PIECES), _LEAST_PIECE)
        self.starts = range(0, length, self.piece)
        self.cache = {0: new_cache(self.model, 1, length)}

    def start_of(self, cell: tuple[int, int]) -> int:
        """Return where the row of a cell begins."""
        return cell[1] // self.piece * self.piece

    def run(self, start: int, cells: list[tuple[int, int]]) -> np.ndarray:
        """Run the text from a place on, a row for each cell, to its hidden states."""
        cache = tree.map_structure(
            lambda x: np.repeat(x, len(cells), axis=0), self._cache_before(start)
        )
        return self._run(start, len(self.text.token_ids), cache, cells)["hidden_states"]

    def _cache_before(self, start: int) -> Any:
        """Return the cache of the text up to a place, piece by piece."""
        if start not in self.cache:
            before = start - self.piece
            result = self._run(before, start, self._cache_before(before), [(0, -1)])
            self.cache[start] = result["cache"]
        return self.cache[start]

    def _run(self, start: int, stop: int, cache: Any, cells: list[tuple[int, int]]) -> Any:
        rows, own = len(cells), slice(start, stop)
        positions = np.arange(start, stop, dtype="int32")
        inputs = {
            "token_ids": np.repeat(self.text.token_ids[None, own], rows, axis=0),
            "positions": np.repeat(positions[None], rows, axis=0),
            "cache": cache,
            "cache_update_index": np.int32(start),
            "cache_mask": np.ones((rows, len(self.text.token_ids)), bool),
        }
        return predict(self.model, {**inputs, **self.bind(rows), **_patch(cells, self.values)})


def _patch(cells: list[tuple[int, int]], values: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Make the inputs of `Patch` for a batch in which each row patches one cell; -1 is no token."""
    positions = np.full((len(cells), len(values), 1), -1, "int32")
    inputs = {f"{_NAME}_positions": positions}
    tokens = [token for _, token in cells]
    for row, (site, token) in enumerate(cells):
        positions[row, site] = token
    for i, value in enumerate(values):
        inputs[f"{_NAME}_value_{i}"] = value[tokens][:, None]
    return inputs


def _measured(lm: CachedCausalLM, measure: Any, hidden_states: Any) -> np.ndarray:
    logits = predict(head_of(lm), hidden_states[:, -1])
    return np.asarray(hosts.to_numpy(measure(ops.convert_to_tensor(logits))), "float32")
