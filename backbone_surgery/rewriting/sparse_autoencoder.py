"""SparseAutoencoder: splice a trained sparse autoencoder into the stream, or steer by a feature."""

import math
from dataclasses import dataclass, replace
from typing import Any

import keras

from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening.site import Place
from backbone_surgery.rewriting.autoencoder_files import read_autoencoder
from backbone_surgery.rewriting.autoencoder_layers import (
    Decoder,
    Encoder,
    FeatureSteering,
    decoder_of,
    encoder_of,
)
from backbone_surgery.rewriting.coder import Coder
from backbone_surgery.rewriting.rewrite import Surgery


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True)
class SparseAutoencoder(Coder):
    """Splice a sparse autoencoder into one site, or steer by one of its features.

    Reads three kinds of folders, told apart by their files:

    * `sae.safetensors`, `cfg.json`: of `sparsify` (https://github.com/EleutherAI/sparsify).
    * `sae_weights.safetensors`, `cfg.json`: of SAELens, releases 3 to 6
      (https://github.com/decoderesearch/SAELens): standard, topk, gated, and jumprelu, as which it
      saves batch top k too.
    * `params.npz`: of Gemma Scope, or `params.safetensors`: of Gemma Scope 2. The path of an `.npz`
      file does as well.

    An autoencoder makes features of p = W_enc (x - b_dec) + b_enc, or of W_enc x + b_enc: relu(p);
    the `k` largest of relu(p) (top k, Gao et al. 2024, arXiv:2406.04093); or p where it is over the
    feature's threshold (JumpReLU, Rajamanoharan et al. 2024, arXiv:2407.14435). A gated one
    (Rajamanoharan et al. 2024, arXiv:2404.16014) is run as the JumpReLU that it equals. The
    reconstruction is the sum of the features' decoder rows, each times its feature, plus b_dec.
    Where SAELens normalises x before (`constant_norm_rescale`, `layer_norm`), that is undone after.
    What else changes the result in its settings is honoured, or refused.

    Spliced (`feature=None`), x becomes x + amount · (reconstruction - x): an amount of 1 is the
    reconstruction alone, 0 is bit-equal to no edit. The features have their own site,
    `blocks.3.sae_latents`, float32[batch, time, latents], which other rewrites can capture, patch
    or ablate. With `error`, what the autoencoder does not reconstruct is kept, as by
    `use_error_term` of SAELens: x becomes x + amount · (decode(features) - decode(features before
    any edit)). So x stays what it is until a rewrite changes its features; in bfloat16 a compiled
    graph may round its last bit another way.

    With a feature, x becomes x + amount · W_dec[feature]. The amount is in the unit of x even where
    the autoencoder normalises: where x is multiplied by s to be encoded, an amount of a adds what a
    feature of s · a does. The row is what a feature of 1 adds: a factor of SAELens' finetuning is
    in it, and it has length 1 where SAELens rescales features by the decoder's norm.

    The amount is a control, a number or one for each row. At `head_outputs` an autoencoder acts on
    all heads side by side. Its weights are float32, and not trained.

    The files are read once: `edited.rewrites[i]` holds the layers, and no path.

    Attributes:
        at: selector of one site of hidden states.
        path: the folder.
        feature: which feature to steer by, or `None` to splice.
        amount: the default of the control.
        name: name of the control.
        error: whether to keep the error of the reconstruction, for a splice.
        layers: the layers, to use instead of reading `path`.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.
    """

    at: str
    path: str
    feature: int | None = None
    amount: float = 1.0
    name: str = "sae"
    error: bool = False
    layers: tuple[keras.layers.Layer, ...] = ()

    def __post_init__(self) -> None:
        fields = self.check_fields()
        fields.integer("feature", smallest=0, optional=True)
        if self.error and self.feature is not None:
            raise fields.refuse(
                "`error` for a splice alone", self, "Leave `feature` or `error` out."
            )

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put the layers at the site."""
        layers = surgery.once("layers", lambda: self.layers or self._read(place.path))
        self._check_layers(place.path, layers)
        size = layers[0].settings["size"]
        heads = place.path == f"blocks.{place.block}.head_outputs"
        if size != (math.prod(x.shape[2:]) if heads else x.shape[-1]) or len(x.shape) != 3 + heads:
            raise SurgeryError(
                f"SparseAutoencoder at '{place.path}': expected one for {list(x.shape[2:])}, as "
                f"stands there. Received one for [{size}] in '{self.path}'. Use the site that it "
                f"was trained on. {surgery.sites_of((size,), place)}"
            )
        amount = surgery.inputs[f"{self.name}_amount"]
        if self.feature is not None:
            return layers[0](x, amount)
        encoded = layers[0](x)
        features = self.site_of(encoded, "sae_latents", place, surgery)
        return layers[1](x, features, amount, *([encoded] if self.error else []))

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
        autoencoder = read_autoencoder(self.path)
        if self.feature is None:
            encoder = encoder_of(autoencoder, f"{self.name}_encoder")
            return encoder, decoder_of(autoencoder, f"{self.name}_decoder")
        latents, size = autoencoder.decoder.shape
        if self.feature >= latents:
            raise SurgeryError(
                f"SparseAutoencoder at '{where}': expected a feature from 0 to {latents - 1}. "
                f"Received {self.feature!r}. Choose one of the autoencoder's."
            )
        layer = FeatureSteering(self.feature, size, name=f"{self.name}_feature")
        return (layer.filled(direction=autoencoder.decoder[self.feature]),)

    def applied(self, surgery: Surgery) -> "SparseAutoencoder":
        """Return the rewrite with its layers, and no path."""
        return replace(self, path="", layers=surgery.once("layers", tuple))
