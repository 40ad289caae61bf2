"""The runs of an attribution graph: one forward, and backward for some features at a time."""

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import keras
import numpy as np

from backbone_surgery import hosts
from backbone_surgery.analysis.direct import (
    FreezeNorms,
    read_target,
    read_uncapped,
    refuse_nan,
)
from backbone_surgery.analysis.gradients import run_nudged
from backbone_surgery.analysis.linear import Coded, Linearize, transcoders_of
from backbone_surgery.analysis.question import (
    bind_row,
    check_finite,
    check_sum,
    derived,
    read_text,
)
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.opening.model import EditedBackbone, arrays_in_place
from backbone_surgery.opening.once import lora_settings, made_once
from backbone_surgery.opening.site import places

_OPERATION = "attribution_graph"
_NAME = "linear"
_METRIC = -1
"""Stands for the number of a transcoder where the metric is meant."""
AT_ONCE = 32
"""How many receivers are traced backwards in one run."""
_OFF = 0.01
"""From which share on a feature is another than its transcoder makes, and not rounded."""


class FeatureRuns:
    """A model, one text, and what stands in it.

    Attributes:
        question: the text.
        features: int32[features, 3], the block, the token and the number of each active feature.
        activations: float32[features].
        scores: float32[features], the same before they are cut off at a threshold.
        is_set: bool[features], whether a rewrite made the feature what it is.
        homes: int[features], the number of the sender that holds what its transcoder makes and no
            other sender does.
        metric: the metric of the text.
    """

    def __init__(
        self,
        lm: CachedCausalLM,
        text: Any,
        target: Any,
        controls: Mapping[str, Any] | None,
        prompt_length: int | None,
    ) -> None:
        self.question = read_text(lm, text, _OPERATION)
        check_sum(lm, _OPERATION)
        self.lm, self.ids = lm, read_target(lm, target, _OPERATION)
        self.coded = transcoders_of(places(lm.opened), _OPERATION)
        bound = bind_row(lm, controls, self.question, _OPERATION, prompt_length)
        self.model = derived(lm, FreezeNorms(of_heads=True), Linearize(_NAME))
        self.summands = list(self.model.report[-1].sites)
        self.inputs = {**self.question.inputs(), **bound}
        self._run()

    @property
    def count(self) -> int:
        """How many features are active."""
        return len(self.features)

    def names(self) -> list[str]:
        """Return the names of all senders."""
        names = [f"blocks.{b}.transcoder_latents[{f}] @ {t}" for b, t, f in self.features]
        coded = {f"blocks.{c.block}.mlp_output": error_of(c.block) for c in self.coded}
        paths = [coded.get(path, path) for path in self.summands]
        length = len(self.question.token_ids)
        return [*names, *(f"{path} @ {t}" for path in paths for t in range(length))]

    def edges_into(self, features: np.ndarray) -> np.ndarray:
        """Return the edges into `AT_ONCE` features at most, float32[n, senders].

        What a rewrite set is made by no sender.
        """
        index = {coded.block: i for i, coded in enumerate(self.coded)}
        ends = np.array([(index[b], t, f) for b, t, f in self.features[features]])
        return np.where(self.is_set[features, None], 0.0, self._edges(ends))

    def edges_into_logits(self) -> np.ndarray:
        """Return the edges into the metric, float32[senders]."""
        return self._edges(np.array([[_METRIC, 0, 0]]))[0]

    def _run(self) -> None:
        """Run the text forward, and keep what stands in it."""
        length = len(self.question.token_ids)
        if hosts.span(self.model):
            hosts.agree(self.model, _OPERATION, {"text": self.inputs})
        metric, scores, outputs = self._step("forward")(*self._arguments())
        self.metric = float(metric)
        if not np.isfinite(self.metric):
            refuse_nan(self.lm, self.inputs, _OPERATION)
        states = {name: hosts.to_numpy(x)[0] for name, x in outputs.items()}
        found, numbers = [], []
        for coded, (score, own) in zip(self.coded, scores, strict=True):
            features = states[f"features/{coded.block}"][:length]
            at = np.nonzero(features)
            found.append(np.stack([np.full(len(at[0]), coded.block), *at], axis=1))
            numbers.append([features[at], *(hosts.to_numpy(x)[0][at] for x in (score, own))])
        self.features = np.concatenate(found).astype("int32")
        self.activations, self.scores, own = np.concatenate(numbers, axis=1)
        far = np.abs(self.activations - own)
        self.is_set = far > _OFF * (np.abs(self.activations) + np.abs(own))
        self.homes = self.count + self.features[:, 1]
        for coded in self.coded:
            number = self.summands.index(f"blocks.{coded.block}.mlp_output")
            self.homes[self._of(coded)] += number * length
        sums = {path: states[f"summand/{path}"][:length] for path in self.summands}
        self._left = {path: np.array(x, "float32") for path, x in sums.items()}
        self._written = [self._take_out(coded, states) for coded in self.coded]

    def _of(self, coded: Coded) -> slice:
        """Return where the features of a transcoder are, which are in the order of tokens."""
        start, end = np.searchsorted(self.features[:, 0], [coded.block, coded.block + 1])
        return slice(int(start), int(end))

    def _take_out(self, coded: Coded, states: Mapping[str, np.ndarray]) -> np.ndarray:
        """Take what a transcoder makes out of what its MLP does, so that the error is left.

        Returns:
            What each active feature adds to the stream, float32[n, size].
        """
        mine, amount = self._of(coded), float(states[f"amount/{coded.block}"])
        rows = hosts.to_numpy(coded.decoder.weight)[self.features[mine, 2]]
        written = rows * (self.activations[mine] * amount)[:, None]
        left = self._left[f"blocks.{coded.block}.mlp_output"]
        np.subtract.at(left, self.features[mine, 1], written)
        left -= amount * hosts.to_numpy(coded.decoder.bias)
        if coded.decoder.settings["source_size"] is not None:
            read = np.asarray(states[f"source/{coded.block}"][: len(left)], "float32")
            left -= amount * (read @ hosts.to_numpy(coded.decoder.skip))
        return written

    def _edges(self, ends: np.ndarray) -> np.ndarray:
        """Return the edges into some features, `AT_ONCE` at most, or into the metric.

        Args:
            ends: int[n, 3], the number of the transcoder, or `_METRIC`; the token;
                the number of the feature.
        """
        count, length = len(ends), len(self.question.token_ids)
        padded = np.pad(ends, [(0, AT_ONCE - count), (0, 0)]).astype("int32")
        gradients = self._step("backward")(*self._arguments(), padded)
        by_path = {
            path: np.asarray(hosts.to_numpy(gradient)[:count, 0, :length], "float32")
            for path, gradient in zip(self.summands, gradients, strict=True)
        }
        edges = np.zeros((count, self.count), "float32")
        for coded, written in zip(self.coded, self._written, strict=True):
            mine, gradient = self._of(coded), by_path[f"blocks.{coded.block}.mlp_output"]
            ends = np.searchsorted(self.features[mine, 1], np.arange(length + 1))
            for token, (a, b) in enumerate(pairwise(ends)):
                edges[:, mine][:, a:b] = gradient[:, token] @ written[a:b].T
        left = [np.einsum("ntd,td->nt", by_path[path], self._left[path]) for path in self.summands]
        whole = np.concatenate([edges, *left], axis=1)
        check_finite(whole, self.lm, _OPERATION)
        return whole

    def _arguments(self) -> tuple[Any, ...]:
        return arrays_in_place(self.model.variables), self.inputs, self.ids

    def _step(self, name: str) -> Any:
        key = _OPERATION, name, lora_settings(self.model)
        make = partial(_compiled, self.model, self.coded, self.summands, name)
        return made_once(self.model, key, make)


def _compiled(model: EditedBackbone, coded: list[Coded], summands: list[str], name: str) -> Any:
    """Return the compiled function that runs the model forward, or gradients backward."""
    import jax
    import jax.numpy as jnp

    def run(nudges: list[Any], values: list[Any], inputs: Any, ids: Any) -> Any:
        def read(captures: dict[str, Any], last: Any) -> Any:
            metric = read_uncapped(model, last, ids)
            states = {k.partition("/")[2]: x for k, x in captures.items() if _is_own(k)}
            sources = [states[f"source/{c.block}"] for c in coded]
            scores = [c.encoder.score(x) for c, x in zip(coded, sources, strict=True)]
            scores = [(x, c.encoder.keep(x)) for c, x in zip(coded, scores, strict=True)]
            weights = [keras.ops.convert_to_tensor(c.encoder.weight) for c in coded]
            return (metric, sources), (scores, states, weights)

        return run_nudged(model, _NAME, nudges, values, inputs, read)

    def zeros(inputs: Any) -> list[Any]:
        shapes = {t.name: tuple(t.shape[2:]) for t in model.inputs}
        time = inputs["token_ids"].shape[1]
        return [jnp.zeros((1, time, *shapes[f"{_NAME}_{i}"])) for i in range(len(summands))]

    def forward(values: list[Any], inputs: Any, ids: Any) -> Any:
        (metric, _), (scores, states, _) = run(zeros(inputs), values, inputs, ids)
        return metric, scores, states

    def backward(values: list[Any], inputs: Any, ids: Any, ends: Any) -> Any:
        def from_zeros(nudges: list[Any]) -> Any:
            return run(nudges, values, inputs, ids)

        (metric, sources), pull, (*_, weights) = jax.vjp(from_zeros, zeros(inputs), has_aux=True)

        def one(end: Any) -> Any:
            which, token, feature = end
            columns = [jnp.where(which == i, w[:, feature], 0) for i, w in enumerate(weights)]
            # Of length 1, so that narrow floats hold what goes backward.
            size = jnp.sqrt(sum(jnp.sum(jnp.square(column)) for column in columns))
            size = jnp.where(size == 0, 1.0, size)
            at = [
                jnp.zeros_like(x).at[0, token].set((column / size).astype(x.dtype))
                for x, column in zip(sources, columns, strict=True)
            ]
            nudges = pull(((which == _METRIC).astype(metric.dtype), at))[0]
            return [size * nudge for nudge in nudges]

        return jax.vmap(one)(ends)

    return jax.jit(forward if name == "forward" else backward)


def error_of(block: int) -> str:
    """Return the name of what an MLP makes, and its transcoder does not."""
    return f"blocks.{block}.transcoder_error"


def _is_own(name: str) -> bool:
    return name.startswith(f"{_NAME}/")
