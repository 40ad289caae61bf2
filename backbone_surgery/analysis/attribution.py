"""Attribution: gradient times activation, for each site and token, in one backward pass."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from backbone_surgery import graph, hosts
from backbone_surgery.analysis.question import (
    Metric,
    TokenLogits,
    bind_row,
    check_no_nan,
    check_selector,
    derived,
    make_metric,
    next_token_logits,
    read_text,
)
from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.opening.model import EditedBackbone, arrays_in_place, lora_settings, made_once
from backbone_surgery.opening.site import Place
from backbone_surgery.rewriting import Capture, SiteRewrite, Surgery

_NAME = "attribution"


@dataclass(frozen=True, eq=False)
class Attribution:
    """What `attribution` returns.

    Attributes:
        values: float32[sites, tokens], gradient times activation, summed over features: by how
            much the metric falls, to first order, if that activation is removed.
        metric: the metric of the text.
        sites: paths of the sites.
        tokens: labels of the text's tokens.
    """

    values: np.ndarray
    metric: float
    sites: list[str]
    tokens: list[str]

    def __repr__(self) -> str:
        size = f"{len(self.sites)} sites x {len(self.tokens)} tokens"
        return f"Attribution({size}; metric {self.metric:.4g})"


def attribution(
    lm: CachedCausalLM,
    text: Any,
    target: Any,
    at: str = "blocks.*",
    controls: Mapping[str, Any] | None = None,
) -> Attribution:
    """Attribute the next-token prediction to the activations at each site and token.

    Source: gradient times input, Shrikumar et al. 2017, https://arxiv.org/abs/1704.02685, applied
    to activations as in attribution patching.

    Args:
        lm: the model, edited or not. Needs the JAX backend of Keras.
        text: a string (without a preprocessor, token ids).
        target: the metric, as for `patch_grid`: a token, a pair (right, wrong), or a function.
        at: site selector; any site but a pattern.
        controls: for the controls of `lm`'s own rewrites.

    Returns:
        An `Attribution`, with `values` float32[sites, tokens].

    Raises:
        SurgeryError: bad input, another backend, or the model gives NaN.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> bs.attribution(lm, [1, 2, 3], target=7, at="blocks.*.head_outputs").values.shape
        (2, 3)
    """
    if keras.config.backend() != "jax":
        raise SurgeryError(
            "attribution: expected the JAX backend of Keras. Received "
            f"'{keras.config.backend()}'. Set KERAS_BACKEND=jax."
        )
    question = read_text(lm, text, "attribution")
    check_selector(at, "attribution")
    measure = make_metric(lm, target, "attribution at 'target'")
    model = derived(lm, Capture(at, name=_NAME), _Nudge(at))
    sites = list(model.report[-1].sites)
    inputs = {**question.inputs(), **bind_row(lm, controls, question, "attribution")}
    if isinstance(measure, TokenLogits):  # other texts and tokens compile nothing new
        key = "step", lora_settings(model)
        tokens, step = measure.ids, made_once(model, key, lambda: _step(model, sites))
    else:
        tokens, step = [], _step(model, sites, measure)
    shapes = [
        (1, len(question.token_ids), *_inputs(model)[f"{_NAME}_{i}"]) for i in range(len(sites))
    ]
    zeros = [np.zeros(shape, "float32") for shape in shapes]
    arguments = (zeros, arrays_in_place(model.variables), inputs, tokens)
    if hosts.span(model):
        parts = {"text": inputs, "model or target": step.lower(*arguments).as_text()}
        hosts.agree(model, "attribution", parts)
    (value, captured), gradients = step(*arguments)
    products = [
        hosts.to_numpy(g) * np.asarray(hosts.to_numpy(x), "float32")
        for g, x in zip(gradients, captured, strict=True)
    ]
    check_no_nan([value, *(p.sum() for p in products)], lm, "attribution")
    summed = [p[0].reshape(len(question.token_ids), -1).sum(axis=-1) for p in products]
    return Attribution(np.stack(summed), float(value), sites, question.labels)


def _step(model: EditedBackbone, sites: list[str], measure: Metric | None = None) -> Any:
    """Return the compiled function that gives metric, activations and gradients.

    Without `measure`, the metric is that of the token ids which it is called with.
    """
    import jax

    def run(nudges: list[Any], values: list[Any], inputs: Any, tokens: list[Any]) -> Any:
        nudged = {**inputs, **{f"{_NAME}_{i}": nudge for i, nudge in enumerate(nudges)}}
        mapping = list(zip(model.variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            outputs = model(nudged)
            logits = next_token_logits(model, outputs["hidden_states"])
        captured = [outputs["captures"][f"{_NAME}/{site}"] for site in sites]
        return _differentiable((measure or TokenLogits(tokens))(logits)[0]), captured

    return jax.jit(jax.value_and_grad(run, has_aux=True))


def _differentiable(value: Any) -> Any:
    """Refuse a metric without gradients."""
    if not keras.backend.is_float_dtype(value.dtype):
        raise SurgeryError(
            "attribution at 'target': expected a function that returns floats. Received one that "
            f"returns {value.dtype}. Return logits, or what is computed from them."
        )
    return value


def _inputs(model: keras.Model) -> dict[str, tuple]:
    return {t.name: tuple(t.shape[2:]) for t in model.inputs}


@dataclass(frozen=True)
class _Nudge(SiteRewrite):
    """Add an input, zero by default, at each site: gradients are taken with respect to it."""

    at: str

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        for i, place in enumerate(self.choose(surgery)):
            if place.is_pattern:
                raise SurgeryError(
                    f"attribution at '{place.path}': expected sites with a value for each token. "
                    "Received an attention pattern. Choose `head_outputs`, say."
                )
            shape = place.shape[2:]
            surgery.control(f"{_NAME}_{i}", np.zeros((1, *shape), "float32"), (None, *shape))
        return super().visitor(surgery)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        nudge = surgery.inputs[f"{_NAME}_{surgery.index}"]
        return keras.ops.add(x, keras.ops.cast(nudge, x.dtype))
