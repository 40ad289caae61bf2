"""Random graphs and random clones of them agree with a small NumPy interpreter.

A program is drawn: bodies of instructions, of which the later may call the earlier. An instruction
may also call the body it is in, up to one of its own values: in Keras that is a nested model built
on the inputs of the graph around it, which share nodes. A program is built as a Keras graph, with
shared layers and nested models, and it is interpreted by plain recursion. A clone is drawn as an
`Edit`, which the interpreter applies as it goes.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras import layers, ops, tree

from backbone_surgery import graph
from backbone_surgery.graph.emission import collect, emit
from backbone_surgery.graph.replay import KEEP, clone_layer_graph

SHAPE = (2, 3)
DENSE = 4
RNG = np.random.default_rng(5)
KERNELS = RNG.normal(size=(DENSE + 1, 3, 3)).astype("float32")
LATE = DENSE
"""A layer that is not in the source, whose output every clone may lift."""


@dataclass(frozen=True)
class Body:
    """A function of some vectors: the top of a program, or one of its nested models."""

    arity: int
    instructions: tuple
    outputs: tuple
    inputs_as: str
    outputs_as: str
    depth: int


@dataclass(frozen=True)
class Edit:
    """A clone: which dense layers are changed how, and whether `pair` loses its second input."""

    wrapped: frozenset = frozenset()
    followed: frozenset = frozenset()
    scaled: frozenset = frozenset()
    shifted: frozenset = frozenset()
    emitted: frozenset = frozenset()
    drop: bool = False


@st.composite
def bodies(draw, callable_bodies):
    arity = draw(st.integers(1, 2))
    count, instructions, depth = arity, [], 0

    def value():
        return count - 1 - draw(st.integers(0, count - 1))

    for _ in range(draw(st.integers(1, 5))):
        kinds = ["dense", "add", "tanh", "split", "pair"] + ["call"] * 5 * bool(callable_bodies)
        kind = draw(st.sampled_from(kinds + ["own"] * 2 * (count > arity)))
        which, outputs = None, 1
        if kind == "dense":
            which = draw(st.integers(0, DENSE - 1))
            args = (value(),)
        elif kind in ("add", "pair"):
            args = (value(), value())
        elif kind == "own":
            which = draw(st.integers(arity, count - 1))
            args = tuple(value() for _ in range(arity))
        elif kind == "call":
            which = draw(st.sampled_from(sorted(callable_bodies)))
            body = callable_bodies[which]
            args = tuple(value() for _ in range(body.arity))
            outputs, depth = len(body.outputs), max(depth, body.depth + 1)
        else:
            args = (value(),)
        outputs = 2 if kind in ("split", "pair") else outputs
        instructions.append((kind, which, args, tuple(range(count, count + outputs))))
        count += outputs
    outputs = tuple(value() for _ in range(draw(st.integers(1, 2))))
    plain = ["plain"] if arity == 1 else []
    return Body(
        arity=arity,
        instructions=tuple(instructions),
        outputs=outputs,
        inputs_as=draw(st.sampled_from([*plain, "list", "dict"])),
        outputs_as=draw(
            st.sampled_from((["plain"] if len(outputs) == 1 else []) + ["list", "dict"])
        ),
        depth=depth,
    )


@st.composite
def programs(draw):
    """Draw a list of bodies: each may call those before it, up to two models deep."""
    program = []
    for _ in range(draw(st.integers(0, 4))):
        shallow = {k: b for k, b in enumerate(program) if b.depth == 0}
        program.append(draw(bodies(shallow)))
    program.append(draw(bodies(dict(enumerate(program)))))
    return program


some_layers = st.frozensets(st.integers(0, DENSE - 1))
edits = st.builds(
    Edit, some_layers, some_layers, some_layers, some_layers, some_layers, st.booleans()
)


# The interpreter.


@dataclass
class Interpreter:
    """Runs a program on arrays, with edits, of which the later see the layers first."""

    program: list
    edits: tuple
    scale: np.ndarray
    late: np.ndarray
    taps: dict = field(default_factory=dict)

    def run(self, body, inputs):
        known = dict(enumerate(inputs))
        makers = {index: maker for maker in body.instructions for index in maker[-1]}

        def value(index):
            if index not in known:
                kind, which, args, outputs = makers[index]
                arrays = [value(a) for a in args]
                if kind == "own":
                    results = self.run(replace(body, outputs=(which,)), arrays)
                else:
                    results = self.apply(kind, which, arrays)
                known.update(zip(outputs, results, strict=True))
            return known[index]

        return [value(index) for index in body.outputs]

    def apply(self, kind, which, args):
        if kind == "call":
            return self.run(self.program[which], args)
        if kind == "pair":
            dropped = any(edit.drop for edit in self.edits)
            return [args[0]] * 2 if dropped else [args[0] + args[1], args[0] - args[1]]
        if kind == "dense":
            return [self.dense(which, args[0])]
        results = {"add": [sum(args)], "tanh": [np.tanh(args[0])], "split": [args[0] + 1, -args[0]]}
        return results[kind]

    def dense(self, which, x):
        y = np.tanh(x @ KERNELS[which])
        # A wrapped layer is hidden from the clones after the one that wrapped it.
        hiding = [k for k, edit in enumerate(self.edits) if which in edit.wrapped]
        visible = self.edits[: hiding[0] + 1] if hiding else self.edits
        for edit in reversed(visible):
            y = 2 * y if which in edit.wrapped else y
            y = np.tanh(y) if which in edit.followed else y
            y = y * self.scale if which in edit.scaled else y
            y = y + self.late if which in edit.shifted else y
            if which in edit.emitted:
                self.taps.setdefault(f"dense_{which}", []).append(y)
        return y


# The same in Keras.


class Split(layers.Layer):
    def call(self, x):
        return x + 1, -x


class Pair(layers.Layer):
    def call(self, x, other):
        return {"sum": x + other, "difference": x - other}


class Wrap(layers.Layer):
    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer

    def call(self, x):
        return 2 * self.layer(x)


@dataclass
class Builder:
    """Builds a program with one layer of each kind and number, shared by all bodies."""

    program: list
    models: dict = field(default_factory=dict)

    def __post_init__(self):
        self.dense = [make_dense(k) for k in range(DENSE)]
        self.pair, self.split = Pair(name="pair"), Split(name="split")

    def graph(self, body, inputs):
        known = dict(enumerate(inputs))
        for kind, which, args, outputs in body.instructions:
            tensors = [known[a] for a in args]
            if kind == "own":
                own = keras.Model(list(inputs), known[which], name=f"own_{outputs[0]}")
                results = [own(tensors)]
            else:
                results = self.apply(kind, which, tensors)
            known.update(zip(outputs, results, strict=True))
        return [known[index] for index in body.outputs]

    def apply(self, kind, which, args):
        if kind == "dense":
            return [self.dense[which](args[0])]
        if kind == "pair":
            both = self.pair(args[0], other=args[1])
            return [both["sum"], both["difference"]]
        if kind == "split":
            return list(self.split(args[0]))
        if kind == "call":
            body = self.program[which]
            called = self.model(which)(pack(body.inputs_as, args, "input"))
            return tree.flatten(called)
        return [args[0] + args[1]] if kind == "add" else [ops.tanh(args[0])]

    def model(self, which):
        if which not in self.models:
            body = self.program[which]
            inputs = [keras.Input(SHAPE[1:], name=f"input_{k}") for k in range(body.arity)]
            outputs = pack(body.outputs_as, self.graph(body, inputs), "output")
            packed = pack(body.inputs_as, inputs, "input")
            self.models[which] = keras.Model(packed, outputs, name=f"model_{which}")
        return self.models[which]


def make_dense(which):
    kernel = keras.initializers.Constant(KERNELS[which])
    return layers.Dense(3, "tanh", use_bias=False, kernel_initializer=kernel, name=f"dense_{which}")


def pack(kind, items, name):
    if kind == "dict":
        return {f"{name}_{k}": item for k, item in enumerate(items)}
    return items[0] if kind == "plain" else list(items)


def call(layer, *args, **kwargs):
    return layer(*args, **kwargs)


def keep(layer, *args, **kwargs):
    return KEEP


def clone_fn(edit, scale, late, otherwise=call):
    def visit(layer, *args, **kwargs):
        if isinstance(layer, Pair) and edit.drop:
            return {"sum": args[0], "difference": args[0]}
        if not isinstance(layer, layers.Dense):
            return otherwise(layer, *args, **kwargs)
        which = int(layer.name.removeprefix("dense_"))
        y = (Wrap(layer) if which in edit.wrapped else layer)(*args, **kwargs)
        y = layers.Activation("tanh")(y) if which in edit.followed else y
        y = y * scale if which in edit.scaled else y
        y = layers.Add()([y, late]) if which in edit.shifted else y
        if which in edit.emitted:
            emit(layer.name, y)
        return y

    return visit


def arrays(structure):
    return [np.asarray(ops.convert_to_numpy(t)) for t in tree.flatten(structure)]


def facts(model, inputs):
    nodes = [
        (id(n), id(n.operation), [id(t) for t in n.input_tensors], [id(t) for t in n.outputs])
        for n in graph.all_nodes(model)
    ]
    return nodes, model.get_config(), [a.tolist() for a in arrays(model(inputs))]


@dataclass
class Case:
    """A program, built, with values for its inputs and for what its clones lift."""

    program: list
    inputs: list = field(init=False)
    outputs: Any = field(init=False)

    def __post_init__(self):
        self.body = self.program[-1]
        self.inputs = [keras.Input(SHAPE[1:], name=f"input_{k}") for k in range(self.body.arity)]
        self.outputs = Builder(self.program).graph(self.body, self.inputs)
        self.scale = keras.Input(batch_shape=(), name="scale")
        self.late = make_dense(LATE)(self.inputs[0])
        rng = np.random.default_rng(11)
        self.values = [rng.normal(size=SHAPE).astype("float32") for _ in self.inputs]
        self.source = keras.Model(self.inputs, self.outputs)

    def expected(self, *edits, scale=1.0):
        late = np.tanh(self.values[0] @ KERNELS[LATE])
        interpreter = Interpreter(self.program, edits, np.float32(scale), late)
        return interpreter.run(self.body, self.values), interpreter.taps


def assert_close(got, expected):
    for a, b in zip(arrays(got), tree.flatten(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


random_graphs = settings(
    max_examples=100,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@random_graphs
@given(programs())
def test_plain_clones_are_bit_equal(program):
    case = Case(program)
    assert_close(case.source(case.values), case.expected()[0])
    before = facts(case.source, case.values)
    kept = {id(t): t for t in case.inputs}
    clones = [
        clone_layer_graph(case.inputs, case.outputs),
        clone_layer_graph(case.inputs, case.outputs, call),
        clone_layer_graph(case.inputs, case.outputs, call, enter_nested=False),
        graph.replay(case.outputs, dict(kept), keep)[0],
        graph.replay(case.outputs, dict(kept), keep, per_use=True)[0],
    ]
    for clone in clones:
        got = arrays(keras.Model(case.inputs, clone)(case.values))
        assert [a.tolist() for a in got] == before[-1]
    assert facts(case.source, case.values) == before


@pytest.mark.slow
@random_graphs
@given(programs())
def test_every_node_is_offered_once(program):
    case = Case(program)
    offered = []

    def clone_fn(layer, *args, **kwargs):
        offered.append(layer)
        return layer(*args, **kwargs)

    clone_layer_graph(case.inputs, case.outputs, clone_fn)
    nodes = {id(n): n for n in graph.all_nodes(case.source) if not n.is_input}
    layers = [n.operation for n in nodes.values() if not isinstance(n.operation, keras.Model)]
    assert Counter(map(id, offered)) == Counter(map(id, layers))


@pytest.mark.slow
@random_graphs
@given(programs(), edits, st.booleans())
def test_edited_clones_compute_what_the_interpreter_does(program, edit, per_use):
    case = Case(program)
    before = facts(case.source, case.values)
    visit = clone_fn(edit, case.scale, case.late, keep if per_use else call)
    if per_use:
        mapping = {id(t): t for t in case.inputs}
        outputs, taps = graph.replay(case.outputs, mapping, visit, per_use=True)
    else:
        with collect() as taps:
            outputs = clone_layer_graph(case.inputs, case.outputs, visit)
    cloned = keras.Model([*case.inputs, case.scale], [outputs, taps])
    for scale in (1.0, -0.5):
        got = cloned([*case.values, np.float32(scale)])
        assert_close(got, list(case.expected(edit, scale=scale)))
    assert facts(case.source, case.values) == before


@pytest.mark.slow
@random_graphs
@given(programs(), edits, edits)
def test_clones_of_clones_compute_what_the_interpreter_does(program, first, second):
    case = Case(program)
    second = Edit(second.wrapped, second.followed, second.scaled, second.shifted, drop=second.drop)
    before = facts(case.source, case.values)
    inputs = [*case.inputs, case.scale]
    with collect() as taps:
        outputs = clone_layer_graph(
            case.inputs, case.outputs, clone_fn(first, case.scale, case.late)
        )
    outputs, taps = clone_layer_graph(
        inputs, [outputs, taps], clone_fn(second, case.scale, case.late)
    )
    got = keras.Model(inputs, [outputs, taps])([*case.values, np.float32(0.7)])
    assert_close(got, list(case.expected(first, second, scale=0.7)))
    assert facts(case.source, case.values) == before
