"""The clone engine: replay a Functional layer graph with its layers shared, changing what runs.

Everything else in this library is a use of `replay`. It visits the nodes (layer calls) between
some inputs and outputs, offers each one to a callback, and connects what the callback returns.
Layers are never copied, so every graph made here holds the same variables. A node that the callback
keeps, with nothing changed above it, is shared by both graphs.

Nested Functional and Sequential models are entered and rebuilt, and three things happen there
that a plain replay could not do:

* *Lifting*: the callback may use a tensor of an outer graph inside a nested model. The nested
  model is re-rooted so that each such tensor becomes one more input of it.
* *Pruning*: a nested input that lost its last user is dropped, so the new graph is not tied to
  inputs it no longer needs.
* *Emitting*: the callback may hand out a tensor under a name (`emit`); it becomes one more output
  of every nested model on the way up.
"""

import contextlib
import contextvars
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
from keras import tree
from keras.src.models.functional import Functional
from keras.src.ops.node import Node

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.graph.building import building
from backbone_surgery.graph.emission import Emitted, emit, emitting, hand_on, hand_over
from backbone_surgery.graph.keras_private import reserve_names
from backbone_surgery.graph.nodes import (
    as_functional,
    in_order,
    is_input,
    node_of,
    repeat,
    topological_nodes,
)
from backbone_surgery.graph.rebuild import (
    Lifting,
    Rebuilt,
    input_like,
    rebuild,
    reroot,
    unique,
)
from backbone_surgery.graph.shared_nodes import share

KEEP = object()
"""Returned by an internal callback to say: this node stays as it is."""

CloneFn = Callable[..., Any]


def is_function(clone_fn: Any) -> bool:
    """Tell whether something can be a `clone_fn`. A layer, or a class of layers, is none."""
    return callable(clone_fn) and not isinstance(clone_fn, type | keras.layers.Layer)


_way: contextvars.ContextVar[tuple[Node, ...]] = contextvars.ContextVar("way", default=())


def visited_node() -> tuple[Node, ...]:
    """Return the node that the running callback is offered, after the nested models it is in.

    A nested model that is used twice has the same nodes at both uses, so it takes all of them, from
    the outermost on, to tell a node from another.
    """
    return _way.get()


@building()
def clone_layer_graph(
    inputs: Any, outputs: Any, clone_fn: CloneFn | None = None, enter_nested: bool = True
) -> Any:
    """Clone the graph of layer calls between `inputs` and `outputs`, sharing the layers.

    `clone_fn(layer, *args, **kwargs)` is called once for every node, in topological order, depth
    first from the outputs, and its result takes the node's place. `layer(*args, **kwargs)` leaves
    the node as it was. A layer that was called twice is offered twice; layers need no
    `get_config`. A nested Functional or Sequential model is entered once and replaced by one new
    Functional wherever it was used. The source graph is not changed.

    Args:
        inputs: a structure of `keras.Input` tensors. They are kept.
        outputs: a structure of symbolic tensors.
        clone_fn: called for each node; `None` is the identity. It may use any tensor of an outer
            graph, and may call `backbone_surgery.emit`.
        enter_nested: whether nested models are entered or offered to `clone_fn` like a layer.

    Returns:
        New symbolic tensors in the structure of `outputs`.

    Raises:
        ValueError: `inputs` are no `keras.Input`, `outputs` depend on one that is not listed, or
            `clone_fn` is no function.
        TypeError: `clone_fn` returned something else than as many tensors as the node had.

    Source: Keras pull request 19600.

    Examples:
        >>> import keras, backbone_surgery as bs
        >>> x = keras.Input((4,))
        >>> y = keras.layers.Dense(4)(x)
        >>> twice = lambda layer, *a, **k: layer(layer(*a, **k))
        >>> model = keras.Model(x, bs.clone_layer_graph(x, y, twice))
    """
    if clone_fn is not None and not is_function(clone_fn):
        raise SurgeryError(
            "clone_layer_graph: expected a `clone_fn(layer, *args, **kwargs)`. Received "
            f"{shown(clone_fn)} of type {type(clone_fn).__name__}. Pass a function."
        )
    flat_inputs = tree.flatten(inputs)
    for tensor in flat_inputs:
        if not is_input(tensor):
            raise SurgeryError(
                "clone_layer_graph: expected every one of `inputs` to be a `keras.Input`. Received "
                f"{tensor!r}. To start from intermediate tensors, first call "
                "`model = keras.Model(tensors, outputs)`, which makes inputs of them, and pass "
                "`model.input` and `model.output`."
            )
    mapping = {id(t): t for t in flat_inputs}
    if clone_fn is None:
        clone_fn, enter_nested = operator.call, False
    new, emitted = replay(outputs, mapping, clone_fn, enter_nested)
    if emitted:
        hand_over(emitted)
    return new


@building()
def replay(
    outputs: Any,
    mapping: dict[int, Any],
    visit: CloneFn,
    enter_nested: bool | Callable[[Functional], bool] = True,
    per_use: bool = False,
) -> tuple[Any, Emitted]:
    """Replay the graph above `outputs` through `visit`, starting from the tensors in `mapping`.

    Args:
        outputs: structure of symbolic tensors.
        mapping: `{id(old tensor): new tensor}`; where the walk stops. Extended in place.
        visit: as `clone_fn`; may also return `KEEP`.
        enter_nested: whether nested models are entered, or a function of one that says so.
        per_use: enter a nested model anew at each of its uses, so that every use can differ. What
            the callback keeps is then shared with the old graph: nested models in which nothing
            changes, and in the others the nodes above the first change.

    Returns:
        The new outputs and what was emitted.

    Raises:
        SurgeryError: the graph needs an input that is not in `mapping`, or a tensor from inside a
            nested model was used outside of it.
        TypeError: as `clone_layer_graph`.
    """
    walk = _Replay(visit, enter_nested, per_use)
    for tensor in mapping.values():
        share(node_of(tensor).operation)
    with emitting() as emitted:
        flat = walk.run(tree.flatten(outputs), mapping)
    walk.check_reachable([*flat, *tree.flatten(emitted)])
    return tree.pack_sequence_as(outputs, flat), emitted


@dataclass(frozen=True)
class _Visited:
    """A node that was visited: what it was called with, what took its place, what was emitted.

    A nested model that is built on an input of the outer graph shares nodes with that graph. Such a
    node is visited once, like any other; in the second graph its replacement is copied.
    """

    inputs: list[keras.KerasTensor]
    outputs: list[keras.KerasTensor]
    emitted: Emitted

    def repeat(
        self, inputs: list[keras.KerasTensor], elsewhere: dict[int, Any]
    ) -> list[keras.KerasTensor]:
        """Copy the replacement for the same node of another graph.

        Args:
            inputs: what the node is called with in that graph.
            elsewhere: `{id(tensor of the first graph): its copy in that graph}`. Extended in place.
        """
        elsewhere.update((id(a), b) for a, b in zip(self.inputs, inputs, strict=True))
        hand_on({name: reroot(tensors, elsewhere) for name, tensors in self.emitted.items()})
        return reroot(self.outputs, elsewhere)


class _Replay:
    """One walk over a graph. Holds the nested models that were rebuilt on the way."""

    def __init__(
        self, visit: CloneFn, enter_nested: bool | Callable[[Functional], bool], per_use: bool
    ) -> None:
        self.visit, self.per_use = visit, per_use
        self.enters = enter_nested if callable(enter_nested) else lambda nested: enter_nested
        self.rebuilt: dict[int, Rebuilt] = {}
        self.visited: dict[int, _Visited] = {}
        self.names: set[str] = set()
        self.reserved: set[str] = set()
        self.roots: set[int] = set()
        self.way: list[Node] = []
        self.nested_inputs: dict[int, tuple[str, keras.KerasTensor]] = {}

    def run(
        self, outputs: list[Any], mapping: dict[int, Any], lifting: Lifting | None = None
    ) -> list[Any]:
        self.roots.update(mapping)
        elsewhere: dict[int, Any] = {}
        nodes = topological_nodes(outputs, mapping)
        names = {node.operation.name for node in nodes}
        self.reserved |= names
        reserve_names(names)
        for node in nodes:
            share(node.operation)
            if node.is_input:
                raise SurgeryError(
                    "clone_layer_graph: expected `inputs` to list every input that `outputs` "
                    f"depend on. Received a graph that also needs '{node.operation.name}'. Add it "
                    "to `inputs`."
                )
            args, kwargs = node.arguments.fill_in(mapping)
            with self._at(node), emitting() as emitted:
                result = self._call(node, args, kwargs, elsewhere)
            handed_out = [(name, t) for name, tensors in emitted.items() for t in tensors]
            tensors = [*result, *(t for _, t in handed_out)]
            if lifting is not None:
                tensors = lifting.lift(tensors)
            for (name, _), tensor in zip(handed_out, tensors[len(result) :], strict=True):
                emit(name, tensor)
            for old, new in zip(node.outputs, tensors, strict=False):
                mapping.setdefault(id(old), new)
        return [mapping[id(t)] for t in outputs]

    @contextlib.contextmanager
    def _at(self, node: Node) -> Iterator[None]:
        self.way.append(node)
        token = _way.set(tuple(self.way))
        try:
            yield
        finally:
            _way.reset(token)
            self.way.pop()

    def check_reachable(self, tensors: list[keras.KerasTensor]) -> None:
        """Refuse tensors that were taken out of a nested model in another way than `emit`."""
        for node in topological_nodes(tensors):
            share(node.operation)
            if node.is_input and id(node.outputs[0]) in self.nested_inputs:
                name, _ = self.nested_inputs[id(node.outputs[0])]
                raise SurgeryError(
                    "clone_fn: expected tensors of the graph that the node is in, or of one "
                    f"around it. Received a tensor from inside the nested model '{name}', used "
                    "outside of it. Hand it out with `backbone_surgery.emit`."
                )

    def _call(self, node: Node, args: tuple, kwargs: dict, elsewhere: dict[int, Any]) -> list[Any]:
        layer = node.operation
        nested = as_functional(layer)
        if nested is not None and self.enters(nested):
            inputs = args[0] if args else kwargs.pop("inputs")
            return self._enter(layer, nested, inputs)(inputs, **kwargs)
        if id(node) in self.visited:
            return self.visited[id(node)].repeat(_tensors(args, kwargs), elsewhere)
        with emitting() as emitted:
            result = self.visit(layer, *args, **kwargs)
        flat = _keep(node, args, kwargs) if result is KEEP else tree.flatten(result)
        _check_result(layer, result, flat, len(node.outputs))
        hand_on(emitted)
        if not self.per_use:
            self.visited[id(node)] = _Visited(_tensors(args, kwargs), flat, emitted)
        return flat

    def _enter(self, layer: keras.Layer, nested: Functional, given: Any) -> Rebuilt:
        """Replay the inside of a nested model, and make a new model of it."""
        if not self.per_use and id(layer) in self.rebuilt:
            return self.rebuilt[id(layer)]
        inputs = like = list(nested.inputs)
        given = in_order(nested, given)
        if self.per_use and len(given) == len(inputs):  # what is given may have other sizes now
            like = [t if _fits(x, t) else x for t, x in zip(inputs, given, strict=True)]
        own = any(a is not b for a, b in zip(like, inputs, strict=True))
        if not self.per_use or own or any(id(t) in self.roots for t in inputs):
            names = [node_of(t).operation.name for t in inputs]
            inputs = [input_like(t, name) for t, name in zip(like, names, strict=True)]
        self.nested_inputs.update((id(t), (layer.name, t)) for t in inputs)
        mapping = {id(old): new for old, new in zip(nested.inputs, inputs, strict=True)}
        name = layer.name
        if self.per_use:
            name = unique(name, self.names, "_use_", self.reserved)
        lifting = Lifting(name, inputs)
        with emitting() as emitted:
            outputs = self.run(nested.outputs, mapping, lifting)
        if not emitted and _same(outputs, nested.outputs):
            return Rebuilt(nested, layer, True, [], [], [])
        rebuilt = rebuild(nested, name, lifting, outputs, emitted)
        rebuilt.new.supports_masking = layer.supports_masking
        self.rebuilt[id(layer)] = rebuilt
        return rebuilt


def _keep(node: Node, args: tuple, kwargs: dict) -> list[Any]:
    """Return what a node makes of these arguments: its own outputs, where they are its own."""
    if _same(_tensors(args, kwargs), node.input_tensors):
        return list(node.outputs)
    return repeat(node, args, kwargs)


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _fits(tensor: Any, wanted: keras.KerasTensor) -> bool:
    """Tell whether a tensor has the shape of another, as far as both are known."""
    pairs = zip(getattr(tensor, "shape", wanted.shape), wanted.shape, strict=False)
    return all(None in pair or pair[0] == pair[1] for pair in pairs)


def _tensors(args: tuple, kwargs: dict) -> list[keras.KerasTensor]:
    return [t for t in tree.flatten((args, kwargs)) if isinstance(t, keras.KerasTensor)]


def _check_result(layer: Any, result: Any, flat: list[Any], expected: int) -> None:
    """Refuse what a callback returned, unless it is as many tensors as the node had."""
    others = [type(t).__name__ for t in flat if not isinstance(t, keras.KerasTensor)]
    if not others and len(flat) == expected:
        return
    received = "None" if result is None else f"{len(flat)} value(s)"
    among = f", among them {', '.join(others)}" if others and result is not None else ""
    raise TypeError(
        f"clone_fn at '{layer.name}' ({type(layer).__name__}): expected {expected} tensor(s), as "
        f"many as the layer call being replaced. Received {received}{among}. Return what takes the "
        "place of `layer(*args, **kwargs)`; hand out anything more with `backbone_surgery.emit`."
    )
