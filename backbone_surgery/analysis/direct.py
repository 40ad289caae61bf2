"""Direct logit attribution: what each layer itself writes towards a token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import ml_dtypes
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.analysis.gradients import take_gradients
from backbone_surgery.analysis.question import (
    TokenLogits,
    bind_row,
    check_finite,
    check_sum,
    count_heads,
    make_metric,
    read_text,
    shapes_at,
)
from backbone_surgery.caching.stand_in import StandIn
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.numbers import check_flag
from backbone_surgery.opening.logits import logits_of
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.open import sites
from backbone_surgery.opening.predict import predict
from backbone_surgery.opening.site import is_written
from backbone_surgery.rewriting import Rewrite, Surgery

_OPERATION = "direct_logit_attribution"
_FAR = 0.1


@dataclass(frozen=True, eq=False)
class DirectLogitAttribution:
    """What `direct_logit_attribution` returns.

    Attributes:
        values: float32[sites], what each site adds to the logit; float32[sites, heads] by head.
        rest: the metric less all `values`: biases of norms, what edits added to the stream, and by
            head all that is no head's.
        metric: the logit after the last token, or the difference of two, before any soft cap; of a
            quantised table that rounds hidden states, without this rounding.
        sites: paths of the sites.
        by_head: whether `values` are those of heads.
    """

    values: np.ndarray
    rest: float
    metric: float
    sites: list[str]
    by_head: bool = False

    @property
    def columns(self) -> list[str]:
        """Labels of the columns of `values`: the numbers of the heads, by head."""
        return [*map(str, range(self.values.shape[1]))] if self.by_head else ["last token"]

    def __repr__(self) -> str:
        size = f"{len(self.sites)} sites" + self.by_head * f" x {len(self.columns)} heads"
        return f"DirectLogitAttribution({size}; metric {self.metric:.4g}, rest {self.rest:.4g})"


def direct_logit_attribution(
    lm: CachedCausalLM,
    text: Any,
    target: Any,
    controls: Mapping[str, Any] | None = None,
    by_head: bool = False,
    prompt_length: int | None = None,
) -> DirectLogitAttribution:
    """Attribute the logit of the next token to what each layer writes to the residual stream.

    The stream at the last token is a sum: of the embeddings, and of what attention and the MLP of
    each block add. The final norm scales all of it by one number, which is held fast. So a logit
    is a sum, too, of a share for each of them. What a layer does by way of later layers is not in
    its share; `attribution` and `patch_grid` measure that.

    Source: nostalgebraist 2020, and Elhage et al. 2021, "A mathematical framework for transformer
    circuits". Norms after attention or the MLP, as in Gemma 2, are held fast likewise. An edit of
    the stream that is not linear, such as `Steer(renormalize=True)`, is taken to first order.

    Args:
        lm: the model, edited or not. Needs the JAX backend of Keras.
        text: a string (without a preprocessor, token ids).
        target: a token, for its logit, or a pair of tokens (right, wrong), for the difference.
        controls: for the controls of `lm`'s own rewrites.
        by_head: whether to attribute to each head of attention.
        prompt_length: how many tokens of the text are its prompt, for edits of generated tokens;
            all by default.

    Returns:
        A `DirectLogitAttribution`.

    Raises:
        SurgeryError: bad input, another backend, blocks of different numbers of heads, or the model
            gives NaN, has a norm that is none, or has several streams, as Gemma 3n.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> got = bs.direct_logit_attribution(lm, [1, 2, 3], target=(7, 8))
        >>> got.sites[:3]
        ['embeddings', 'blocks.0.attention_output', 'blocks.0.mlp_output']
        >>> bs.direct_logit_attribution(lm, [1, 2, 3], 7, by_head=True).values.shape
        (2, 2)
    """
    question = read_text(lm, text, _OPERATION)
    check_sum(lm, _OPERATION)
    check_flag(_OPERATION, "by_head", by_head)
    ids = read_target(lm, target, _OPERATION)
    bound = bind_row(lm, controls, question, _OPERATION, prompt_length)
    at, heads = _leaves(list(sites(lm.opened)), by_head)
    if by_head:
        count_heads(_OPERATION, shapes_at(lm, heads))
    frozen = (FreezeNorms(),)
    (got,) = take_gradients(
        lm, _OPERATION, [question], bound, at, read_uncapped, ids, frozen, alone=True
    )
    if np.isnan(got.value):
        refuse_nan(lm, {**question.inputs(), **bound}, _OPERATION)
    products = {
        site: g[-1] * x[-1]
        for site, g, x in zip(got.sites, got.gradients, got.activations, strict=True)
    }
    wanted = {site: p for site, p in products.items() if not by_head or site in heads}
    kept = int(by_head)
    summed = [p.reshape(*p.shape[:kept], -1).sum(axis=-1) for p in wanted.values()]
    values = np.stack(summed)
    rest = got.value - float(values.sum(dtype="float64"))
    return DirectLogitAttribution(values, rest, got.value, [*wanted], bool(by_head))


def read_target(lm: CachedCausalLM, target: Any, operation: str) -> Any:
    """Return the ids of a token, or of a pair of tokens (right, wrong)."""
    measure = make_metric(lm, target, f"{operation} at 'target'")
    if not isinstance(measure, TokenLogits):
        raise SurgeryError(
            f"{operation} at 'target': expected a token or a pair of tokens (right, wrong). "
            f"Received {shown(target)}. Of other functions of logits take `attribution`."
        )
    return measure.ids


def refuse_nan(lm: CachedCausalLM, inputs: dict[str, Any], operation: str) -> None:
    """Say why there is no number: the model gives none, or a `FrozenNorm` refuses its norm."""
    outputs = predict(lm.opened, lm.opened.with_defaults(inputs))
    check_finite(lm.opened.hidden_states(outputs), lm, operation)
    raise SurgeryError(
        f"{operation}: expected norms that scale a vector to one length, and nothing else. "
        "Received a model with another kind of norm. Take `attribution`, or `patch_grid`."
    )


def _leaves(paths: list[str], by_head: bool) -> tuple[tuple[str, ...], set[str]]:
    """Return the sites that write to the stream, heads for attention by head; and the heads."""
    heads = {path for path in paths if by_head and path.endswith(".head_outputs")}
    replaced = {path.replace("head_outputs", "attention_output") for path in heads}
    chosen = [p for p in paths if p in heads or (is_written(p) and p not in replaced)]
    if by_head and not heads:
        raise SurgeryError(
            f"{_OPERATION} with by_head=True: expected blocks with a site 'head_outputs'. Received "
            f"{shown(paths)}. Leave `by_head` out."
        )
    return tuple(chosen), heads


def read_uncapped(model: EditedBackbone, last: Any, tokens: Any) -> Any:
    """Return the logit of a token, or the difference of two, without the soft cap."""
    import jax

    def capped(states: Any) -> Any:
        return ops.cast(TokenLogits(tokens)(logits_of(model.token_embedding, states))[0], "float32")

    # At zero a soft cap has slope 1.
    value, slope = jax.value_and_grad(capped)(ops.zeros_like(last))
    return value + ops.sum(ops.cast(slope, "float32") * ops.cast(last, "float32"))


@dataclass(frozen=True)
class FreezeNorms(Rewrite):
    """Give the norms of hidden states gradients as if they scaled by a constant.

    Attributes:
        of_heads: whether norms of what heads have are held fast, too.
    """

    of_heads: bool = False

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Replace each norm of hidden states by a `FrozenNorm`."""

        def visit(layer: Any, *args: Any, **kwargs: Any) -> Any:
            is_layer = isinstance(layer, keras.layers.Layer)
            is_norm = is_layer and "norm" in type(layer).__name__.lower()
            ranks = (3, 4) if self.of_heads else (3,)
            if not is_norm or len(args) != 1 or len(args[0].shape) not in ranks:
                return graph.KEEP
            surgery.fired.append(layer.name)
            frozen = surgery.once(
                f"frozen_{id(layer)}", lambda: FrozenNorm(layer, f"frozen_{layer.name}")
            )
            return frozen(args[0])

        return visit


class FrozenNorm(StandIn):
    """Compute what a norm computes, with the gradient of a product with a constant.

    Args:
        layer: the norm, built: x is scaled to one length, after its mean was taken out or not, then
            multiplied by a number for each feature, and a bias may be added.
    """

    def call(self, inputs: Any) -> Any:
        """Normalize the inputs, float[batch, time, features], or [batch, time, heads, features]."""
        x, y = (ops.cast(t, "float32") for t in (inputs, self.layer(inputs)))
        zeros = ops.zeros((1, 1, *inputs.shape[2:]), inputs.dtype)
        signs = zeros + ops.cast(1 - 2 * (np.arange(inputs.shape[-1]) % 2), inputs.dtype)
        bias, even, shifted = (
            ops.cast(self.layer(t), "float32") for t in (zeros, signs, signs + 1)
        )
        # What takes the mean out does not see a shift.
        rounding = 2 * float(ml_dtypes.finfo(self.compute_dtype).eps)
        seen = _FAR * ops.max(ops.abs(even - bias)) + rounding * ops.max(ops.abs(even))
        is_centred = ops.max(ops.abs(shifted - even)) < seen
        signs = ops.cast(signs, "float32")
        scale = (even - bias) / (signs - ops.where(is_centred, ops.mean(signs), 0.0))
        x = x - ops.where(is_centred, ops.mean(x, axis=-1, keepdims=True), 0.0)
        scaled = scale * x
        whole = ops.sum(ops.square(scaled), axis=-1, keepdims=True)
        length = ops.sum(scaled * (y - bias), axis=-1, keepdims=True) / ops.maximum(whole, 1e-30)
        off = ops.sum(ops.square(y - bias - length * scaled), axis=-1, keepdims=True)
        near = _FAR**2 * ops.square(y - bias) + rounding**2 * ops.square(y)
        is_norm = off <= ops.sum(near, axis=-1, keepdims=True)
        slope = ops.stop_gradient(ops.where(is_norm, length, float("nan")) * scale)
        moved = slope * (x - ops.stop_gradient(x))
        return ops.cast(ops.stop_gradient(y) + moved, self.compute_dtype)
