"""Stages: a model cut before some of its layers, to run what depends on one of them alone.

A call of a layer belongs to the stage of the last cut that it depends on. Nested models are cut
too. Each tensor has a number; a stage takes and makes lists of arrays, by their numbers. So
whatever crosses a cut, such as the hidden states and the masks, is found in the graph.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops, tree
from keras.src.models.functional import Functional
from keras.src.ops.node import Node

from backbone_surgery.graph.nodes import as_functional, in_order, topological_nodes


@dataclass(frozen=True)
class Call:
    """A call of a layer, with the numbers of the tensors that it takes and makes."""

    node: Node
    takes: list[int]
    makes: list[int]


class Stage(keras.Model):
    """A model that runs some calls of the layers of another, and shares its layers.

    Args:
        calls: in their order.
        wanted: numbers of tensors that are used elsewhere.

    Call arguments:
        values: the arrays whose numbers `takes` lists. One of a single row stands for as many rows
            as others have.

    Returns:
        The arrays whose numbers `makes` lists.

    Attributes:
        takes: numbers of the tensors that the calls need and do not make.
        makes: numbers of those that they make and that are wanted.
    """

    def __init__(self, calls: Sequence[Call], wanted: set[int], **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        made = dict.fromkeys(n for call in calls for n in call.makes)
        taken = dict.fromkeys(n for call in calls for n in call.takes)
        self.calls = tuple(calls)
        self.takes = tuple(n for n in taken if n not in made)
        self.makes = tuple(n for n in made if n in wanted)
        self.parts = [call.node.operation for call in calls]
        pairs = [p for c in calls for p in zip(c.takes, c.node.input_tensors, strict=True)]
        by_row = {n for n, tensor in pairs if tensor.shape[:1] == (None,)}
        self._by_row = by_row.intersection(self.takes)
        self.built = True

    def making(self, numbers: Sequence[int]) -> "Stage":
        """Return the part of it that makes some of what it makes, and no more."""
        needed, calls = set(numbers), []
        for call in reversed(self.calls):
            if needed.intersection(call.makes):
                needed.update(call.takes)
                calls.append(call)
        return Stage(calls[::-1], set(numbers), dtype=self.dtype_policy, name=self.name)

    def reached(self, numbers: Iterable[int]) -> list[int]:
        """Return which of the things that it makes depend on other tensors, of some numbers."""
        known, made = set(numbers), set()
        for call in self.calls:
            if known.intersection(call.takes):
                known.update(call.makes)
                made.update(call.makes)
        return [n for n in self.makes if n in made]

    def call(self, values, training=None):
        """Make the calls."""
        known = dict(zip(self.takes, values, strict=True))
        sizes = [ops.shape(known[n])[0] for n in self._by_row]
        is_known = all(isinstance(size, int) for size in sizes)
        rows = max(sizes, default=1) if is_known else ops.max(ops.stack(sizes))
        for n in self._by_row:
            known[n] = ops.broadcast_to(known[n], (rows, *ops.shape(known[n])[1:]))
        for call in self.calls:
            tensors = zip(call.node.input_tensors, call.takes, strict=True)
            given = {id(tensor): known[n] for tensor, n in tensors}
            args, kwargs = call.node.arguments.fill_in(given)
            if "training" in kwargs:  # as it was when the call was added to the graph
                kwargs["training"] = training
            made = tree.flatten(call.node.operation(*args, **kwargs))
            known.update(zip(call.makes, made, strict=True))
        return [known[n] for n in self.makes]


class Stages:
    """The stages of a model: one before all cuts, and one after each.

    Args:
        model: a Functional model.
        outputs: a structure of its tensors, those that are wanted.
        kind: a class of layers. The model is cut before each call of one.

    Attributes:
        inputs: the numbers of the inputs, in the structure of the inputs of the model.
        outputs: the numbers of the outputs.
        cuts: `{name of the layer: (index of the stage that it begins, number of what goes in)}`.
        stages: the stage before all cuts, then the one that begins at each of them. It takes what
            goes into the layer, and else only what the model, or the stages before, make.
    """

    def __init__(self, model: keras.Model, outputs: Any, kind: type[keras.Layer]) -> None:
        inputs = tree.flatten(model.input)
        self._kind, self._policy = kind, model.dtype_policy
        self._calls: list[list[Call]] = [[]]
        self._levels = [0] * len(inputs)
        self.cuts: dict[str, tuple[int, int]] = {}
        numbers = {id(t): n for n, t in enumerate(inputs)}
        ends = self._sort(tree.flatten(outputs), numbers)
        self.inputs = tree.pack_sequence_as(model.input, range(len(inputs)))
        self.outputs = tree.pack_sequence_as(outputs, ends)
        self.stages = [self._stage(level, set(ends)) for level in range(len(self._calls))]
        self._parts: dict[tuple[int, ...], Stage] = {}

    def maker(self, number: int) -> int:
        """Return the index of the stage that makes a tensor, 0 for an input of the model."""
        return self._levels[number]

    def part(self, index: int, numbers: tuple[int, ...]) -> Stage:
        """Return what of a stage makes some numbers, the same each time."""
        whole = self.stages[index]
        if numbers == whole.makes:
            return whole
        if numbers not in self._parts:
            self._parts[numbers] = whole.making(numbers)
        return self._parts[numbers]

    def _sort(self, outputs: Sequence[Any], numbers: dict[int, int]) -> list[int]:
        """Sort the calls above some outputs by stage.

        Args:
            outputs: of the model, or of one nested in it.
            numbers: `{id(tensor): number}` of its inputs. Extended by those of all its tensors.

        Returns:
            The numbers of the outputs.
        """
        for node in topological_nodes(outputs, numbers):
            takes = [numbers[id(t)] for t in node.input_tensors]
            nested = as_functional(node.operation)
            given = None if nested is None else _given(nested, node)
            if nested is None or given is None:
                makes = self._call(node, takes)
            else:
                own = zip(nested.inputs, given, strict=True)
                makes = self._sort(nested.outputs, {id(t): numbers[id(x)] for t, x in own})
            numbers.update(zip(map(id, node.outputs), makes, strict=True))
        return [numbers[id(t)] for t in outputs]

    def _call(self, node: Node, takes: list[int]) -> list[int]:
        """Add a call to the stage of the last cut that it depends on."""
        level = max(self._levels[n] for n in takes)
        if isinstance(node.operation, self._kind):
            level = len(self._calls)
            self._calls.append([])
            self.cuts[node.operation.name] = level, takes[0]
        first = len(self._levels)
        makes = list(range(first, first + len(node.outputs)))
        self._levels += [level] * len(makes)
        self._calls[level].append(Call(node, takes, makes))
        return makes

    def _stage(self, level: int, ends: set[int]) -> Stage:
        others = (call for i, calls in enumerate(self._calls) if i != level for call in calls)
        wanted = ends.union(*(call.takes for call in others))
        return Stage(self._calls[level], wanted, dtype=self._policy, name=f"stage_{level}")


def _given(nested: Functional, node: Node) -> list[Any] | None:
    """Return what a nested model is called with, in the order of its inputs.

    Where it is called with more than its inputs, such as masks, `None`: it is one call then.
    """
    args, kwargs = node.arguments.args, node.arguments.kwargs
    given = in_order(nested, args[0] if args else kwargs.get("inputs"))
    alike = sorted(map(id, given)) == sorted(map(id, node.input_tensors))
    return given if alike else None
