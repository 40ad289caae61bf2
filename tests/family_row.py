"""What a family under test is, and how its tiny backbones are made."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import keras_hub
import numpy as np

from backbone_surgery import graph, hosts

VOCABULARY = 60


def spread(backbone, seed):
    """Give the weights values large enough for the greedy choice to be clear."""
    rng = np.random.default_rng(seed)
    for variable in backbone.trainable_variables:
        value = hosts.to_numpy(variable)
        if value.ndim > 1:
            value = rng.normal(0, 1 / np.sqrt(np.prod(value.shape[:-1])) + 0.15, value.shape)
        else:
            value = value + rng.normal(0, 0.1, value.shape)
        variable.assign(value.astype(value.dtype))
    return backbone


def make(backbone_class, **defaults):
    """Return a function that makes tiny random backbones of a class."""
    config = {"vocabulary_size": VOCABULARY, "num_layers": 2, **defaults}

    def make_one(seed=0, **kwargs):
        keras.utils.set_random_seed(seed)  # vectors, such as sinks, may begin at random
        return spread(backbone_class(**{**config, **kwargs}), seed)

    return make_one


def make_gpt2(seed=0, **kwargs):
    config = {
        "vocabulary_size": VOCABULARY,
        "num_layers": 2,
        "num_heads": 4,
        "hidden_dim": 32,
        "intermediate_dim": 64,
        "max_sequence_length": 64,
        "dropout": 0.0,
    }
    return spread(keras_hub.models.GPT2Backbone(**{**config, **kwargs}), seed)


def make_deep_gpt2(seed=0, **kwargs):
    """One of three blocks, for what takes more than two: to be swapped, say, and to stay."""
    return make_gpt2(seed, **{"num_layers": 3, **kwargs})


def make_gemma(seed=0, **kwargs):
    config = {
        "vocabulary_size": VOCABULARY,
        "num_layers": 2,
        "num_query_heads": 4,
        "num_key_value_heads": 1,
        "hidden_dim": 32,
        "intermediate_dim": 96,
        "head_dim": 8,
    }
    return spread(keras_hub.models.GemmaBackbone(**{**config, **kwargs}), seed)


def make_gemma2(seed=0, **kwargs):
    config = {
        "num_layers": 2,
        "num_key_value_heads": 2,
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
        "attention_logit_soft_cap": 50.0,
        "final_logit_soft_cap": 30.0,
        "use_sliding_window_attention": True,
        "sliding_window_size": 6,
    }
    return make_gemma(seed, **{**config, **kwargs})


@dataclass(frozen=True)
class Row:
    """A family under test.

    Attributes:
        make: `(seed=0, **config) -> backbone`, tiny and random.
        task: KerasHub's own task of the family: an independent way to generate.
        shapes: configs of odd shapes, which are opened too.
        layers: `{site: sub-layer}`, such as `{"query": "attention.query_dense"}`: sub-layers of the
            backbone's own blocks that give what stands at a site.
        embeddings: where the backbone has the layer whose output `score` hands out first, if that
            is not in its graph.
        stream: which of the streams that blocks give, stacked, is the hidden states.
        block_mask: name of the block's argument for the padding mask.
        block_arguments: other arguments that the backbone gives its blocks.
        inputs: inputs of the backbone and of the task besides the text.
        task_inputs: inputs of the task alone.
        task_is_right: whether KerasHub's own task generates what its backbone computes, for prompts
            as others take them.
        head: name of the layer that gives logits, where the backbone gives them.
        lora: names of the layers that LoRA goes into, where KerasHub's own are not there.
        int8_is_right: whether KerasHub computes the same after int8 quantisation, but for rounding.
        int8_error: what Keras says where it cannot quantise the backbone.
        needs_first_block: whether the others take something of the first block.
        in_numpy: whether `numpy_models.py` has the family, for the tests of every rewrite.
        tolerance: of the opened and the cached graph, relative to the largest hidden state.
    """

    make: Callable[..., Any]
    task: type
    shapes: tuple[dict[str, Any], ...] = ()
    layers: dict[str, str] = field(default_factory=dict)
    embeddings: str = ""
    stream: int | None = None
    block_mask: str = "decoder_padding_mask"
    block_arguments: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    task_inputs: dict[str, Any] = field(default_factory=dict)
    task_is_right: bool = True
    head: str = ""
    lora: tuple[str, ...] | None = None
    int8_is_right: bool = True
    int8_error: str = ""
    needs_first_block: bool = False
    in_numpy: bool = False
    tolerance: float = 5e-6

    def without_head(self, backbone):
        """Return the backbone's own model of hidden states."""
        if not self.head:
            return backbone
        head = next(n for n in graph.graph_nodes(backbone) if n.operation.name == self.head)
        return keras.Model(backbone.input, head.input_tensors[0])


LLAMA_LAYERS = {
    "attention_norm": "_self_attention_layernorm",
    "query": "_self_attention_layer._query_dense",
    "key": "_self_attention_layer._key_dense",
    "value": "_self_attention_layer._value_dense",
    "attention_output": "_self_attention_layer._output_dense",
    "mlp_norm": "_feedforward_layernorm",
    "mlp_output": "_feedforward_output_dense",
}
"""Those of blocks that are made as Llama's is."""
