"""Attribution graph: which features of transcoders act on which later ones, and on the logits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from backbone_surgery.analysis.feature_runs import AT_ONCE, FeatureRuns, error_of
from backbone_surgery.analysis.ranking import ranked
from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.request import check_backend
from backbone_surgery.numbers import check_count, read_number

LOGITS = "logits"


@dataclass(frozen=True, eq=False)
class AttributionGraph:
    """What `attribution_graph` returns.

    Attributes:
        values: float32[senders, receivers], by how much the receiver is greater because of the
            sender, by ways that lead through no other feature. Zero for a receiver that a rewrite
            set, such as a `Clamp`.
        senders: what adds to the residual stream at a token: features as
            `blocks.3.transcoder_latents[7] @ 5`, at token 5; `embeddings @ 5`;
            `blocks.3.transcoder_error @ 5`, what an MLP makes and its transcoder does not, with the
            features that were left out; and `blocks.3.mlp_output @ 5` of a block without a
            transcoder, or `per_layer_output` of Gemma 4.
        receivers: the features, in the same order, before they are cut off at a threshold; and
            `logits`.
        features: int32[features, 3], the block, the token and the number of each feature.
        activations: float32[features].
        rest: float32[receivers], what receivers have of no sender: biases.
        metric: the metric of the text.
        tokens: labels of the text's tokens.
        active: how many features are active in the text.
    """

    values: np.ndarray
    senders: list[str]
    receivers: list[str]
    features: np.ndarray
    activations: np.ndarray
    rest: np.ndarray
    metric: float
    tokens: list[str]
    active: int

    def __repr__(self) -> str:
        size = f"{len(self.features):,} of {self.active:,} active features"
        return f"AttributionGraph({size}; metric {self.metric:.4g}, explained {self.explained:.2f})"

    @cached_property
    def influence(self) -> np.ndarray:
        """float64[senders], the share of each sender in the metric, directly and through features.

        What senders give a receiver is divided up by magnitude, so that the shares of those that
        receive nothing, such as embeddings and errors, add up to 1.
        """
        shares = _shares(self.values.astype("float64")).T
        order = np.roll(np.arange(len(shares)), 1)  # the metric first
        return _influence(shares[order], np.arange(len(self.features)))

    @cached_property
    def shares(self) -> np.ndarray:
        """float64[senders, receivers], the influence of each edge.

        It is the share of what goes into the receiver, times the influence of the receiver.
        """
        return _shares(self.values.astype("float64")) * np.append(
            self.influence[: len(self.features)], 1.0
        )

    @property
    def explained(self) -> float:
        """The influence of the embeddings; the others are errors, or set by a rewrite.

        It is the replacement score of Ameisen et al. Features that were left out count as errors,
        so it grows with the number of those that are traced.
        """
        is_embedding = [name.startswith("embeddings") for name in self.senders]
        return float(self.influence[is_embedding].sum())

    def top(self, count: int = 10) -> list[tuple[str, str, float]]:
        """Return the edges of the greatest influence, with their values.

        Args:
            count: how many, at most.

        Raises:
            SurgeryError: `count` is no positive int.
        """
        check_count("AttributionGraph.top", "count", count, "edges")
        cells = (cell for cell in islice(ranked(self.shares), int(count)) if self.shares[cell] > 0)
        return [(self.senders[s], self.receivers[r], float(self.values[s, r])) for s, r in cells]

    def pruned(self, share: float = 0.8) -> "AttributionGraph":
        """Return the graph of the features that have most of the influence of all.

        The others become a part of the error of their transcoder.

        Args:
            share: of the influence of all features, over 0 and at most 1.

        Raises:
            SurgeryError: `share` is no such number.
        """
        number = read_number(share)
        if number is None or not 0 < number <= 1:
            raise SurgeryError(
                f"AttributionGraph.pruned at 'share': expected a number over 0, at most 1. "
                f"Received {share!r}. Pass 0.8, say."
            )
        count = len(self.features)
        influence = self.influence[:count]
        order = np.argsort(-influence, kind="stable")
        before = np.cumsum(influence[order]) - influence[order]
        kept = np.sort(order[before < number * influence.sum()])
        senders = np.concatenate([kept, np.arange(count, len(self.senders))])
        receivers = np.append(kept, count)
        numbers = {name: i for i, name in enumerate(self.senders)}
        homes = np.array([numbers[f"{error_of(b)} @ {t}"] for b, t, _ in self.features])
        return replace(
            self,
            values=_left_out(self.values[:, receivers], homes, kept),
            senders=[self.senders[i] for i in senders],
            receivers=[self.receivers[i] for i in receivers],
            features=self.features[kept],
            activations=self.activations[kept],
            rest=self.rest[receivers],
        )


def _left_out(values: np.ndarray, homes: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return the edges of fewer features: those of the others go into errors.

    Args:
        values: float[senders, receivers], the features first.
        homes: int[features], the number of the sender that each feature goes into.
        kept: int[n], the features that stay.
    """
    lost = np.delete(np.arange(len(homes)), kept)
    whole = values[len(homes) :].astype("float32")
    np.add.at(whole, homes[lost] - len(homes), values[lost])
    return np.concatenate([values[kept], whole])


def _shares(values: np.ndarray) -> np.ndarray:
    """Return magnitudes of float[senders, receivers] such that those of each receiver add to 1."""
    sizes = np.abs(values)
    return sizes / np.maximum(sizes.sum(axis=0), 1e-30)


def _influence(shares: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Return the influence of each sender on the metric, float[senders].

    Args:
        shares: float[receivers, senders], of what goes into the metric, and into features.
        features: int[receivers - 1], which senders these features are.
    """
    direct, into = shares[0], shares[1:]
    between = into[:, features]
    last = own = direct[features]
    while last.any():  # no feature acts on its own block: the ways end
        last = last @ between
        own = own + last
    return direct + own @ into


def attribution_graph(
    lm: CachedCausalLM,
    text: Any,
    target: Any,
    max_features: int = 1024,
    controls: Mapping[str, Any] | None = None,
    prompt_length: int | None = None,
) -> AttributionGraph:
    """Trace a prediction back through the features of transcoders to the tokens of a text.

    Where attention patterns and the scales of norms are held fast, the residual stream is a sum of
    embeddings and of what features write; and a feature of a later block, before it is cut off at
    its threshold, is a sum of what it reads of that. Each summand is an edge.

    The model has a `Transcoder` in some of its blocks, in all of them best: with `error=True` the
    graph is of the model itself, and otherwise of the model of transcoders. An MLP without one is
    unexplained altogether. A transcoder writes into its own block alone. Other edits of the stream
    that are not linear, such as a `SparseAutoencoder` without `error`, are taken to first order.

    Of a long text there are more active features than can be traced. Those of the greatest
    influence are taken, step by step from the logits backwards.

    Source: Ameisen et al. 2025, "Circuit Tracing: Revealing Computational Graphs in Language
    Models", https://transformer-circuits.pub/2025/attribution-graphs/methods.html.

    Args:
        lm: the model. Needs the JAX backend of Keras.
        text: a string (without a preprocessor, token ids).
        target: a token, for its logit, or a pair of tokens (right, wrong), for the difference;
            before any soft cap. In a pair what raises all logits does not count.
        max_features: how many features are traced, at most.
        controls: for the controls of `lm`'s own rewrites.
        prompt_length: how many tokens of the text are its prompt, for edits of generated tokens;
            all by default.

    Returns:
        An `AttributionGraph`.

    Raises:
        SurgeryError: bad input, another backend, a model without transcoders, or NaN or Inf.
    """
    check_backend("attribution_graph")
    check_count("attribution_graph", "max_features", max_features, "features")
    runs = FeatureRuns(lm, text, target, controls, prompt_length)
    most = min(int(max_features), runs.count)
    first = runs.edges_into_logits()
    rows = np.empty((1 + most, len(first)), "float32")
    shares = np.empty_like(rows)
    rows[0], shares[0] = first, _shares(first)
    chosen = np.zeros(0, "int64")
    while len(chosen) < most:
        done = 1 + len(chosen)
        influence = _influence(shares[:done], chosen)
        influence[chosen] = -1.0
        order = np.argsort(-influence[: runs.count], kind="stable")
        best = order[: min(max(most // 8, 1), AT_ONCE, most - len(chosen))]
        new = slice(done, done + len(best))
        rows[new] = runs.edges_into(best)
        shares[new] = _shares(rows[new].T).T
        chosen = np.concatenate([chosen, best])
    return _graph(runs, chosen, rows)


def _graph(runs: FeatureRuns, chosen: np.ndarray, rows: np.ndarray) -> AttributionGraph:
    """Put the graph of the chosen features together."""
    order = np.argsort(chosen, kind="stable")
    kept = chosen[order]
    values = np.concatenate([rows[1:][order], rows[:1]]).T
    senders = np.concatenate([kept, np.arange(runs.count, values.shape[0])])
    names = runs.names()
    totals = np.append(runs.scores[kept], runs.metric)
    values = _left_out(values, runs.homes, kept)
    return AttributionGraph(
        values,
        [names[i] for i in senders],
        [*(names[i] for i in kept), LOGITS],
        runs.features[kept],
        runs.activations[kept],
        (totals - values.sum(axis=0, dtype="float64")).astype("float32"),
        runs.metric,
        runs.question.labels,
        runs.count,
    )
