"""The clone engine keeps the contract of Keras pull request 19600, and what it promises beyond.

A cloned graph is compared by its numbers with its source or with plain NumPy. The zoo below holds
one small graph for each thing that a Functional model can contain.
"""

import contextlib
import json
import sys

import keras
import numpy as np
import pytest
from keras import layers, ops, tree

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.graph.emission import collect, emit
from backbone_surgery.graph.replay import KEEP, clone_layer_graph

SIZE = 4


def identity(layer, *args, **kwargs):
    return layer(*args, **kwargs)


def keep(inputs, outputs):
    return graph.replay(
        outputs, {id(t): t for t in tree.flatten(inputs)}, lambda *args, **kwargs: KEEP
    )[0]


def numbers(values):
    tensors = [ops.convert_to_tensor(v) for v in tree.flatten(values)]
    return [np.asarray(ops.convert_to_numpy(t), "float64") for t in tensors]


def assert_same(got, expected, tolerance=0.0):
    for a, b in zip(numbers(got), numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def vector(name=None, size=SIZE, **kwargs):
    return keras.Input((size,), name=name, **kwargs)


def scalar(name, **kwargs):
    return keras.Input(batch_shape=(), name=name, **kwargs)


def dense(name=None, size=SIZE):
    return layers.Dense(size, name=name, bias_initializer="normal")


def nested(name, *stack):
    """A Functional model that applies layers one after another."""
    x = vector()
    y = x
    for layer in stack:
        y = layer(y)
    return keras.Model(x, y, name=name)


def functionals(model):
    """Return the nested models that a model uses, once each."""
    nodes = graph.graph_nodes(model)
    return list({id(f): f for n in nodes if (f := graph.as_functional(n.operation))}.values())


def by_name(name, change):
    """A clone_fn that puts `change(output)` after each call of the layers with that name."""

    def clone_fn(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        return change(result) if layer.name == name else result

    return clone_fn


class Apply(layers.Layer):
    """Applies a function: it has no config it could be made from."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Wrap(layers.Layer):
    """A wrapper as a user would write it: twice what the wrapped layer gives."""

    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer

    def call(self, x):
        return 2 * self.layer(x)


class Optional(layers.Layer):
    def call(self, x, more=None):
        return x if more is None else x + more

    def compute_output_spec(self, x, more=None):
        return keras.KerasTensor(x.shape, x.dtype)


class Flip(layers.Layer):
    """Does something else in training, without a state."""

    def call(self, x, training=None):
        return -x if training else x


class Opaque(keras.Model):
    """A Functional subclass that does more than its graph says."""

    def __init__(self, name):
        x = vector()
        super().__init__(x, dense("inner")(x), name=name)

    def call(self, inputs, training=None, mask=None):
        return 3 * super().call(inputs)


# The zoo: name -> function that returns inputs, outputs, and values for the inputs.

ZOO = {}


def case(build):
    ZOO[build.__name__] = build
    return build


def values(*shapes):
    rng = np.random.default_rng(3)
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


VECTOR = (2, SIZE)
TOKENS = np.array([[1, 2, 0, 0, 0], [3, 0, 0, 4, 0]], "int32")


@case
def shared_layer():
    x, shared = vector(), dense()
    return x, shared(dense()(shared(x))), values(VECTOR)


@case
def diamond():
    x = vector()
    top = dense()(x)
    return x, layers.Concatenate()([dense()(top), top, layers.ReLU()(top)]), values(VECTOR)


@case
def deep_nesting_used_often():
    inner = nested("inner", dense(), layers.ReLU())
    middle = nested("middle", inner, dense(), inner)
    x = vector()
    return x, middle(inner(middle(x))), values(VECTOR)


@case
def sequential_in_functional():
    x = vector()
    return x, keras.Sequential([dense(), keras.Sequential([dense()])])(x), values(VECTOR)


@case
def functional_in_sequential():
    model = keras.Sequential([nested("inner", dense()), dense()])
    model.build((None, SIZE))
    return model.inputs, model.outputs, values(VECTOR)


@case
def dicts_lists_and_tuples():
    a, b, c = vector("a"), vector("b"), vector("c")
    outputs = {"sum": a + b, "more": (dense()(c), [a, dense()(b)])}
    v = values(VECTOR, VECTOR, VECTOR)
    return {"a": a, "rest": [b, (c,)]}, outputs, {"a": v[0], "rest": [v[1], (v[2],)]}


@case
def nested_with_dicts():
    a, b = vector("a"), vector("b")
    inner = keras.Model({"a": a, "b": b}, {"z": (a, dense()(b)), "y": a - b})
    x, y = vector("x"), vector("y")
    first = inner({"a": x, "b": y})
    second = inner({"a": first["y"], "b": first["z"][1]})
    return [x, y], [second, first["z"]], values(VECTOR, VECTOR)


@case
def nested_list_called_with_dict():
    # The names sort in another order than the inputs.
    a, b = vector("z"), vector("a")
    inner = keras.Model([a, b], a - 2 * b)
    x, y = vector("x"), vector("y")
    return [x, y], inner({"z": x, "a": y}), values(VECTOR, VECTOR)


@case
def nested_that_passes_an_input_through():
    a, unused = vector("a"), vector("unused")
    inner = keras.Model([a, unused], [a, dense()(a)])
    x = vector()
    passed, made = inner([x, x + 1])
    return x, passed * made, values(VECTOR)


@case
def scalar_input():
    x, s = vector("x"), scalar("s")
    return [x, s], dense()(x) * s, [*values(VECTOR), np.float32(0.3)]


@case
def optional_input_given():
    x, more = vector("x"), vector("more", optional=True)
    return [x, more], Optional()(dense()(x), more), values(VECTOR, VECTOR)


@case
def optional_input_left_out():
    x, more = vector("x"), vector("more", optional=True)
    a, b = vector("a"), vector("b", optional=True)
    inner = keras.Model([a, b], Optional()(a, b))
    return [x, more], inner([dense()(x), more]), [*values(VECTOR), None]


@case
def several_outputs():
    x = vector()
    first, _, third = Apply(lambda x: (x + 1, x * 2, x * 3))(x)
    parts = Apply(lambda x: {"b": x + 4, "a": x * 5})(third)
    return x, [first - parts["b"], parts["a"]], values(VECTOR)


@case
def wrappers():
    x = keras.Input((5, SIZE))
    y = layers.Bidirectional(layers.GRU(3, unroll=True, return_sequences=True))(x)
    return (
        x,
        Wrap(layers.TimeDistributed(nested("inner", Wrap(dense()))))(dense()(y)),
        values((2, 5, SIZE)),
    )


@case
def raw_operations():
    x, y = vector("x"), vector("y")
    z = ops.where(x > 0, x @ ops.transpose(y) @ y, 2.5 - x * 0.5)
    first, second = ops.split(z, 2, axis=-1)
    return [x, y], ops.concatenate([second, first + np.ones(2)], axis=0), values(VECTOR, VECTOR)


@case
def tensors_as_keywords():
    x, h, c = keras.Input((5, SIZE), name="x"), vector("h", 3), vector("c", 3)
    y, h2, _ = layers.LSTM(3, unroll=True, return_sequences=True, return_state=True)(
        x, initial_state=[h, c]
    )
    z, scores = layers.MultiHeadAttention(2, 2)(
        query=x, value=y, return_attention_scores=True, use_causal_mask=True
    )
    return [x, h, c], [z, scores, h2], values((2, 5, SIZE), (2, 3), (2, 3))


@case
def nested_as_keyword():
    x = vector()
    return x, nested("inner", dense())(inputs=x), values(VECTOR)


@case
def opaque_subclass():
    x = vector()
    return x, Opaque("opaque")(x), values(VECTOR)


@case
def opaque_instance():
    inner = nested("inner", dense())
    original = inner.call
    inner.call = lambda inputs, training=None, mask=None: 3 * original(inputs)
    x = vector()
    return x, inner(x), values(VECTOR)


@case
def sequential_without_a_graph():
    first = Apply(lambda xs, training=None: xs[0] - xs[1])
    x, y = vector("x"), vector("y")
    return [x, y], keras.Sequential([first, dense()])([x, y]), values(VECTOR, VECTOR)


@case
def nested_on_the_outer_input():
    x = vector()
    shared = layers.ReLU()(dense()(x))
    inner = keras.Model(x, shared)
    return x, [inner(dense()(x)), inner(shared) - shared], values(VECTOR)


@case
def masks():
    x = keras.Input((5,), dtype="int32")
    y = layers.Embedding(9, SIZE, mask_zero=True)(x)
    return x, layers.LSTM(3, unroll=True)(layers.Dropout(0.1)(y)), [TOKENS]


@case
def masks_in_sequential():
    embedding = layers.Embedding(9, SIZE, mask_zero=True)
    x = keras.Input((5,), dtype="int32")
    return x, keras.Sequential([embedding, layers.LSTM(3, unroll=True)])(x), [TOKENS]


@case
def masks_through_nested():
    y = keras.Input((5, SIZE))
    inner = keras.Model(y, layers.Dropout(0.1)(y))
    inner.supports_masking = True
    x = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(9, SIZE, mask_zero=True)(x)
    return x, layers.LSTM(3, unroll=True)(inner(embedded)), [TOKENS]


@case
def always_training():
    x = vector()
    inner = nested("inner", Flip())
    return x, inner(x, training=True) + inner(x), values(VECTOR)


@case
def mixed_precision():
    with dtype_policy("mixed_bfloat16"):
        x = vector()
        y = nested("inner", dense(), layers.LayerNormalization())(x) + 1.0
        return x, keras.Sequential([dense(), layers.Dense(3, dtype="float32")])(y), values(VECTOR)


@contextlib.contextmanager
def dtype_policy(name):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


CLONES = {
    "none": clone_layer_graph,
    "identity": lambda inputs, outputs: clone_layer_graph(inputs, outputs, identity),
    "not entered": lambda i, o: clone_layer_graph(i, o, identity, enter_nested=False),
    "keep": keep,
}


def facts(model, inputs):
    """Everything a clone must leave alone."""
    config = None
    with contextlib.suppress(NotImplementedError, TypeError):
        config = json.dumps(model.get_config(), sort_keys=True, default=str)
    nodes = [
        (id(n), id(n.operation), [id(t) for t in n.input_tensors], [id(t) for t in n.outputs])
        for n in graph.all_nodes(model)
    ]
    weights = [(id(v), numbers(v)[0].tolist()) for v in model.variables]
    return config, nodes, weights, [a.tolist() for a in numbers(model(inputs))]


def built(build):
    inputs, outputs, data = build()
    source = keras.Model(inputs, outputs)
    data = data if isinstance(inputs, list | dict) else data[0]
    source(data)  # Keras leaves some models unbuilt until their first call.
    return inputs, outputs, data, source


@pytest.mark.by_default(8)
@pytest.mark.parametrize("build", ZOO.values(), ids=list(ZOO))
def test_plain_clones_are_bit_equal_over_the_same_variables(build):
    inputs, outputs, data, source = built(build)
    before = facts(source, data)
    made = {id(t) for t in tree.flatten(outputs) if not graph.is_input(t)}
    for name, clone in CLONES.items():
        new = clone(inputs, outputs)
        tree.assert_same_structure(new, outputs)
        if name != "keep":  # what the passes keep, they share
            assert made.isdisjoint(id(t) for t in tree.flatten(new)), name
        cloned = keras.Model(inputs, new)
        assert [a.tolist() for a in numbers(cloned(data))] == before[-1], name
        assert [id(v) for v in cloned.variables] == [id(v) for v in source.variables], name
    assert facts(source, data) == before


@pytest.mark.by_default(8)
@pytest.mark.parametrize("build", ZOO.values(), ids=list(ZOO))
def test_rewrite_that_lifts_and_emits_everywhere_leaves_the_source_alone(build):
    inputs, outputs, data, source = built(build)
    before = facts(source, data)
    strength = scalar("strength")

    def clone_fn(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        for tensor in tree.flatten(result):
            emit(layer.name, tensor)
        return tree.map_structure(
            lambda t: t * ops.cast(strength, t.dtype) if "float" in t.dtype else t, result
        )

    with collect() as taps:
        new = clone_layer_graph(inputs, outputs, clone_fn)
    cloned = keras.Model([inputs, strength], [new, taps])
    assert_same(cloned([data, np.float32(1)])[0], source(data))
    assert facts(source, data) == before


# Which nodes are offered, in which order.


def offered(inputs, outputs, **kwargs):
    names = []

    def clone_fn(layer, *args, **kw):
        names.append(layer.name)
        return layer(*args, **kw)

    clone_layer_graph(inputs, outputs, clone_fn, **kwargs)
    return names


def test_nodes_are_offered_once_each_depth_first_from_the_outputs():
    x, shared = vector(), dense("shared")
    left = dense("left")(shared(x))
    right = shared(dense("right")(x))
    dense("not_an_ancestor")(left)
    outputs = [layers.Add(name="add")([left, right]), dense("late")(left)]
    assert offered(x, outputs) == ["shared", "left", "right", "shared", "add", "late"]


def test_nested_model_is_entered_once_and_not_offered():
    x = vector()
    inner = nested("inner", dense("a"))
    outer = nested("outer", inner, dense("b"), inner)
    assert offered(x, outer(inner(outer(x)))) == ["a", "b"]


def test_nested_model_is_offered_like_a_layer_when_not_entered():
    x = vector()
    inner = nested("inner", dense("a"))
    assert offered(x, inner(inner(x)), enter_nested=False) == ["inner", "inner"]


@pytest.mark.parametrize("build", [opaque_subclass, opaque_instance])
def test_model_that_overrides_call_is_offered_like_a_layer(build):
    x, y, _ = build()
    assert offered(x, y) == [graph.node_of(y).operation.name]


def test_functional_subclass_with_the_call_of_its_graph_is_entered():
    class Plain(keras.Model):
        def __init__(self):
            x = vector()
            super().__init__(x, dense("inner")(x))

    x = vector()
    assert offered(x, Plain()(x)) == ["inner"]


# Nested models on an input of the outer graph.


def on_the_outer_input(order):
    """Build a graph and a nested model that share two nodes, to be met in the one or the other."""
    x = vector("x")
    shared = layers.ReLU(name="relu")(dense("shared")(x))
    inner = keras.Model(x, shared, name="inner")
    other = dense("other")(x)
    outputs = {
        "inner first": lambda: inner(other) + 2 * shared,
        "outer first": lambda: 2 * shared + inner(other),
        "inner of outer": lambda: inner(shared) + other,
        "inner twice": lambda: inner(inner(other)) - shared,
    }
    return x, outputs[order]()


ORDERS = ["inner first", "outer first", "inner of outer", "inner twice"]


@pytest.mark.parametrize("order", ORDERS)
def test_node_shared_with_a_nested_model_is_offered_once(order):
    x, y = on_the_outer_input(order)
    names = offered(x, y)
    assert (names.count("shared"), names.count("relu"), names.count("other")) == (1, 1, 1)


@pytest.mark.parametrize("order", ORDERS)
def test_layer_made_at_a_node_shared_with_a_nested_model_is_one(order):
    x, y = on_the_outer_input(order)
    added, strength = [], scalar("strength")

    def clone_fn(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        if layer.name != "shared":
            return result
        added.append(dense("added"))
        result = added[-1](result) * strength
        emit("tap", result)
        return result

    with collect() as taps:
        new = clone_layer_graph(x, y, clone_fn)
    cloned = keras.Model([x, strength], [new, taps["tap"]])
    assert len(added) == 1
    first, second = keras.Model(x, y).get_layer("shared"), keras.Model(x, y).get_layer("other")
    seen = []

    def relu(v):
        seen.append(numbers(3 * added[0](first(v)))[0])
        return np.maximum(seen[-1], 0)

    v = values(VECTOR)[0]
    shared, other = relu(v), numbers(second(v))[0]
    expected = {
        "inner first": lambda: relu(other) + 2 * shared,
        "outer first": lambda: 2 * shared + relu(other),
        "inner of outer": lambda: relu(shared) + other,
        "inner twice": lambda: relu(relu(other)) - shared,
    }[order]()
    result, tapped = cloned([v, np.float32(3)])
    assert_same(result, expected, 1e-5)
    assert sorted(np.sum(t) for t in numbers(tapped)) == pytest.approx(
        sorted(np.sum(t) for t in seen), rel=1e-5
    )


def test_node_shared_by_nested_models_alone_is_offered_once():
    a = vector()
    shared = dense("shared")(a)
    first = keras.Model(a, layers.ReLU(name="relu")(shared), name="first")
    second = keras.Model(a, [shared, dense("more")(shared)], name="second")
    x = vector()
    outputs = [first(x), second(first(x))]
    assert sorted(offered(x, outputs)) == ["more", "relu", "shared"]
    assert_same(
        keras.Model(x, clone_layer_graph(x, outputs, identity))(values(VECTOR)[0]),
        keras.Model(x, outputs)(values(VECTOR)[0]),
    )


# Sharing.


def test_shared_layers_stay_shared():
    x, shared = vector(), dense("shared")
    y = shared(layers.ReLU()(shared(x)))
    cloned = keras.Model(x, clone_layer_graph(x, y, by_name("shared", lambda t: t + 1)))
    assert cloned.get_layer("shared") is shared
    v = values(VECTOR)[0]
    assert_same(cloned(v), shared(ops.relu(shared(v) + 1)) + 1, 1e-6)
    shared.kernel.assign(2 * shared.kernel)
    assert_same(cloned(v), shared(ops.relu(shared(v) + 1)) + 1, 1e-6)


def test_nested_model_becomes_one_new_functional_used_wherever_the_old_one_was():
    x = vector()
    inner = nested("inner", dense("a"))
    outer = nested("outer", inner, dense("b"), inner)
    cloned = keras.Model(x, clone_layer_graph(x, outer(inner(outer(x))), identity))
    new = {f.name: f for f in functionals(cloned)}
    assert sorted(new) == ["inner", "outer"]
    assert new["inner"] is not inner
    assert new["outer"] is not outer
    assert functionals(new["outer"]) == [new["inner"]]


def test_sequential_becomes_a_functional_of_its_name():
    x = vector()
    y = keras.Sequential([dense("a")], name="stack")(x)
    (new,) = functionals(keras.Model(x, clone_layer_graph(x, y, identity)))
    assert not isinstance(new, keras.Sequential)
    assert new.name == "stack"


def test_without_clone_fn_nested_models_themselves_are_shared():
    x = vector()
    inner = nested("inner", dense())
    assert functionals(keras.Model(x, clone_layer_graph(x, inner(x)))) == [inner]


def test_nested_model_keeps_its_signature_when_nothing_was_lifted():
    inputs, outputs, _ = nested_with_dicts()
    (new,) = functionals(keras.Model(inputs, clone_layer_graph(inputs, outputs, identity)))
    assert sorted(new.input) == ["a", "b"]
    assert sorted(new.output) == ["y", "z"]


def test_nested_model_keeps_an_input_that_it_never_used():
    x, y, _ = nested_that_passes_an_input_through()
    (new,) = functionals(keras.Model(x, clone_layer_graph(x, y, identity)))
    assert [t.name for t in new.inputs] == ["a", "unused"]


def test_inputs_are_kept_and_may_be_outputs():
    x = vector()
    new = clone_layer_graph(x, [x, dense()(x)], identity)
    assert new[0] is x
    assert graph.node_of(new[1]).input_tensors == [x]


# The four examples of the pull request.


@pytest.fixture
def model():
    x = vector()
    a = layers.Dense(SIZE, name="a", activation="relu")
    return keras.Model(x, dense("b")(a(x)))


def test_example_identical_clone(model):
    output = clone_layer_graph(model.input, model.output, identity)
    new_model = keras.Model(model.input, output)
    v = values(VECTOR)[0]
    assert_same(new_model(v), model(v))


def test_example_wrap_every_dense(model):
    def clone_fn(layer, *args, **kwargs):
        if isinstance(layer, layers.Dense):
            wrapper = Wrap(layer)
            return wrapper(*args, **kwargs)
        else:
            return layer(*args, **kwargs)

    output = clone_layer_graph(model.input, model.output, clone_fn)
    new_model = keras.Model(model.input, output)
    v = values(VECTOR)[0]
    a, b = model.get_layer("a"), model.get_layer("b")
    assert_same(new_model(v), 2 * b(2 * a(v)), 1e-6)


def test_example_insert_a_dense_after_every_dense(model):
    inserted = []

    def clone_fn(layer, *args, **kwargs):
        if isinstance(layer, layers.Dense):
            output = layer(*args, **kwargs)
            inserted.append(layers.Dense(SIZE))
            return inserted[-1](output)
        else:
            return layer(*args, **kwargs)

    output = clone_layer_graph(model.input, model.output, clone_fn)
    new_model = keras.Model(model.input, output)
    v = values(VECTOR)[0]
    a, b = model.get_layer("a"), model.get_layer("b")
    assert_same(new_model(v), inserted[1](b(inserted[0](a(v)))), 1e-6)


def test_example_collect_inner_activations(model):
    activations = []

    def clone_fn(layer, *args, **kwargs):
        output = layer(*args, **kwargs)
        activations.append(output)
        return output

    output = clone_layer_graph(model.input, model.output, clone_fn)
    new_output = [output, *activations]
    new_model = keras.Model(model.input, new_output)
    v = values(VECTOR)[0]
    hidden = model.get_layer("a")(v)
    assert_same(new_model(v), [model(v), hidden, model(v)])


# Errors.


def test_intermediate_tensors_as_inputs_are_refused_with_the_way_out():
    x = vector()
    middle = dense()(x)
    y = dense()(middle)
    with pytest.raises(ValueError, match=r"first call `model = keras\.Model\(tensors, outputs\)`"):
        clone_layer_graph(middle, y, identity)
    model = keras.Model(middle, y)
    cloned = keras.Model(model.input, clone_layer_graph(model.input, model.output, identity))
    v = values(VECTOR)[0]
    assert_same(cloned(v), model(v))


@pytest.mark.parametrize("bad", [None, 3, np.ones(2), keras.KerasTensor((2,))])
def test_inputs_that_are_no_tensors_are_refused(bad):
    with pytest.raises(SurgeryError, match=r"every one of `inputs` to be a `keras\.Input`"):
        clone_layer_graph([vector(), bad], vector(), identity)


def test_graph_that_begins_at_no_input_is_refused():
    y = layers.Add()([vector("x"), keras.KerasTensor((None, SIZE))])
    with pytest.raises(SurgeryError, match=r"Begin the graph at a `keras\.Input`"):
        clone_layer_graph(vector(), y, identity)


@pytest.mark.parametrize("bad", [None, 3, np.ones(2), keras.KerasTensor((2,))])
def test_outputs_that_no_layer_made_are_refused(bad):
    with pytest.raises(SurgeryError, match=r"pass tensors such as `model\.output`"):
        clone_layer_graph(vector(), bad, identity)


@pytest.mark.parametrize("clone_fn", [3, layers.Dense, layers.Dense(4)])
def test_what_is_no_function_is_refused(clone_fn):
    x = vector()
    with pytest.raises(SurgeryError, match=r"expected a `clone_fn\(layer, \*args, \*\*kwargs\)`"):
        clone_layer_graph(x, layers.Dense(4)(x), clone_fn)


def test_missing_input_is_named():
    x, y = vector("x"), vector("y")
    with pytest.raises(ValueError, match=r"also needs 'y'\. Add it to `inputs`"):
        clone_layer_graph([x], layers.Add()([x, y]), identity)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda y: None, "Received None"),
        (lambda y: [], r"Received 0 value\(s\)"),
        (lambda y: [y, y], r"Received 2 value\(s\)\. Return what takes the place"),
        (lambda y: np.ones(2), r"Received 1 value\(s\), among them ndarray"),
        (lambda y: [y, "b"], r"Received 2 value\(s\), among them str"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_wrong_result_of_a_clone_fn_is_refused_at_the_layer(result, words, inside):
    x = vector()
    layer = dense("the_layer")
    y = nested("inner", layer)(x) if inside else layer(x)
    expected = r"clone_fn at 'the_layer' \(Dense\): expected 1 tensor\(s\).*" + words
    with pytest.raises(TypeError, match=expected):
        clone_layer_graph(x, y, by_name("the_layer", result))


def test_too_few_of_several_outputs_are_refused():
    x, y, _ = several_outputs()
    with pytest.raises(TypeError, match=r"expected 3 tensor\(s\).*Received 2 value"):
        clone_layer_graph(x, y, lambda layer, *args, **kwargs: layer(*args, **kwargs)[:2])


def test_tensor_that_no_layer_made_is_refused_as_a_result():
    x = vector()
    with pytest.raises(SurgeryError, match="made by neither"):
        clone_layer_graph(x, dense()(x), lambda *args, **kwargs: keras.KerasTensor((None, SIZE)))


def test_tensor_from_inside_another_nested_model_is_refused():
    x = vector()
    y = nested("second", dense("b"))(nested("first", dense("a"))(x))
    seen = []

    def clone_fn(layer, *args, **kwargs):
        seen.append(layer(*args, **kwargs))
        return seen[0] + seen[-1]

    with pytest.raises(SurgeryError, match=r"inside the nested model 'first', used outside of it"):
        clone_layer_graph(x, y, clone_fn)


# Lifting.


def lifting_model(uses):
    """`uses` calls of a model that holds, two deep, the layer `d`; and its NumPy twin."""
    inner = nested("inner", dense("d"))
    outer = nested("outer", inner, layers.ReLU())
    x = vector("x")
    y = x
    for _ in range(uses):
        y = outer(y)
    kernel, bias = numbers(inner.get_layer("d").weights)

    def twin(v, change):
        for _ in range(uses):
            v = np.maximum(change(v @ kernel + bias), 0)
        return v

    return x, y, twin


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_outer_input_can_be_used_two_models_deep(uses):
    x, y, twin = lifting_model(uses)
    strength = scalar("strength")
    y = clone_layer_graph(x, y, by_name("d", lambda t: t * strength))
    cloned = keras.Model([x, strength], y)
    assert len(functionals(cloned)) == 1
    v = values(VECTOR)[0]
    for s in (np.float32(1), np.float32(-0.7)):
        assert_same(cloned([v, s]), twin(v, lambda a, s=s: a * s), 1e-5)


def test_several_outer_tensors_of_several_shapes_can_be_used():
    x, y, twin = lifting_model(2)
    direction, table = vector("direction"), keras.Input(batch_shape=(3, SIZE), name="table")

    def change(tensor):
        rows = ops.sum(table, axis=0)
        return tensor + direction * rows + table[1]

    y = clone_layer_graph(x, y, by_name("d", change))
    cloned = keras.Model([x, direction, table], y)
    v, d, t = values(VECTOR, VECTOR, (3, SIZE))
    assert_same(cloned([v, d, t]), twin(v, lambda a: a + d * t.sum(0) + t[1]), 1e-5)


def test_lifted_tensor_may_be_made_by_a_layer_that_is_also_used_inside():
    shared = dense("shared")
    inner = nested("inner", shared)
    x = vector()
    y = inner(inner(shared(x)))
    first = []

    def clone_fn(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        first.append(result)
        return result if len(first) == 1 else result + 2 * first[0]

    cloned = keras.Model(x, clone_layer_graph(x, y, clone_fn))
    kernel, bias = numbers(shared.weights)
    v = values(VECTOR)[0]
    h = v @ kernel + bias
    once = h @ kernel + bias + 2 * h
    assert_same(cloned(v), once @ kernel + bias + 2 * h, 1e-5)


def test_outer_tensor_may_be_one_of_several_outputs():
    x, y, twin = lifting_model(2)
    halves = Apply(lambda x: (x + 1, x * 2))(x)
    change = by_name("d", lambda t: t * halves[1] + halves[0])
    cloned = keras.Model(x, clone_layer_graph(x, y, change))
    v = values(VECTOR)[0]
    assert_same(cloned(v), twin(v, lambda a: a * (v * 2) + v + 1), 1e-5)


def test_tensor_of_the_middle_model_is_lifted_into_the_inner_one_only():
    inner = nested("inner", dense("d"))
    m = vector()
    middle_relu = layers.ReLU(name="relu")(m)
    outer = keras.Model(m, inner(middle_relu), name="outer")
    x = vector()
    seen = []

    def clone_fn(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        seen.append(result)
        return result * seen[0] if layer.name == "d" else result

    cloned = keras.Model(x, clone_layer_graph(x, outer(outer(x)), clone_fn))
    (new,) = functionals(cloned)
    assert len(new.inputs) == 1
    kernel, bias = numbers(inner.weights)
    v = values(VECTOR)[0]
    expected = v
    for _ in range(2):
        h = np.maximum(expected, 0)
        expected = (h @ kernel + bias) * h
    assert_same(cloned(v), expected, 1e-5)


def test_node_inside_may_be_replaced_by_an_outer_tensor_alone():
    x, y, _ = lifting_model(2)
    other = vector("other")
    cloned = keras.Model(other, clone_layer_graph(x, y, by_name("d", lambda t: other)))
    v = values(VECTOR)[0]
    assert_same(cloned(v), np.maximum(v, 0))


def test_optional_outer_input_may_be_left_out():
    x, y, twin = lifting_model(2)
    more = vector("more", optional=True)
    y = clone_layer_graph(x, y, by_name("d", lambda t: Optional()(t, more)))
    cloned = keras.Model([x, more], y)
    v, m = values(VECTOR, VECTOR)
    assert_same(cloned([v, m]), twin(v, lambda a: a + m), 1e-5)
    assert_same(cloned([v, None]), twin(v, lambda a: a), 1e-5)


def test_product_with_a_constant_can_be_lifted():
    # Keras marks such a product as sparse, which no dense value may be passed for.
    x, y, twin = lifting_model(1)
    scaled = x * 2.0
    assert scaled.sparse
    cloned = keras.Model(x, clone_layer_graph(x, y, by_name("d", lambda t: t + scaled)))
    assert not any(t.sparse for t in functionals(cloned)[0].inputs)
    v = values(VECTOR)[0]
    assert_same(cloned(v), twin(v, lambda a: a + 2 * v), 1e-5)


def test_a_clone_can_be_cloned_again_and_again():
    x, y, twin = lifting_model(2)
    strengths = []
    for k in range(3):
        strengths.append(scalar(f"strength_{k}"))
        y = clone_layer_graph(
            [x, *strengths], y, by_name("d", lambda t: t * strengths[-1] + strengths[0])
        )
    cloned = keras.Model([x, *strengths], y)
    v = values(VECTOR)[0]
    a, b, c = (np.float32(s) for s in (0.5, 2, -3))
    # The last change stands right after the layer.
    expected = twin(v, lambda t: ((t * c + a) * b + a) * a + a)
    assert_same(cloned([v, a, b, c]), expected, 1e-5)


def test_lifted_inputs_have_names_of_their_own():
    x, y, _ = lifting_model(1)
    strength = scalar("strength")
    for _ in range(2):
        y = clone_layer_graph([x, strength], y, by_name("d", lambda t: t * strength))
    (outer,) = functionals(keras.Model([x, strength], y))
    assert [t.name for t in outer.inputs[1:]] == ["outer.strength", "outer.strength_1"]


# Pruning.


def masked_add(x, mask):
    return x + ops.cast(mask, "float32")[:, None]


def pruning_model():
    """A padding mask goes two models deep, to the one layer `masked`."""
    a, m = vector("a"), keras.Input((), name="m")
    inner = keras.Model([m, a], dense("d")(Apply(masked_add, name="masked")(a, m)), name="inner")
    a, m = vector("a"), keras.Input((), name="m")
    outer = keras.Model({"a": a, "m": m}, inner([m, a]), name="outer")
    x, mask = vector("x"), keras.Input((), name="mask")
    y = outer({"a": outer({"a": x, "m": mask}), "m": mask})
    return x, mask, y, numbers(inner.weights)


def drop_mask(layer, *args, **kwargs):
    return args[0] if layer.name == "masked" else layer(*args, **kwargs)


@pytest.mark.parametrize("shift", [0, 2.5])
def test_input_that_lost_its_last_user_is_dropped_at_every_depth(shift):
    x, mask, y, (kernel, bias) = pruning_model()
    instead = scalar("instead")

    def clone_fn(layer, *args, **kwargs):
        result = drop_mask(layer, *args, **kwargs)
        return result + instead if shift and layer.name == "d" else result

    y = clone_layer_graph([x, mask], y, clone_fn)
    v = values(VECTOR)[0]
    cloned = keras.Model([x, instead] if shift else x, y)
    expected = (v @ kernel + bias + shift) @ kernel + bias + shift
    assert_same(cloned([v, np.float32(shift)] if shift else v), expected, 1e-5)


def test_input_that_is_still_used_is_kept():
    x, mask, y, (kernel, bias) = pruning_model()
    y = clone_layer_graph([x, mask], y, by_name("d", lambda t: t * 2.0))
    v, m = values(VECTOR, (2,))
    once = (v + m[:, None]) @ kernel + bias
    expected = 2 * ((2 * once + m[:, None]) @ kernel + bias)
    assert_same(keras.Model([x, mask], y)([v, m]), expected, 1e-5)


@pytest.mark.filterwarnings("ignore:.*was passed an input with a mask attached:UserWarning")
def test_masks_stay_with_their_inputs_when_one_is_dropped():
    a, b = keras.Input((5, 3), name="a"), keras.Input((5, SIZE), name="b")
    both = [
        layers.LSTM(3, unroll=True, name="first")(a),
        layers.LSTM(3, unroll=True, name="second")(b),
    ]
    inner = keras.Model([a, b], layers.Add(name="add")(both))
    x, y = keras.Input((5, 3), name="x"), keras.Input((5, SIZE), name="y")
    m = keras.Input((5,), dtype="bool", name="m")
    for masks_given, second_mask in (([m, None], None), ([None, m], True)):
        z = inner([x, y], mask=masks_given)
        first_dropped = clone_layer_graph(
            [x, y, m],
            z,
            lambda layer, *args, **kwargs: (
                args[0][1] if layer.name == "add" else layer(*args, **kwargs)
            ),
        )
        cloned = keras.Model([y, m] if second_mask else y, first_dropped)
        v = values((2, 5, SIZE))[0]
        mask = np.array([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]], bool)
        expected = inner.get_layer("second")(v, mask=mask if second_mask else None)
        assert_same(cloned([v, mask] if second_mask else v), expected, 1e-6)


# Emitting.


def test_emitted_tensors_arrive_once_for_each_use_from_any_depth():
    x, y, twin = lifting_model(3)
    with collect() as taps:
        y = clone_layer_graph(x, y, by_name("d", lambda t: emit("d", t) or t * 2.0))
    assert list(taps) == ["d"]
    v = values(VECTOR)[0]
    seen = []
    expected = twin(v, lambda a: seen.append(a) or 2 * a)
    assert_same(keras.Model(x, [y, taps["d"]])(v), [expected, seen], 1e-5)


def test_emitting_while_lifting_and_pruning():
    x, mask, y, (kernel, bias) = pruning_model()
    strength = scalar("strength")

    def clone_fn(layer, *args, **kwargs):
        result = drop_mask(layer, *args, **kwargs)
        if layer.name == "d":
            emit("before", result)
            emit("strength", strength)
            result = result * strength
            emit("after", result)
            emit("before", args[0])
        return result

    with collect() as taps:
        y = clone_layer_graph([x, mask], y, clone_fn)
    v, s = values(VECTOR)[0], np.float32(0.5)
    a = v @ kernel + bias
    b = (a * s) @ kernel + bias
    got = keras.Model([x, strength], [y, taps])([v, s])
    expected = {"before": [a, v, b, a * s], "after": [a * s, b * s], "strength": [s, s]}
    assert_same(got, [b * s, expected], 1e-5)


def test_emit_outside_of_a_clone_fn_is_refused():
    with pytest.raises(SurgeryError, match=r"emit at 'a'.*Move it into the clone_fn"):
        emit("a", vector())


def test_emit_of_something_else_than_a_tensor_is_refused():
    x = vector()
    with collect(), pytest.raises(SurgeryError, match=r"emit at 'a'.*Received 3 of type int"):
        clone_layer_graph(x, dense("d")(x), by_name("d", lambda t: emit("a", 3) or t))


def test_emitted_tensors_without_a_collector_are_refused():
    x = vector()
    with pytest.raises(
        SurgeryError, match=r"emitted tensors \['a'\]. Received none. Wrap the call"
    ):
        clone_layer_graph(x, dense("d")(x), by_name("d", lambda t: emit("a", t) or t))


def test_failing_clone_fn_leaves_no_scope_behind():
    x = vector()
    y = nested("inner", dense("d"))(x)
    with pytest.raises(ZeroDivisionError):
        clone_layer_graph(x, y, by_name("d", lambda t: 1 / 0))
    with pytest.raises(SurgeryError, match="Move it into the clone_fn"):
        emit("a", x)


# Training, precision, masks, depth.


def test_training_mode_reaches_nested_layers_and_updates_the_shared_state():
    norm, drop = layers.BatchNormalization(momentum=0.5), layers.Dropout(0.5, seed=1)
    x = vector()
    y = nested("inner", norm, drop)(x)
    source = keras.Model(x, y)
    cloned = keras.Model(x, clone_layer_graph(x, y, identity))
    v = values((16, SIZE))[0]
    state = numbers(source.variables)
    expected = numbers(source(v, training=True))
    moved = numbers(source.variables)
    for variable, value in zip(source.variables, state, strict=True):
        variable.assign(value)
    assert_same(cloned(v, training=True), expected)
    assert_same(source.variables, moved)
    assert not np.array_equal(moved[2], state[2])
    assert (expected[0] == 0).any()
    assert_same(cloned(v), source(v))


def test_one_step_of_fitting_a_clone_trains_the_source():
    x, y, _ = lifting_model(2)
    source = keras.Model(x, y)
    strength = keras.Input((1,), name="strength")
    y = clone_layer_graph(x, y, by_name("d", lambda t: t * strength))
    cloned = keras.Model([x, strength], y)
    v = values((8, SIZE))[0]
    ones = np.ones((8, 1), "float32")
    before = numbers(source.variables)
    cloned.compile("sgd", "mse")
    cloned.fit([v, ones], v + 1, epochs=1, verbose=0)
    assert all(
        not np.array_equal(a, b) for a, b in zip(before, numbers(source.variables), strict=True)
    )
    assert_same(cloned([v, ones]), source(v), 1e-6)


def test_frozen_nested_model_stays_frozen():
    x, y, _ = lifting_model(2)
    source = keras.Model(x, y)
    source.trainable = False
    cloned = keras.Model(x, clone_layer_graph(x, y, by_name("d", lambda t: t + x)))
    assert cloned.trainable_variables == []
    assert len(cloned.non_trainable_variables) == 2


@pytest.mark.filterwarnings("ignore:.*was passed an input with a mask attached:UserWarning")
def test_mask_reaches_a_layer_inside_a_model_that_was_lifted_into():
    a = keras.Input((5, SIZE))
    inner = keras.Model(a, layers.LSTM(3, unroll=True, name="lstm")(a))
    x = keras.Input((5,), dtype="int32")
    y = inner(layers.Embedding(9, SIZE, mask_zero=True)(x))
    strength = scalar("strength")
    new = clone_layer_graph(x, y, by_name("lstm", lambda t: t * strength))
    cloned = keras.Model([x, strength], new)
    source = keras.Model(x, y)
    assert_same(cloned([TOKENS, np.float32(3)]), 3 * source(TOKENS), 1e-6)
    changed = np.where(TOKENS == 0, 5, TOKENS)
    assert not np.allclose(source(changed), source(TOKENS))


def test_run_time_strength_in_mixed_precision():
    x, y, data = mixed_precision()
    strength = scalar("strength", dtype="bfloat16")
    new = clone_layer_graph(x, y, lambda layer, *args, **kwargs: layer(*args, **kwargs) * strength)
    cloned = keras.Model([x, strength], new)
    source = keras.Model(x, y)
    assert_same(cloned([ops.convert_to_tensor(*data), ops.ones((), "bfloat16")]), source(*data))
    inner = functionals(cloned)[0]
    assert inner.get_layer(index=1).compute_dtype == "bfloat16"


@contextlib.contextmanager
def recursion_limit(limit):
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.by_default(1)
@pytest.mark.parametrize("clone", CLONES.values(), ids=list(CLONES))
def test_chain_deeper_than_the_recursion_limit_is_cloned(clone):
    depth = 1500
    x = vector()
    y = x
    for _ in range(depth):
        y = y + 1.0
    new = clone(x, y)
    assert len(graph.topological_nodes([new])) == depth + 1
    # Building a model of it is up to Keras, which does recurse.
    with recursion_limit(20 * depth):
        model = keras.Model(x, new)
        assert_same(model(np.zeros(VECTOR, "float32")), np.full(VECTOR, depth))


# The helpers that the rest of the package uses.


def test_replay_can_enter_a_model_anew_at_each_use():
    x, y, _ = lifting_model(2)
    factors = iter([2.0, 3.0])
    change = by_name("d", lambda t: t * next(factors))
    new, _ = graph.replay(y, {id(x): x}, change, per_use=True)
    cloned = keras.Model(x, new)
    assert [f.name for f in functionals(cloned)] == ["outer", "outer_use_1"]
    kernel, bias = numbers(cloned.weights)
    v = values(VECTOR)[0]
    for factor in (2, 3):
        v = np.maximum(factor * (v @ kernel + bias), 0)
    assert_same(cloned(values(VECTOR)[0]), v, 1e-5)


def test_replay_gives_no_use_the_name_of_a_model_that_stays():
    shared, other = nested("part", dense("a")), nested("part_use_1", dense("b"))
    x = vector()
    y = other(shared(shared(x)))
    new, _ = graph.replay(y, {id(x): x}, lambda *args, **kwargs: KEEP, per_use=True)
    cloned = keras.Model(x, new)
    assert [f.name for f in functionals(cloned)] == ["part", "part_use_2", "part_use_1"]
    v = values(VECTOR)[0]
    assert_same(cloned(v), keras.Model(x, y)(v))


def test_replay_can_put_other_tensors_for_the_inputs():
    x, y, twin = lifting_model(1)
    other = vector("other")
    new, _ = graph.replay(y, {id(x): other + 1.0}, identity)
    v = values(VECTOR)[0]
    assert_same(keras.Model(other, new)(v), twin(v + 1, lambda a: a), 1e-5)


def test_callback_can_tell_which_node_it_is_offered_at_which_use():
    x, y, _ = lifting_model(2)
    model, offered = keras.Model(x, y), []

    def visit(layer, *args, **kwargs):
        offered.append(graph.visited_node())
        assert offered[-1][-1].operation is layer
        return KEEP

    graph.replay(y, {id(x): x}, visit, per_use=True)
    assert len(set(offered)) == len(offered)
    outer = [node for node in graph.graph_nodes(model) if not node.is_input]
    assert {way[0] for way in offered} == set(outer)
    assert len({way[-1] for way in offered}) < len(offered)
    assert graph.visited_node() == ()


def test_replay_stops_at_a_tensor_that_is_given():
    x = vector()
    first, second = Apply(lambda x: (x + 1, x * 2))(layers.ReLU()(x))
    given = vector("given")
    new, _ = graph.replay(first + second, {id(x): x, id(first): given}, identity)
    v, g = values(VECTOR, VECTOR)
    assert_same(keras.Model([x, given], new)([v, g]), g + 2 * np.maximum(v, 0), 1e-6)


def test_keep_does_not_trace_again():
    traced = []
    x = vector()
    y = Apply(lambda x: traced.append(x) or x + 1)(x)
    traced.clear()
    keep(x, y)
    assert not traced
    clone_layer_graph(x, y, identity)
    assert traced


def test_keep_traces_again_where_shapes_changed():
    x = vector(size=3)
    y = layers.ReLU()(layers.Dense(2, name="narrow")(x))
    wide = layers.Dense(5)
    new, _ = graph.replay(
        y, {id(x): x}, lambda layer, *args, **_: wide(*args) if layer.name == "narrow" else KEEP
    )
    assert new.shape == (None, 5)
    v = values((2, 3))[0]
    assert_same(keras.Model(x, new)(v), np.maximum(numbers(wide(v))[0], 0))


def test_nest_makes_inputs_of_the_tensors_that_are_used():
    x, y, z = vector("x"), vector("y"), vector("z")
    layer = dense("d")
    out = graph.nest("block", lambda a, b, c: layer(a) + c, x + 1.0, y, z)
    model = graph.node_of(out).operation
    assert model.name == "block"
    assert [t.name for t in model.inputs] == ["block.add", "block.z"]
    v, w = values(VECTOR, VECTOR)
    assert_same(keras.Model([x, z], out)([v, w]), layer(v + 1) + w, 1e-6)


def test_is_plain_call_tells_a_call_from_anything_more():
    x, layer = vector(), dense()
    assert graph.is_plain_call(layer(x), layer, (x,), {})
    assert not graph.is_plain_call(layer(x) + 1, layer, (x,), {})
    assert not graph.is_plain_call(layer(x + 1), layer, (x,), {})
    assert not graph.is_plain_call(dense()(x), layer, (x,), {})
    assert not graph.is_plain_call(None, layer, (x,), {})


def test_all_nodes_walks_into_nested_models():
    x, y, _ = lifting_model(2)
    names = [n.operation.name for n in graph.all_nodes(keras.Model(x, y)) if not n.is_input]
    assert [n for n in names if n in ("outer", "inner", "d")] == ["outer", "inner", "d"] * 2


def test_graph_nodes_of_something_else_than_a_functional_is_refused():
    for other in (keras.Sequential([dense()]), Opaque("opaque"), dense()):
        with pytest.raises(SurgeryError, match=r"expected a Functional model"):
            graph.graph_nodes(other)


def test_variables_are_listed_as_keras_lists_them():
    """Once each, where layers are shared; with those that draw random numbers."""
    shared = layers.Dense(SIZE, name="shared")
    inner = keras.Sequential([shared, layers.Dropout(0.5), layers.BatchNormalization()])
    x = keras.Input((SIZE,))
    model = keras.Model(x, inner(shared(layers.GaussianNoise(0.1)(x))))
    model = keras.Model(x, model(x))
    model.extra = layers.Dense(2)
    model.extra.build((None, 2))
    variables = graph.variables_of(model)
    assert [*map(id, variables)] == [*map(id, model.variables)]
    assert len(variables) == 2 + 2 + 4 + 2  # weights, states of two generators, norm, extra
