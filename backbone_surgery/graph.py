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
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
from keras import tree
from keras.src.models.functional import Functional
from keras.src.ops.node import Node

from backbone_surgery.errors import SurgeryError

KEEP = object()
"""Returned by an internal callback to say: this node stays as it is."""

CloneFn = Callable[..., Any]
Emitted = dict[str, list[keras.KerasTensor]]

_emitted: contextvars.ContextVar[Emitted | None] = contextvars.ContextVar("emitted", default=None)
_collector: contextvars.ContextVar[Emitted | None] = contextvars.ContextVar(
    "collector", default=None
)


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
        _check_is_input(tensor)
    for tensor in tree.flatten(outputs):
        if not isinstance(tensor, keras.KerasTensor):
            raise SurgeryError(
                "clone_layer_graph: expected `outputs` to be symbolic tensors. Received "
                f"{tensor!r} of type {type(tensor).__name__}. Pass `model.output`."
            )
    mapping = {id(t): t for t in flat_inputs}
    enter = enter_nested and clone_fn is not None
    new, emitted = replay(outputs, mapping, clone_fn or _identity, enter_nested=enter)
    if emitted:
        collector = _collector.get()
        if collector is None:
            raise SurgeryError(
                f"clone_layer_graph: expected a collector for the emitted tensors "
                f"{sorted(emitted)}. Wrap the call: `with backbone_surgery.collect() as taps:`."
            )
        for name, tensors in emitted.items():
            collector.setdefault(name, []).extend(tensors)
    return new


def emit(name: str, tensor: keras.KerasTensor) -> None:
    """Hand a tensor out of the graph being cloned, under a name, from any depth of nesting.

    Only callable inside a `clone_fn`. See `collect` for where the tensor arrives.

    Args:
        name: the name under which it arrives.
        tensor: a symbolic tensor of the graph being built.

    Raises:
        SurgeryError: called outside a `clone_fn`.
    """
    scope = _emitted.get()
    if scope is None:
        raise SurgeryError(
            f"emit at '{name}': expected to be called from a clone_fn while a graph is being "
            "cloned. Received a call outside of one. Move it into the clone_fn."
        )
    scope.setdefault(name, []).append(tensor)


@contextlib.contextmanager
def collect() -> Iterator[Emitted]:
    """Collect what a `clone_fn` emits: `{name: [one top-level tensor per use]}`.

    A nested model that is used three times emits three tensors under one name.

    Example:
        >>> import keras, backbone_surgery as bs
        >>> x = keras.Input((4,))
        >>> y = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(3)])(x)
        >>> def tap(layer, *args, **kwargs):
        ...     result = layer(*args, **kwargs)
        ...     bs.emit(layer.name, result)
        ...     return result
        >>> with bs.collect() as taps:
        ...     y = bs.clone_layer_graph(x, y, tap)
        >>> sorted(len(tensors) for tensors in taps.values())
        [1, 1]
    """
    collected: Emitted = {}
    token = _collector.set(collected)
    try:
        yield collected
    finally:
        _collector.reset(token)


def replay(
    outputs: Any,
    mapping: dict[int, Any],
    visit: CloneFn,
    enter_nested: bool = True,
    per_use: bool = False,
) -> tuple[Any, Emitted]:
    """Replay the graph above `outputs` through `visit`, starting from the tensors in `mapping`.

    Args:
        outputs: structure of symbolic tensors.
        mapping: `{id(old tensor): new tensor}`; where the walk stops. Extended in place.
        visit: as `clone_fn`; may also return `KEEP`.
        enter_nested: whether nested models are entered.
        per_use: enter a nested model anew at each of its uses, so that every use can differ.

    Returns:
        The new outputs and what was emitted.
    """
    scope: Emitted = {}
    token = _emitted.set(scope)
    try:
        flat = _Replay(visit, enter_nested, per_use).run(tree.flatten(outputs), mapping)
    finally:
        _emitted.reset(token)
    return tree.pack_sequence_as(outputs, flat), scope


class _Rebuilt:
    """A nested model made anew, and how to call it in place of the old one."""

    def __init__(
        self,
        old: Functional,
        new: Functional,
        kept: list[int],
        lifted: list[keras.KerasTensor],
        emitted: list[str],
    ) -> None:
        self.old, self.new = old, new
        self.kept, self.lifted, self.emitted = kept, lifted, emitted
        self.same_signature = not lifted and not emitted and len(kept) == len(old.inputs)

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        if self.same_signature:
            return self.new(inputs, **kwargs)
        flat = _flat_inputs(self.old, inputs)
        called = self.new([flat[i] for i in self.kept] + self.lifted, **kwargs)
        result = tree.flatten(called)
        for name, tensor in zip(self.emitted, result[len(self.old.outputs) :], strict=True):
            emit(name, tensor)
        return result[: len(self.old.outputs)]


class _Replay:
    """One walk over a graph. Holds the nested models that were rebuilt on the way."""

    def __init__(self, visit: CloneFn, enter_nested: bool, per_use: bool) -> None:
        self.visit, self.enter_nested, self.per_use = visit, enter_nested, per_use
        self.rebuilt: dict[int, _Rebuilt] = {}
        self.names: set[str] = set()

    def run(self, outputs: list[Any], mapping: dict[int, Any]) -> list[Any]:
        for node in topological_nodes(outputs, mapping):
            _check_inputs_are_given(node)
            args, kwargs = node.arguments.fill_in(mapping)
            result = self._call(node, args, kwargs)
            for old, new in zip(node.outputs, result, strict=True):
                mapping.setdefault(id(old), new)
        return [mapping[id(t)] for t in outputs]

    def _call(self, node: Node, args: tuple, kwargs: dict) -> list[Any]:
        layer = node.operation
        nested = as_functional(layer) if self.enter_nested else None
        if nested is not None:
            inputs, kwargs = _split_inputs(args, kwargs)
            return tree.flatten(self._enter(layer, nested)(inputs, **kwargs))
        result = self.visit(layer, *args, **kwargs)
        if result is KEEP:
            return _repeat(node, args, kwargs)
        flat = tree.flatten(result)
        if len(flat) != len(node.outputs) or any(
            not isinstance(t, keras.KerasTensor) for t in flat
        ):
            raise TypeError(
                f"clone_fn at '{layer.name}' ({type(layer).__name__}): expected "
                f"{len(node.outputs)} tensor(s), as many as the layer call being replaced. "
                f"Received {_describe(result)}. Return what takes the place of "
                "`layer(*args, **kwargs)`; hand out anything more with `backbone_surgery.emit`."
            )
        return flat

    def _enter(self, layer: keras.Layer, nested: Functional) -> _Rebuilt:
        if not self.per_use and id(layer) in self.rebuilt:
            return self.rebuilt[id(layer)]
        inputs = [_fresh_input(t) for t in nested.inputs]
        mapping = {id(old): new for old, new in zip(nested.inputs, inputs, strict=True)}
        scope: Emitted = {}
        token = _emitted.set(scope)
        try:
            outputs = self.run(nested.outputs, mapping)
        finally:
            _emitted.reset(token)
        names = [name for name, tensors in scope.items() for _ in tensors]
        rebuilt = _rebuild(
            nested,
            self._unique(layer.name),
            inputs,
            outputs + [t for tensors in scope.values() for t in tensors],
            names,
        )
        self.rebuilt[id(layer)] = rebuilt
        return rebuilt

    def _unique(self, name: str) -> str:
        unique, count = name, 0
        while self.per_use and unique in self.names:
            count += 1
            unique = f"{name}_use_{count}"
        self.names.add(unique)
        return unique


def _rebuild(
    nested: Functional,
    name: str,
    inputs: list[keras.KerasTensor],
    outputs: list[keras.KerasTensor],
    emitted: list[str],
) -> _Rebuilt:
    """Make a Functional of a replayed nested graph: lift free tensors, drop unused inputs."""
    lifted, used = _free_and_used(outputs, inputs)
    lifted_inputs = _lifted_inputs(name, lifted, {t.name for t in inputs})
    if lifted:
        outputs = _reroot(outputs, dict(zip(map(id, lifted), lifted_inputs, strict=True)))
    was_used = _free_and_used(nested.outputs, nested.inputs)[1]
    kept = [i for i, t in enumerate(inputs) if id(t) in used or id(nested.inputs[i]) not in was_used]
    if not kept and not lifted:
        kept = [0]
    if lifted or emitted or len(kept) < len(inputs):
        new = Functional([inputs[i] for i in kept] + lifted_inputs, outputs, name=name)
    else:
        struct_in = tree.pack_sequence_as(nested._inputs_struct, inputs)
        struct_out = tree.pack_sequence_as(nested._outputs_struct, outputs)
        new = Functional(struct_in, struct_out, name=name)
    return _Rebuilt(nested, new, kept, lifted, emitted)


def topological_nodes(outputs: Iterable[Any], stop: Iterable[int] = ()) -> list[Node]:
    """List the nodes above `outputs`, each after those it depends on, depth first.

    Args:
        outputs: symbolic tensors.
        stop: ids of tensors above which the walk does not go.
    """
    ordered: list[Node] = []
    state: dict[int, bool] = {}
    for output in outputs:
        if id(output) in stop:
            continue
        stack = [(node_of(output), False)]
        while stack:
            node, ready = stack.pop()
            if ready:
                state[id(node)] = True
                ordered.append(node)
                continue
            if id(node) in state:
                continue
            state[id(node)] = False
            stack.append((node, True))
            parents = [node_of(t) for t in node.input_tensors if id(t) not in stop]
            stack.extend((p, False) for p in reversed(parents) if id(p) not in state)
    return ordered


def node_of(tensor: keras.KerasTensor) -> Node:
    """Return the node (layer call) that made a symbolic tensor."""
    history = tensor._keras_history
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

    A subclass that overrides `call` does something else than its graph says: it is a layer like
    any other.
    """
    if isinstance(layer, keras.Sequential):
        same_call = type(layer).call is keras.Sequential.call
        return layer._functional if same_call else None
    if isinstance(layer, Functional) and type(layer).call is Functional.call:
        return layer
    return None


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


def _identity(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return layer(*args, **kwargs)


def _check_is_input(tensor: Any) -> None:
    if not is_input(tensor):
        raise SurgeryError(
            "clone_layer_graph: expected every one of `inputs` to be a `keras.Input`. Received "
            f"{tensor!r}. To start from intermediate tensors, first call "
            "`model = keras.Model(tensors, outputs)`, which makes inputs of them, and pass "
            "`model.input` and `model.output`."
        )


def _check_inputs_are_given(node: Node) -> None:
    if node.is_input:
        raise SurgeryError(
            "clone_layer_graph: expected `inputs` to list every input that `outputs` depend on. "
            f"Received a graph that also needs '{node.operation.name}'. Add it to `inputs`."
        )


def _describe(result: Any) -> str:
    if result is None:
        return "None"
    flat = tree.flatten(result)
    others = [type(t).__name__ for t in flat if not isinstance(t, keras.KerasTensor)]
    return f"{len(flat)} value(s)" + (f", among them {', '.join(others)}" if others else "")


def _split_inputs(args: tuple, kwargs: dict) -> tuple[Any, dict]:
    if args:
        return args[0], kwargs
    kwargs = dict(kwargs)
    return kwargs.pop("inputs"), kwargs


def _flat_inputs(model: Functional, inputs: Any) -> list[Any]:
    """Flatten what a nested model was called with, in the order of its own inputs."""
    if isinstance(inputs, dict) and not isinstance(model._inputs_struct, dict):
        return [inputs[t.name] for t in model.inputs]
    return tree.flatten(inputs)


def _fresh_input(tensor: keras.KerasTensor) -> keras.KerasTensor:
    layer = tensor._keras_history.operation
    return keras.Input(
        batch_shape=tensor.shape,
        dtype=tensor.dtype,
        sparse=tensor.sparse,
        optional=getattr(layer, "optional", False),
        name=layer.name,
    )


def _free_and_used(
    outputs: Sequence[keras.KerasTensor], inputs: Sequence[keras.KerasTensor]
) -> tuple[list[keras.KerasTensor], set[int]]:
    """Find the tensors a nested graph takes from outside, and the inputs it really uses.

    A tensor is inside when it depends on one of `inputs`; what an inside node or an output takes
    from elsewhere is free.
    """
    own = {id(t) for t in inputs}
    nodes = topological_nodes(outputs)
    inside: set[int] = set()
    free: dict[int, keras.KerasTensor] = {}
    used: set[int] = {id(t) for t in outputs if id(t) in own}
    for node in nodes:
        sources = node.input_tensors
        if any(id(t) in own or id(node_of(t)) in inside for t in sources):
            inside.add(id(node))
            used.update(id(t) for t in sources if id(t) in own)
            outer = [t for t in sources if id(t) not in own and id(node_of(t)) not in inside]
            free.update((id(t), t) for t in outer)
    outer = [t for t in outputs if id(t) not in own and id(node_of(t)) not in inside]
    free.update((id(t), t) for t in outer)
    return list(free.values()), used


def _lifted_inputs(
    name: str, lifted: list[keras.KerasTensor], taken: set[str]
) -> list[keras.KerasTensor]:
    """Make an input for each lifted tensor, named so that no two in one picture are alike."""
    result = []
    for tensor in lifted:
        history = tensor._keras_history
        many = len(tree.flatten(node_of(tensor).outputs)) > 1
        base = f"{name}.{history.operation.name}" + (f"_{history.tensor_index}" if many else "")
        unique, count = base, 0
        while unique in taken:
            count += 1
            unique = f"{base}_{count}"
        taken.add(unique)
        sparse = tensor.sparse and is_input(tensor)
        made = keras.Input(
            batch_shape=tensor.shape, dtype=tensor.dtype, sparse=sparse, name=unique
        )
        result.append(made)
    return result


def _reroot(outputs: list[Any], mapping: dict[int, Any]) -> list[Any]:
    """Copy the nodes that depend on the tensors in `mapping`, putting their new values in."""
    for node in topological_nodes(outputs, mapping):
        if not any(id(t) in mapping for t in node.input_tensors):
            continue
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


def nest(
    name: str, build: Callable[..., keras.KerasTensor], *tensors: keras.KerasTensor
) -> keras.KerasTensor:
    """Run `build(*tensors)` inside a new nested model, and call that model on `tensors`.

    Args:
        name: name of the nested model; the names of its inputs begin with it.
        build: makes one symbolic tensor out of as many as are given.
        tensors: what to pass. Those that `build` does not use do not become inputs.

    Returns:
        The output of the nested model, a tensor of the graph that `tensors` belong to.
    """
    inputs = _lifted_inputs(name, list(tensors), set())
    output = build(*inputs)
    _, used = _free_and_used([output], inputs)
    pairs = [(i, t) for i, t in zip(inputs, tensors, strict=True) if id(i) in used]
    model = Functional([i for i, _ in pairs], output, name=name)
    return model([t for _, t in pairs])
