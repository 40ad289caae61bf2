"""Hoisting: take a part of what goes into some layers, instead of what comes out of them.

Where only some tokens of a tensor are wanted, the layers above it that work on each token alone
need not run for the others.
"""

from collections.abc import Callable
from typing import Any

import keras

from backbone_surgery.graph.building import building
from backbone_surgery.graph.nodes import node_of, repeat, topological_nodes


@building()
def hoist(
    tensor: keras.KerasTensor,
    take: Callable[[keras.KerasTensor], keras.KerasTensor],
    passes: Callable[[Any, tuple, dict[str, Any]], bool],
) -> keras.KerasTensor:
    """Return what `take(tensor)` gives, taken as far above the tensor as may be.

    Args:
        tensor: a symbolic tensor.
        take: makes a symbolic tensor of one, of the same dtype and number of axes.
        passes: `(layer, args, kwargs)`: whether `take(layer(x))` equals `layer(take(x))`.
    """
    nodes = topological_nodes([tensor])
    passed = {id(node_of(tensor))}
    for node in reversed(nodes):
        if id(node) in passed:
            arguments = node.arguments
            if node.is_input or not passes(node.operation, arguments.args, arguments.kwargs):
                passed.remove(id(node))
            else:
                passed.update(id(node_of(t)) for t in node.input_tensors)
    known: dict[int, keras.KerasTensor] = {}

    def taken(x: Any) -> Any:
        if not isinstance(x, keras.KerasTensor):
            return x
        if id(x) not in known:
            known[id(x)] = take(x)
        return known[id(x)]

    for node in nodes:
        if id(node) in passed:
            new = repeat(node, *node.arguments.convert(taken))
            known.update(zip(map(id, node.outputs), new, strict=True))
    return taken(tensor)
