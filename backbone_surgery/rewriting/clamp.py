"""Clamp: set some of the numbers that stand at a site, such as features of an autoencoder."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.numbers import read_finite, read_int32, repeats
from backbone_surgery.opening.site import Place
from backbone_surgery.rewriting.amounts import bind_amounts
from backbone_surgery.rewriting.control import (
    Tokens,
    default_tokens,
    range_before,
    read_tokens,
    token_rows,
)
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.rewrite import ControlledRewrite, Rows, Surgery
from backbone_surgery.rewriting.site_layer import SiteLayer
from backbone_surgery.rewriting.steering import in_range

UNUSED = -1
"""A feature that is none: nothing is set there."""

_LEAST, _MOST = 4, 256
"""How many features a row has, unused ones included: few programs are compiled, all are quick."""

_KEYS = ("features", "values", "tokens")


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True, eq=False)
class Clamp(ControlledRewrite):
    """Clamp features of a sparse autoencoder, or neurons of an MLP: set them to values.

    At each token some of the numbers that stand at the site become others, whatever they were: 0
    takes a feature out, and a large number keeps it on. All other numbers stay bit-equal.

    Which features, and to what, may differ from row to row in a call: `controls={name: {"features":
    int[n] or int[batch, n], "values": a number, float[n], float[batch, n] or float[batch, 1],
    "tokens": ...}}`. -1 is no feature. What is left out is as in the rewrite; a number alone, or
    float[batch], is the value of all its features. A row has at most 256. Up to four, or as many as
    the rewrite names, compile nothing new, nor do others; more do, at each doubling.

    The inputs of the graph are `<name>_features` int32[batch, n], `<name>_values`
    float32[batch, n] and `<name>_tokens` int32[batch, 3].

    Source: feature steering, Templeton et al. 2024, "Scaling Monosemanticity".

    Attributes:
        at: selector of one site with a row of numbers for each token: `blocks.3.sae_latents`, which
            a `SparseAutoencoder` makes, `blocks.3.mlp_hidden`, or hidden states.
        features: which numbers to set where a call does not say, counted from 0; none by default.
        values: to what: a number, or one for each of `features`.
        tokens: at which tokens, as of `Steer`.
        name: name of the control.
        size: how many numbers the site has; `operate` fills it in.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.Clamp("blocks.0.mlp_hidden", features=(3, 7))])
        >>> lm = bs.CachedCausalLM(edited)
        >>> prompts = {"token_ids": [[1, 2], [1, 2]], "padding_mask": [[1, 1], [1, 1]]}
        >>> clamp = {"features": [[3], [5]], "values": 2.0, "tokens": "generated"}
        >>> options = {"max_new_tokens": 2, "stop_token_ids": None}
        >>> lm.generate(prompts, controls={"clamp": clamp}, **options)["token_ids"].shape
        (2, 4)
    """

    at: str
    features: tuple[int, ...] = ()
    values: Any = 0.0
    tokens: Tokens = "all"
    name: str = "clamp"
    size: int | None = None

    def __post_init__(self) -> None:
        fields = Fields(self)
        fields.selector()
        fields.name()
        fields.integer("size", smallest=1, optional=True)
        fields.keep("tokens", read_tokens(self.tokens, fields.where))
        is_empty = isinstance(self.features, tuple | list) and not self.features
        features = np.zeros(0, "int32") if is_empty else read_int32(self.features, 0)
        fits = features is not None and features.ndim == 1 and len(features) <= _MOST
        if features is None or not fits or repeats(features):
            rule = f"up to {_MOST} features from 0 on, each once"
            raise fields.refuse(rule, self.features, "Pass `(12, 40)`, say.")
        fields.keep("features", tuple(features.tolist()))
        values = read_finite(self.values)
        if values is None or values.shape not in ((), features.shape):
            raise fields.refuse(
                f"`values` to be a finite number, or one for each feature, [{len(features)}]",
                self.values,
                "0 takes a feature out.",
            )
        fields.keep("values", values.tolist() if not values.ndim else tuple(values.tolist()))

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Declare the controls, then visit the site."""
        places = self.choose(surgery)
        if len(places) != 1 or len(places[0].shape) != 3 or places[0].is_pattern:
            listed = ", ".join(f"{p.path} {list(p.shape[2:])}" for p in places)
            raise SurgeryError(
                f"Clamp at '{self.at}': expected one site with a row of numbers for each token, "
                f"such as 'blocks.3.mlp_hidden'. Received {listed}. Use one `Clamp` for each; of "
                "heads take `Ablate`, or a `Patch`."
            )
        size = places[0].shape[2]
        if max(self.features, default=0) >= size:
            raise SurgeryError(
                f"Clamp at '{places[0].path}': expected features from 0 to {size - 1}. Received "
                f"{max(self.features)}. Choose others."
            )
        surgery.once("size", lambda: size)
        features, values = self._padded(np.array([self.features], "int32"), self._own)
        surgery.control(f"{self.name}_features", features[0], (None,))
        surgery.control(f"{self.name}_values", values[0], (None,))
        surgery.control(f"{self.name}_tokens", default_tokens(self.tokens))
        return super().visitor(surgery)

    @property
    def _own(self) -> np.ndarray:
        """The values of the rewrite, float32[1, n]."""
        return np.broadcast_to(np.float32(self.values), (1, len(self.features)))

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put a clamping layer at the site."""
        inputs = [surgery.inputs[f"{self.name}_{key}"] for key in _KEYS]
        return Clamping(name=self.layer_name(place))(x, surgery.positions, *inputs)

    def applied(self, surgery: Surgery) -> "Clamp":
        """Return the rewrite with the size of its site."""
        return replace(self, size=surgery.once("size", int))

    def before(self, end: int, bound: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Leave out what acts on generated tokens alone, or on no feature."""
        tokens = range_before(bound[f"{self.name}_tokens"], end)
        if tokens is None or (bound[f"{self.name}_features"] == UNUSED).all():
            return {f"{self.name}_{key}": np.zeros(0) for key in _KEYS}
        return {f"{self.name}_tokens": tokens}

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind features, values and tokens; see the class."""
        where = f"controls at '{self.name}'"
        control = value if isinstance(value, Mapping) else {}
        if not set(control) <= {*_KEYS}:
            raise SurgeryError(
                f"{where}: expected a dict of {', '.join(_KEYS)}. Received {shown(list(control))}. "
                "See `Clamp`."
            )
        features = self._read_features(control.get("features"), where, rows)
        if value is None or isinstance(value, Mapping):
            given = control.get("values")
        else:
            given = bind_amounts(value, where, rows.batch, or_else=", or a dict; see `Clamp`")
            given = given[:, None]
        if not features.shape[1] and value is not None:
            raise SurgeryError(
                f"{where}: expected features to set, since the `Clamp` names none. Received "
                f"{shown(value)}. Name `features` in the `Clamp`, or pass them with the values."
            )
        values = self._read_values(given, features, where)
        features, values = self._padded(*_trimmed(features, values, where))
        tokens = self.tokens if control.get("tokens") is None else control["tokens"]
        return {
            f"{self.name}_features": features,
            f"{self.name}_values": values,
            f"{self.name}_tokens": token_rows(tokens, rows.prompt_lengths, where),
        }

    def _read_features(self, value: Any, where: str, rows: Rows) -> np.ndarray:
        """Read features as int32[batch, n]."""
        own = np.array(self.features, "int32")
        array = own if value is None else read_int32(value, UNUSED, (self.size or 2**31) - 1)
        if array is not None and array.ndim == 1:
            array = array[None]
        fits = array is not None and array.ndim == 2 and len(array) in (1, rows.batch)
        if array is None or not fits or repeats(array) or (value is not None and not array.size):
            most = "" if self.size is None else f" to {self.size - 1}"
            raise SurgeryError(
                f"{where}: expected features int[n] or int[{rows.batch}, n], from 0{most}, or -1 "
                f"for none, each once in a row. Received {shown(value)}. Pass [3, 7], say; fill "
                "shorter rows up with -1."
            )
        return np.broadcast_to(array, (rows.batch, array.shape[1]))

    def _read_values(self, value: Any, features: np.ndarray, where: str) -> np.ndarray:
        """Read values as float32[batch, n]."""
        batch, n = features.shape
        own = np.float32(0 if (features == UNUSED).all() else self.values)
        array = own if value is None else read_finite(value)
        if array is None or np.shape(array) not in ((), (n,), (1, n), (batch, n), (batch, 1)):
            each = f"[{n}] (one for each feature), [{batch}, {n}]{f' or [{batch}, 1]' * (n > 1)}"
            raise SurgeryError(
                f"{where}: expected values, a finite number, {each}. Received "
                f"{shown(self.values if value is None else value)}. Pass one of these."
            )
        return np.broadcast_to(array, features.shape)

    def _padded(self, features: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fill up with features that are none: to four, or twice as many as often as needed."""
        count = features.shape[1]
        least = max(count, len(self.features), _LEAST)
        missing = (0, 0), (0, (1 << (least - 1).bit_length()) - count)
        return np.pad(features, missing, constant_values=UNUSED), np.pad(values, missing)


def _trimmed(features: np.ndarray, values: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Sort each row, and leave out columns that are no feature in any row."""
    order = np.argsort(-features, axis=1)
    features, values = (np.take_along_axis(x, order, axis=1) for x in (features, values))
    most = int((features != UNUSED).sum(axis=1).max(initial=0))
    if most > _MOST:
        raise SurgeryError(
            f"{where}: expected at most {_MOST} features in a row. Received {most}. Set fewer, or "
            "`Patch` the whole site."
        )
    return features[:, :most], values[:, :most]


class Clamping(SiteLayer):
    """Set some of the numbers of each token.

    Call arguments:
        x: float[batch, time, size].
        positions: int32[batch, time].
        features: int32[batch, n], which of the numbers; -1 for none.
        values: float32[batch, n].
        tokens: int32[batch, 3], as of `SteeringScale`.
    """

    def call(self, x, positions, features, values, tokens):
        """Take the values where they are to stand; leave all else exactly as it is."""
        match = ops.equal(features[..., None], ops.arange(x.shape[-1], dtype="int32"))
        which = ops.argmax(ops.cast(match, "int32"), axis=1)
        value = ops.cast(ops.take_along_axis(values, which, axis=1), x.dtype)[:, None]
        is_set = ops.logical_and(in_range(positions, tokens)[..., None], ops.any(match, 1)[:, None])
        return ops.where(is_set, value, x)
