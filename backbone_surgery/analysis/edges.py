"""Edges: what one part of a model does to the prediction by way of one other part, directly."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backbone_surgery.analysis.edge_runs import EdgeRuns
from backbone_surgery.analysis.ranking import ranked
from backbone_surgery.analysis.runs import batches
from backbone_surgery.analysis.stream import EMBEDDINGS, LOGITS, Reader, exchange
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.request import check_backend
from backbone_surgery.numbers import check_count, check_flag


@dataclass(frozen=True, eq=False)
class Edges:
    """What `edge_attribution` and `edge_patching` return.

    Attributes:
        values: float32[senders, receivers], by how much the metric of the corrupted text changes
            if the receiver reads what the sender writes in the clean text; NaN where no edge is.
        senders: what writes to the residual stream: paths of sites, heads as
            `blocks.0.head_outputs[3]`.
        receivers: what reads it, by the paths of what is made of it, heads as
            `blocks.1.query[0]`, and `logits`.
        feeds: bool[receivers, senders], whether what the receiver makes is what the sender writes,
            or goes into it: a query, key or value into a head.
        clean: the metric of the clean text.
        corrupted: the metric of the corrupted text.
        is_exact: whether each edge was patched, and not attributed to by gradients.
    """

    values: np.ndarray
    senders: list[str]
    receivers: list[str]
    feeds: np.ndarray
    clean: float
    corrupted: float
    is_exact: bool

    def __repr__(self) -> str:
        size = f"{len(self.senders)} senders x {len(self.receivers)} receivers"
        return f"Edges({size}; clean {self.clean:.4g}, corrupted {self.corrupted:.4g})"

    def top(self, count: int = 10) -> list[tuple[str, str, float]]:
        """Return the edges of the greatest values, of either sign.

        Args:
            count: how many, at most.

        Returns:
            A sender, a receiver and the value for each, the greatest first.

        Raises:
            SurgeryError: `count` is no positive int.
        """
        check_count("Edges.top", "count", count, "edges")
        return self._named(self.order()[: int(count)])

    def circuit(self, count: int = 100) -> list[tuple[str, str, float]]:
        """Return those of the edges of the greatest values that join.

        That is, those on a way along such edges from the embeddings to the logits. The others carry
        nothing: without them `faithfulness` is the same.

        Args:
            count: among how many, at most.

        Returns:
            As `top`.

        Raises:
            SurgeryError: `count` is no positive int, or these are edges of some receivers alone.
        """
        check_count("Edges.circuit", "count", count, "edges")
        is_fed = self.feeds.any(axis=0) | (np.array(self.senders) == EMBEDDINGS)
        if LOGITS not in self.receivers or not is_fed.all():
            raise SurgeryError(
                f"Edges.circuit: expected edges of all receivers. Received {self!r}. Leave "
                "`receivers` out where you ask for them."
            )
        order = self.order()[: int(count)]
        kept = np.zeros(self.values.shape, bool)
        kept[tuple(np.transpose(order))] = True
        joined = _joined(kept, self.feeds, self.senders.index(EMBEDDINGS))
        return self._named([edge for edge in order if joined[edge]])

    @staticmethod
    def mean(edges: "Sequence[Edges]") -> "Edges":
        """Return the mean of the edges of several pairs of texts in the same model.

        Args:
            edges: those of each pair, one or more.

        Raises:
            SurgeryError: no edges, or edges between others.
        """
        listed = [*edges] if np.iterable(edges) else []
        if not listed or not all(isinstance(one, Edges) for one in listed):
            raise SurgeryError(
                f"Edges.mean: expected a list of `Edges`. Received {shown(edges)}. Pass what "
                "`edge_attribution` or `edge_patching` returned for each pair of texts."
            )
        first = listed[0]
        for one in listed:
            if (one.senders, one.receivers) != (first.senders, first.receivers):
                raise SurgeryError(
                    f"Edges.mean: expected edges between the same senders and receivers. Received "
                    f"{first!r} and {one!r}. Ask for them of one model, with the same options."
                )
        return replace(
            first,
            values=np.mean([one.values for one in listed], axis=0, dtype="float64").astype("f4"),
            clean=float(np.mean([one.clean for one in listed])),
            corrupted=float(np.mean([one.corrupted for one in listed])),
            is_exact=all(one.is_exact for one in listed),
        )

    def _named(self, edges: list[tuple[int, int]]) -> list[tuple[str, str, float]]:
        return [(self.senders[s], self.receivers[r], float(self.values[s, r])) for s, r in edges]

    def order(self) -> list[tuple[int, int]]:
        """Return the edges as indices of their senders and receivers, as `top` orders them."""
        cells = ranked(np.abs(np.nan_to_num(self.values)))
        return [cell for cell in cells if not np.isnan(self.values[cell])]


def edge_attribution(
    lm: CachedCausalLM,
    clean: Any,
    corrupted: Any,
    metric: Any,
    receivers: str | None = None,
    controls: Mapping[str, Any] | None = None,
    by_head: bool = False,
    steps: int = 1,
    prompt_length: int | None = None,
) -> Edges:
    """Attribute the difference of two texts to the edges of the model's graph, by gradients.

    An edge leads from what writes to the residual stream, the sender, to what reads it later, the
    receiver. Its value is to first order what `edge_patching` measures: the change of what is
    written, times the gradient of the metric with respect to what the receiver reads.

    Source: edge attribution patching, Syed et al. 2023, https://arxiv.org/abs/2310.10348; with
    `steps` the gradients are integrated along a line of embeddings, from those of the corrupted
    text towards those of the clean one, Hanna et al. 2024, https://arxiv.org/abs/2403.17806.

    Args:
        lm: the model, edited or not. Needs the JAX backend of Keras.
        clean: a text, a string (without a preprocessor, token ids).
        corrupted: another, of as many tokens.
        metric: as for `patch_grid`: a token, a pair (right, wrong), or a function.
        receivers: site selector, as of `edge_patching`; all by default.
        controls: for the controls of `lm`'s own rewrites.
        by_head: whether heads of attention send, and its queries, keys and values receive, head by
            head. What a block computes of the stream apart from them, such as a gate of attention,
            is no receiver then.
        steps: how many points of the line to take gradients at, the corrupted text first, equally
            far from each other, the clean text left out. One takes them at the corrupted text
            alone, where a metric may be flat.
        prompt_length: how many tokens of each text are its prompt, for edits of generated tokens;
            all by default.

    Returns:
        `Edges`.

    Raises:
        SurgeryError: bad input, another backend, texts of different lengths, no such receivers,
            blocks without the sites, or NaN or Inf.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> bs.edge_attribution(lm, [1, 2, 3], [1, 4, 3], metric=(5, 6))  # doctest: +ELLIPSIS
        Edges(5 senders x 5 receivers; clean ..., corrupted ...)
    """
    check_count("edge_attribution", "steps", steps, "points")
    check_backend("edge_attribution")
    runs = EdgeRuns(
        "edge_attribution",
        lm,
        clean,
        corrupted,
        metric,
        receivers=receivers,
        controls=controls,
        by_head=by_head,
        prompt_length=prompt_length,
    )
    values = _attributed(runs, int(steps))
    return Edges(values, *runs.names(), runs.feeds(), *runs.ends, False)


def edge_patching(
    lm: CachedCausalLM,
    clean: Any,
    corrupted: Any,
    metric: Any,
    receivers: str | None = None,
    controls: Mapping[str, Any] | None = None,
    by_head: bool = False,
    batch_size: int = 32,
    prompt_length: int | None = None,
    hold_mlps: bool = True,
) -> Edges:
    """Patch every edge of the model's graph, one at a time.

    The corrupted text is run, and all that writes to the residual stream stays as it is there, but
    for the sender, which writes what it writes in the clean text. Only the receiver reads that.
    What it makes of it is put into the corrupted text, which then goes on to the prediction.

    Source: path patching, Wang et al. 2022, https://arxiv.org/abs/2211.00593, and Goldowsky-Dill et
    al. 2023, https://arxiv.org/abs/2304.05969, of paths of one edge: MLPs in between are held fast,
    too, unless `hold_mlps=False`, as Wang et al. do it. `edge_attribution` takes no pass for each
    edge; this takes a pass from the receiver on for each edge, so choose receivers in a large
    model.

    Args:
        lm: the model, edited or not.
        clean: a text, a string (without a preprocessor, token ids).
        corrupted: another, of as many tokens.
        metric: as for `patch_grid`: a token, a pair (right, wrong), or a function.
        receivers: site selector of what receivers make, such as `blocks.9.query`,
            `blocks.*.mlp_output`, or `logits`; all by default.
        controls: for the controls of `lm`'s own rewrites.
        by_head: as of `edge_attribution`.
        batch_size: how many edges to run at once, at most.
        prompt_length: how many tokens of each text are its prompt, for edits of generated tokens;
            all by default.
        hold_mlps: whether MLPs between the two write what they write in the corrupted text. If not,
            they hand on what reaches them, and attention alone is held. Then a way by an MLP is
            part of two edges, and those of a sender make up more than it does.

    Returns:
        `Edges`.

    Raises:
        SurgeryError: bad input, texts of different lengths, no such receivers, blocks without the
            sites, or NaN or Inf.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> texts = [1, 2, 3], [1, 4, 3]
        >>> bs.edge_patching(lm, *texts, (5, 6), "blocks.1.query", by_head=True).receivers
        ['blocks.1.query[0]', 'blocks.1.query[1]']
    """
    check_count("edge_patching", "batch_size", batch_size, "edges")
    check_flag("edge_patching", "hold_mlps", hold_mlps)
    runs = EdgeRuns(
        "edge_patching",
        lm,
        clean,
        corrupted,
        metric,
        receivers=receivers,
        controls=controls,
        by_head=by_head,
        prompt_length=prompt_length,
    )
    values = _patched(runs, int(batch_size), bool(hold_mlps))
    return Edges(values, *runs.names(), runs.feeds(), *runs.ends, True)


def _joined(kept: np.ndarray, feeds: np.ndarray, first: int) -> np.ndarray:
    """Return which edges are on a way from a sender to the last receiver.

    Args:
        kept: bool[senders, receivers], the edges.
        feeds: as in `Edges`.
        first: the sender.

    Returns:
        bool[senders, receivers].
    """
    senders, receivers = (np.zeros(size, bool) for size in kept.shape)
    senders[first] = receivers[-1] = True
    while True:
        joined = kept & senders[:, None] & receivers
        onward = senders | (kept & senders[:, None]).any(axis=0) @ feeds
        backward = receivers | feeds @ (kept & receivers).any(axis=1)
        if (onward == senders).all() and (backward == receivers).all():
            return joined
        senders, receivers = onward, backward


def _attributed(runs: EdgeRuns, steps: int) -> np.ndarray:
    """Return the edges by gradients, the mean over some points of the line between the texts.

    Returns:
        float32[senders, receivers], NaN where no edge is.
    """
    streams = runs.streams
    ends = [np.asarray(streams.at(r, EMBEDDINGS), "float32") for r in (runs.base, runs.clean)]
    moves = {path: _move(runs, path) for path in runs.senders}
    values, rows, columns = runs.table()
    for step in range(steps):
        embedded = ends[0] + step / steps * (ends[1] - ends[0])
        run = streams.after(runs.base, EMBEDDINGS, embedded) if step else runs.base
        gradients = streams.gradients(run, runs.slope(streams.logits(run)))
        for receiver in runs.receivers:
            pulled = streams.pulled(run, receiver, gradients[receiver.path])
            for path, gradient in pulled.items():
                part = moves[path] @ gradient.reshape(len(gradient), -1).T / steps
                runs.check(part)
                cell = rows[path], columns[receiver.path]
                values[cell] = part if step == 0 else values[cell] + part
    return values


def _move(runs: EdgeRuns, path: str) -> np.ndarray:
    """Return by how much what is written changes, float32[names, tokens * hidden_dim]."""
    base = np.asarray(runs.streams.at(runs.base, path), "float32")
    move = np.asarray(runs.sent(path), "float32") - base
    return move.reshape(len(move), -1)


def _patched(runs: EdgeRuns, batch_size: int, hold_mlps: bool) -> np.ndarray:
    """Return the edges, each by a pass; see `_attributed`."""
    values, rows, columns = runs.table()
    for path in runs.senders:
        sent = {runs.streams.number(path): runs.sent(path)}
        changed = runs.streams.spread(runs.base, sent, hold_mlps)
        for receiver in runs.receivers:
            made = runs.streams.read(receiver.number, runs.base, changed)
            if made is not None:
                part = _measured(runs, receiver, made, batch_size)
                values[rows[path], columns[receiver.path]] = part
    return values


def _measured(runs: EdgeRuns, receiver: Reader, made: np.ndarray, batch_size: int) -> np.ndarray:
    """Return by how much the metric changes if a receiver makes something else.

    Args:
        runs: the runs.
        receiver: the receiver.
        made: what it makes, float[rows, ...].
        batch_size: how many passes to run at once, at most.

    Returns:
        float32[rows, heads].
    """
    streams, base = runs.streams, runs.base
    if receiver.path == LOGITS:
        return runs.measure(made)[:, None] - runs.ends[1]
    if receiver.heads is not None:
        made = exchange(streams.at(base, receiver.path), made)
    measured: list[float] = []
    for part, padded in batches(range(len(made)), min(batch_size, len(made))):
        logits = streams.logits(streams.after(base, receiver.path, made[padded]))
        measured.extend(runs.measure(logits)[: len(part)])
    return np.array(measured, "float32").reshape(-1, receiver.heads or 1) - runs.ends[1]
