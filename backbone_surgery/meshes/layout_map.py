"""`layout_map`: which axis of each weight is split over the devices that share a model.

The layout is that of Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053): projections out of the
residual stream are split by what they make, heads or inner units, and those back into it by what
they read. Between the two nothing is exchanged, so a block takes two all-reduces.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, closest, shown
from backbone_surgery.opening.experts import MixedExperts
from backbone_surgery.opening.head import TableAndHead
from backbone_surgery.opening.int4 import kernel_shape, policy_of
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.open import open_backbone
from backbone_surgery.opening.packed_axes import PACKED, packed_axes
from backbone_surgery.opening.quantizing import CALIBRATED
from backbone_surgery.opening.recurrence import CausalConvolution
from backbone_surgery.opening.site import Site, is_block
from backbone_surgery.presets import load_backbone

_BY_HEADS = {"query", "key", "value", "output_gate"}
"""Sites of heads, behind the projections that make them."""


class Split(NamedTuple):
    """An axis of a weight that can be split.

    Attributes:
        variable: the weight.
        axis: which axis.
        units: what lies along it: heads, inner units or tokens.
        summed: whether what the shares give has to be added up.
        vocabulary: whether the units are the tokens of the vocabulary.
        width: how many numbers are added up for a token; `None` is `hidden_dim`.
    """

    variable: keras.Variable
    axis: int
    units: int
    summed: bool = False
    vocabulary: bool = False
    width: int | None = None


def layout_map(
    preset_or_backbone: Any, mesh: keras.distribution.DeviceMesh, model: str = "model"
) -> keras.distribution.LayoutMap:
    """Lay the weights of a model out over one axis of a mesh, by their shapes.

    Heads, inner units of the MLP and the vocabulary are split where they divide by the axis. What
    does not divide, and all else, is on every device.

    Args:
        preset_or_backbone: the name of a preset, whose weights are not loaded here; or a backbone.
        mesh: the devices.
        model: the axis that shares a model; rows of a batch may be split over another.

    Returns:
        An entry for each weight that is split, under the path of its variable; or under a pattern,
        if the path has a name that Keras counts up: the next backbone has another one. Where two
        weights would have one pattern, as of `dense` and `dense_1` side by side, their paths are
        those of the backbone given, or of the next one that is made of the preset.

    Raises:
        SurgeryError: the mesh has no such axis.

    Examples:
        >>> import keras, backbone_surgery as bs
        >>> mesh = keras.distribution.DeviceMesh((1, 1), ["batch", "model"])
        >>> layout = bs.layout_map("tiny_gpt2", mesh)
        >>> layout["transformer_layer_0/self_attention/query/kernel"].axes
        (None, 'model', None)
    """
    if not isinstance(mesh, keras.distribution.DeviceMesh):
        raise SurgeryError(
            f"layout_map: expected a `keras.distribution.DeviceMesh`. Received {shown(mesh)}. Make "
            'one, such as `DeviceMesh((2, 4), ["batch", "model"])`.'
        )
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    if model not in sizes:
        raise SurgeryError(
            f"layout_map at 'model': expected an axis of the mesh. Received {shown(model)}. "
            f"{closest(str(model), sizes)}"
        )
    backbone = preset_or_backbone
    if isinstance(backbone, keras.Model):
        found = list(splits(backbone, sizes[model]))
    else:
        with graph.without_values(), graph.names_given_back():
            backbone = load_backbone(backbone, load_weights=False)
            found = list(splits(backbone, sizes[model]))
    patterns = _patterns(backbone)
    layout = keras.distribution.LayoutMap(mesh)
    # A weight that two layers share comes twice.
    for path, split in {split.variable.path: split for split in found}.items():
        if split.units % sizes[model] == 0:
            rank = len(split.variable.shape)
            axes = tuple(model if i == split.axis else None for i in range(rank))
            layout[patterns[path]] = keras.distribution.TensorLayout(axes, mesh)
    return layout


def _patterns(backbone: keras.Model) -> dict[str, str]:
    """Return what to look each weight of a backbone up by: its path, or a pattern of that.

    Keras gives a layer without a name that of its class and a number, which counts up from one
    backbone to the next. A pattern leaves the number open. Where two weights would have one, as of
    two such layers side by side, both keep their path.
    """
    counted = _counted_names(backbone)
    patterns = {v.path: _pattern(v.path, counted) for v in _unedited(backbone).variables}
    uses = Counter(patterns.values())
    # Keras takes a path for a pattern, too.
    return {path: p if uses[p] == 1 else re.escape(path) for path, p in patterns.items()}


def _counted_names(backbone: keras.Model) -> dict[str, str]:
    """Return the names of layers that Keras made, and what they are without the number."""
    layers = graph.layers_within(_unedited(backbone))
    names = (layer.name for layer in layers if graph.is_auto_named(layer))
    return {name: re.escape(re.sub(r"_\d+$", "", name)) for name in names}


def _unedited(backbone: keras.Model) -> keras.Model:
    """Return the backbone itself: what an edit brings along is shared by nobody.

    The graph of an edited one has no blocks, whose names are in the paths. And a layer of the edit
    may stand between a site and the projection that makes it.
    """
    return backbone.owner if isinstance(backbone, EditedBackbone) else backbone


def _pattern(path: str, counted: dict[str, str]) -> str:
    return "/".join(
        rf"{counted[name]}(_\d+)?" if name in counted else re.escape(name)
        for name in path.split("/")
    )


def splits(backbone: keras.Model, devices: int = 1) -> Iterator[Split]:
    """Yield the axes of the weights of a backbone along which so many devices would share it.

    Whether what lies along an axis divides by them, `Split.units` tells. Of an edited backbone they
    are those before the edit, also of blocks that it leaves out.
    """
    opened = open_backbone(_unedited(backbone))
    yield from _of_vocabulary(opened)
    for node in graph.all_nodes(opened):
        nested = graph.as_functional(node.operation)
        if nested is not None and is_block(nested):
            yield from _of_block(nested, devices)


def _of_vocabulary(opened: EditedBackbone) -> Iterator[Split]:
    embedding = opened.token_embedding
    if isinstance(embedding, TableAndHead):
        tokens = (1, 1, embedding.input_dim)
        for split in _of_projection(embedding.head, tokens, reads=False):
            yield split._replace(vocabulary=True)
    embedding = getattr(embedding, "table", embedding)  # where logits come of another layer
    layers = (node.operation for node in graph.all_nodes(opened))
    others = [x for x in dict.fromkeys(layers) if type(x) is keras.layers.Embedding]
    yield from _of_table(embedding, vocabulary=True)
    for table in others:  # such as that of what Gemma 3n and 4 give each block of a token
        if table is not embedding:
            yield from _of_table(table, vocabulary=False)


def _of_table(table: Any, vocabulary: bool) -> Iterator[Split]:
    for variable in table.variables:
        # Where a model has other weights for its logits, tokens are their columns.
        axis = 1 if variable.name == "reverse_embeddings" else 0
        if variable.name.endswith(("_scale", "_zero")):  # of what int4 packs, see below
            continue
        if len(variable.shape) == 2 and variable.shape[axis] == table.input_dim:
            split = Split(variable, axis, table.input_dim, axis == 0, vocabulary, table.output_dim)
            yield from _as_stored(table, split)


def _of_block(block: keras.Model, devices: int) -> Iterator[Split]:
    sites = {
        node.operation.role: node
        for node in graph.graph_nodes(block)
        if isinstance(node.operation, Site)
    }
    for role in _BY_HEADS & set(sites):
        for layer in _projections(sites[role]):
            yield from _of_projection(layer, sites[role].outputs[0].shape, reads=False)
    if "head_outputs" in sites and "attention_output" in sites:
        for layer in _projections(sites["attention_output"]):
            yield from _of_projection(layer, sites["head_outputs"].outputs[0].shape, reads=True)
    if "mlp_hidden" in sites and "mlp_output" in sites:
        shape = sites["mlp_hidden"].outputs[0].shape
        for layer in _projections(sites["mlp_hidden"]):
            yield from _of_projection(layer, shape, reads=False)
        for layer in _projections(sites["mlp_output"]):
            yield from _of_projection(layer, shape, reads=True)
    for node in graph.graph_nodes(block):
        if isinstance(node.operation, CausalConvolution):
            for layer in _projections(node):
                yield from _of_projection(layer, node.outputs[0].shape, reads=False)
        if isinstance(node.operation, MixedExperts):
            yield from _of_experts(node.operation, devices)


def _projections(site: Any) -> list[keras.Layer]:
    """Return the layers with kernels that what stands at a site comes out of, the nearest ones."""
    found, waiting, visited = [], [site], set()
    while waiting:
        for tensor in waiting.pop().input_tensors:
            node = graph.node_of(tensor)
            if id(node) in visited:
                continue
            visited.add(id(node))
            if any(len(v.shape) > 1 for v in getattr(node.operation, "variables", ())):
                found.append(node.operation)
            else:
                waiting.append(node)
    return found


def _of_projection(layer: keras.Layer, shape: tuple[int, ...], reads: bool) -> Iterator[Split]:
    """Split a projection by the units that it reads or makes, see `_axis`.

    Where it reads them, what the shares give is added up, and the bias is added once, everywhere.
    """
    axis = _axis(layer, shape, reads)
    if axis is None:
        return
    for variable in layer.variables:
        if variable.name == "kernel":
            yield from _as_stored(layer, Split(variable, axis, shape[2], summed=reads))
        elif variable.name == "bias" and not reads:
            yield Split(variable, 0, shape[2])


def _as_stored(layer: keras.Layer, split: Split) -> Iterator[Split]:
    """Yield how a weight of a layer is split: itself, or the arrays that int4 packs it into."""
    weight = split.variable
    if layer.quantization_mode != "int4" or weight.name not in PACKED:
        yield split
        return
    found = packed_axes(layer, weight.name, split.axis, policy_of(layer).block_size)
    units = math.gcd(split.units, found.parts)
    for variable in graph.own_weights(layer):
        if (axis := found.axes.get(variable.name)) is not None:
            summed = split.summed and variable is weight
            yield split._replace(variable=variable, axis=axis, units=units, summed=summed)


def _axis(layer: keras.Layer, shape: tuple[int, ...], reads: bool) -> int | None:
    """Return the axis of a kernel along which units lie, if they lie along one by themselves.

    Queries, keys and values that are made by one kernel side by side do not.

    Args:
        layer: a projection.
        shape: of the units, [batch, time, units, ...].
        reads: whether the layer reads them, or makes them.
    """
    if not isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense):
        return None
    if layer.quantization_mode in CALIBRATED:  # Keras packs them in another way
        return None
    kernel = kernel_shape(layer)
    if isinstance(layer, keras.layers.Dense):
        axis = 0 if reads else 1
        return axis if kernel[axis] == math.prod(shape[2:]) else None
    read, rest = layer.equation.split(",")
    stored, made = rest.split("->")
    unit = (read if reads else made)[2]
    axis = stored.find(unit)
    if axis < 0:
        return None
    # One axis of inner units, or one of heads that two axes of a Dense layer would be.
    return axis if kernel[axis] in (shape[2], math.prod(shape[2:])) else None


def _of_experts(layer: MixedExperts, devices: int) -> Iterator[Split]:
    """Split the kernels of all experts as the family says: each expert, or the experts."""
    for name, axis in layer.axes(devices).items():
        variable = getattr(layer.bank, name)
        if axis is not None:
            reads = layer.shared[name] == len(variable.shape) - 2
            yield Split(variable, axis, variable.shape[axis], summed=reads)
