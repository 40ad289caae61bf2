"""Rewrite a layer inside a composite layer: one that is made of layers, but not as a graph.

The inside of a user's own layer is Python code, so there is no node to replace. What can be
replaced is the object that the code gets when it reads `self.inner`. The composite layer, and each
layer on the path down, gets a twin (`graph/twin.py`): an object over the same state that has
another `inner`, one whose call runs the `clone_fn`. Only the new model holds the twins, so the
original layers and all other models stay as they are, in every thread.
"""

from collections.abc import Iterator
from typing import Any

import keras
from keras import tree

from backbone_surgery import graph
from backbone_surgery.errors import SelectorError, SurgeryError, closest, shown
from backbone_surgery.graph import twin
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.rewriting.operate import operate


@graph.building()
def rewrite_nested(model: keras.Model, path: str, clone_fn: graph.CloneFn) -> keras.Model:
    """Rewrite a layer inside the composite layers of a model, and return a new model.

    Wherever the code of the composite layer calls the layer at `path`, the new model runs
    `clone_fn(layer, *args, **kwargs)`, with the arguments of that call; `layer(*args, **kwargs)`
    leaves it as it was. `clone_fn` runs at every call of the model, on its tensors, so create its
    layers before, not inside it. The new model tracks them: they train, and they are saved, except
    by an `EditedBackbone`, whose `save_weights` writes the weights of its backbone alone. The new
    model shares the variables of `model`, and changes nothing of it.

    Args:
        model: a Functional or Sequential model, or an edited backbone.
        path: the layers from the outermost to the innermost, joined by dots, such as
            `"block.conv"`. Each goes by its name or by the attribute of the layer around it
            (`"block.stages.0.conv"` for a list). Nested models count as layers. A composite layer
            used several times is rewritten at every node of the graph.
        clone_fn: as for `clone_layer_graph`. A layer that is itself a node of the graph is
            rewritten in the graph, once for each node.

    Returns:
        A new `keras.Model`, or an `EditedBackbone` where `model` is one. Save it with
        `save_weights`: it has no config.

    Raises:
        SelectorError: `path` leads nowhere, or to several layers.
        SurgeryError: the layer is never called, or `clone_fn` makes layers or uses variables that
            no model would track.
        TypeError: `clone_fn` returned something else than as many tensors as the layer does.

    Examples:
        >>> import keras, backbone_surgery as bs
        >>> class Block(keras.layers.Layer):
        ...     def __init__(self):
        ...         super().__init__(name="block")
        ...         self.dense = keras.layers.Dense(4)
        ...
        ...     def call(self, x):
        ...         return x + self.dense(x)
        >>> x = keras.Input((4,))
        >>> model = keras.Model(x, Block()(x))
        >>> twice = lambda layer, x: layer(layer(x))
        >>> new = bs.rewrite_nested(model, "block.dense", twice)
        >>> new.variables[0] is model.variables[0]
        True
    """
    graph.graph_nodes(model)  # Refuses what has no graph.
    if not isinstance(path, str) or not graph.is_function(clone_fn):
        raise SurgeryError(
            f"rewrite_nested at {shown(path)}: expected a path such as 'block.conv' and a "
            f"`clone_fn(layer, *args, **kwargs)`. Received {shown(clone_fn)}. Pass a string and a "
            "function."
        )
    composite, *inner = _find(model, path)
    diversion = _Diversion(inner[-1] if inner else composite, clone_fn, path)
    replacement = diversion.twin
    for container, child in reversed(list(zip([composite, *inner], inner, strict=False))):
        replacement = twin.twin(container, {id(child): replacement})

    def visit(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if layer is not composite:
            return layer(*args, **kwargs)
        if not inner:
            diversion.fired = True
            return clone_fn(layer, *args, **kwargs)
        _trace_training(replacement, args, kwargs)
        return replacement(*args, **kwargs)

    try:
        new = _clone(model, visit)
    except Exception:
        if diversion.refusal is None:
            raise
        raise diversion.refusal from None  # without the words that Keras puts around it
    diversion.finish(new, _paths(model))
    if isinstance(new, EditedBackbone):
        known = {id(v) for v in model.variables}
        brought_in = diversion.brought_in
        new.also_train(x for x in brought_in if any(id(v) not in known for v in x.weights))
    return new


def _clone(model: keras.Model, visit: graph.CloneFn) -> keras.Model:
    if isinstance(model, EditedBackbone):
        return operate(model, [visit])
    whole = graph.as_functional(model) or model
    outputs = graph.clone_layer_graph(whole.input, whole.output, visit)
    return keras.Model(whole.input, outputs, name=model.name)


def _trace_training(layer: keras.Layer, args: tuple, kwargs: dict) -> None:
    """Trace a call in training, on tensors outside the graph: some layers are called only then."""
    args, kwargs = tree.map_structure(_without_graph, (args, kwargs))
    layer(*args, **{**kwargs, "training": True})


def _without_graph(x: Any) -> Any:
    return keras.KerasTensor(x.shape, x.dtype) if isinstance(x, keras.KerasTensor) else x


class _Diversion:
    """The twin of the layer at the end of a path: to call it is to run `clone_fn`.

    While the new model is built, each call is inspected: which layers `clone_fn` brings in, and
    which variables it reads. Keras tracks state by walking over layers. What it does not track
    would neither train nor be saved, and a compiled function would treat it as a constant.
    """

    def __init__(self, layer: keras.Layer, clone_fn: graph.CloneFn, path: str) -> None:
        self.clone_fn, self.path = clone_fn, path
        self.brought_in: list[keras.Layer] = []
        self.read: dict[int, keras.Variable] = {}
        self.fired, self.building = False, True
        self.refusal: Exception | None = None
        self.twin = twin.divert(layer, self.run, self.brought_in)

    def run(self, layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        if not self.building:
            return self.clone_fn(layer, *args, **kwargs)
        self.fired = True
        return self._look(layer, args, kwargs)

    def finish(self, model: keras.Model, known: list[str]) -> None:
        """Check what `clone_fn` did while `model` was built."""
        self.building = False
        if not self.fired:
            raise SurgeryError(
                f"rewrite_nested at '{self.path}': expected a layer that is called when the model "
                "runs. Received one that never is: its weights may be used without a call, or by "
                "code that Keras does not trace. Choose another of these layers: "
                f"{', '.join(known)}."
            )
        tracked = {id(v) for v in (*model.variables, *model.metrics_variables)}
        untracked = [v.path for key, v in self.read.items() if key not in tracked]
        if untracked:
            raise SurgeryError(
                f"rewrite_nested at '{self.path}': expected a clone_fn that keeps its variables in "
                f"layers which it calls. Received one that reads {', '.join(untracked)}, which the "
                "new model would not track. Make a layer of what uses them, once, before the call."
            )

    def _look(self, layer: keras.Layer, args: tuple, kwargs: dict) -> Any:
        """Run `clone_fn`, twice, and keep the layers that it calls and the variables it reads."""
        with graph.watching_calls() as own:
            expected = len(tree.flatten(layer(*args, **kwargs)))
        with _Reads(self.read):
            with graph.watching_calls() as first:
                self.clone_fn(layer, *args, **kwargs)
            with graph.watching_calls() as again:
                result = self.clone_fn(layer, *args, **kwargs)
        created = [layer.name for key, layer in again.items() if key not in first]
        if created:
            self.refusal = SurgeryError(
                f"rewrite_nested at '{self.path}': expected a clone_fn that makes no layers, since "
                f"it runs at every call. Received one that made {', '.join(created)}. Make layers "
                "once, before the call of `rewrite_nested`, or use `keras.ops`."
            )
            raise self.refusal
        count = 0 if result is None else len(tree.flatten(result))
        if count != expected:
            self.refusal = TypeError(
                f"clone_fn at '{self.path}' ({type(layer).__name__}): expected {expected} "
                "tensor(s), as many as the layer call being replaced. Received "
                f"{'None' if result is None else f'{count} value(s)'}. Return what takes the place "
                "of `layer(*args, **kwargs)`."
            )
            raise self.refusal
        known = {*own, *map(id, self.brought_in)}
        self.brought_in += [layer for key, layer in again.items() if key not in known]
        return result


class _Reads(keras.StatelessScope):
    """Note which variables are read inside."""

    def __init__(self, read: dict[int, keras.Variable]) -> None:
        super().__init__()
        self.read = read

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.read[id(variable)] = variable
        return super().get_current_value(variable)


# Paths.

_MANY = 60
"""From this many paths on, an error lists only the layers at the top."""


def _find(model: keras.Model, path: str) -> list[keras.Layer]:
    """Return the layers on a path, from the one that is a node of the graph to the last."""
    chains = {tuple(map(id, chain)): chain for chain in _chains(model, path)}
    if not chains:
        raise SelectorError(
            f"rewrite_nested at '{path}': expected the path of a layer in '{model.name}'. Received "
            f"one that leads nowhere. {closest(path, _near(model, path))}"
        )
    if len(chains) > 1:
        raise SelectorError(
            f"rewrite_nested at '{path}': expected a path to one layer. Received one that fits "
            f"{len(chains)} layers of the same name. Use attributes: "
            f"{', '.join(_near(model, path))}."
        )
    (chain,) = chains.values()
    while len(chain) > 1 and graph.as_functional(chain[0]) is not None:
        chain = chain[1:]
    return chain


def _near(model: keras.Model, path: str) -> list[str]:
    """List the paths below the last layer that a path reaches."""
    parts = path.split(".")
    for head in (".".join(parts[:k]) for k in range(len(parts) - 1, 0, -1)):
        for *_, layer in _chains(model, head):
            if below := _paths(layer):
                return [f"{head}.{path}" for path in below]
    known = _paths(model)
    return known if len(known) < _MANY else [names[0] for _, names in _children(model)]


def _chains(layer: keras.Layer, path: str) -> Iterator[list[keras.Layer]]:
    """Walk the chains of layers, from a layer down, that a path describes."""
    for child, names in _children(layer):
        for name in names:
            if path == name:
                yield [child]
            elif path.startswith(f"{name}."):
                yield from ([child, *rest] for rest in _chains(child, path[len(name) + 1 :]))


def _paths(layer: keras.Layer) -> list[str]:
    """List the paths of all layers inside, each by one of its names."""
    paths = []
    for child, (name, *_) in _children(layer):
        paths += [name, *(f"{name}.{path}" for path in _paths(child))]
    return paths


def _children(layer: keras.Layer) -> list[tuple[keras.Layer, list[str]]]:
    """Return the layers inside a layer, with their names: attributes first."""
    layers, attributes = twin.inside(layer)
    children = {id(child): child for child in layers}
    names: dict[int, list[str]] = {key: [] for key in children}
    for name, value in attributes.items():
        for path, held in _items(value, name):
            if id(held) in names:
                names[id(held)].append(path)
    return [(child, list(dict.fromkeys([*names[k], child.name]))) for k, child in children.items()]


def _items(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Walk the values of an attribute, also inside lists, tuples and dicts."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _items(item, f"{name}.{key}")
    else:
        yield name, value
