"""Insert and Replace: put a Keras layer behind what stands at a site, or in place of it."""

from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from backbone_surgery.errors import SurgeryError
from backbone_surgery.rewrites.rewrite import SiteRewrite, Surgery
from backbone_surgery.rewrites.sources import source_of
from backbone_surgery.site import Place


@dataclass(frozen=True, eq=False)
class Insert(SiteRewrite):
    """Insert a layer at a site: what stands there from now on is `layer(x)`.

    The layer is called once for each site that the selector picks, so it is shared by them. It must
    keep the shape and work on each token alone; `check` finds one that does not. Where it has
    trainable weights, `fit` trains them and leaves the backbone alone.

    Attributes:
        at: site selector.
        layer: a `keras.layers.Layer` that takes and gives one tensor.

    Example:
        >>> import backbone_surgery as bs, keras, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.Insert("blocks.1.mlp_output", keras.layers.Dense(8))])
        >>> [v.shape for v in edited.trainable_variables]
        [(8, 8), (8,)]
    """

    at: str
    layer: keras.layers.Layer

    def __post_init__(self) -> None:
        _check_layer("Insert", self.at, self.layer)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Call the layer on what stands at the site."""
        return call_layer("Insert", self.layer, x, x, place, surgery)


@dataclass(frozen=True, eq=False)
class Replace(SiteRewrite):
    """Replace the computation that makes what stands at a site by a layer.

    The layer is given what that computation was given: the tensor at the site before it, such as
    `mlp_norm` for `mlp_hidden`; for a whole block, `blocks.3`, the block's input. A site computed
    from several others, such as `attention`, is refused. All that earlier rewrites had put between
    the two goes; a replaced block has no cache.

    Attributes:
        at: site selector.
        layer: a `keras.layers.Layer` that gives a tensor of the shape of the site. It is shared
            by all sites that the selector picks.

    Example:
        >>> import backbone_surgery as bs, keras, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> mlp = keras.layers.Dense(16, activation="relu")
        >>> bs.operate(backbone, [bs.Replace("blocks.1.mlp_hidden", mlp)]).report[0].sites
        ('blocks.1.mlp_hidden',)
    """

    at: str
    layer: keras.layers.Layer

    def __post_init__(self) -> None:
        _check_layer("Replace", self.at, self.layer)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Call the layer on what the computation was given."""
        source = source_of(x, place, surgery, "Replace")
        return call_layer("Replace", self.layer, source, x, place, surgery)


def call_layer(
    operation: str,
    layer: keras.layers.Layer,
    x: keras.KerasTensor,
    like: keras.KerasTensor,
    place: Place,
    surgery: Surgery,
) -> Any:
    """Call a layer that a user gave, declare it as one to train, and keep the dtype of a site."""
    try:
        made = layer(x)
    except (TypeError, ValueError) as error:
        raise SurgeryError(
            f"{operation} at '{place.path}': expected a layer that takes one tensor of shape "
            f"{x.shape}. Received '{layer.name}' ({type(layer).__name__}), which fails with: "
            f"{error} Build a layer for this site."
        ) from error
    surgery.train(layer)
    differs = isinstance(made, keras.KerasTensor) and made.dtype != like.dtype
    return ops.cast(made, like.dtype) if differs else made


def _check_layer(operation: str, at: str, layer: Any) -> None:
    if not isinstance(layer, keras.layers.Layer):
        raise SurgeryError(
            f"{operation} at '{at}': expected a `keras.layers.Layer`. Received {layer!r} of type "
            f"{type(layer).__name__}. Pass an instance; a function can be a `keras.layers.Lambda`."
        )
