"""Gradients of a number that a model computes of a text, with respect to activations at sites."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph, hosts
from backbone_surgery.analysis.question import (
    Metric,
    Text,
    TokenLogits,
    derived,
    last_of,
)
from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.request import check_backend
from backbone_surgery.opening.logits import logits_of
from backbone_surgery.opening.model import EditedBackbone, arrays_in_place
from backbone_surgery.opening.once import lora_settings, made_once
from backbone_surgery.opening.site import Place
from backbone_surgery.rewriting import Capture, Rewrite, SiteRewrite, Surgery

_NAME = "nudge"

Read = Callable[[EditedBackbone, Any, Any], Any]
"""Maps a model, the last token's hidden states float[1, hidden_dim] and token ids to a number."""


@dataclass(frozen=True)
class Gradients:
    """What stands at sites, and the gradients of a number with respect to it.

    Attributes:
        value: the number.
        sites: paths of the sites.
        activations: for each of them float32[tokens, ...].
        gradients: likewise.
    """

    value: float
    sites: list[str]
    activations: list[np.ndarray]
    gradients: list[np.ndarray]


def take_gradients(
    lm: CachedCausalLM,
    operation: str,
    questions: Sequence[Text],
    bound: Mapping[str, np.ndarray],
    at: tuple[str, ...],
    read: Read,
    tokens: Any,
    rewrites: tuple[Rewrite, ...] = (),
    alone: bool = False,
    reused: bool = True,
) -> list[Gradients]:
    """Run each of some texts forward and backward, by one program.

    Args:
        lm: the model. Needs the JAX backend of Keras.
        operation: what asks, for errors.
        questions: the texts, of as many tokens.
        bound: the inputs of the model's own controls.
        at: selectors of the sites.
        read: the number.
        tokens: token ids, which are handed to `read`: others compile nothing new.
        rewrites: what is done to the model first.
        alone: whether each site is taken as if it did not depend on the others.
        reused: whether `read` is the same function each time, so that its program is kept.

    Raises:
        SurgeryError: another backend, or a pattern among the sites.
    """
    check_backend(operation)
    nudge = Nudge(at, operation, alone)
    model = derived(lm, *rewrites, Capture(at=at, name=_NAME), nudge)
    sites = list(model.report[-1].sites)
    key = operation, lora_settings(model)
    make = partial(_step, model, sites, read)
    step = made_once(model, key, make) if reused else make()
    shapes = {t.name: tuple(t.shape[2:]) for t in model.inputs}
    sizes = [(1, questions[0].width, *shapes[f"{_NAME}_{i}"]) for i in range(len(sites))]
    added = [np.zeros(size, "float32") for size in sizes]
    found = []
    for question in questions:
        inputs = {**question.inputs(), **bound}
        arguments = (added, arrays_in_place(model.variables), inputs, tokens)
        if hosts.span(model):
            parts = {"text": inputs, "model or target": step.lower(*arguments).as_text()}
            hosts.agree(model, operation, parts)
        (value, captured), gradients = step(*arguments)
        rows = (_rows(arrays, len(question.token_ids)) for arrays in (captured, gradients))
        found.append(Gradients(float(value), sites, *rows))
    return found


def metric_gradients(
    lm: CachedCausalLM,
    operation: str,
    questions: Sequence[Text],
    bound: Mapping[str, np.ndarray],
    at: tuple[str, ...],
    measure: Metric,
    where: str,
) -> list[Gradients]:
    """Take gradients of a metric of the next token of each text, named `where` in errors."""
    read, tokens = _of(measure, where), []
    if isinstance(measure, TokenLogits):  # other tokens compile nothing new
        read, tokens = _of_tokens, measure.ids
    reused = read is _of_tokens
    return take_gradients(lm, operation, questions, bound, at, read, tokens, reused=reused)


def _of_tokens(model: EditedBackbone, last: Any, tokens: Any) -> Any:
    return TokenLogits(tokens)(logits_of(model.token_embedding, last))[0]


def _of(measure: Metric, where: str) -> Read:
    """Return what computes a metric of one's own, which must have gradients."""

    def read(model: EditedBackbone, last: Any, tokens: Any) -> Any:
        return differentiable(measure, logits_of(model.token_embedding, last), where)

    return read


def differentiable(measure: Metric, logits: Any, where: str) -> Any:
    """Measure logits float[1, vocabulary]; refuse a metric without gradients, named `where`."""
    value = measure(logits)[0]
    if not keras.backend.is_float_dtype(value.dtype):
        raise SurgeryError(
            f"{where}: expected a function that returns floats. Received one that returns "
            f"{value.dtype}. Return logits, or what is computed from them."
        )
    return value


def _rows(arrays: list[Any], length: int) -> list[np.ndarray]:
    return [np.asarray(hosts.to_numpy(array)[0, :length], "float32") for array in arrays]


def _step(model: EditedBackbone, sites: list[str], read: Read) -> Any:
    """Return the compiled function that gives a number, activations and gradients."""
    import jax

    def run(nudges: list[Any], values: list[Any], inputs: Any, tokens: Any) -> Any:
        def take(captures: dict[str, Any], last: Any) -> Any:
            return read(model, last, tokens), [captures[f"{_NAME}/{site}"] for site in sites]

        return run_nudged(model, _NAME, nudges, values, inputs, take)

    return jax.jit(jax.value_and_grad(run, has_aux=True))


def run_nudged(
    model: EditedBackbone,
    name: str,
    nudges: list[Any],
    values: list[Any],
    inputs: Any,
    read: Callable[[dict[str, Any], Any], Any],
) -> Any:
    """Run a model as a function of what is added at some sites, and read what it gives.

    Args:
        model: with inputs `name_0`, ..., one for each of `nudges`, and with captures.
        name: what these inputs begin with.
        nudges: what is added.
        values: those of the model's variables.
        inputs: the others.
        read: maps captures by name, and the last token's hidden states, to what is returned.
    """
    nudged = {**inputs, **{f"{name}_{i}": nudge for i, nudge in enumerate(nudges)}}
    mapping = list(zip(model.variables, values, strict=True))
    with keras.StatelessScope(state_mapping=mapping):
        outputs = model(nudged)
        last = last_of(outputs["hidden_states"], inputs["padding_mask"])
        return read(outputs["captures"], last)


@dataclass(frozen=True)
class Nudge(SiteRewrite):
    """Add an input, zero by default, at each site: gradients are taken with respect to it."""

    at: tuple[str, ...]  # type: ignore[assignment]
    operation: str
    alone: bool

    def choose(self, surgery: Surgery) -> list[Place]:
        """Return the sites that any of the selectors picks; refuse patterns."""
        paths = {place.path for selector in self.at for place in surgery.select(selector)}
        chosen = [place for place in surgery.places if place.path in paths]
        for place in chosen:
            if place.is_pattern:
                raise SurgeryError(
                    f"{self.operation} at '{place.path}': expected sites with a value for each "
                    "token. Received an attention pattern. Choose `head_outputs`, say."
                )
        return chosen

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Declare the inputs, then visit the sites."""
        for i, place in enumerate(self.choose(surgery)):
            shape = place.shape[2:]
            surgery.control(f"{_NAME}_{i}", np.zeros((1, *shape), "float32"), (None, *shape))
        return super().visitor(surgery)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Add the input."""
        nudge = surgery.inputs[f"{_NAME}_{surgery.index}"]
        x = ops.stop_gradient(x) if self.alone else x
        return ops.add(x, ops.cast(nudge, x.dtype))
