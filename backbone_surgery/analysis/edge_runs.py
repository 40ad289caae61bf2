"""Runs of two texts for the edges between them: who sends, who receives, and what is measured."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from backbone_surgery import hosts
from backbone_surgery.analysis.question import (
    bind_row,
    check_no_nan,
    check_selector,
    head_of,
    make_metric,
    read_pair,
)
from backbone_surgery.analysis.stream import Reader, Streams, heads_of, role_of
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.numbers import check_flag
from backbone_surgery.opening.predict import predict
from backbone_surgery.opening.site import select

LOGITS = "logits"


@dataclass(frozen=True)
class Receiver:
    """What reads the stream.

    Attributes:
        path: the site of what it makes, or `logits`.
        takes: numbers of what it reads.
        heads: how many heads it has; `None` where it is taken as a whole.
        reader: what makes that; `None` of the logits.
    """

    path: str
    takes: tuple[int, ...]
    heads: int | None
    reader: Reader | None

    @property
    def names(self) -> list[str]:
        """What to call it, head by head."""
        return names_of(self.path, self.heads)


Rate = Callable[[dict[int, np.ndarray], Receiver], np.ndarray]
"""Maps a changed stream, and a receiver, to float32[rows, heads]."""


class EdgeRuns:
    """Two texts, run whole, and what is asked of the edges between them.

    Args:
        operation: what asks, for errors.
        lm: the model.
        clean: a text.
        corrupted: another.
        metric: as for `patch_grid`.
        controls: for the controls of the model's own rewrites.
        by_head: whether attention is taken head by head.
        prompt_length: how many tokens are the prompt.
        receivers: site selector of those that are asked for; all by default.

    Attributes:
        texts: the clean one and the corrupted one.
        bound: inputs of the model's own controls.
        streams: the graph.
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
        controls: Any,
        by_head: Any,
        prompt_length: Any,
        receivers: str | None = None,
    ) -> None:
        check_flag(operation, "by_head", by_head)
        self.operation, self.lm = operation, lm
        self.texts = read_pair(lm, clean, corrupted, operation)
        self.metric = make_metric(lm, metric, f"{operation} at 'metric'")
        self.bound = bind_row(lm, controls, self.texts[1], operation, prompt_length)
        self.streams = Streams(lm, operation, bool(by_head))
        self.receivers = self._receivers(receivers)
        runs = [self.streams.whole({**text.inputs(), **self.bound}) for text in self.texts]
        self.clean, self.base = runs
        clean_end, corrupted_end = (self.measure(self.streams.outputs(run))[0] for run in runs)
        self.ends = float(clean_end), float(corrupted_end)
        check_no_nan(self.ends, lm, operation)

    def measure(self, states: np.ndarray) -> np.ndarray:
        """Measure hidden states of last tokens, float[rows, hidden_dim]."""
        logits = predict(head_of(self.lm), states)
        measured = hosts.to_numpy(self.metric(ops.convert_to_tensor(logits)))
        return np.asarray(measured, "float32")

    def _receivers(self, receivers: str | None) -> list[Receiver]:
        streams = self.streams
        known = [Receiver(r.path, r.takes, r.heads, r) for r in streams.readers]
        known.append(Receiver(LOGITS, (streams.number_at(streams.last),), None, None))
        paths = [receiver.path for receiver in known]
        if receivers is not None:
            check_selector(receivers, self.operation, "receivers")
        picked = set(paths if receivers is None else select(receivers, paths))
        return [receiver for receiver in known if receiver.path in picked]

    def rated(self, rate: Rate) -> tuple[np.ndarray, list[str], list[str]]:
        """Rate the edges from each sender to each receiver.

        Returns:
            float32[senders, receivers], NaN where no edge is; names of senders and of receivers.
        """
        rows, senders = [], []
        for path in self.streams.written:
            names, written = self._sender(path)
            changed = self.streams.spread(self.base, path, written)
            parts = []
            for receiver in self.receivers:
                part = np.full((len(written), receiver.heads or 1), np.nan, "float32")
                if any(n in changed for n in receiver.takes):
                    part = rate(changed, receiver)
                    check_no_nan(part, self.lm, self.operation)
                parts.append(part)
            senders += names
            rows.append(np.concatenate(parts, axis=1))
        return np.concatenate(rows), senders, [n for r in self.receivers for n in r.names]

    def _sender(self, path: str) -> tuple[list[str], np.ndarray]:
        """Return what to call a sender, and what it writes as in the clean text.

        Returns:
            Names, and float[names, tokens, hidden_dim].
        """
        streams = self.streams
        if not streams.by_head or role_of(path) != "attention_output":
            return [path], streams.at(self.clean, path)
        heads = streams.at(self.clean, heads_of(path))[0]
        written = streams.heads_written(self.base, path, heads)
        return names_of(heads_of(path), len(written)), written


def names_of(path: str, heads: int | None) -> list[str]:
    """Return what to call the heads of a site, or the site itself."""
    return [path] if heads is None else [f"{path}[{head}]" for head in range(heads)]
