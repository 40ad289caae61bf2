"""Reading a layer graph: which layer call made a tensor, and what stands above it.

Only this package touches private Keras. `tests/graph/test_keras_internals.py` pins each private
name, so that a Keras release which moves one says so plainly.
"""

from collections.abc import Container, Iterable, Iterator
from typing import Any

import keras
from keras import tree
from keras.src.models.functional import Functional
from keras.src.ops.node import Node

from backbone_surgery.errors import SurgeryError, shown


def topological_nodes(outputs: Iterable[Any], stop: Container[int] = ()) -> list[Node]:
    """List the nodes above `outputs`, each after those it depends on, depth first.

    Args:
        outputs: symbolic tensors.
        stop: ids of tensors above which the walk does not go.
    """
    ordered: list[Node] = []
    visited: set[int] = set()
    stack = [(node_of(t), False) for t in reversed(list(outputs)) if id(t) not in stop]
    while stack:
        node, ready = stack.pop()
        if ready:
            ordered.append(node)
        elif id(node) not in visited:
            visited.add(id(node))
            stack.append((node, True))
            parents = reversed(node.input_tensors)
            stack.extend((node_of(t), False) for t in parents if id(t) not in stop)
    return ordered


def node_of(tensor: keras.KerasTensor) -> Node:
    """Return the node (layer call) that made a symbolic tensor."""
    history = getattr(tensor, "_keras_history", None)
    if history is None or history.operation is None:
        raise SurgeryError(
            "surgery: expected symbolic tensors made by `keras.Input` or by a layer call. Received "
            f"{tensor!r} of type {type(tensor).__name__}, made by neither. Begin the graph at a "
            "`keras.Input`, and pass tensors such as `model.output`."
        )
    return history.operation._inbound_nodes[history.node_index]


def is_input(tensor: Any) -> bool:
    """Tell whether a tensor comes from `keras.Input`."""
    if not isinstance(tensor, keras.KerasTensor):
        return False
    history = getattr(tensor, "_keras_history", None)
    return history is not None and isinstance(history.operation, keras.layers.InputLayer)


def is_plain_call(result: Any, layer: Any, args: tuple, kwargs: dict) -> bool:
    """Tell whether `result` is what `layer(*args, **kwargs)` gives, and nothing else."""
    flat = tree.flatten(result)
    if not flat or not all(isinstance(t, keras.KerasTensor) for t in flat):
        return False
    arguments = [id(t) for t in tree.flatten((args, kwargs)) if isinstance(t, keras.KerasTensor)]
    nodes = [node_of(t) for t in flat]
    return all(
        n.operation is layer and arguments == [id(t) for t in n.input_tensors] for n in nodes
    )


def as_functional(layer: Any) -> Functional | None:
    """Return the layer graph of a nested model that runs exactly that graph, else `None`.

    A subclass or an instance that overrides `call` does something else than its graph says: it is
    a layer like any other.
    """
    own = keras.Sequential if isinstance(layer, keras.Sequential) else Functional
    if not isinstance(layer, own) or getattr(layer.call, "__func__", None) is not own.call:
        return None
    return layer._functional if own is keras.Sequential else layer


def graph_nodes(model: keras.Model) -> list[Node]:
    """List the nodes of a Functional model in the order in which `replay` visits them."""
    functional = as_functional(model)
    if functional is None:
        raise SurgeryError(
            f"surgery at '{getattr(model, 'name', shown(model))}': expected a Functional model. "
            f"Received {type(model).__name__}. Build it with `keras.Model(inputs, outputs)`."
        )
    return topological_nodes(functional.outputs)


def all_nodes(model: keras.Model) -> Iterator[Node]:
    """Walk the nodes of a Functional model and of the models nested in it."""
    for node in graph_nodes(model):
        yield node
        if as_functional(node.operation) is not None:
            yield from all_nodes(node.operation)


def in_order(model: Functional, structure: Any) -> list[Any]:
    """Flatten what a nested model was called with, in the order of its own inputs."""
    if isinstance(structure, dict) and not isinstance(model._inputs_struct, dict):
        return [structure.get(t.name) for t in model.inputs]
    return tree.flatten(structure)


def repeat(node: Node, args: tuple, kwargs: dict, layer: Any = None) -> list[Any]:
    """Make the same call on other tensors of the same shapes, without tracing it again.

    Args:
        node: the call.
        args: what to call the layer on.
        kwargs: likewise.
        layer: another layer, built, that gives the same shapes and dtypes as that of the node.
    """
    layer = node.operation if layer is None else layer
    old = node.input_tensors
    new = [t for t in tree.flatten((args, kwargs)) if isinstance(t, keras.KerasTensor)]
    alike = len(old) == len(new) and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(old, new, strict=True)
    )
    if not alike:
        return tree.flatten(layer(*args, **kwargs))
    # A name of its own for each tensor would take as long as all the rest.
    outputs = [keras.KerasTensor(t.shape, t.dtype, name=t.name) for t in node.outputs]
    Node(layer, call_args=args, call_kwargs=kwargs, outputs=outputs)
    return outputs


def connect(layer: keras.layers.Layer, *args: Any) -> Any:
    """Call a layer that is built, casts nothing and says itself what comes out: add its node.

    Args:
        layer: it.
        args: structures of symbolic tensors.
    """
    outputs = layer.compute_output_spec(*args)
    Node(layer, call_args=args, call_kwargs={}, outputs=outputs)
    return outputs
