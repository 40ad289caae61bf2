"""SparseAutoencoder: splice a trained sparse autoencoder into the stream, or steer by a feature."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.files import STORABLE, as_path, read_arrays, read_json, reading
from backbone_surgery.numbers import is_int
from backbone_surgery.opening.site import Place, Site
from backbone_surgery.rewriting.amounts import bind_amounts
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.rewrite import ControlledRewrite, Rows, Surgery
from backbone_surgery.rewriting.site_layer import interpolate

_MOST = 2**20
"""Bytes of `cfg.json`."""

_KEYS = ("encoder.weight", "encoder.bias", "W_dec", "b_dec")


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True)
class SparseAutoencoder(ControlledRewrite):
    """Splice a sparse autoencoder into one site, or steer by one of its features.

    Reads what EleutherAI's `sparsify` saves (https://github.com/EleutherAI/sparsify): a folder with
    `sae.safetensors` and `cfg.json`. The autoencoder keeps the `k` largest features of
    relu(W_enc (x - b_dec) + b_enc). Its reconstruction is the sum of their decoder rows, each times
    its feature, plus b_dec.

    Spliced (`feature=None`), x becomes x + amount · (reconstruction - x): an amount of 1 is the
    reconstruction alone, 0 is bit-equal to no edit. The features have their own site,
    `blocks.3.sae_latents`, float[batch, time, latents], which other rewrites can capture, patch or
    ablate. With a feature, x becomes x + amount · W_dec[feature]. The amount is a control, a number
    or one for each row. The autoencoder's weights are not trained.

    The files are read once: `edited.rewrites[i]` holds the layers, and no path.

    Attributes:
        at: selector of one site of hidden states.
        path: the folder.
        feature: which feature to steer by, or `None` to splice.
        amount: the default of the control.
        name: name of the control.
        layers: the layers, to use instead of reading `path`.
    """

    at: str
    path: str
    feature: int | None = None
    amount: float = 1.0
    name: str = "sae"
    layers: tuple[keras.layers.Layer, ...] = ()

    files: ClassVar[tuple[str, ...]] = ("path",)

    def __post_init__(self) -> None:
        fields = Fields(self)
        fields.selector()
        fields.name()
        fields.number("amount")
        fields.integer("feature", smallest=0, optional=True)
        fields.instance("path", str | os.PathLike, "the path of a folder")  # type: ignore[arg-type]
        fields.instance("layers", list | tuple, "`layers` as a tuple")  # type: ignore[arg-type]
        fields.keep("layers", tuple(self.layers))

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Declare the control, then visit the site."""
        places = self.choose(surgery)
        if len(places) != 1:
            raise SurgeryError(
                f"SparseAutoencoder at '{self.at}': expected one site, the one that it was trained "
                f"on. Received {', '.join(p.path for p in places)}. Use one for each."
            )
        surgery.control(f"{self.name}_amount", np.float32(self.amount))
        return super().visitor(surgery)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put the layers at the site."""
        layers = surgery.once("layers", lambda: self.layers or self._read(place.path))
        self._check_layers(place.path, layers)
        size = layers[0].settings["size"]
        if size != x.shape[-1] or len(x.shape) != 3:
            raise SurgeryError(
                f"SparseAutoencoder at '{place.path}': expected one for {list(x.shape[2:])}, as "
                f"stands there. Received one for [{size}] in '{self.path}'. Use the site that it "
                f"was trained on. {surgery.sites_of((size,), place)}"
            )
        amount = surgery.inputs[f"{self.name}_amount"]
        if self.feature is not None:
            return layers[0](x, amount)
        latents = f"blocks.{place.block}.sae_latents"
        if latents in [p.path for p in surgery.places]:
            raise SurgeryError(
                f"SparseAutoencoder at '{place.path}': expected a block without another spliced "
                f"autoencoder, so that '{latents}' is one site. Received a second one. Splice one "
                "of them into another block."
            )
        features = Site("sae_latents", name=f"{self.name}_latents")(layers[0](x))
        return layers[1](x, features, amount)

    def _check_layers(self, where: str, layers: tuple[Any, ...]) -> None:
        """Check that the layers are those of this feature, or of a splice."""
        kinds = [type(layer) for layer in layers]
        if self.feature is None:
            fits = kinds == [Encoder, Decoder]
        else:
            fits = kinds == [FeatureSteering] and layers[0].settings["feature"] == self.feature
        if not fits:
            raise SurgeryError(
                f"SparseAutoencoder at '{where}': expected `layers` made for feature "
                f"{self.feature!r}. Received others. Leave `layers` out, and give the path again."
            )

    def _read(self, where: str) -> tuple[keras.layers.Layer, ...]:
        """Build the layers from the files."""
        weights, k = read_autoencoder(self.path)
        latents, size = weights["W_dec"].shape
        center, rows = weights["b_dec"], weights["W_dec"]
        if self.feature is None:
            encoder = Encoder(latents, size, k, name=f"{self.name}_encoder").filled(
                weight=weights["encoder.weight"].T, bias=weights["encoder.bias"], center=center
            )
            decoder = Decoder(latents, size, name=f"{self.name}_decoder")
            return encoder, decoder.filled(weight=rows, bias=center)
        if self.feature >= latents:
            raise SurgeryError(
                f"SparseAutoencoder at '{where}': expected a feature from 0 to {latents - 1}. "
                f"Received {self.feature!r}. Choose one of the autoencoder's."
            )
        layer = FeatureSteering(self.feature, size, name=f"{self.name}_feature")
        return (layer.filled(direction=rows[self.feature]),)

    def applied(self, surgery: Surgery) -> "SparseAutoencoder":
        """Return the rewrite with its layers, and no path."""
        return replace(self, path="", layers=surgery.once("layers", tuple))

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind an amount: a number, or one for each row."""
        value = self.amount if value is None else value
        return {
            f"{self.name}_amount": bind_amounts(value, f"controls at '{self.name}'", rows.batch)
        }


def read_autoencoder(path: str) -> tuple[dict[str, np.ndarray], int]:
    """Read an autoencoder's weights, float32, and how many features it keeps.

    Raises:
        SurgeryError: files, weights or settings that are missing or that this cannot run.
    """
    if not path:
        raise SurgeryError(
            "SparseAutoencoder: expected the path of a folder, or `layers`. Received neither. Pass "
            "the folder of one layer."
        )
    folder = as_path(path, "SparseAutoencoder")
    missing = [n for n in ("cfg.json", "sae.safetensors") if not (folder / n).is_file()]
    if missing:
        raise SurgeryError(
            f"SparseAutoencoder at '{path}': expected a folder with cfg.json and sae.safetensors. "
            f"Received one without {' and '.join(missing)}. Pass the folder of one layer."
        )
    with reading(folder, "SparseAutoencoder", "an autoencoder that `sparsify` saved"):
        config = dict(read_json(folder / "cfg.json", _MOST))
        weights = read_arrays(folder / "sae.safetensors")
    unknown = [n for n in ("signed", "transcode", "skip_connection") if config.get(n)]
    if unknown or config.get("activation", "topk") != "topk" or not _is_count(config.get("k")):
        raise SurgeryError(
            f"SparseAutoencoder at '{path}': expected a top-k autoencoder with `k` in cfg.json, "
            f"neither signed nor a transcoder. Received {str(config)[:200]}. Use another one."
        )
    stored = {name: list(w.shape) for name, w in weights.items()}
    latents, size = [*stored.get("W_dec", []), 0, 0][:2]
    shapes = ([latents, size], [latents], [latents, size], [size])
    wanted = dict(zip(_KEYS, shapes, strict=True))
    numbers = all(w.dtype in STORABLE and np.isfinite(w).all() for w in weights.values())
    if stored != wanted or not numbers or not 0 < config["k"] <= latents:
        raise SurgeryError(
            f"SparseAutoencoder at '{path}': expected weights {', '.join(_KEYS)} of shapes "
            f"[latents, size], [latents], [latents, size], [size], and k of at most that many "
            f"latents. Received {stored} and k {config['k']}. Use a file saved by `sparsify`."
        )
    return {name: weights[name].astype("float32") for name in _KEYS}, int(config["k"])


def _is_count(value: Any) -> bool:
    return is_int(value) and value > 0


class _Fixed(keras.layers.Layer):
    """A layer of weights that are not trained, computed in float32.

    Args:
        settings: the arguments by name, as `get_config` gives them back; `size` is that of a token.
        shapes: the shapes of its weights, by name.
    """

    def __init__(
        self, settings: dict[str, int], shapes: dict[str, tuple[int, ...]], **kwargs: Any
    ) -> None:
        super().__init__(autocast=False, **{**kwargs, "dtype": "float32"})
        self.settings, self.shapes = settings, shapes

    def build(self, *inputs):
        """Create the weights, zero until they are filled."""
        for name, shape in self.shapes.items():
            weight = self.add_weight(name=name, shape=shape, initializer="zeros", trainable=False)
            setattr(self, name, weight)

    def filled(self, **values: np.ndarray) -> "_Fixed":
        """Fill the weights, and return the layer."""
        self.build(None)
        self.built = True
        for name, value in values.items():
            getattr(self, name).assign(value)
        return self

    def get_config(self):
        """Return the settings."""
        return {**super().get_config(), **self.settings}


@keras.saving.register_keras_serializable("backbone_surgery")
class Encoder(_Fixed):
    """Encode float[batch, time, size] as its k largest features, float32[batch, time, latents]."""

    def __init__(self, latents: int, size: int, k: int, **kwargs: Any) -> None:
        shapes = {"weight": (size, latents), "bias": (latents,), "center": (size,)}
        super().__init__({"latents": latents, "size": size, "k": k}, shapes, **kwargs)

    def call(self, x):
        """Return the features, zero but for the k largest of each token."""
        features = ops.matmul(ops.cast(x, "float32") - self.center, self.weight) + self.bias
        features = ops.relu(features)
        smallest = ops.top_k(features, self.settings["k"])[0][..., -1:]
        return ops.where(features >= smallest, features, 0.0)

    def compute_output_spec(self, x):
        """Return the shape of the features."""
        return keras.KerasTensor((*x.shape[:-1], self.settings["latents"]), "float32")


@keras.saving.register_keras_serializable("backbone_surgery")
class Decoder(_Fixed):
    """Decode features, and mix the reconstruction with what was encoded."""

    def __init__(self, latents: int, size: int, **kwargs: Any) -> None:
        shapes = {"weight": (latents, size), "bias": (size,)}
        super().__init__({"latents": latents, "size": size}, shapes, **kwargs)

    def call(self, x, features, amount):
        """Go from x to the reconstruction by an amount, float32[batch]."""
        return interpolate(x, ops.matmul(features, self.weight) + self.bias, amount)

    def compute_output_spec(self, x, features, amount):
        """Keep the shape and dtype of `x`."""
        return keras.KerasTensor(x.shape, x.dtype)


@keras.saving.register_keras_serializable("backbone_surgery")
class FeatureSteering(_Fixed):
    """Add a multiple of one feature's decoder row."""

    def __init__(self, feature: int, size: int, **kwargs: Any) -> None:
        super().__init__({"feature": feature, "size": size}, {"direction": (size,)}, **kwargs)

    def call(self, x, amount):
        """Return x + amount · direction; x itself where the amount is zero."""
        amount = amount[:, None, None]
        steered = ops.cast(x, "float32") + amount * self.direction
        return ops.where(ops.equal(amount, 0), x, ops.cast(steered, x.dtype))

    def compute_output_spec(self, x, amount):
        """Keep the shape and dtype of `x`."""
        return keras.KerasTensor(x.shape, x.dtype)
