"""Linear: a model in which features of transcoders act on later ones by sums alone.

Source: Ameisen et al. 2025, "Circuit Tracing", https://transformer-circuits.pub/2025/attribution-graphs.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.caching.stand_in import StandIn
from backbone_surgery.errors import SurgeryError
from backbone_surgery.graph.emission import emit
from backbone_surgery.opening.site import Place, Site, is_written
from backbone_surgery.rewriting import Rewrite, Surgery
from backbone_surgery.rewriting.autoencoder_layers import Decoder, Encoder

FEATURES = "transcoder_latents"
_HELD = ("query", "key", "decay", "write_strength", "output_gate", "value_gate")
"""Roles of sites that are held fast, so that attention is a sum of values."""
_GATED = "convolution_activation"
"""Name of the activation behind the convolution of linear attention."""


@dataclass(frozen=True)
class Coded:
    """A transcoder in a graph.

    Attributes:
        block: the decoder block that it is in.
        encoder: its encoder.
        decoder: its decoder.
        at: the node of its encoder, and that of its decoder, each after the models it is in.
    """

    block: int
    encoder: Encoder
    decoder: Decoder
    at: tuple[tuple[Any, ...], tuple[Any, ...]]


def transcoders_of(places: list[Place], operation: str) -> list[Coded]:
    """Return the transcoders of a graph whose sites are these, in the order of their blocks.

    Raises:
        SurgeryError: there are none, or one takes the place of something else than an MLP.
    """
    found = [place for place in places if place.path == f"blocks.{place.block}.{FEATURES}"]
    if not found:
        raise SurgeryError(
            f"{operation}: expected a model with transcoders. Received one without. Put them in by "
            "`bs.Transcoder`, with `error=True`."
        )
    return [_coded(place, operation) for place in found]


def _coded(place: Place, operation: str) -> Coded:
    """Return the transcoder whose features stand at a site."""
    *way, node = place.nodes
    above = graph.topological_nodes([node.outputs[0]])
    encoder = next(n for n in reversed(above) if isinstance(n.operation, Encoder))
    nodes = graph.topological_nodes(way[-1].operation.outputs)
    sites = {n.operation.role: n for n in nodes if isinstance(n.operation, Site)}
    between = {id(n.outputs[0]) for n in sites.values()}
    written = sites["mlp_output"].input_tensors if "mlp_output" in sites else []
    for decoder in graph.topological_nodes(written, between):
        if isinstance(decoder.operation, Decoder) and _reads(decoder, node):
            at = (*way, encoder), (*way, decoder)
            return Coded(place.block or 0, encoder.operation, decoder.operation, at)
    raise SurgeryError(
        f"{operation} at '{place.path}': expected transcoders that make `mlp_output`. Received one "
        "elsewhere. Leave it out."
    )


def _reads(decoder: Any, features: Any) -> bool:
    return features in graph.topological_nodes([decoder.input_tensors[1]])


@dataclass(frozen=True)
class Linearize(Rewrite):
    """Make the model a sum: of what stands at the embeddings, and of what each MLP makes.

    Queries and keys are held fast, so that attention is a sum of values, and gates; so is what each
    MLP makes, but for the skip connections of transcoders. Norms are for `FreezeNorms`. To each
    summand an input is added, zero by default, to take gradients with respect to. What is summed,
    and what transcoders read and make of it, becomes an output.

    Attributes:
        name: what the inputs and outputs begin with.
    """

    captures: ClassVar[bool] = True

    name: str

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Hold fast what is not linear, and hand out what is summed and read."""
        coded = transcoders_of(surgery.places, "Linearize")
        encoders = {c.at[0]: c for c in coded}
        decoders = {c.at[1]: c for c in coded}
        sites = {place.nodes: place for place in surgery.places}
        by_decoder = {f"blocks.{c.block}.mlp_output" for c in coded}
        sources: dict[int, keras.KerasTensor] = {}

        def visit(layer: Any, *args: Any, **kwargs: Any) -> Any:
            node = graph.visited_node()
            if node in encoders:
                sources[encoders[node].block] = args[0]
                emit(f"{self.name}/source/{encoders[node].block}", args[0])
            if node in decoders:
                return self._decoded(decoders[node], sources, surgery, *args, **kwargs)
            if getattr(layer, "name", "") == _GATED:
                return Gate(layer, name=f"{_GATED}_held")(*args)
            place = sites.get(node)
            if place is None or not isinstance(layer, Site):
                return graph.KEEP
            if layer.role == FEATURES:
                emit(f"{self.name}/features/{place.block}", args[0])
            elif layer.role in _HELD:
                return layer(ops.stop_gradient(args[0]))
            elif is_written(place.path) and layer.role != "attention_output":
                if place.path not in by_decoder:
                    return layer(self._summand(ops.stop_gradient(args[0]), place.path, surgery))
            return graph.KEEP

        return visit

    def _decoded(
        self,
        coded: Coded,
        sources: dict[int, keras.KerasTensor],
        surgery: Surgery,
        x: keras.KerasTensor,
        features: keras.KerasTensor,
        amount: keras.KerasTensor,
        **others: keras.KerasTensor,
    ) -> keras.KerasTensor:
        """Return what a decoder gives, held fast but for the skip connection."""
        made = ops.stop_gradient(coded.decoder(x, features, amount, **others))
        if coded.decoder.settings["source_size"] is not None:
            made = Skip(coded.decoder, name=f"{coded.decoder.name}_skip")(
                made, sources[coded.block], amount
            )
        emit(f"{self.name}/amount/{coded.block}", amount)
        return self._summand(made, f"blocks.{coded.block}.mlp_output", surgery)

    def _summand(self, x: keras.KerasTensor, path: str, surgery: Surgery) -> keras.KerasTensor:
        """Hand out what is summed, and add an input to it."""
        surgery.fired.append(path)
        emit(f"{self.name}/summand/{path}", x)
        shape = x.shape[2:]
        zeros = np.zeros((1, *shape), "float32")
        nudge = surgery.control(f"{self.name}_{surgery.index}", zeros, (None, *shape))
        return ops.add(x, ops.cast(nudge, x.dtype))


class Gate(StandIn):
    """Compute what an activation computes, with the gradient of a product with a constant.

    Args:
        layer: the activation, of which 0 makes 0.
    """

    def call(self, x):
        """Multiply x by what the activation makes of it, divided by it."""
        made = self.layer(x)
        slope = ops.where(ops.equal(x, 0), 0.0, made / ops.where(ops.equal(x, 0), 1.0, x))
        return ops.stop_gradient(made) + ops.stop_gradient(slope) * (x - ops.stop_gradient(x))


class Skip(keras.layers.Layer):
    """Give what stands there the gradient of a transcoder's skip connection.

    Args:
        decoder: of the transcoder, which owns the weights.
    """

    def __init__(self, decoder: Decoder, **kwargs: Any) -> None:
        super().__init__(autocast=False, **{**kwargs, "dtype": "float32"})
        self.decoder = decoder
        self.built = True

    def call(self, x, source, amount):
        """Return x as it is, float[batch, time, size]."""
        linear = ops.matmul(ops.cast(source, "float32"), self.decoder.skip) * amount[:, None, None]
        return x + ops.cast(linear - ops.stop_gradient(linear), x.dtype)

    def compute_output_spec(self, x, source, amount):
        """Keep the shape and dtype of `x`."""
        return keras.KerasTensor(x.shape, x.dtype)
