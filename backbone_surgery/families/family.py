"""What a family is: how one architecture's decoder block and positions are opened.

A family file holds one `FAMILY`. Its `open_block` spells out the dataflow of the architecture's
decoder block in the block's own sub-layers; everything else is shared.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.site import BlockInput, Site

OpenBlock = Callable[..., keras.KerasTensor]


@dataclass(frozen=True)
class Family:
    """One architecture: which layer is its decoder block, and how to open it.

    Attributes:
        name: such as `gpt2`.
        block: class of the decoder block.
        open_block: `(block, hidden_states, padding_mask, positions) -> hidden_states`, on symbolic
            tensors float[batch, time, hidden], int[batch, time], int32[batch, time]. It puts a
            `Site` at each place, all but the last.
        hidden_states: name of the block's argument for the hidden states.
        padding_mask: name of the block's argument for the padding mask.
        position_layers: classes of layers outside of the block that number the tokens by
            themselves unless they are given `positions=`.
        refuse: `(block) -> reason`, or `None` when the block can be opened.
        sampler: the sampler that KerasHub's own task for this family takes by default.
        model_types: the names that Hugging Face and llama.cpp have for the architecture.
        model_type: `(block) -> one of them`; the first by default.
    """

    name: str
    block: type[keras.layers.Layer]
    open_block: OpenBlock
    hidden_states: str = "x"
    padding_mask: str = "padding_mask"
    position_layers: tuple[type[keras.layers.Layer], ...] = ()
    refuse: Callable[[Any], str | None] = lambda block: None
    sampler: str = "greedy"
    model_types: tuple[str, ...] = ()
    model_type: Callable[[Any], str] | None = None

    def arguments(self, block: keras.layers.Layer, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        """Split the call of a block into its hidden states and its padding mask."""
        reason = self.refuse(block)
        if reason is not None:
            raise SurgeryError(f"open at '{block.name}': expected {reason}.")
        bound = inspect.signature(block.call).bind(*args, **kwargs).arguments
        hidden_states = bound.pop(self.hidden_states)
        padding_mask = bound.pop(self.padding_mask, None)
        plain = {"use_causal_mask": True, "cache_update_index": 0, "training": None}
        other = {k: v for k, v in bound.items() if v is not None and v is not plain.get(k, None)}
        if padding_mask is None or other:
            received = "no mask" if padding_mask is None else ", ".join(sorted(other))
            raise SurgeryError(
                f"open at '{block.name}': expected a call with hidden states and "
                f"`{self.padding_mask}` alone. Received {received}. Call the block as the "
                "backbone does."
            )
        return hidden_states, padding_mask

    def open(
        self,
        block: keras.layers.Layer,
        hidden_states: keras.KerasTensor,
        padding_mask: keras.KerasTensor,
        positions: keras.KerasTensor,
        name: str,
    ) -> keras.KerasTensor:
        """Run a decoder block as a nested model of its sub-layers."""

        def build(x: keras.KerasTensor, *others: keras.KerasTensor) -> keras.KerasTensor:
            return Site("block")(self.open_block(block, BlockInput()(x), *others))

        return graph.nest(name, build, hidden_states, padding_mask, positions)

    def token_embedding(self, model: keras.Model) -> keras.layers.Layer:
        """Find the layer that embeds token ids, and in reverse gives the logits."""
        found = list(dict.fromkeys(_embeddings(model)))
        if len(found) != 1:
            raise SurgeryError(
                f"open at '{model.name}': expected one `keras.layers.ReversibleEmbedding` in the "
                f"graph, to make logits with. Received {len(found)}. Keep the backbone's own token "
                "embedding in the graph."
            )
        return found[0]

    def model_type_of(self, owner: keras.Model) -> str:
        """Return the name that Hugging Face and llama.cpp have for the architecture of a model."""
        if self.model_type is None:
            return next(iter(self.model_types), self.name)
        layers = (node.operation for node in graph.all_nodes(owner))
        return self.model_type(next(x for x in layers if isinstance(x, self.block)))

    def max_positions(self, model: keras.Model) -> int | None:
        """Return how many positions the model has learned, or `None` when it has no limit."""
        limits = [
            node.operation.sequence_length
            for node in graph.all_nodes(model)
            if isinstance(node.operation, self.position_layers)
        ]
        return min(limits, default=None)


def _embeddings(model: keras.Model) -> list[keras.layers.Layer]:
    layers = (node.operation for node in graph.all_nodes(model))
    return [layer for layer in layers if isinstance(layer, keras.layers.ReversibleEmbedding)]
