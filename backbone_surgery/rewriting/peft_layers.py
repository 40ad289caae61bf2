"""Which linear layers of KerasHub's families the modules of `transformers` are."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening.open import open_backbone
from backbone_surgery.opening.site import is_block
from backbone_surgery.rewriting.peft_files import Factors

_LAYERS = {
    "query": ("query", "query_dense", "q_proj"),
    "key": ("key", "key_dense", "k_proj"),
    "value": ("value", "value_dense", "v_proj"),
    "output": ("attention_output", "output_dense", "o_proj"),
    "gate": ("feedforward_gate_dense", "ffw_gating", "gate_proj"),
    "up": ("feedforward_intermediate_dense", "ffw_gating_2", "up_proj", "mlp_intermediate_dense"),
    "down": ("feedforward_output_dense", "ffw_linear", "down_proj", "mlp_output_dense"),
    "per_layer": ("per_layer_up_proj",),
}
"""What the linear layers of a block are called in KerasHub's families."""

_MODULES = {
    **dict.fromkeys(("q_proj",), ("query",)),
    **dict.fromkeys(("k_proj",), ("key",)),
    **dict.fromkeys(("v_proj",), ("value",)),
    **dict.fromkeys(("c_attn", "qkv_proj", "query_key_value"), ("query", "key", "value")),
    **dict.fromkeys(("o_proj", "out_proj", "dense", "attn.c_proj"), ("output",)),
    **dict.fromkeys(("gate_proj",), ("gate",)),
    **dict.fromkeys(("up_proj", "fc1", "c_fc", "dense_h_to_4h"), ("up",)),
    **dict.fromkeys(("gate_up_proj",), ("gate", "up")),
    **dict.fromkeys(("down_proj", "fc2", "dense_4h_to_h", "mlp.c_proj"), ("down",)),
    "per_layer_projection": ("per_layer",),
}
"""The same of the modules of `transformers`. One module may be several layers."""

_ATTENTION = ("self_attn", "attn", "attention", "self_attention", "linear_attn")
_MLP = ("mlp", "mlp.shared_expert")
"""What `transformers` calls the parts of a block that hold linear layers."""


def linear_nodes(owner: keras.Model) -> Iterator[tuple[str, Any]]:
    """Yield the linear layers in the blocks of a backbone, as nodes by path, `blocks.3.query`."""
    blocks = [x for x in graph.graph_nodes(open_backbone(owner)) if is_block(x.operation)]
    for i, block in enumerate(blocks):
        for node in graph.graph_nodes(block.operation):
            if isinstance(node.operation, keras.layers.Dense | keras.layers.EinsumDense):
                yield f"blocks.{i}.{node.operation.name}", node


def parts_of(
    name: str, block: int, module: str, factors: Factors, nodes: Mapping[str, Any]
) -> Iterator[tuple[str, Factors]]:
    """Yield the layers that a module of `transformers` is, each with its share of the factors.

    Args:
        name: of the rewrite, for errors.
        block: in which block.
        module: name in the block, such as `self_attn.q_proj`.
        factors: of the whole module.
        nodes: see `linear_nodes`.

    Raises:
        SurgeryError: there is no such layer, or the factors are those of another size.
    """
    paths = _paths(block, module, nodes)
    expected = f"Lora at '{name}': expected factors of linear layers in attention and MLP"
    received = f"Received some of '{module}' in block {block}"
    if paths is None:
        linear = ", ".join(p for p in nodes if p.startswith(f"blocks.{block}."))
        raise SurgeryError(
            f"{expected}. {received}, which is none. Merge the adapter with `merge_and_unload` of "
            f"PEFT, and load the model that it gives. Linear layers here: {linear or 'none'}."
        )
    inputs = math.prod(nodes[paths[0]].input_tensors[0].shape[2:])
    shapes = [nodes[path].outputs[0].shape[2:] for path in paths]
    outputs = [math.prod(shape) for shape in shapes]
    rank = factors.down.shape[1]
    if (factors.down.shape[0], factors.up.shape[1]) != (inputs, sum(outputs)):
        raise SurgeryError(
            f"{expected}, from {inputs} to {sum(outputs)} numbers. {received}, from "
            f"{factors.down.shape[0]} to {factors.up.shape[1]}. Use an adapter of this base."
        )
    if module.endswith("query_key_value") and len(paths) > 1:  # those of each head side by side
        heads, size = shapes[0]
        stacked = np.moveaxis(factors.up.reshape(rank, heads, len(paths), size), 2, 0)
        ups = list(stacked.reshape(len(paths), rank, -1))
    else:
        ups = np.split(factors.up, np.cumsum(outputs)[:-1], axis=1)
    for path, up in zip(paths, ups, strict=True):
        yield path, replace(factors, up=up)


def _paths(block: int, module: str, nodes: Mapping[str, Any]) -> list[str] | None:
    """Return the paths of the layers that a module is; `None` if it is none."""
    *parents, last = module.split(".")
    parent = ".".join(parents)
    roles = _MODULES.get(last) or _MODULES.get(f"{parent}.{last}", ())
    parts: tuple[str, ...] = (*_ATTENTION, *_MLP)
    if roles:
        parts = _ATTENTION if roles[0] in ("query", "key", "value", "output") else _MLP
    if parent not in ("", *parts):
        return None
    found = [
        path
        for role in roles
        for name in _LAYERS[role]
        if (path := f"blocks.{block}.{name}") in nodes
    ]
    if found and len(found) == len(roles):
        return found
    own = f"blocks.{block}.{last}"
    return [own] if own in nodes else None
