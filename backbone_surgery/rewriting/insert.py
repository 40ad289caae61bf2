"""Insert and Replace: put a Keras layer after what stands at a site, or in its place."""

import inspect
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from backbone_surgery.errors import SurgeryError, plain
from backbone_surgery.opening.site import Place
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.rewrite import SiteRewrite, Surgery, beside_blocks
from backbone_surgery.rewriting.sources import source_of

_BY_NAME = ("padding_mask", "positions")
"""What a layer also gets, where its `call` has an argument of that name."""


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True, eq=False)
class Insert(SiteRewrite):
    """Insert a layer at a site: what stands there becomes `layer(x)`.

    All sites that the selector picks share the layer. It must keep the shape, and work on each
    token alone or keep state (`Stateful`). If it has trainable weights, `fit` trains these and
    leaves the backbone alone.

    Attributes:
        at: site selector.
        layer: a `keras.layers.Layer` that takes and returns one tensor. If its `call` has arguments
            `padding_mask` or `positions`, it gets these too, int[batch, time].

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
        >>> import backbone_surgery as bs, keras, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.Insert("blocks.1.mlp_output", keras.layers.Dense(8))])
        >>> [v.shape for v in edited.trainable_variables]
        [(8, 8), (8,)]
    """

    at: str
    layer: keras.layers.Layer

    def __post_init__(self) -> None:
        _check(self)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Call the layer on what stands at the site."""
        return _call("Insert", self.layer, x, x, place, surgery)


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True, eq=False)
class Replace(SiteRewrite):
    """Replace the computation of a site by a layer.

    The layer takes the input of that computation: the tensor at the site before it, such as
    `mlp_norm` for `mlp_hidden`; for a whole block, `blocks.3`, the block's input. A site computed
    from several others, such as `head_outputs`, is refused. What earlier rewrites put between the
    two sites is removed with it. A replaced block has no cache, and hands on what goes beside the
    hidden states, as in Gemma 3n.

    Attributes:
        at: site selector.
        layer: a `keras.layers.Layer` that returns a tensor of the shape of the site. All sites
            that the selector picks share it.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
        >>> import backbone_surgery as bs, keras, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> mlp = keras.layers.Dense(16, activation="relu")
        >>> bs.operate(backbone, [bs.Replace("blocks.1.mlp_hidden", mlp)]).report[0].sites
        ('blocks.1.mlp_hidden',)
    """

    at: str
    layer: keras.layers.Layer

    def __post_init__(self) -> None:
        _check(self)

    def choose(self, surgery: Surgery) -> list[Place]:
        """Return the sites, and those of what goes beside the hidden states of whole blocks."""
        chosen = super().choose(surgery)
        return [*chosen, *beside_blocks(chosen, surgery)]

    def checked(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Hand on what goes beside a block that is replaced."""
        is_beside = place.path == f"blocks.{place.block}.{surgery.model.family.beside}"
        if is_beside and f"blocks.{place.block}" in surgery.fired and surgery.beside is not None:
            return surgery.beside
        return super().checked(x, place, surgery)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Call the layer on the input of the computation."""
        source = source_of(x, place, surgery, "Replace")
        return _call("Replace", self.layer, source, x, place, surgery)


def _call(
    operation: str,
    layer: keras.layers.Layer,
    x: keras.KerasTensor,
    like: keras.KerasTensor,
    place: Place,
    surgery: Surgery,
) -> Any:
    """Call a user's layer, declare it as one to train, and keep the dtype of the site."""
    parameters = inspect.signature(layer.call).parameters
    by_name = {name: getattr(surgery, name) for name in _BY_NAME if name in parameters}
    try:
        result = layer(x, **by_name)
    except Exception as error:  # whatever the user's code runs into
        raise SurgeryError(
            f"{operation} at '{place.path}': expected a layer that takes one tensor of shape "
            f"{x.shape}. Received '{layer.name}' ({type(layer).__name__}), which fails with: "
            f"{plain(error)} Build a layer for this site."
        ) from error
    surgery.train(layer)
    differs = isinstance(result, keras.KerasTensor) and result.dtype != like.dtype
    return ops.cast(result, like.dtype) if differs else result


def _check(rewrite: Any) -> None:
    fields = Fields(rewrite)
    fields.selector()
    described = "a `keras.layers.Layer` (a function can be a `keras.layers.Lambda`)"
    fields.instance("layer", keras.layers.Layer, described)
