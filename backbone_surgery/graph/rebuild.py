"""Rebuild nested models: lift outer tensors, prune unused inputs, carry emitted tensors out."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import tree
from keras.src.backend.common.masking import get_keras_mask
from keras.src.models.functional import Functional

from backbone_surgery.graph.building import building
from backbone_surgery.graph.emission import Emitted, emit
from backbone_surgery.graph.keras_private import new_input
from backbone_surgery.graph.nodes import (
    connect,
    in_order,
    is_input,
    node_of,
    repeat,
    topological_nodes,
)


@dataclass(frozen=True)
class Rebuilt:
    """A nested model made anew, and how to call it in place of the old one."""

    old: Functional
    new: Functional
    same_signature: bool
    kept: list[int]
    lifted: list[keras.KerasTensor]
    emitted: list[str]

    def __call__(self, inputs: Any, **kwargs: Any) -> list[Any]:
        """Call the new model as the old one was called, and emit its further outputs."""
        if self.same_signature:
            return tree.flatten(_call(self.new, inputs, kwargs))
        if kwargs.get("mask") is not None:
            # Keras pairs masks and inputs by their order.
            masks = dict(enumerate(in_order(self.old, kwargs["mask"])))
            kwargs["mask"] = [masks.get(i) for i in self.kept] + [None] * len(self.lifted)
        flat = in_order(self.old, inputs)
        flat = [flat[i] for i in self.kept] + self.lifted
        result = tree.flatten(_call(self.new, flat, kwargs))
        count = len(self.old.outputs)
        for name, tensor in zip(self.emitted, result[count:], strict=True):
            emit(name, tensor)
        return result[:count]


class Lifting:
    """The inputs that a nested model gets for the outer tensors that are used inside it.

    A tensor is inside when it depends on an input of the model; what an inside node or a result
    takes from elsewhere gets a stand-in.

    Attributes:
        inputs: the inputs that the model has.
        lifted: `{id(outer tensor): its stand-in}`.
        instead: `{id(tensor): (tensor, what stands for it inside)}`.
    """

    def __init__(self, name: str, inputs: list[keras.KerasTensor]) -> None:
        self.name, self.inputs = name, inputs
        self.taken = {t.name for t in inputs}
        self.lifted: dict[int, keras.KerasTensor] = {}
        self.instead = {id(t): (t, t) for t in inputs}

    def lift(self, tensors: list[keras.KerasTensor]) -> list[keras.KerasTensor]:
        """Return the tensors, with new nodes copied where they use outer tensors."""
        for node in topological_nodes(tensors, self.instead):
            ids = {id(t) for t in node.input_tensors}
            if any(i in self.instead and i not in self.lifted for i in ids):
                new = node.outputs
                if any(self._inner(t) is not t for t in node.input_tensors):
                    new = repeat(node, *node.arguments.convert(self._inner))
                for old, t in zip(node.outputs, new, strict=True):
                    self.instead[id(old)], self.instead[id(t)] = (old, t), (t, t)
        return [self._inner(t) for t in tensors]

    def _inner(self, tensor: Any) -> Any:
        if isinstance(tensor, keras.KerasTensor) and id(tensor) not in self.instead:
            stand_in = self.lifted[id(tensor)] = _stand_in(self.name, tensor, self.taken)
            self.instead[id(tensor)] = (tensor, stand_in)
            self.instead[id(stand_in)] = (stand_in, stand_in)
        return self.instead.get(id(tensor), (None, tensor))[1]


def rebuild(
    nested: Functional,
    name: str,
    lifting: Lifting,
    outputs: list[keras.KerasTensor],
    emitted: Emitted,
) -> Rebuilt:
    """Make a Functional of a replayed nested graph: prune, and add what was lifted and emitted."""
    inputs = lifting.inputs
    handed_out = [(key, tensor) for key, tensors in emitted.items() for tensor in tensors]
    outputs = outputs + [tensor for _, tensor in handed_out]
    used = _used(outputs, [*inputs, *lifting.lifted.values()])
    lifted = [lifting.instead[i][0] for i, t in lifting.lifted.items() if id(t) in used]
    stand_ins = [t for t in lifting.lifted.values() if id(t) in used]
    # An input that never had a user stays: only a rewrite's own doing is undone.
    was_used = _used(nested.outputs, nested.inputs)
    pairs = enumerate(zip(nested.inputs, inputs, strict=True))
    kept = [i for i, (old, new) in pairs if id(new) in used or id(old) not in was_used]
    same_signature = not lifted and not emitted and len(kept) == len(inputs)
    if same_signature:
        struct_in = tree.pack_sequence_as(nested._inputs_struct, inputs)
        struct_out = tree.pack_sequence_as(nested._outputs_struct, outputs)
        new = Functional(struct_in, struct_out, name=name)
    else:
        new = Functional([inputs[i] for i in kept] + stand_ins, outputs, name=name)
    return Rebuilt(nested, new, same_signature, kept, lifted, [key for key, _ in handed_out])


@building()
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
    used = _used(tree.flatten(output), inputs)
    kept = [(i, t) for i, t in zip(inputs, tensors, strict=True) if id(i) in used]
    model = Functional([i for i, _ in kept], output, name=name)
    return _call(model, [t for _, t in kept], {})


def _call(model: Functional, inputs: Any, kwargs: dict[str, Any]) -> Any:
    """Call a nested model; where Keras would cast nothing and pass on no mask, add its node."""
    given = tree.flatten(inputs)
    alike = not kwargs and len(given) == len(model.inputs)
    plain = alike and all(
        isinstance(a, keras.KerasTensor) and a.dtype == b.dtype and get_keras_mask(a) is None
        for a, b in zip(given, model.inputs, strict=True)
    )
    return connect(model, inputs) if plain else model(inputs, **kwargs)


def unique(
    name: str, taken: set[str], suffix: str = "_", reserved: Container[str] = frozenset()
) -> str:
    """Return the name, numbered if it is among `taken`, and add it to them.

    Args:
        name: the name.
        taken: names that were given.
        suffix: what stands before the number.
        reserved: names that no numbered name may be, since something may keep its own.
    """
    unique, count = name, 0
    while unique in taken or (count and unique in reserved):
        count += 1
        unique = f"{name}{suffix}{count}"
    taken.add(unique)
    return unique


def input_like(tensor: keras.KerasTensor, name: str) -> keras.KerasTensor:
    """Make an input that can take the value of `tensor`."""
    # Keras marks the product of a tensor and a constant as sparse, so only inputs are believed.
    layer = node_of(tensor).operation
    return new_input(
        tensor.shape,
        dtype=tensor.dtype,
        sparse=is_input(tensor) and tensor.sparse,
        optional=is_input(tensor) and layer.optional,
        name=name,
    )


def _stand_in(model_name: str, tensor: keras.KerasTensor, taken: set[str]) -> keras.KerasTensor:
    """Make an input of a nested model for an outer tensor, unlike any other in one picture."""
    name = f"{model_name}.{node_of(tensor).operation.name}"
    return input_like(tensor, unique(name, taken))


def _used(outputs: Sequence[keras.KerasTensor], inputs: Sequence[keras.KerasTensor]) -> set[int]:
    """Return the ids of the inputs that the outputs depend on."""
    own = {id(t) for t in inputs}
    taken = [t for node in topological_nodes(outputs, own) for t in node.input_tensors]
    return own.intersection(map(id, [*taken, *outputs]))


def reroot(outputs: list[Any], mapping: dict[int, Any]) -> list[Any]:
    """Copy the nodes that depend on the tensors in `mapping`, putting their new values in.

    Args:
        outputs: symbolic tensors. One that depends on none of them is returned as it is.
        mapping: `{id(old tensor): new tensor}`. Extended by each tensor that is copied.
    """
    for node in topological_nodes(outputs, mapping):
        if any(id(t) in mapping for t in node.input_tensors):
            args, kwargs = node.arguments.convert(lambda x: mapping.get(id(x), x))
            for old, new in zip(node.outputs, repeat(node, args, kwargs), strict=True):
                mapping[id(old)] = new
    return [mapping.get(id(t), t) for t in outputs]
