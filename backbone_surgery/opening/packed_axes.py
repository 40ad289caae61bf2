"""Where on a mesh the arrays lie that int8 and int4 make of a weight: as the weight itself lay.

int4 packs a kernel of any rank into a matrix of two axes, with scales for groups of its inputs. So
not each axis of a kernel is one of the matrix, and devices share whole groups.
"""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras

from backbone_surgery import graph, hosts
from backbone_surgery.opening.int4 import kernel_shape
from backbone_surgery.opening.placement import placement_of

PACKED = ("kernel", "embeddings", "reverse_embeddings")
"""Names of the weights that int8 and int4 make narrow."""


class PackedAxes(NamedTuple):
    """How devices can share what a weight is packed into.

    Attributes:
        axes: of each array by its name, which is that of the weight, and more; empty if they can't.
        parts: how many there are at most: a number of devices that divides them can share it.
    """

    axes: dict[str, int]
    parts: int


def packed_axes(layer: keras.Layer, name: str, axis: int, block: int | None) -> PackedAxes:
    """Return the axes along which lies what did along an axis of a weight before int4 packed it.

    Args:
        layer: a `Dense`, an `EinsumDense`, or a table; packed already or not.
        name: of the weight: kernel, embeddings or reverse_embeddings.
        axis: of the weight, as it was.
        block: how many inputs a scale is for; `None` or -1 for all.
    """
    group = max(block or 0, 0)
    if name != "kernel":
        is_known = axis == (1 if name == "reverse_embeddings" else 0)
        scales = {f"{name}_scale": axis if group else 0, f"{name}_zero": axis}
        return PackedAxes({name: axis, **scales} if is_known else {}, layer.input_dim)
    shape, reads = kernel_shape(layer), _axes_read(layer)
    rows = math.prod(shape[i] for i in reads)
    columns = math.prod(shape) // rows
    reads_first = reads == [*range(len(reads))]
    if axis == 0 and group:
        parts = rows // group if rows % group == 0 else 1
        return PackedAxes(dict.fromkeys(("kernel", "kernel_scale", "kernel_zero"), 0), parts)
    if axis == 0 and reads_first:
        return PackedAxes({"kernel": 0}, rows)
    if axis == len(reads) and reads_first:
        scales = {"kernel_scale": 1 if group else 0, "kernel_zero": 1}
        return PackedAxes({"kernel": 1, **scales}, columns // 2 if columns % 2 == 0 else 1)
    return PackedAxes({}, 1)


def _axes_read(layer: keras.Layer) -> list[int]:
    """Return the axes of a kernel that a product adds up over."""
    if isinstance(layer, keras.layers.Dense):
        return [0]
    stored, made = layer.equation.split(",")[1].split("->")
    return [i for i, letter in enumerate(stored) if letter not in made]


@contextlib.contextmanager
def laid_out(
    owner: keras.Model, chosen: Iterable[keras.Layer], mode: str, config: Any
) -> Iterator[None]:
    """Have the arrays made inside of weights that lie on a mesh lie as these do.

    What GPTQ and AWQ pack is whole on each device. For int8 and int4 Keras needs weights as NumPy
    arrays: where processes hold a mesh together, each has them in the memory of its host meanwhile.

    Args:
        owner: of the weights.
        chosen: layers that are quantised inside.
        mode: to which they are quantised inside.
        config: of that; `None` for Keras's.
    """
    placement = placement_of(owner.variables)
    if placement is None:
        yield
        return
    sizes, devices = placement.mesh.shape, placement.mesh.devices.ravel()
    mesh = keras.distribution.DeviceMesh(tuple(sizes.values()), [*sizes], devices)
    layout = keras.distribution.LayoutMap(mesh)
    config = config or keras.quantizers.Int4QuantizationConfig()
    layers = chosen if mode in ("int8", "int4") else ()
    weights = [(x, v) for x in layers for v in graph.own_weights(x) if v.name in PACKED]
    for layer, variable in weights:
        for name, axes in _axes_made(layer, variable, mode, config, sizes).items():
            path = variable.path.removesuffix(variable.name) + name
            layout[re.escape(path)] = keras.distribution.TensorLayout(axes, mesh)
    with (
        keras.distribution.ModelParallel(layout_map=layout).scope(),
        _whole([v for _, v in weights]) if hosts.span(owner) else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def _whole(variables: Iterable[keras.Variable]) -> Iterator[None]:
    """Have weights that lie in parts on several hosts lie whole in the memory of each of them."""
    import jax

    shardings = [(v, graph.array_of(v).sharding) for v in variables]
    with hosts.host_memory(True):
        try:
            for v, _ in shardings:
                graph.put_array(v, keras.ops.convert_to_tensor(hosts.to_numpy(v)))
            yield
        except BaseException:
            for v, sharding in shardings:
                graph.put_array(v, jax.device_put(graph.array_of(v), sharding))
            raise


def _axes_made(
    layer: keras.Layer, variable: keras.Variable, mode: str, config: Any, sizes: Mapping[str, int]
) -> dict[str, tuple[Any, ...]]:
    """Return for each array that is made of a weight the axes of the mesh, if any share it."""
    name, sharding = variable.name, getattr(graph.array_of(variable), "sharding", None)
    spec = tuple(getattr(sharding, "spec", ()))
    if not any(spec):
        return {}
    if mode == "int8":
        return {name: spec}
    block = getattr(config, "block_size", None)
    made: dict[str, dict[int, str]] = {}
    for axis, along in enumerate(spec):
        found = packed_axes(layer, name, axis, block)
        if isinstance(along, str) and found.parts % sizes[along] == 0:
            for array, own in found.axes.items():
                made.setdefault(array, {})[own] = along
    return {k: tuple(own.get(i) for i in range(max(own) + 1)) for k, own in made.items()}
