"""Transcoder: run a trained transcoder in place of an MLP, with its features as a site."""

from dataclasses import dataclass, replace
from typing import Any

import keras
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening.site import Place, Site
from backbone_surgery.rewriting.autoencoder_layers import Decoder, Encoder, decoder_of, encoder_of
from backbone_surgery.rewriting.coder import Coder
from backbone_surgery.rewriting.rewrite import Surgery
from backbone_surgery.rewriting.transcoder_files import read_transcoder

_EPSILONS = {"rms": 1e-6, "layer": 1e-5}
"""What stands under the root, by the norm: as in Gemma, and as in GPT-2."""


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True)
class Transcoder(Coder):
    """Run a transcoder in place of an MLP: it reads the MLP's input, and makes its output.

    A transcoder makes features of p = W_enc s + b_enc, where s stands at `source`: relu(p), the `k`
    largest of relu(p), or p where it is over the feature's threshold (JumpReLU). Its output is
    the sum of the features' decoder rows, each times its feature, plus b_dec, plus W_skip s where
    it has a skip connection.

    Reads these files, told apart by their names:

    * `sae.safetensors`, `cfg.json`: of `sparsify` (https://github.com/EleutherAI/sparsify).
    * `sae_weights.safetensors`, `cfg.json`: of SAELens 6
      (https://github.com/decoderesearch/SAELens): transcoder, skip_transcoder, jumprelu_transcoder,
      jumprelu_skip_transcoder.
    * `params.npz`: of Gemma Scope, or `params.safetensors`: of Gemma Scope 2.
    * the path of another `.safetensors` file: of circuit-tracer, one layer
      (https://github.com/decoderesearch/circuit-tracer).

    What stands at `at`, x, becomes x + amount · (output - x): an amount of 1 is the transcoder
    alone, 0 is bit-equal to no edit. The features have their own site,
    `blocks.3.transcoder_latents`, float32[batch, time, latents], which other rewrites can capture,
    patch, clamp or ablate. With `error`, what the transcoder does not get right is kept: x becomes
    x + amount · (decode(features) - decode(features before any edit)). So x stays what it is until
    a rewrite changes its features.

    The amount is a control, a number or one for each row. The weights are float32, and not
    trained. The MLP is still run, as a row may have another amount.

    Sources: Dunefsky et al. 2024, arXiv:2406.11944; with skip connections, Paulo et al. 2025,
    arXiv:2501.18823.

    Attributes:
        at: selector of the one site whose value it makes, such as `blocks.3.mlp_output`.
        path: the folder, or the file.
        source: selector of the one site that it reads, of the same block or the input of that
            block. `None` for what the files say.
        norm: what is done first to what stands at `source`: nothing; `"rms"`, division by the root
            of the mean of squares (plus 1e-6); `"layer"`, subtraction of the mean and division by
            the standard deviation (root of the variance plus 1e-5). So a transcoder reads
            `residual_mid` that was trained on what a norm gives before its weights are applied, as
            TransformerLens' `ln2.hook_normalized` is. `None` for what the files say, if they are
            asked for `source` too.
        amount: the default of the control.
        name: name of the control.
        error: whether to keep the error of the reconstruction.
        layers: the layers, to use instead of reading `path`.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.
    """

    at: str
    path: str
    source: str | None = None
    norm: str | None = None
    amount: float = 1.0
    name: str = "transcoder"
    error: bool = False
    layers: tuple[keras.layers.Layer, ...] = ()

    def __post_init__(self) -> None:
        fields = self.check_fields()
        fields.instance("source", str, "`source` to be the selector of a site", optional=True)
        if self.norm is not None:
            fields.choice("norm", _EPSILONS)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put the layers at the site."""
        if place.block is None:
            raise self._refused(place, "a site in a block", "Choose its `mlp_output`.")
        read = surgery.once("read", lambda: self if self.layers else self._read(place))
        kinds = [type(layer) for layer in read.layers]
        if kinds != [Encoder, Decoder] or read.source is None:
            advice = "Leave `layers` out, and give the path again."
            raise self._refused(place, "`layers` and `source` of a `Transcoder`", advice)
        encoder, decoder = read.layers
        source = self._find(x, read.source, place, surgery)
        for tensor, path, layer in ((source, read.source, encoder), (x, place.path, decoder)):
            size = layer.settings["size"]
            if tensor.shape[2:] != (size,):
                raise SurgeryError(
                    f"Transcoder at '{place.path}': expected one for {list(tensor.shape[2:])} at "
                    f"'{path}'. Received one for [{size}]. Use that of this model's layer. "
                    f"{surgery.sites_of((size,), place)}"
                )
        if read.norm is not None:
            source = SourceNorm(read.norm, name=f"{self.name}_norm")(source)
        encoded = encoder(source)
        features = self.site_of(encoded, "transcoder_latents", place, surgery)
        others = {"encoded": encoded} if self.error else {}
        if decoder.settings["source_size"] is not None and not self.error:
            others = {"source": source}
        return decoder(x, features, surgery.inputs[f"{self.name}_amount"], **others)

    def _refused(self, place: Place, expected: str, advice: str) -> SurgeryError:
        return SurgeryError(
            f"Transcoder at '{place.path}': expected {expected}. Received other ones. {advice}"
        )

    def _find(
        self, x: keras.KerasTensor, selector: str, place: Place, surgery: Surgery
    ) -> keras.KerasTensor:
        """Return what stands at the source: in the same block, or the input of the block."""
        [chosen, *others] = surgery.select(selector)
        before = f"blocks.{place.block - 1}" if place.block else "embeddings"  # type: ignore[operator]
        if chosen.path == before and not others and surgery.stream is not None:
            return surgery.stream
        role = chosen.path.removeprefix(f"blocks.{place.block}.")
        for node in graph.topological_nodes([x]):
            if isinstance(node.operation, Site) and node.operation.role == role and not others:
                return node.outputs[0]
        raise SurgeryError(
            f"Transcoder at '{place.path}': expected `source` to be one site of block "
            f"{place.block} that '{place.path}' is computed from, or '{before}'. Received "
            f"'{selector}'. Choose 'blocks.{place.block}.mlp_norm', say."
        )

    def _read(self, place: Place) -> "Transcoder":
        """Build the layers from the files, with what they read."""
        files = read_transcoder(self.path)
        if self.source is None and files.source is None:
            raise SurgeryError(
                f"Transcoder at '{place.path}': expected `source`, as no file in '{self.path}' "
                f"says what it reads. Received none. Pass 'blocks.{place.block}.mlp_norm' for the "
                f"MLP's input, or 'blocks.{place.block}.residual_mid' for the stream before its "
                "norm; for TransformerLens' `ln2.hook_normalized` pass the latter, and `norm`."
            )
        encoder = encoder_of(files.coder, f"{self.name}_encoder")
        decoder = decoder_of(files.coder, f"{self.name}_decoder", files.skip)
        source, norm = self.source, self.norm
        if source is None:
            source = f"blocks.{place.block}.{files.source}"
            norm = files.norm if norm is None else norm
        return replace(self, path="", layers=(encoder, decoder), source=source, norm=norm)

    def applied(self, surgery: Surgery) -> "Transcoder":
        """Return the rewrite with its layers, what it reads, and no path."""
        return surgery.once("read", lambda: self)


class SourceNorm(keras.layers.Layer):
    """Normalise tokens without weights, in float32.

    Args:
        kind: `"rms"` or `"layer"`, see `Transcoder`.
    """

    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(autocast=False, **{**kwargs, "dtype": "float32"})
        self.kind = kind

    def call(self, x):
        """Return float32[batch, time, size]."""
        x = ops.cast(x, "float32")
        if self.kind == "layer":
            x = x - ops.mean(x, axis=-1, keepdims=True)
        squares = ops.mean(ops.square(x), axis=-1, keepdims=True)
        return x * ops.rsqrt(squares + _EPSILONS[self.kind])

    def compute_output_spec(self, x):
        """Keep the shape."""
        return keras.KerasTensor(x.shape, "float32")
