"""Depth: run whole decoder blocks again, in another order, not at all, or not for every row.

`Repeat`, `Reorder` and `Remove` are one idea: an order in which the blocks run. The graph from the
input of one block to the input of the next is a segment, and a new graph is a new chain of
segments. What a plain `clone_fn` put between two blocks belongs to the first of them. What goes
beside the hidden states (`Family.beside`) goes the same way. What a block lends to later ones, such
as its keys and values, comes from the last run of it before them. `Skip` leaves the graph as long
as it is, and takes a block out of it at run time.
"""

import abc
import itertools
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import tree

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.graph.emission import Emitted
from backbone_surgery.numbers import is_int
from backbone_surgery.opening.site import BesideInput, BlockInput, Place, is_block, stream_index
from backbone_surgery.rewriting.amounts import bind_amounts
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.rewrite import (
    ControlledRewrite,
    Rewrite,
    Rows,
    Surgery,
    beside_blocks,
)
from backbone_surgery.rewriting.site_layer import SiteLayer, interpolate

_MOST = 1000


class Depth(Rewrite):
    """A new order of the blocks, which are renumbered in that order.

    What earlier rewrites did inside a block moves with it. Each use of a block has its own caches,
    and its own sites for later rewrites. At most 1000 blocks run in one graph.
    """

    whole_blocks = True

    @abc.abstractmethod
    def order(self, surgery: Surgery, count: int) -> list[int]:
        """Return which of `count` blocks to run, in order."""

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Leave every node as it is: only the connections change."""
        return lambda layer, *args, **kwargs: graph.KEEP

    def rebuild(self, surgery: Surgery) -> tuple[Any, Emitted]:
        """Chain the blocks anew."""
        where = f"{type(self).__name__} at '{getattr(self, 'at', 'blocks.*')}'"
        handed_out = [*surgery.model.captures, *surgery.model.signals]
        if handed_out:
            raise SurgeryError(
                f"{where}: expected a graph that captures or watches nothing yet, since blocks get "
                f"new numbers. Received {', '.join(handed_out)}. Put `Capture` and `Condition` "
                "after it."
            )
        chain = _Chain(surgery.model, where)
        order = self.order(surgery, len(chain.blocks))
        if not order:
            raise SurgeryError(
                f"{where}: expected at least one block to stay. Received {len(chain.blocks)} "
                "blocks, all of which would go. Select fewer."
            )
        visit = self.visitor(surgery)
        inputs = {id(t): t for t in tree.flatten(surgery.model.input)}
        # Once more, so that each use of a block is a nested model of its own.
        return graph.replay([{}, chain.run(order, visit)], inputs, visit, per_use=True)

    def selected(self, surgery: Surgery, selector: str) -> list[int]:
        """Return the numbers of the selected blocks, and report them as fired."""
        places = select_blocks(surgery, selector, type(self).__name__)
        surgery.fired.extend(place.path for place in places)
        return [place.block for place in places if place.block is not None]


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True)
class Repeat(Depth):
    """Run consecutive blocks several times, as a group: 1, 2, 3 twice is 1, 2, 3, 1, 2, 3.

    Attributes:
        at: selector of whole blocks, such as `blocks.2:6`.
        times: how often they run, 2 at least.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.Repeat("blocks.1", times=3)])
        >>> len(bs.rewire(edited).output["cache"])
        4
    """

    at: str
    times: int = 2

    def __post_init__(self) -> None:
        fields = Fields(self)
        fields.selector()
        fields.integer("times", smallest=2)

    def order(self, surgery: Surgery, count: int) -> list[int]:
        """Run the group several times."""
        group = self.selected(surgery, self.at)
        _check_count(f"Repeat at '{self.at}'", count + len(group) * (self.times - 1))
        return [*range(group[0]), *group * self.times, *range(group[-1] + 1, count)]


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True)
class Remove(Depth):
    """Take blocks out of the graph, their caches with them.

    Attributes:
        at: selector of whole blocks, such as `blocks.-1`.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> len(bs.rewire(bs.operate(backbone, [bs.Remove("blocks.0")])).output["cache"])
        1
    """

    at: str

    def __post_init__(self) -> None:
        Fields(self).selector()

    def order(self, surgery: Surgery, count: int) -> list[int]:
        """Leave the selected blocks out."""
        removed = self.selected(surgery, self.at)
        return [i for i in range(count) if i not in removed]


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True)
class Reorder(Depth):
    """Run the blocks in any order: some left out, some several times.

    Attributes:
        blocks: numbers of blocks in the order in which they run; -1 is the last block.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.Reorder([1, 0, 0])])
        >>> bs.sites(edited)[-2:]
        ['blocks.2', 'final_norm']
    """

    blocks: Iterable[int]

    def __post_init__(self) -> None:
        blocks: tuple[Any, ...]
        try:
            # One more than may run is enough to refuse an iterator without end.
            blocks = tuple(itertools.islice(self.blocks, _MOST + 1))
        except Exception:  # whatever an object that is no list runs into
            blocks = (None,)
        # A mapping and a set have no order that was meant, and bytes are text.
        meant = not isinstance(self.blocks, Mapping | Set | bytes | bytearray)
        if not meant or not all(map(is_int, blocks)):
            raise SurgeryError(
                "Reorder at 'blocks.*': expected numbers of blocks, each an integer. Received "
                f"{shown(self.blocks)}. List the blocks in the order in which they are to run."
            )
        _check_count("Reorder at 'blocks.*'", len(blocks))
        object.__setattr__(self, "blocks", tuple(map(int, blocks)))

    def order(self, surgery: Surgery, count: int) -> list[int]:
        """Return the order, with negative numbers counted from the end."""
        known = all(-count <= i < count for i in self.blocks)
        order = [i % count for i in self.blocks] if known else []
        if not known or order == list(range(count)):
            raise SurgeryError(
                f"Reorder at 'blocks.*': expected numbers from 0 to {count - 1}, in another order "
                f"than they have. Received {shown(self.blocks)}. List the blocks in the order in "
                "which they are to run."
            )
        surgery.fired.extend(f"blocks.{i}" for i in order)
        return order


def _check_count(where: str, count: int) -> None:
    """Refuse more blocks than anyone can need, before their graph fills the memory."""
    if count > _MOST:
        raise SurgeryError(
            f"{where}: expected at most {_MOST} blocks to run. Received {count}. Run fewer."
        )


class _Chain:
    """The blocks of a graph as segments of one stream, with what goes beside it.

    Attributes:
        starts: for each block the hidden states that go in, and what goes in beside them.
        ends: likewise, of the next block, or what comes out of the last.
    """

    def __init__(self, model: keras.Model, where: str) -> None:
        self.model, self.where = model, where
        nodes = graph.graph_nodes(model)
        self.blocks = [node for node in nodes if is_block(node.operation)]
        inside = sum(is_block(n.operation) for n in graph.all_nodes(model)) - len(self.blocks)
        marks = (BlockInput, BesideInput) if model.family.beside else (BlockInput,)
        given = [[stream_index(node.operation, mark) for mark in marks] for node in self.blocks]
        if inside or not self.blocks or any(None in indices for indices in given):
            raise self._refuse("blocks nested in another model, or without hidden states")
        self.count = len(marks)
        pairs = zip(self.blocks, given, strict=True)
        self.starts = [[node.input_tensors[i] for i in indices] for node, indices in pairs]
        self.ends = [*self.starts[1:], self.blocks[-1].outputs[: self.count]]
        self.side = _independent(nodes, self.starts[0])
        lent = (node.outputs[self.count :] for node in self.blocks)
        self.lent = {id(t): i for i, tensors in enumerate(lent) for t in tensors}
        segments = zip(self.starts, self.ends, strict=True)
        self.lenders = [
            self._check_segment(start, end, self.blocks[i : i + 1])
            for i, (start, end) in enumerate(segments)
        ]
        self._check_segment(self.ends[-1], tree.flatten(model.output)[:1], [])

    def run(self, order: list[int], visit: graph.CloneFn) -> Any:
        """Connect the segments in a new order; returns the new outputs of the model."""
        stream, ran = self.starts[0], set[int]()
        lent: dict[int, Any] = {}
        for i in order:
            self._check_lenders(i, ran)
            own = self.blocks[i].outputs[self.count :]
            lent = {key: t for key, t in lent.items() if self.lent[key] != i}
            mapping = {**self.side, **lent, **_mapped(self.starts[i], stream)}
            made, _ = graph.replay([*self.ends[i], *own], mapping, visit, enter_nested=False)
            stream = made[: self.count]
            lent |= _mapped(own, made[self.count :])
            ran.add(i)
        mapping = {**self.side, **_mapped(self.ends[-1], stream)}
        return graph.replay(self.model.output, mapping, visit, enter_nested=False)[0]

    def _check_segment(self, start: list[Any], end: list[Any], own: list[Any]) -> set[int]:
        """Refuse a segment that uses anything of the stream but its own start, and what is lent.

        Returns:
            The numbers of the blocks that lend something to it.
        """
        first = {id(t) for t in self.starts[0]} - {id(t) for t in start}
        lenders = set()
        stop = {**self.side, **self.lent, **_mapped(start, start)}
        for node in graph.topological_nodes(end, stop):
            past = any(id(t) in first for t in node.input_tensors)
            if past or (is_block(node.operation) and node not in own):
                raise self._refuse(f"a connection past a block, from '{node.operation.name}'")
            lenders |= {self.lent[id(t)] for t in node.input_tensors if id(t) in self.lent}
        return lenders

    def _check_lenders(self, block: int, ran: set[int]) -> None:
        """Refuse to run a block before one that lends it something."""
        missing = sorted(self.lenders[block] - ran)
        if missing:
            raise SurgeryError(
                f"{self.where}: expected each block to run after the one whose keys and values it "
                f"borrows. Received block {block} without block {missing[0]} before it. Keep block "
                f"{missing[0]} before it, or leave block {block} out too."
            )

    def _refuse(self, received: str) -> SurgeryError:
        return SurgeryError(
            f"{self.where}: expected blocks in one chain, each fed by the one before alone. "
            f"Received {received}. Change the order of the blocks before you connect anything else."
        )


def _mapped(old: list[Any], new: list[Any]) -> dict[int, Any]:
    return {id(a): b for a, b in zip(old, new, strict=True)}


def _independent(nodes: list[Any], start: list[Any]) -> dict[int, Any]:
    """Return, by id, the tensors that do not depend on the start of the stream."""
    dependent = {id(t) for t in start}
    for node in nodes:
        if any(id(t) in dependent for t in node.input_tensors):
            dependent.update(id(t) for t in node.outputs)
    return {id(t): t for node in nodes for t in node.outputs if id(t) not in dependent}


def select_blocks(surgery: Surgery, selector: str, operation: str) -> list[Place]:
    """Return the selected blocks; refuse a selector of anything else."""
    places = surgery.select(selector)
    if any(place.path != f"blocks.{place.block}" for place in places):
        blocks = [p.path for p in surgery.places if p.path == f"blocks.{p.block}"]
        raise SurgeryError(
            f"{operation} at '{selector}': expected a selector of whole blocks. Received one that "
            f"picks {', '.join(p.path for p in places)}. Select among {', '.join(blocks)}."
        )
    return places


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True)
class Skip(ControlledRewrite):
    """Skip blocks at run time: the output of a skipped block is its input.

    The amount is a control, one for each row and block: 1 skips the block, 0 is bit-equal to no
    edit, and an amount between scales the block's contribution down. The block is still computed;
    to save its time and its cache, take it out with `Remove`. A `Steer` at the same site that comes
    before is skipped too.

    Attributes:
        at: selector of whole blocks, such as `blocks.5:7`.
        amount: the default of the control.
        name: name of the control: `generate(controls={name: amount})`.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 3, 2, 8, 16)
        >>> bs.operate(backbone, [bs.Skip("blocks.1:")]).report[0].sites
        ('blocks.1', 'blocks.2')
    """

    at: str
    amount: float = 1.0
    name: str = "skip"

    def __post_init__(self) -> None:
        fields = Fields(self)
        fields.selector()
        fields.name()
        fields.number("amount")

    def choose(self, surgery: Surgery) -> list[Place]:
        """Return the selected blocks, and the sites of what goes beside the hidden states."""
        chosen = select_blocks(surgery, self.at, "Skip")
        return [*chosen, *beside_blocks(chosen, surgery)]

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Declare the control, then visit the sites."""
        count = len(select_blocks(surgery, self.at, "Skip"))
        surgery.control(f"{self.name}_amount", np.full(count, self.amount, "float32"))
        return super().visitor(surgery)

    def checked(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Do the same to what goes beside, whose site comes after that of its block."""
        if place.path == f"blocks.{place.block}":
            return super().checked(x, place, surgery)
        layer = Skipping(surgery.index, name=f"{self.name}_beside")
        return layer(x, surgery.beside, surgery.inputs[f"{self.name}_amount"])

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Choose between what stands at the end of the block and what came into it."""
        layer = Skipping(surgery.index, name=f"{self.name}_block")
        return layer(x, surgery.stream, surgery.inputs[f"{self.name}_amount"])

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind an amount: a number, one for each row, or one for each row and selected block."""
        value = self.amount if value is None else value
        name = f"{self.name}_amount"
        where = f"controls at '{self.name}'"
        return {name: bind_amounts(value, where, rows.batch, rows.shapes[name])}


class Skipping(SiteLayer):
    """Take a block's contribution out of the stream.

    Args:
        index: which of the selected blocks this is.

    Call arguments:
        x: float[batch, time, ...], after the block.
        before: float[batch, time, ...], before it.
        amount: float32[batch, blocks].
    """

    def __init__(self, index: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.index = index

    def call(self, x, before, amount):
        """Go from after the block to before it by the amount."""
        return interpolate(x, before, amount[:, self.index])
