"""Circuits: how much of what a model does is left where only some of its edges are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backbone_surgery.analysis.edge_runs import EdgeRuns
from backbone_surgery.analysis.edges import Edges
from backbone_surgery.analysis.stream import EMBEDDINGS, Reader, heads_of
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.numbers import is_int

_OPERATION = "faithfulness"


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """What `faithfulness` returns.

    Attributes:
        counts: how many edges each circuit has.
        values: float32[circuits], the metric of each.
        clean: the metric of the clean text, in the whole model.
        corrupted: the metric of the corrupted text, in the whole model.
    """

    counts: list[int]
    values: np.ndarray
    clean: float
    corrupted: float

    @property
    def shares(self) -> np.ndarray:
        """How far from corrupted to clean each metric is: float32[circuits].

        A circuit may go too far, or the wrong way: below 0, or above 1.
        """
        return (self.values - self.corrupted) / np.float32(self.clean - self.corrupted)

    def __repr__(self) -> str:
        pairs = zip(self.counts, self.shares, strict=True)
        shares = ", ".join(f"{count}: {share:.4g}" for count, share in pairs)
        return f"Faithfulness(shares by edges left {{{shares}}})"


def faithfulness(
    lm: CachedCausalLM,
    clean: Any,
    corrupted: Any,
    metric: Any,
    edges: Edges,
    circuits: Sequence[int | Sequence[Any]],
    controls: Mapping[str, Any] | None = None,
    prompt_length: int | None = None,
) -> Faithfulness:
    """Run circuits: models of which some edges are left, those of the greatest values, say.

    In a circuit each receiver reads, along the edges that are left, what the circuit writes of the
    clean text, and along all others what the model writes of the corrupted one. With all edges
    that is the model on the clean text, with none on the corrupted one. Edges count where a way
    along others that are left joins them to the embeddings and to the logits. What is not sent,
    such as the embeddings for each layer of Gemma 3n and 4, and by head the gates and decays of
    Qwen 3.5 and RWKV-7, stays that of the corrupted text.

    Source: circuits of edges, Conmy et al. 2023, https://arxiv.org/abs/2304.14997; faithfulness as
    a share of what separates the texts, Hanna et al. 2024, https://arxiv.org/abs/2403.17806.

    Args:
        lm: the model, edited or not.
        clean: a text, a string (without a preprocessor, token ids): the one of `edges`, or another.
        corrupted: another, of as many tokens.
        metric: as for `patch_grid`: a token, a pair (right, wrong), or a function.
        edges: what `edge_attribution` or `edge_patching` returned, of all receivers. By head if
            they are.
        circuits: what to leave, for each circuit: how many edges, those of the greatest values, of
            either sign; or which, as `[(sender, receiver), ...]`, with or without their values.
        controls: for the controls of `lm`'s own rewrites.
        prompt_length: how many tokens of each text are its prompt, for edits of generated tokens;
            all by default.

    Returns:
        `Faithfulness`.

    Raises:
        SurgeryError: bad input, edges of another model or of some receivers alone, texts of
            different lengths or with the same metric, or NaN or Inf.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> asked = lm, [1, 2, 3], [1, 4, 3], (5, 6)
        >>> edges = bs.edge_attribution(*asked)
        >>> bs.faithfulness(*asked, edges, circuits=[0, 15, [("embeddings", "logits")]])
        Faithfulness(shares by edges left {0: 0, 15: 1, 1: ...})
    """
    read = _read_circuits(edges, circuits)
    runs = EdgeRuns(
        _OPERATION,
        lm,
        clean,
        corrupted,
        metric,
        receivers=None,
        controls=controls,
        by_head=any("[" in name for name in edges.senders),
        prompt_length=prompt_length,
    )
    _check_edges(runs, edges)
    values = [_Circuit(runs, kept).measured() for kept in read]
    counts = [int(kept.sum()) for kept in read]
    return Faithfulness(counts, np.array(values, "float32"), *runs.ends)


def _read_circuits(edges: Any, circuits: Any) -> list[np.ndarray]:
    """Read which edges each circuit leaves, bool[senders, receivers]."""
    if not isinstance(edges, Edges):
        raise SurgeryError(
            f"{_OPERATION} at 'edges': expected `Edges`. Received {shown(edges)}. Pass what "
            "`edge_attribution` or `edge_patching` returned."
        )
    order = edges.order()
    known = {(edges.senders[s], edges.receivers[r]): (s, r) for s, r in order}
    is_list = np.iterable(circuits) and not isinstance(circuits, str)
    circuits = list(circuits) if is_list else circuits
    listed = [_chosen(circuit, order, known) for circuit in circuits] if is_list else []
    chosen = [circuit for circuit in listed if circuit is not None]
    if not listed or len(chosen) < len(listed):
        wrong = next((circuits[i] for i, found in enumerate(listed) if found is None), circuits)
        raise SurgeryError(
            f"{_OPERATION} at 'circuits': expected ints from 0 to {len(order)}, as many edges as "
            "there are, or lists of edges, each (sender, receiver) as `edges.top()` names them. "
            f"Received {shown(wrong)}. Pass [10, edges.circuit(100)], say."
        )
    kept = np.zeros((len(chosen), *edges.values.shape), bool)
    for one, circuit in zip(kept, chosen, strict=True):
        for edge in circuit:
            one[edge] = True
    return [*kept]


def _chosen(circuit: Any, order: list[Any], known: Mapping[Any, Any]) -> list[Any] | None:
    """Return the indices of the edges of a circuit; `None` if they are none."""
    if is_int(circuit):
        return order[:circuit] if 0 <= circuit <= len(order) else None
    if isinstance(circuit, str) or not np.iterable(circuit):
        return None
    try:
        edges = [tuple(edge) for edge in circuit]
        named = [edge[:2] for edge in edges if len(edge) in (2, 3)]
        return [known[edge] for edge in named] if len(named) == len(edges) else None
    except (KeyError, TypeError):
        return None


def _check_edges(runs: EdgeRuns, edges: Edges) -> None:
    senders, receivers = runs.names()
    is_known = (edges.senders, edges.receivers) == (senders, receivers)
    if not is_known or edges.values.shape != (len(senders), len(receivers)):
        raise SurgeryError(
            f"{_OPERATION} at 'edges': expected those of this model, {len(senders)} senders x "
            f"{len(receivers)} receivers. Received {edges!r}. Leave `receivers` out where you ask "
            "for them."
        )
    if runs.ends[0] == runs.ends[1]:
        raise SurgeryError(
            f"{_OPERATION}: expected two texts that the metric tells apart. Received "
            f"{runs.ends[0]} of both. Choose other texts or another metric."
        )


class _Circuit:
    """A run in which some edges alone carry what the clean text has.

    Args:
        runs: the texts.
        kept: bool[senders, receivers], the edges.
    """

    def __init__(self, runs: EdgeRuns, kept: np.ndarray) -> None:
        self._runs, self._streams, self._base = runs, runs.streams, runs.base
        _, self._rows, self._columns = runs.table()
        self._kept = kept
        number = self._streams.number(EMBEDDINGS)
        self._made = {number: self._streams.at(runs.clean, EMBEDDINGS)}

    def measured(self) -> float:
        """Return the metric."""
        for reader in self._streams.readers:
            self._made[reader.number] = self._read(reader)
        return float(self._runs.measure(self._made[self._streams.readers[-1].number])[0])

    def _read(self, reader: Reader) -> np.ndarray:
        """Return what a reader makes in the circuit, one row."""
        kept = self._kept[:, self._columns[reader.path]]
        sent = {
            self._streams.number(path): self._sent(path, kept[rows].T)
            for path, rows in self._rows.items()
            if kept[rows].any()
        }
        base = self._base[reader.number]
        changed = self._streams.spread(self._base, sent)
        made = self._streams.read(reader.number, self._base, changed)
        if made is None or reader.heads is None:
            return base if made is None else made
        heads = np.arange(reader.heads)  # each of its own row
        return np.moveaxis(made[heads, :, heads], 0, 1)[None]

    def _sent(self, path: str, kept: np.ndarray) -> np.ndarray:
        """Return what is written for each head of a reader, float[rows, tokens, hidden_dim].

        Args:
            path: of what is written.
            kept: bool[rows, senders], whether the writing, or each head of it, is the circuit's.
        """
        heads = self._streams.has_heads(path)
        number = self._streams.number(heads_of(path) if heads else path)
        if number not in self._made:
            self._made[number] = self._heads(number)
        chosen = kept[:, None, :, None] if heads else kept[:, :, None]
        written = np.where(chosen, self._made[number], self._base[number])
        return self._streams.heads_written(self._base, path, written) if heads else written

    def _heads(self, number: int) -> np.ndarray:
        """Return what heads put out of the queries, keys and values of the circuit."""
        read = {
            reader.number: self._made[reader.number]
            for reader in self._streams.readers
            if reader.heads is not None and reader.number in self._made
        }
        changed = self._streams.spread(self._base, read)
        made = self._streams.read(number, self._base, changed)
        return self._base[number] if made is None else made
