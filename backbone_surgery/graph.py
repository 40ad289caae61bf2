"""The clone engine: replay a Functional layer graph with its layers shared, changing what runs.

Everything else in this package is a use of `replay`. It walks the nodes (layer invocations)
between some inputs and outputs, offers each one to a callback, and connects whatever the callback
returns. Layers are never copied, so every graph made here holds the same variables.

Nested Functional and Sequential models are entered and rebuilt, and three things happen there
that a plain replay could not do:

* *Lifting*: the callback may use a tensor of an outer graph inside a nested model. The nested
  model is re-rooted so that each such tensor becomes one more input of it.
* *Pruning*: a nested input that lost its last user is dropped, so the new graph is not tied to
  inputs it no longer needs.
* *Emitting*: the callback may hand out a tensor under a name (`emit`); it becomes one more output
  of every nested model on the way up.

This is the only module that touches private Keras. `tests/test_keras_internals.py` pins each
private name, so that a Keras release which moves one says so plainly.
"""

import contextlib
import operator
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import tree
from keras.src.backend.common import global_state
from keras.src.models.functional import Functional
from keras.src.ops.node import Node

from backbone_surgery.emission import Emitted, emit, emitting, hand_over
from backbone_surgery.errors import SurgeryError

KEEP = object()
"""Returned by an internal callback to say: this node stays as it is."""

CloneFn = Callable[..., Any]


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
        ValueError: `inputs` are no `keras.Input`, or `outputs` depend on one that is not listed.
        TypeError: `clone_fn` returned something else than as many tensors as the node had.

    Source: Keras pull request 19600.

    Example:
        >>> import keras, backbone_surgery as bs
        >>> x = keras.Input((4,))
        >>> y = keras.layers.Dense(4)(x)
        >>> twice = lambda layer, *a, **k: layer(layer(*a, **k))
        >>> model = keras.Model(x, bs.clone_layer_graph(x, y, twice))
    """
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
        per_use: enter a nested model anew at each of its uses, so that every use can differ.

    Returns:
        The new outputs and what was emitted.

    Raises:
        SurgeryError: the graph needs an input that is not in `mapping`, or a tensor from inside a
            nested model was used outside of it.
        TypeError: as `clone_layer_graph`.
    """
    walk = _Replay(visit, enter_nested, per_use)
    with emitting() as emitted:
        flat = walk.run(tree.flatten(outputs), mapping)
    walk.check_reachable([*flat, *tree.flatten(emitted)])
    return tree.pack_sequence_as(outputs, flat), emitted


@dataclass(frozen=True)
class _Rebuilt:
    """A nested model made anew, and how to call it in place of the old one."""

    old: Functional
    new: Functional
    same_signature: bool
    kept: list[int]
    lifted: list[keras.KerasTensor]
    emitted: list[str]

    def __call__(self, inputs: Any, **kwargs: Any) -> list[Any]:
        if self.same_signature:
            return tree.flatten(self.new(inputs, **kwargs))
        if kwargs.get("mask") is not None:
            # Keras pairs masks and inputs by their order.
            masks = dict(enumerate(in_order(self.old, kwargs["mask"])))
            kwargs["mask"] = [masks.get(i) for i in self.kept] + [None] * len(self.lifted)
        flat = in_order(self.old, inputs)
        result = tree.flatten(self.new([flat[i] for i in self.kept] + self.lifted, **kwargs))
        count = len(self.old.outputs)
        for name, tensor in zip(self.emitted, result[count:], strict=True):
            emit(name, tensor)
        return result[:count]


class _Replay:
    """One walk over a graph. Holds the nested models that were rebuilt on the way."""

    def __init__(
        self, visit: CloneFn, enter_nested: bool | Callable[[Functional], bool], per_use: bool
    ) -> None:
        self.visit, self.per_use = visit, per_use
        self.enters = enter_nested if callable(enter_nested) else lambda nested: enter_nested
        self.rebuilt: dict[int, _Rebuilt] = {}
        self.names: set[str] = set()
        self.nested_inputs: dict[int, tuple[str, keras.KerasTensor]] = {}

    def run(self, outputs: list[Any], mapping: dict[int, Any]) -> list[Any]:
        for node in topological_nodes(outputs, mapping):
            if node.is_input:
                raise SurgeryError(
                    "clone_layer_graph: expected `inputs` to list every input that `outputs` "
                    f"depend on. Received a graph that also needs '{node.operation.name}'. Add it "
                    "to `inputs`."
                )
            args, kwargs = node.arguments.fill_in(mapping)
            result = self._call(node, args, kwargs)
            for old, new in zip(node.outputs, result, strict=True):
                mapping.setdefault(id(old), new)
        return [mapping[id(t)] for t in outputs]

    def check_reachable(self, tensors: list[keras.KerasTensor]) -> None:
        """Refuse tensors that were taken out of a nested model in another way than `emit`."""
        for node in topological_nodes(tensors):
            if node.is_input and id(node.outputs[0]) in self.nested_inputs:
                name, _ = self.nested_inputs[id(node.outputs[0])]
                raise SurgeryError(
                    "clone_fn: expected tensors of the graph that the node is in, or of one "
                    f"around it. Received a tensor from inside the nested model '{name}', used "
                    "outside of it. Hand it out with `backbone_surgery.emit`."
                )

    def _call(self, node: Node, args: tuple, kwargs: dict) -> list[Any]:
        layer = node.operation
        nested = as_functional(layer)
        if nested is not None and self.enters(nested):
            inputs = args[0] if args else kwargs.pop("inputs")
            return self._enter(layer, nested)(inputs, **kwargs)
        result = self.visit(layer, *args, **kwargs)
        if result is KEEP:
            return _repeat(node, args, kwargs)
        flat = tree.flatten(result)
        others = [type(t).__name__ for t in flat if not isinstance(t, keras.KerasTensor)]
        if others or len(flat) != len(node.outputs):
            received = "None" if result is None else f"{len(flat)} value(s)"
            among = f", among them {', '.join(others)}" if others and result is not None else ""
            raise TypeError(
                f"clone_fn at '{layer.name}' ({type(layer).__name__}): expected "
                f"{len(node.outputs)} tensor(s), as many as the layer call being replaced. "
                f"Received {received}{among}. Return what takes the place of "
                "`layer(*args, **kwargs)`; hand out anything more with `backbone_surgery.emit`."
            )
        return flat

    def _enter(self, layer: keras.Layer, nested: Functional) -> _Rebuilt:
        """Replay the inside of a nested model, and make a new model of it."""
        if not self.per_use and id(layer) in self.rebuilt:
            return self.rebuilt[id(layer)]
        inputs = [_input_like(t, node_of(t).operation.name) for t in nested.inputs]
        self.nested_inputs.update((id(t), (layer.name, t)) for t in inputs)
        mapping = {id(old): new for old, new in zip(nested.inputs, inputs, strict=True)}
        with emitting() as emitted:
            outputs = self.run(nested.outputs, mapping)
        name = _unique(layer.name, self.names, "_use_") if self.per_use else layer.name
        rebuilt = _rebuild(nested, name, inputs, outputs, emitted)
        rebuilt.new.supports_masking = layer.supports_masking
        self.rebuilt[id(layer)] = rebuilt
        return rebuilt


def _rebuild(
    nested: Functional,
    name: str,
    inputs: list[keras.KerasTensor],
    outputs: list[keras.KerasTensor],
    emitted: Emitted,
) -> _Rebuilt:
    """Make a Functional of a replayed nested graph: lift, prune, and add what was emitted."""
    handed_out = [(key, tensor) for key, tensors in emitted.items() for tensor in tensors]
    outputs = outputs + [tensor for _, tensor in handed_out]
    lifted, used = _free_and_used(outputs, inputs)
    taken = {t.name for t in inputs}
    stand_ins = [_stand_in(name, t, taken) for t in lifted]
    outputs = _reroot(outputs, dict(zip(map(id, lifted), stand_ins, strict=True)))
    # An input that never had a user stays: only a rewrite's own doing is undone.
    _, was_used = _free_and_used(nested.outputs, nested.inputs)
    pairs = enumerate(zip(nested.inputs, inputs, strict=True))
    kept = [i for i, (old, new) in pairs if id(new) in used or id(old) not in was_used]
    same_signature = not lifted and not emitted and len(kept) == len(inputs)
    if same_signature:
        struct_in = tree.pack_sequence_as(nested._inputs_struct, inputs)
        struct_out = tree.pack_sequence_as(nested._outputs_struct, outputs)
        new = Functional(struct_in, struct_out, name=name)
    else:
        new = Functional([inputs[i] for i in kept] + stand_ins, outputs, name=name)
    return _Rebuilt(nested, new, same_signature, kept, lifted, [key for key, _ in handed_out])


def nest(name: str, build: Callable[..., Any], *tensors: keras.KerasTensor) -> Any:
    """Run `build(*tensors)` inside a new nested model, and call that model on `tensors`.

    Args:
        name: name of the nested model; the names of its inputs begin with it.
        build: makes a symbolic tensor, or a list of them, out of as many as are given.
        tensors: what to pass. Those that `build` does not use do not become inputs.

    Returns:
        What `build` returned, as tensors of the graph that `tensors` belong to.
    """
    taken: set[str] = set()
    inputs = [_stand_in(name, t, taken) for t in tensors]
    output = build(*inputs)
    _, used = _free_and_used(tree.flatten(output), inputs)
    kept = [(i, t) for i, t in zip(inputs, tensors, strict=True) if id(i) in used]
    model = Functional([i for i, _ in kept], output, name=name)
    return model([t for _, t in kept])


def topological_nodes(outputs: Iterable[Any], stop: Container[int] = ()) -> list[Node]:
    """List the nodes above `outputs`, each after those it depends on, depth first.

    Args:
        outputs: symbolic tensors.
        stop: ids of tensors above which the walk does not go.
    """
    ordered: list[Node] = []
    seen: set[int] = set()
    stack = [(node_of(t), False) for t in reversed(list(outputs)) if id(t) not in stop]
    while stack:
        node, ready = stack.pop()
        if ready:
            ordered.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
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
    given = [id(t) for t in tree.flatten((args, kwargs)) if isinstance(t, keras.KerasTensor)]
    nodes = [node_of(t) for t in flat]
    return all(n.operation is layer and given == [id(t) for t in n.input_tensors] for n in nodes)


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
            f"surgery at '{getattr(model, 'name', model)}': expected a Functional model. "
            f"Received {type(model).__name__}. Build it with `keras.Model(inputs, outputs)`."
        )
    return topological_nodes(functional.outputs)


def all_nodes(model: keras.Model) -> Iterator[Node]:
    """Walk the nodes of a Functional model and of the models nested in it."""
    for node in graph_nodes(model):
        yield node
        if as_functional(node.operation) is not None:
            yield from all_nodes(node.operation)


def _unique(name: str, taken: set[str], suffix: str = "_") -> str:
    unique, count = name, 0
    while unique in taken:
        count += 1
        unique = f"{name}{suffix}{count}"
    taken.add(unique)
    return unique


def in_order(model: Functional, structure: Any) -> list[Any]:
    """Flatten what a nested model was called with, in the order of its own inputs."""
    if isinstance(structure, dict) and not isinstance(model._inputs_struct, dict):
        return [structure.get(t.name) for t in model.inputs]
    return tree.flatten(structure)


def _input_like(tensor: keras.KerasTensor, name: str) -> keras.KerasTensor:
    """Make an input that can take the value of `tensor`."""
    # Keras marks the product of a tensor and a constant as sparse, so only inputs are believed.
    layer = node_of(tensor).operation
    return keras.Input(
        batch_shape=tensor.shape,
        dtype=tensor.dtype,
        sparse=is_input(tensor) and tensor.sparse,
        optional=is_input(tensor) and layer.optional,
        name=name,
    )


def _stand_in(model_name: str, tensor: keras.KerasTensor, taken: set[str]) -> keras.KerasTensor:
    """Make an input of a nested model for an outer tensor, unlike any other in one picture."""
    name = f"{model_name}.{node_of(tensor).operation.name}"
    return _input_like(tensor, _unique(name, taken))


def _free_and_used(
    outputs: Sequence[keras.KerasTensor], inputs: Sequence[keras.KerasTensor]
) -> tuple[list[keras.KerasTensor], set[int]]:
    """Find the tensors a nested graph takes from outside, and the inputs it really uses.

    A tensor is inside when it depends on one of `inputs`; what an inside node or an output takes
    from elsewhere is free.
    """
    own = {id(t) for t in inputs}
    inside = set(own)
    taken: list[keras.KerasTensor] = []
    for node in topological_nodes(outputs, own):
        if any(id(t) in inside for t in node.input_tensors):
            inside.update(id(t) for t in node.outputs)
            taken.extend(node.input_tensors)
    taken.extend(outputs)
    free = {id(t): t for t in taken if id(t) not in inside}
    return list(free.values()), own.intersection(map(id, taken))


def _reroot(outputs: list[Any], mapping: dict[int, Any]) -> list[Any]:
    """Copy the nodes that depend on the tensors in `mapping`, putting their new values in."""
    for node in topological_nodes(outputs, mapping):
        if any(id(t) in mapping for t in node.input_tensors):
            args, kwargs = node.arguments.convert(lambda x: mapping.get(id(x), x))
            for old, new in zip(node.outputs, _repeat(node, args, kwargs), strict=True):
                mapping[id(old)] = new
    return [mapping.get(id(t), t) for t in outputs]


def _repeat(node: Node, args: tuple, kwargs: dict) -> list[Any]:
    """Make the same call on other tensors of the same shapes, without tracing it again."""
    layer = node.operation
    old = node.input_tensors
    new = [t for t in tree.flatten((args, kwargs)) if isinstance(t, keras.KerasTensor)]
    alike = len(old) == len(new) and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(old, new, strict=True)
    )
    if not alike:
        return tree.flatten(layer(*args, **kwargs))
    outputs = [keras.KerasTensor(shape=t.shape, dtype=t.dtype) for t in node.outputs]
    Node(layer, call_args=args, call_kwargs=kwargs, outputs=outputs)
    return outputs


WITHOUT_MEMORY = "uninitialized_variables"
"""Where Keras lists, for each thread, the variables that are made in a stateless scope."""


@contextlib.contextmanager
def deferred(made: list[keras.Variable]) -> Iterator[None]:
    """Give the variables that are made inside no memory before the end.

    Args:
        made: where each is put as it is made, and taken from at the end. A list whose `append`
            refuses a variable stops it before anything is computed with it. An error inside
            forgets them all.
    """
    before = global_state.get_global_attribute(WITHOUT_MEMORY)
    global_state.set_global_attribute(WITHOUT_MEMORY, made)
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        global_state.set_global_attribute(WITHOUT_MEMORY, before)
    for variable in made:
        variable._deferred_initialize()


# What a twin has to know of a layer; see `twin.py`.

LEFT_BY_CALLS: dict[str, type] = {
    "_inbound_nodes": list,
    "_outbound_nodes": list,
    "_losses": list,
    "_loss_ids": set,
}
"""The attributes in which calls leave nodes and losses on a layer, and what each is."""

LISTS_OF_LAYERS = {"_layers", "_operations", "_operations_by_depth", "_functional", "_modules"}
"""The attributes in which Keras itself, or torch, lists the layers that a layer is made of."""


def sublayers(layer: keras.Layer) -> list[keras.Layer]:
    """List the layers that a layer is made of, as Keras tracks them, inputs left out."""
    return [sub for sub in layer._layers if not isinstance(sub, keras.layers.InputLayer)]


def members_tracking(layers: Callable[[], list[keras.Layer]]) -> dict[str, property]:
    """Return members of a class whose instances track these layers."""
    return {"_layers": property(lambda _: layers())}


def members_running(layer: keras.Layer, swaps: dict[int, Any]) -> dict[str, Any]:
    """Return members of a subclass that runs the graph of a nested model with other layers.

    Args:
        layer: an instance of the class around which the subclass is made.
        swaps: `{id(layer of the graph): what runs in its place}`.
    """
    if not isinstance(layer, Functional):
        return {}

    def run(self: Any, inputs: Any, operation_fn: CloneFn = lambda op: op, **kwargs: Any) -> Any:
        def swapped(op: Any) -> Any:
            return operation_fn(swaps.get(id(op), op))

        return type(layer)._run_through_graph(self, inputs, operation_fn=swapped, **kwargs)

    return {"_run_through_graph": run}


@contextlib.contextmanager
def watching_calls() -> Iterator[dict[int, keras.Layer]]:
    """Collect the layers called inside, in this thread, but not those that other layers call.

    Keras keeps a list of open name scopes for each thread, and a layer opens one when it is called.
    """
    before = global_state.get_global_attribute("name_scope_stack", default=[])
    scopes = _WatchedScopes(before)
    global_state.set_global_attribute("name_scope_stack", scopes)
    try:
        yield scopes.called
    finally:
        global_state.set_global_attribute("name_scope_stack", before)


class _WatchedScopes(list):
    def __init__(self, scopes: list) -> None:
        super().__init__(scopes)
        self.depth = len(scopes)
        self.called: dict[int, keras.Layer] = {}

    def append(self, scope: Any) -> None:
        callers = [s.caller for s in (*self[self.depth :], scope)]
        layers = [caller for caller in callers if isinstance(caller, keras.Layer)]
        if layers == [scope.caller]:
            self.called[id(scope.caller)] = scope.caller
        super().append(scope)


def layers_within(layer: keras.Layer) -> list[keras.Layer]:
    """List a layer and every layer in it, at any depth, each once."""
    return list(dict.fromkeys(layer._flatten_layers()))


def own_weights(layer: keras.Layer) -> list[keras.Variable]:
    """List the weights that a layer holds itself, without those of the layers in it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def is_auto_named(layer: keras.Layer) -> bool:
    """Tell whether Keras made up the name of a layer, out of the name of its class."""
    return is_made_up(layer.name, type(layer).__name__)


def is_made_up(name: str, class_name: str) -> bool:
    """Tell whether a name is what Keras makes up for a layer of a class."""
    stem = re.sub(r"_\d+$", "", name)
    return stem.replace("_", "") == class_name.replace("_", "").lower()
