"""Runs of two texts for the edges between them: who sends, who receives, and what is measured."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from keras import ops

from backbone_surgery import hosts
from backbone_surgery.analysis.gradients import differentiable
from backbone_surgery.analysis.question import (
    bind_row,
    check_finite,
    check_measured,
    check_selector,
    make_metric,
    measured,
    read_pair,
)
from backbone_surgery.analysis.stream import (
    Reader,
    Streams,
    exchange,
    heads_of,
    names_of,
)
from backbone_surgery.errors import SelectorError
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.numbers import check_flag
from backbone_surgery.opening.site import select


class EdgeRuns:
    """Two texts, run whole, and what is asked of the edges between them.

    Args:
        operation: what asks, for errors.
        lm: the model.
        clean: a text.
        corrupted: another.
        metric: as for `patch_grid`.
        receivers: site selector of those that are asked for; all where `None`.
        controls: for the controls of the model's own rewrites.
        by_head: whether attention is taken head by head.
        prompt_length: how many tokens are the prompt.

    Attributes:
        streams: the graph.
        senders: for each path of what is written, what to call it, or each of its heads.
        receivers: those that are asked for, in order.
        clean: the run of the clean text.
        base: the run of the corrupted text.
        ends: the metric of the one and of the other.
    """

    def __init__(
        self,
        operation: str,
        lm: CachedCausalLM,
        clean: Any,
        corrupted: Any,
        metric: Any,
        *,
        receivers: str | None,
        controls: Any,
        by_head: Any,
        prompt_length: Any,
    ) -> None:
        check_flag(operation, "by_head", by_head)
        self.lm, self._operation, self._where = lm, operation, f"{operation} at 'metric'"
        texts = read_pair(lm, clean, corrupted, operation)
        self._metric = make_metric(lm, metric, self._where)
        bound = bind_row(lm, controls, texts[1], operation, prompt_length)
        self.streams = Streams(lm, operation, bool(by_head))
        self.receivers = self._receivers(receivers)
        self.clean, self.base = (self.streams.whole({**t.inputs(), **bound}) for t in texts)
        runs = (self.clean, self.base)
        clean_end, corrupted_end = (self.measure(self.streams.logits(run))[0] for run in runs)
        self.ends = float(clean_end), float(corrupted_end)
        self.senders = {path: self._names(path) for path in self.streams.written}

    def measure(self, logits: np.ndarray) -> np.ndarray:
        """Measure logits float[rows, vocabulary]."""
        return measured(self.lm, self._metric, logits, self._where)

    def slope(self, logits: np.ndarray) -> np.ndarray:
        """Return the gradient of the metric with respect to logits, float[1, vocabulary]."""
        import jax

        slope = jax.grad(lambda x: differentiable(self._metric, x, self._where))
        gradient = hosts.to_numpy(slope(ops.convert_to_tensor(logits)))
        check_measured(np.asarray(gradient, "float32"), logits, self.lm, self._where, "gradients")
        return gradient

    def check(self, gradients: Any) -> None:
        """Refuse NaN and Inf."""
        check_finite(gradients, self.lm, self._operation)

    def table(self) -> tuple[np.ndarray, dict[str, slice], dict[str, slice]]:
        """Return values float32[senders, receivers], all NaN, and what rows and columns are of."""
        rows = _slices([*self.senders], [len(names) for names in self.senders.values()])
        paths = [receiver.path for receiver in self.receivers]
        columns = _slices(paths, [len(receiver.names) for receiver in self.receivers])
        size = tuple(len(names) for names in self.names())
        return np.full(size, np.nan, "float32"), rows, columns

    def names(self) -> tuple[list[str], list[str]]:
        """Return what to call senders and receivers."""
        senders = [name for names in self.senders.values() for name in names]
        return senders, [name for receiver in self.receivers for name in receiver.names]

    def feeds(self) -> np.ndarray:
        """Return what receivers make of what senders write; see `Edges.feeds`."""
        table, rows, columns = self.table()
        feeds = np.zeros(table.shape[::-1], bool)
        for reader in self.receivers:
            for path in self.streams.fed(reader):
                groups = np.eye(len(reader.names), dtype=bool)
                part = np.repeat(groups, len(self.senders[path]) // len(groups), axis=1)
                feeds[columns[reader.path], rows[path]] = part
        return feeds

    def sent(self, path: str) -> np.ndarray:
        """Return what is written in the clean text, float[names, tokens, hidden_dim]."""
        if not self.streams.has_heads(path):
            return self.streams.at(self.clean, path)
        base, clean = (self.streams.at(run, heads_of(path)) for run in (self.base, self.clean))
        return self.streams.heads_written(self.base, path, exchange(base, clean))

    def _names(self, path: str) -> list[str]:
        if not self.streams.has_heads(path):
            return [path]
        heads = heads_of(path)
        return names_of(heads, self.streams.at(self.base, heads).shape[2])

    def _receivers(self, receivers: str | None) -> list[Reader]:
        known = self.streams.readers
        if receivers is None:
            return known
        check_selector(receivers, self._operation, "receivers")
        try:
            picked = set(select(receivers, [reader.path for reader in known]))
        except SelectorError as error:
            raise SelectorError(
                f"{self._operation} at 'receivers': {error} With by_head=True queries, keys and "
                "values receive, and else attention as a whole."
            ) from error
        return [reader for reader in known if reader.path in picked]


def _slices(paths: Sequence[str], counts: Sequence[int]) -> dict[str, slice]:
    """Return which of a row of things are of each path."""
    ends = pairwise(np.cumsum([0, *counts]).tolist())
    return {path: slice(*both) for path, both in zip(paths, ends, strict=True)}
