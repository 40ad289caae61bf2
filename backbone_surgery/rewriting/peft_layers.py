"""Which linear layers of KerasHub's families the modules of `transformers` are, and back."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.open import open_backbone
from backbone_surgery.opening.site import is_block
from backbone_surgery.rewriting.peft_files import Factors

_LAYERS = {
    "query": ("query", "query_dense", "q_proj", "receptance"),
    "key": ("key", "key_dense", "k_proj"),
    "value": ("value", "value_dense", "v_proj"),
    "output": ("attention_output", "output_dense", "o_proj"),
    "gate": ("feedforward_gate_dense", "ffw_gating", "gate_proj"),
    "up": ("feedforward_intermediate_dense", "ffw_gating_2", "up_proj", "mlp_intermediate_dense"),
    "down": ("feedforward_output_dense", "ffw_linear", "down_proj", "mlp_output_dense"),
    "per_layer": ("per_layer_up_proj", "per_layer_projection"),
}
"""What the linear layers of a block are called in KerasHub's families."""

_QUERIES_AND_VALUES = (*_LAYERS["query"], *_LAYERS["value"], "query_key_value", "in_proj_qkv")

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
_STREAMS = ("laurel", "altup")
"""Likewise, those of Gemma 3n beside them."""

_ROOTS = {
    **dict.fromkeys(("gpt2", "bloom", "falcon"), "transformer.h"),
    "gpt_neox": "gpt_neox.layers",
    "opt": "model.decoder.layers",
}
_ROOTS_WITH_IMAGES = dict.fromkeys(("gemma3", "gemma3n", "gemma4"), "model.language_model.layers")
"""What `AutoModelForCausalLM` of `transformers` calls the list of blocks, by model type."""

_USUAL = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b"),
    *("linear_attn.in_proj_a", "linear_attn.out_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    *("per_layer_input_gate", "per_layer_projection"),
    *("laurel.linear_left", "laurel.linear_right", "altup.modality_router"),
    *("altup.prediction_coefs", "altup.correction_coefs"),
)
_FUSED = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_4h_to_h")
_WRITTEN = {
    **{"bloom": (*_FUSED, "mlp.dense_h_to_4h"), "falcon": _FUSED},
    "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_proj"),
    "gpt_neox": ("attention.query_key_value", "attention.dense", "mlp.dense_4h_to_h"),
    "opt": (*_USUAL[:3], "self_attn.out_proj", "fc2"),
    "phi3": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
}
"""Modules of a block that are linear, by model type."""

_SHARED_EXPERT = ("shared_expert_gate_dense", "shared_expert_gate")
"""What KerasHub's mixtures with a shared expert have in a block."""


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


def paths_of(
    name: str,
    targets: Sequence[str] | None,
    model: EditedBackbone,
    nodes: Mapping[str, Any],
    left: Collection[str],
) -> list[str]:
    """Return the layers that a new adapter goes beside.

    Args:
        name: of the rewrite, for errors.
        targets: names of layers of KerasHub, or of modules of `transformers`, by how they end, or
            what a layer makes, such as `"query"`; queries and values if `None`.
        model: the model.
        nodes: see `linear_nodes`.
        left: the paths of those that the graph still has.

    Raises:
        SurgeryError: the graph has no such layer.
    """
    layers = {path: path.split(".", 2)[2] for path in nodes if path in left}
    expected = f"Lora at '{name}': expected linear layers that the graph has"
    here = f"Linear layers here: {', '.join(sorted(set(layers.values()))) or 'none'}."
    if targets is None:
        usual = [path for path, layer in layers.items() if layer in _QUERIES_AND_VALUES]
        if not usual:
            raise SurgeryError(
                f"{expected}. Received none of queries and values. Name others by "
                f"`target_modules`. {here}"
            )
        return usual
    modules, chosen = module_names(model, nodes), set()
    for target in targets:
        own = (target, *_LAYERS.get(target, ()))
        found = {path for path, layer in layers.items() if layer in own}
        for module, paths in modules.items():
            if f".{module}".endswith(f".{target}"):  # as PEFT matches them
                found.update(layers.keys() & paths)
        if not found:
            raise SurgeryError(
                f"{expected} as `target_modules`. Received {shown(target)}, which is none. {here}"
            )
        chosen |= found
    return [path for path in layers if path in chosen]


def module_names(
    model: EditedBackbone, nodes: Mapping[str, Any], root: str | None = None
) -> dict[str, list[str]]:
    """Return `{module: the layers that it is}`, with whole names as `transformers` has them.

    There are none where the family does not say which models of `transformers` are its own.

    Args:
        model: the model.
        nodes: see `linear_nodes`.
        root: what the list of blocks is called; by default as in `AutoModelForCausalLM`.
    """
    family, names = model.family, {}
    kind = family.model_types_of(model.owner)[0]
    roots = _ROOTS | (_ROOTS_WITH_IMAGES if family.image_nodes(model.owner) else {})
    root = root or roots.get(kind, "model.layers")
    modules = _WRITTEN.get(kind, _USUAL) if family.model_types else ()
    for block in sorted({int(path.split(".")[1]) for path in nodes}):
        shared = any(f"blocks.{block}.{name}" in nodes for name in _SHARED_EXPERT)
        taken: set[str] = set()
        for module in modules:
            paths = _paths(block, module, nodes)
            if paths is None or taken.intersection(paths):
                continue
            taken.update(paths)
            written = module.replace("mlp.", "mlp.shared_expert.") if shared else module
            names[f"{root}.{block}.{written}"] = paths
    return names


def joined(
    module: str, paths: Sequence[str], factors: Mapping[str, Factors], nodes: Mapping[str, Any]
) -> Factors:
    """Return the factors of a module from those of the layers that it is; see `parts_of`.

    Layers of one `down` keep its rank; else ranks add up. A layer without factors gets zeros.
    """
    if len(paths) == 1:
        return factors[paths[0]]
    own = [factors[path] for path in paths if path in factors]
    one = all(np.array_equal(f.down, own[0].down) and f.scale == own[0].scale for f in own)
    down = own[0].down if one else np.concatenate([f.down * f.scale for f in own], axis=1)
    shapes = [nodes[path].outputs[0].shape[2:] for path in paths]
    ups, begin = [], 0
    for path, shape in zip(paths, shapes, strict=True):
        up = np.zeros((down.shape[1], math.prod(shape)), "float32")
        if path in factors:
            rank = len(factors[path].up)
            up[begin : begin + rank] = factors[path].up
            begin += 0 if one else rank
        ups.append(up)
    if module.endswith("query_key_value"):  # those of each head side by side
        ups = [np.stack([up.reshape(len(up), *shapes[0]) for up in ups], axis=2)]
    up = np.concatenate([up.reshape(down.shape[1], -1) for up in ups], axis=1)
    return Factors(down, up, own[0].scale if one else 1.0)


def _paths(block: int, module: str, nodes: Mapping[str, Any]) -> list[str] | None:
    """Return the paths of the layers that a module is; `None` if it is none."""
    *parents, last = module.split(".")
    parent = ".".join(parents)
    roles = _MODULES.get(last) or _MODULES.get(f"{parent}.{last}", ())
    parts: tuple[str, ...] = (*_ATTENTION, *_MLP, *_STREAMS)
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
