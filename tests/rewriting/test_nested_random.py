"""Random composite layers, rewritten inside, agree with a small NumPy interpreter.

A program is a list of composite layers, of which the later hold and call the earlier, up to three
deep, and some dense layers. Sub-layers are shared, and called any number of times. A rewrite is a
route of sub-layers down from the last composite, and what to do at its end.
"""

from dataclasses import dataclass, field

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras import layers, ops

import backbone_surgery as bs

DENSE, LATE = 3, 3
KERNELS = np.random.default_rng(5).normal(size=(DENSE + 1, 3, 3)).astype("float32")
X = np.random.default_rng(6).normal(size=(2, 3)).astype("float32")
HOLDERS = ("attributes", "list", "dict", "pair")


@dataclass(frozen=True)
class Body:
    """What a composite layer is made of, and which parts it calls on which values."""

    parts: tuple[str, ...]
    calls: tuple[tuple[int, int], ...]
    holder: str
    depth: int


@dataclass(frozen=True)
class Edit:
    route: tuple[str, ...]
    kind: str
    by_name: bool


@st.composite
def programs(draw):
    depths = {f"dense_{k}": 0 for k in range(DENSE)}
    program = {}
    for k in range(draw(st.integers(1, 4))):
        names = st.sampled_from([name for name, depth in depths.items() if depth < 3])
        parts = tuple(draw(st.lists(names, min_size=1, max_size=3, unique=True)))
        call = st.tuples(st.integers(0, len(parts) - 1), st.integers(0, 3))
        depth = 1 + max(depths[name] for name in parts)
        calls = tuple(draw(st.lists(call, min_size=1, max_size=3)))
        program[f"composite_{k}"] = Body(parts, calls, draw(st.sampled_from(HOLDERS)), depth)
        depths[f"composite_{k}"] = depth
    return program


@st.composite
def cases(draw):
    program = draw(programs())
    edits = []
    for _ in range(draw(st.integers(1, 2))):
        route = [list(program)[-1]]
        while len(route) == 1 or (route[-1] in program and draw(st.booleans())):
            route.append(draw(st.sampled_from(program[route[-1]].parts)))
        kind = draw(st.sampled_from(["double", "twice", "drop", "late"]))
        edits.append(Edit(tuple(route), kind, draw(st.booleans())))
    return program, edits


# The interpreter.


@dataclass
class Interpreter:
    program: dict
    fired: set = field(default_factory=set)

    def function(self, name, edits):
        """Return the function of a layer, edited by routes that begin with its parts."""
        if name not in self.program:
            return lambda x: np.tanh(x @ KERNELS[int(name.removeprefix("dense_"))])
        body = self.program[name]

        def run(x):
            values = [x]
            for part, value in body.calls:
                child = body.parts[part]
                below = [(k, route[1:], kind) for k, route, kind in edits if route[0] == child]
                y = self.edited(child, below)(values[value % len(values)])
                values.append(y + values[0])
            return values[-1]

        return run

    def edited(self, name, edits):
        function = self.function(name, [edit for edit in edits if edit[1]])
        for k, route, kind in edits:
            if not route:
                function = self.wrapped(function, k, kind)
        return function

    def wrapped(self, function, k, kind):
        def run(x):
            self.fired.add(k)
            if kind == "late":
                return np.tanh(function(x) @ KERNELS[LATE])
            return {
                "double": lambda: 2 * function(x),
                "twice": lambda: function(function(x)),
                "drop": lambda: x,
            }[kind]()

        return run


def expected(program, edits):
    """Return what the model gives with the edits, and which of them fired."""
    interpreter = Interpreter(program)
    top, other = list(program)[-1], next(iter(program))
    routes = [(k, edit.route[1:], edit.kind) for k, edit in enumerate(edits)]
    rewritten = interpreter.function(top, routes)
    once = rewritten(X)
    elsewhere = rewritten if other == top else interpreter.function(other, [])
    return [once, rewritten(once), elsewhere(X)], interpreter.fired


# The same in Keras.


class Composite(layers.Layer):
    def __init__(self, body, parts, **kwargs):
        super().__init__(**kwargs)
        self.body = body
        if body.holder == "list":
            self.parts = list(parts)
        elif body.holder == "dict":
            self.parts = {f"part_{k}": part for k, part in enumerate(parts)}
        elif body.holder == "pair":
            self.first, self.rest = parts[0], (tuple(parts[1:]),)
        else:
            for k, part in enumerate(parts):
                setattr(self, f"part_{k}", part)

    def build(self, shape):
        for k in range(len(self.body.parts)):
            if not self.part(k).built:
                self.part(k).build(shape)

    def part(self, k):
        if self.body.holder == "pair":
            return self.first if k == 0 else self.rest[0][k - 1]
        if self.body.holder == "attributes":
            return getattr(self, f"part_{k}")
        return self.parts[k if self.body.holder == "list" else f"part_{k}"]

    def call(self, x):
        values = [x]
        for part, value in self.body.calls:
            values.append(self.part(part)(values[value % len(values)]) + x)
        return values[-1]


def attribute(body, k):
    if body.holder == "pair":
        return f"rest.0.{k - 1}" if k else "first"
    prefix = {"list": "parts.", "dict": "parts.part_", "attributes": "part_"}[body.holder]
    return f"{prefix}{k}"


def path(program, edit):
    steps = [edit.route[0]]
    for above, below in zip(edit.route, edit.route[1:], strict=False):
        body = program[above]
        steps.append(below if edit.by_name else attribute(body, body.parts.index(below)))
    return ".".join(steps)


def make_dense(k):
    kernel = keras.initializers.Constant(KERNELS[k])
    return layers.Dense(3, "tanh", use_bias=False, kernel_initializer=kernel, name=f"dense_{k}")


def build(program):
    made = {f"dense_{k}": make_dense(k) for k in range(DENSE)}
    for name, body in program.items():
        made[name] = Composite(body, [made[part] for part in body.parts], name=name)
    x = keras.Input((3,))
    top, other = made[list(program)[-1]], made[next(iter(program))]
    once = top(x)
    return keras.Model(x, [once, top(once), other(x)])


def rewrites(late):
    return {
        "double": lambda layer, x: 2 * layer(x),
        "twice": lambda layer, x: layer(layer(x)),
        "drop": lambda layer, x: x,
        "late": lambda layer, x: late(layer(x)),
    }


@pytest.mark.slow
@settings(
    max_examples=30,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(cases())
def test_rewritten_composites_compute_what_the_interpreter_does(case):
    program, edits = case
    source = build(program)
    before = source.predict_on_batch(X)
    late, new, done = make_dense(LATE), source, []
    for edit in edits:
        clone_fn = rewrites(late)[edit.kind]
        if len(done) in expected(program, [*done, edit])[1]:
            new = bs.rewrite_nested(new, path(program, edit), clone_fn)
            done.append(edit)
        else:
            with pytest.raises(bs.SurgeryError, match="called when the model runs"):
                bs.rewrite_nested(new, path(program, edit), clone_fn)
    assert_close(new.predict_on_batch(X), expected(program, done)[0])
    assert_close(before, expected(program, [])[0])
    assert all(map(np.array_equal, source.predict_on_batch(X), before))
    assert {id(v) for v in source.variables} <= {id(v) for v in new.variables}
    assert len({id(v) for v in new.variables}) == len(new.variables)


def assert_close(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ops.convert_to_numpy(a), b, rtol=1e-4, atol=1e-4)
