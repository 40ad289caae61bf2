"""Transcoder: run a trained transcoder in place of an MLP, with its features as a site."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import keras
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening.site import Place, Site, is_stream
from backbone_surgery.rewriting.autoencoder_layers import Decoder, Encoder, decoder_of, encoder_of
from backbone_surgery.rewriting.coder import Coder
from backbone_surgery.rewriting.rewrite import Surgery
from backbone_surgery.rewriting.transcoder_files import TranscoderFiles, read_transcoder

_EPSILON = 1e-6
"""What stands under the root where the model has no norm that tells."""


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
    a rewrite changes its features. The MLP of a later block answers such a change, and not its
    transcoder, where that has `error` too.

    The amount is a control, a number or one for each row. The weights are float32, and not
    trained. The MLP is still run, as a row may have another amount.

    Sources: Dunefsky et al. 2024, arXiv:2406.11944; with skip connections, Paulo et al. 2025,
    arXiv:2501.18823.

    Attributes:
        at: selector of the one site whose value it makes, such as `blocks.3.mlp_output`.
        path: the folder, or the file.
        source: selector of the one site that it reads, of the same block or the input of that
            block, as it is inside of what wraps it. `None` for what the files say.
        norm: what is done first to what stands at `source`: `"none"`; `"rms"`, division by the root
            of the mean of squares; `"layer"`, subtraction of the mean and division by the standard
            deviation; under the root stands the epsilon of the model's own norm. So a transcoder
            reads `residual_mid` that was trained on what a norm gives before its weights are
            applied, as TransformerLens' `ln2.hook_normalized` is. `None` for what the files say.
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
            fields.choice("norm", ("none", "rms", "layer"))

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put the layers at the site."""
        if place.block is None or is_stream(place.path):
            raise SurgeryError(
                f"Transcoder at '{place.path}': expected a site of a block that is added to the "
                "residual stream. Received the stream itself. Choose 'mlp_output' of the block."
            )
        read = surgery.once("read", lambda: self._kept() if self.layers else self._read(x, place))
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
        if read.norm != "none":
            epsilon = _epsilon(f"blocks.{place.block}.mlp_norm", surgery)
            source = SourceNorm(read.norm, epsilon, name=f"{self.name}_norm")(source)
        encoded = encoder(source)
        features = self.site_of(encoded, "transcoder_latents", place, surgery)
        others = {"encoded": encoded} if self.error else {}
        if decoder.settings["source_size"] is not None and not self.error:
            others = {"source": source}
        return decoder(x, features, surgery.inputs[f"{self.name}_amount"], **others)

    def _find(
        self, x: keras.KerasTensor, selector: str, place: Place, surgery: Surgery
    ) -> keras.KerasTensor:
        """Return what stands at the source: in the same block, or the input of the block."""
        before = f"blocks.{place.block - 1}" if place.block else "embeddings"  # type: ignore[operator]
        known = self.source is not None or selector in [p.path for p in surgery.places]
        paths = [p.path for p in surgery.select(selector)] if known else []
        if paths == [before] and surgery.stream is not None:
            return surgery.stream
        roles = [path.removeprefix(f"blocks.{place.block}.") for path in paths]
        for node in graph.topological_nodes([x]):
            if isinstance(node.operation, Site) and [node.operation.role] == roles:
                return node.outputs[0]
        raise SurgeryError(
            f"Transcoder at '{place.path}': expected `source`, or what the files say, to be one "
            f"site of block {place.block} that '{place.path}' is computed from, or '{before}'. "
            f"Received '{selector}'. Pass `source='blocks.{place.block}.mlp_norm'`, say."
        )

    def _kept(self) -> "Transcoder":
        """Return the rewrite, if it has the layers and what they read."""
        kinds = [type(layer) for layer in self.layers]
        if kinds != [Encoder, Decoder] or self.source is None:
            raise SurgeryError(
                f"Transcoder at '{self.at}': expected `layers` and `source` of a rewrite in "
                f"`edited.rewrites`. Received {self.layers!r} and {self.source!r}. Leave `layers` "
                "out, and give the path again."
            )
        return replace(self, path="", norm=self.norm or "none")

    def _read(self, x: keras.KerasTensor, place: Place) -> "Transcoder":
        """Build the layers from the files, with what they read."""
        files = read_transcoder(self.path)
        block = f"blocks.{place.block}"
        said = None if files.source is None else f"{block}.{files.source}"
        source, norm = self.source or said, self.norm
        if source is None:
            raise SurgeryError(
                f"Transcoder at '{place.path}': expected `source`, as no file in '{self.path}' "
                f"says what it reads. Received none. Pass '{block}.mlp_norm' for the MLP's input, "
                f"or '{block}.residual_mid' for the stream before its norm; for TransformerLens' "
                "`ln2.hook_normalized` pass the latter, and `norm`."
            )
        if norm is None and files.norm is not None and source != said:
            raise SurgeryError(
                f"Transcoder at '{place.path}': expected `norm` beside this `source`, since what "
                f"'{self.path}' reads is '{said}' with norm='{files.norm}'. Received '{source}' "
                "alone. Leave `source` out, or say whether what stands there is normalised."
            )
        self._check_files(files, x, place)
        encoder = encoder_of(files.coder, f"{self.name}_encoder")
        decoder = decoder_of(files.coder, f"{self.name}_decoder", files.skip)
        norm = norm or (files.norm if source == said else None) or "none"
        return replace(self, path="", layers=(encoder, decoder), source=source, norm=norm)

    def _check_files(self, files: TranscoderFiles, x: keras.KerasTensor, place: Place) -> None:
        """Refuse what was trained on the output of a module that is no site here."""
        if files.of_module and _is_normed(x):
            raise SurgeryError(
                f"Transcoder at '{place.path}': expected one that makes what is added to the "
                "residual stream, behind the norm that follows the MLP. Received one of the MLP's "
                f"own output, in '{self.path}'. Use one of Gemma Scope, or train one there."
            )
        if files.layer not in (None, place.block):
            warnings.warn(
                f"Transcoder at '{place.path}': '{self.path}' is of layer {files.layer}.",
                stacklevel=2,
            )

    def applied(self, surgery: Surgery) -> "Transcoder":
        """Return the rewrite with its layers, what it reads, and no path."""
        return surgery.once("read", lambda: self)


def _is_normed(x: keras.KerasTensor) -> bool:
    """Tell whether a norm stands between a tensor and the site before it."""
    above = graph.topological_nodes([x])
    sites = {id(n.outputs[0]) for n in above if isinstance(n.operation, Site)}
    names = (type(n.operation).__name__.lower() for n in graph.topological_nodes([x], sites))
    return any("norm" in name for name in names)


def _epsilon(path: str, surgery: Surgery) -> float:
    """Return the epsilon of the norm that makes a site, or 1e-6."""
    for place in surgery.places:
        if place.path == path:
            norm = graph.node_of(place.nodes[-1].input_tensors[0]).operation
            return float(getattr(norm, "epsilon", _EPSILON))
    return _EPSILON


class SourceNorm(keras.layers.Layer):
    """Normalise tokens without weights, in float32.

    Args:
        kind: `"rms"` or `"layer"`, see `Transcoder`.
        epsilon: what stands under the root beside the mean of squares.
    """

    def __init__(self, kind: str, epsilon: float, **kwargs: Any) -> None:
        super().__init__(autocast=False, **{**kwargs, "dtype": "float32"})
        self.kind, self.epsilon = kind, epsilon

    def call(self, x):
        """Return float32[batch, time, size]."""
        x = ops.cast(x, "float32")
        if self.kind == "layer":
            x = x - ops.mean(x, axis=-1, keepdims=True)
        squares = ops.mean(ops.square(x), axis=-1, keepdims=True)
        return x * ops.rsqrt(squares + self.epsilon)

    def compute_output_spec(self, x):
        """Keep the shape."""
        return keras.KerasTensor(x.shape, "float32")
