"""Reft: learn to edit hidden states within a few directions."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import keras
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.opening.site import Place
from backbone_surgery.rewriting.control import Tokens, check_trained_tokens, read_tokens
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.ranged import RangedRewrite
from backbone_surgery.rewriting.rewrite import Surgery
from backbone_surgery.rewriting.site_layer import SiteLayer
from backbone_surgery.rewriting.steering import in_range


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True, eq=False)
class Reft(RangedRewrite):
    """Edit hidden states within a subspace that `fit` learns, the backbone frozen.

    h becomes h + strength · Rᵀ(W h + b - R h), where R and W are float[rank, hidden_dim], and the
    rows of R are orthonormal: what h says along them is replaced by what is learned. W begins as R
    and b as zero, so the edit begins as none. A strength of 0 is bit-equal to no edit, and 1 is
    what was trained.

    `edited.rewrites[i].interventions` holds the layers. Apply that rewrite to another graph, and it
    puts the same, trained ones there.

    Source: LoReFT, Wu et al. 2024, arXiv:2404.03592, which starts W at random.

    Attributes:
        name: name of the control: a strength, for all rows or one for each, or a `Control` of
            strength and tokens.
        rank: how many directions each site has, fewer than `hidden_dim`.
        at: selector of sites of hidden states.
        tokens: which tokens are edited, as of `Steer`. To edit generated tokens alone, train with
            `"all"`, and pass `Control(tokens="generated")` to `generate`.
        strength: the default of the control. `fit` trains at it: at 0 there is no gradient.
        seed: of R at first.
        interventions: `{site path: layer}` to use instead of new ones.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.Reft("mood", rank=2, at="blocks.1")])
        >>> [v.shape for v in edited.trainable_variables]
        [(2, 8), (2, 8), (2,)]
    """

    name: str
    rank: int
    at: str
    tokens: Tokens = "all"
    strength: float = 1.0
    seed: int = 0
    interventions: Mapping[str, keras.layers.Layer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fields = Fields(self, "name")
        fields.name()
        fields.selector()
        fields.integer("rank", smallest=1)
        fields.number("strength")
        fields.integer("seed", smallest=0)
        fields.keep("tokens", read_tokens(self.tokens, fields.where))
        fields.layers("interventions", Intervention, "{site path: layer}")
        if not self.interventions:
            check_trained_tokens(self.tokens, fields.where)

    @property
    def _where(self) -> str:
        return f"Reft at '{self.name}'"

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Check that each layer has a site, and declare the controls; then visit the sites."""
        paths = [place.path for place in self.choose(surgery)]
        if self.interventions and set(self.interventions) != set(paths):
            raise SurgeryError(
                f"{self._where}: expected an intervention for exactly the selected sites {paths}. "
                f"Received some for {shown(list(self.interventions))}. Leave `interventions` out "
                "to start with new ones."
            )
        self.declare(surgery)
        return super().visitor(surgery)

    def check_fit(self) -> None:
        """Refuse to train what acts on generated tokens alone."""
        if any(layer.trainable for layer in self.interventions.values()):
            check_trained_tokens(self.tokens, self._where)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put an intervention at the site."""
        size = x.shape[-1]
        if len(x.shape) != 3 or self.rank >= size:
            raise SurgeryError(
                f"{self._where}: expected a site of tokens with more than {self.rank} numbers, the "
                f"rank. Received '{place.path}' with {list(x.shape[2:])}. Select hidden states, "
                "such as 'blocks.3', and a rank such as 4."
            )
        layer = self.interventions.get(place.path)
        layer = layer or Intervention(self.rank, self.seed, name=self.layer_name(place))
        if layer.built and layer.towards.shape != (self.rank, size):
            raise SurgeryError(
                f"{self._where}: expected an intervention of shape {(self.rank, size)} for "
                f"'{place.path}'. Received one of {tuple(layer.towards.shape)}. Use those of this "
                "rank and architecture."
            )
        surgery.train(layer)
        surgery.once("interventions", dict)[place.path] = layer
        return layer(x, surgery.positions, *self.declared(surgery))

    def applied(self, surgery: Surgery) -> "Reft":
        """Return the rewrite with its layers."""
        return replace(self, interventions=surgery.once("interventions", dict))


@keras.saving.register_keras_serializable("backbone_surgery")
class Intervention(SiteLayer):
    """Replace what hidden states say along some directions.

    Args:
        rank: how many directions.
        seed: of R at first.

    Call arguments:
        x: float[batch, time, hidden_dim].
        positions: int32[batch, time].
        strength: float32[batch].
        tokens: int32[batch, 3], as of `SteeringScale`.
    """

    def __init__(self, rank: int, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rank, self.seed = rank, seed

    def build(self, x_shape, *others):
        """Create R, W and b, so that nothing changes at first."""
        shape, options = (self.rank, x_shape[-1]), {"dtype": "float32"}
        self.along = self.add_weight(
            shape=shape,
            initializer=keras.initializers.Orthogonal(seed=self.seed),
            constraint=OrthonormalRows(),
            name="along",
            **options,
        )
        self.towards = self.add_weight(shape=shape, initializer="zeros", name="towards", **options)
        self.towards.assign(ops.copy(self.along))  # else both are donated as one array
        self.bias = self.add_weight(shape=(self.rank,), initializer="zeros", name="bias", **options)

    def call(self, x, positions, strength, tokens):
        """Edit the tokens in range; leave the others, and strength 0, exactly as they are."""
        h = ops.cast(x, "float32")
        change = ops.matmul(h, ops.transpose(self.towards - self.along)) + self.bias
        scale = ops.where(in_range(positions, tokens), strength[:, None], 0.0)[..., None]
        edited = h + scale * ops.matmul(change, self.along)
        return ops.where(ops.not_equal(scale, 0), ops.cast(edited, x.dtype), x)

    def get_config(self):
        """Return rank and seed."""
        return {**super().get_config(), "rank": self.rank, "seed": self.seed}


@keras.saving.register_keras_serializable("backbone_surgery")
class OrthonormalRows(keras.constraints.Constraint):
    """Turn the rows of a matrix into orthonormal ones that span the same space, by QR."""

    def __call__(self, w):
        """Keep rows that are orthonormal as they are, up to rounding."""
        q, r = ops.qr(ops.transpose(w))
        signs = ops.where(ops.diagonal(r) < 0, -1.0, 1.0)
        return ops.transpose(q * signs)
