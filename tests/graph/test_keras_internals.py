"""Every private Keras name that the clone engine needs is where it was.

When a Keras release moves one, the test that fails says which. Only `backbone_surgery/graph/` needs
mending then, since no other package uses private Keras (tests/test_layering.py). This file does not
import the package, which could not even start then.
"""

import ast
import importlib
from pathlib import Path

import keras
import keras_hub
import pytest

ENGINE = Path(__file__).parents[2] / "backbone_surgery" / "graph"

IMPORTS = {
    "keras.src.backend": "compute_output_spec",
    "keras.src.backend.common": "global_state",
    "keras.src.backend.common.masking": "get_keras_mask",
    "keras.src.backend.common.variables": "AutocastScope",
    "keras.src.models.functional": "Functional",
    "keras.src.ops.node": "Node",
    "keras.src.ops.operation": "Operation",
    "keras.src.quantizers": "quantizers",
    "keras.src.quantizers.utils": "should_quantize_layer",
    "keras.src.utils.tracking": "DotNotTrackScope",
}
ATTRIBUTES = {
    "_keras_history",
    "_inbound_nodes",
    "_inputs_struct",
    "_outputs_struct",
    "_functional",
    "_layers",
    "_initialize_layout",
    "_direct_assign",
    "_deferred_initialize",
    "_outbound_nodes",
    "_losses",
    "_loss_ids",
    "_operations",
    "_operations_by_depth",
    "_run_through_graph",
    "_flatten_layers",
    "_trainable_variables",
    "_non_trainable_variables",
    "_seed_generators",
    "_kernel",
    "_embeddings",
    "_value",
    "_set_vocabulary_and_merges_tokenizers",
    "_tokenize_tf",
    "_tokenize_tokenizers",
    "_tokenizer",
}
"""The private names that are pinned below. A new one in the engine needs a test of its own."""


def moved(name):
    return f"Keras moved or changed `{name}`, which backbone_surgery/graph/ needs"


@pytest.fixture
def x():
    return keras.Input((3,), name="x")


@pytest.mark.parametrize(("module", "name"), IMPORTS.items())
def test_import_path(module, name):
    try:
        found = hasattr(importlib.import_module(module), name)
    except ImportError:
        found = False
    assert found, moved(f"{module}.{name}")


def test_keras_history_fields(x):
    layer = keras.layers.Dense(2)
    y = layer(x)
    assert hasattr(y, "_keras_history"), moved("KerasTensor._keras_history")
    history = y._keras_history
    assert history.operation is layer, moved("KerasTensor._keras_history.operation")
    assert history.node_index == 0, moved("KerasTensor._keras_history.node_index")
    assert layer(x)._keras_history.node_index == 1, moved("KerasTensor._keras_history.node_index")
    parts = keras.ops.split(x, 3, axis=-1)
    indices = [t._keras_history.tensor_index for t in parts]
    assert indices == [0, 1, 2], moved("KerasTensor._keras_history.tensor_index")


def test_what_a_layer_has_before_it_is_initialized():
    layer = keras.layers.Layer.__new__(keras.layers.Layer)
    lists = {"layers", "metrics", "seed_generators", "trainable_variables"}
    tracked = {f"_{name}" for name in {*lists, "non_trainable_variables", "tracker"}}
    own = set(vars(layer)) - tracked
    assert own == {"_lock", "_auto_config", "build", "quantize"}, moved("Layer.__new__")
    assert vars(layer)["_lock"] is True, moved("Layer._lock")


def test_attributes_that_are_not_tracked():
    from keras.src.utils.tracking import DotNotTrackScope

    layer, part = keras.layers.Layer(), keras.layers.Layer()
    with DotNotTrackScope():
        layer.first = part
    assert layer._layers == [], moved("keras.src.utils.tracking.DotNotTrackScope")
    layer.second = part
    assert layer._layers == [part], moved("keras.src.utils.tracking.DotNotTrackScope")


def test_tensor_without_a_layer_has_no_operation(x):
    free = keras.KerasTensor((None, 3))
    assert getattr(free, "_keras_history", None) is None, moved("KerasTensor._keras_history")
    keras.layers.Add()([x, free])
    assert free._keras_history.operation is None, moved("KerasTensor._keras_history.operation")


def test_inbound_nodes(x):
    layer = keras.layers.Dense(2)
    outputs = [layer(x), layer(x)]
    nodes = getattr(layer, "_inbound_nodes", ())
    assert [n.outputs for n in nodes] == [[y] for y in outputs], moved("Layer._inbound_nodes")


def test_node_fields(x):
    layer = keras.layers.Add()
    node = layer([x, layer([x, x])])._keras_history.operation._inbound_nodes[1]
    assert node.operation is layer, moved("Node.operation")
    assert [id(t) for t in node.input_tensors] == [
        id(x),
        id(layer._inbound_nodes[0].outputs[0]),
    ], moved("Node.input_tensors")
    assert not node.is_input, moved("Node.is_input")
    assert x._keras_history.operation._inbound_nodes[0].is_input, moved("Node.is_input")


def test_node_arguments_fill_in_and_convert(x):
    layer = keras.layers.MultiHeadAttention(1, 2)
    query, value = keras.Input((4, 3)), keras.Input((4, 3))
    layer(query, value=value, use_causal_mask=True)
    arguments = layer._inbound_nodes[0].arguments
    args, kwargs = arguments.fill_in({id(query): "q", id(value): "v"})
    assert (args, kwargs["value"], kwargs["use_causal_mask"]) == (("q",), "v", True), moved(
        "SymbolicArguments.fill_in"
    )
    args, kwargs = arguments.convert(lambda a: "q" if a is query else a)
    assert (args, kwargs["value"], kwargs["use_causal_mask"]) == (("q",), value, True), moved(
        "SymbolicArguments.convert"
    )


def test_node_constructor_records_a_call(x):
    from keras.src.ops.node import Node

    layer = keras.layers.Dense(2)
    layer(x)
    y = keras.KerasTensor((None, 2))
    Node(layer, call_args=(x,), call_kwargs={}, outputs=[y])
    assert y._keras_history == (layer, 1, 0), moved("Node(op, call_args, call_kwargs, outputs)")
    value = keras.ops.ones((1, 3))
    got = keras.Model(x, y)(value)
    assert keras.ops.all(got == layer(value)), moved("Node(op, call_args, call_kwargs, outputs)")


def test_node_is_listed_with_its_outputs_and_numbered_by_the_length_of_the_list(x):
    class Watched(list):
        def append(self, node):
            listed.append((node, list(node.outputs)))
            super().append(node)

    listed, layer = [], keras.layers.Dense(2)
    vars(layer)["_inbound_nodes"] = Watched([None] * 3)
    y = layer(x)
    assert listed == [(layer._inbound_nodes[3], [y])], moved("Node(...) lists itself")
    assert y._keras_history.node_index == 3, moved("KerasTensor._keras_history.node_index")
    y.made_by = 1  # A tensor of Keras takes attributes.


def test_outputs_of_an_operation_are_counted_by_its_first_node(x):
    split = keras.layers.Lambda(lambda x: (x, x))
    split(x)
    del split._inbound_nodes[0].outputs[1]
    with pytest.raises(ValueError, match="not connected"):
        keras.Model(x, split(x))


def test_node_needs_no_more_of_its_operation_than_a_list():
    from types import SimpleNamespace

    from keras.src.ops.node import Node

    nobody = SimpleNamespace(_inbound_nodes=[])
    node = Node(nobody, call_args=(), call_kwargs={}, outputs=[keras.KerasTensor((2,))])
    assert nobody._inbound_nodes == [node], moved("Node(op, call_args, call_kwargs, outputs)")
    assert node.input_tensors == [], moved("Node.input_tensors")


def test_functional_is_what_keras_model_makes_and_takes_a_name(x):
    from keras.src.models.functional import Functional

    assert isinstance(keras.Model(x, x + 1.0), Functional), moved("keras.Model -> Functional")
    assert Functional([x], [x + 1.0], name="n").name == "n", moved("Functional(inputs, outputs)")
    assert getattr(keras.Model(x, x + 1.0).call, "__func__", None) is Functional.call, moved(
        "Functional.call"
    )


def test_inputs_struct_and_outputs_struct(x):
    y = keras.Input((3,), name="y")
    model = keras.Model({"x": x, "y": y}, {"b": x + y, "a": (x, y)})
    assert model._inputs_struct == {"x": x, "y": y}, moved("Functional._inputs_struct")
    struct = model._outputs_struct
    assert struct["a"] == (x, y), moved("Functional._outputs_struct")
    assert keras.tree.flatten(struct) == model.outputs, moved("Functional._outputs_struct")


def test_sequential_functional(x):
    from keras.src.models.functional import Functional

    model = keras.Sequential([keras.layers.Dense(2)])
    assert model._functional is None, moved("Sequential._functional")
    model(x)
    assert isinstance(model._functional, Functional), moved("Sequential._functional")
    assert model.call.__func__ is keras.Sequential.call, moved("Sequential.call")


def test_facts_of_inputs_and_tensors():
    x = keras.Input(batch_shape=(), dtype="int32", optional=True, name="x")
    layer = x._keras_history.operation
    assert isinstance(layer, keras.layers.InputLayer), moved("InputLayer")
    assert (layer.name, layer.optional) == ("x", True), moved("InputLayer.optional")
    assert x.sparse is False, moved("KerasTensor.sparse")
    assert (x * 2).sparse is True, (
        "Keras no longer marks the product with a constant as sparse: "
        "backbone_surgery/graph/ need not distrust `KerasTensor.sparse` any more"
    )
    assert keras.layers.LSTM(2).supports_masking is True, moved("Layer.supports_masking")


def test_tree_keeps_none_as_a_leaf_and_sorts_dicts():
    # Optional inputs are passed as None, and outputs of a nested model are told by their order.
    flat = keras.tree.flatten({"b": None, "a": [1, (2,)]})
    assert flat == [1, 2, None], moved("keras.tree.flatten")


def test_what_a_layer_tracks_and_what_calls_leave_on_it(x):
    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dropout(0.5)

        def call(self, x):
            self.add_loss(keras.ops.sum(x))
            return self.inner(x)

    layer = Outer()
    assert vars(layer)["_layers"] == [layer.inner], moved("Layer._layers")
    layer(layer(x))
    layer(keras.ops.ones((1, 3)))
    assert len(vars(layer)["_inbound_nodes"]) == 2, moved("Layer._inbound_nodes")
    assert len(vars(layer)["_outbound_nodes"]) == 1, moved("Layer._outbound_nodes")
    assert len(vars(layer)["_losses"]) == 1, moved("Layer._losses")
    assert vars(layer)["_loss_ids"] == set(), moved("Layer._loss_ids")


def test_a_layer_call_opens_a_name_scope(x):
    from keras.src.backend.common import global_state

    class Looks(keras.layers.Layer):
        def call(self, x):
            stacks.append(global_state.get_global_attribute("name_scope_stack"))
            callers.append([scope.caller for scope in stacks[-1]])
            return x

    stacks, callers, layer = [], [], Looks()
    mine = []
    global_state.set_global_attribute("name_scope_stack", mine)
    layer(keras.ops.ones(3))
    assert stacks[0] is mine, moved("global attribute name_scope_stack")
    assert callers[0] == [layer], moved("name_scope.caller")


def test_names_are_numbered_by_one_count_for_each_thread():
    from keras.src.backend.common import global_state

    keras.utils.clear_session(free_memory=False)
    names = [keras.layers.Dense(2).name for _ in range(3)]
    assert names == ["dense", "dense_1", "dense_2"], moved("names such as dense_1")
    counts = global_state.get_global_attribute("object_name_uids")
    assert counts["dense"] == 3, moved("global attribute object_name_uids")
    counts["dense"] = 7
    assert keras.layers.Dense(2).name == "dense_7", moved("global attribute object_name_uids")


def test_a_model_runs_its_graph_through_one_method(x):
    dense = keras.layers.Dense(2)
    model = keras.Model(x, dense(x))
    assert dense in vars(model)["_operations"], moved("Functional._operations")
    by_depth = vars(model)["_operations_by_depth"]
    assert [dense] in by_depth.values(), moved("Functional._operations_by_depth")
    run, seen = model._run_through_graph, []

    def spy(inputs, operation_fn=lambda op: op, **kwargs):
        return run(inputs, operation_fn=lambda op: seen.append(op) or operation_fn(op), **kwargs)

    object.__setattr__(model, "_run_through_graph", spy)
    model(keras.ops.ones((1, 3)))
    assert seen == [dense], moved("Functional._run_through_graph(inputs, operation_fn)")


def test_flatten_layers():
    inner = keras.layers.Dense(2)
    model = keras.Sequential([keras.layers.TimeDistributed(inner)])
    assert hasattr(model, "_flatten_layers"), moved("Layer._flatten_layers")
    found = model._flatten_layers()
    assert found[0] is model, moved("Layer._flatten_layers")
    assert any(layer is inner for layer in found), moved("Layer._flatten_layers")


def test_own_variables():
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    for name, count in (("_trainable_variables", 2), ("_non_trainable_variables", 2)):
        assert len(getattr(layer, name, ())) == count, moved(f"Layer.{name}")
        assert getattr(keras.Sequential([layer]), name) == [], moved(f"Layer.{name}")
    dropout = keras.layers.Dropout(0.5, seed=1)
    assert dropout._seed_generators == [dropout.seed_generator], moved("Layer._seed_generators")


def test_the_array_of_a_variable():
    with keras.StatelessScope(initialize_variables=False):
        layer = keras.layers.Dense(2)
        layer.build((None, 3))
    assert layer.kernel._value is None, moved("Variable._value")
    variable = keras.Variable([1.0])
    assert variable._value is variable.value, moved("Variable._value")


def test_the_kernel_of_a_layer_that_is_built_for_gptq():
    layer = keras.layers.Dense(4)
    layer.build((None, 8))
    config = keras.quantizers.GPTQConfig(None, None, weight_bits=4, group_size=4)
    layer.quantize("gptq", config=config)
    assert layer._kernel in layer.variables, moved("Dense._kernel")
    del layer._kernel
    assert [v.name for v in layer.variables if "kernel" == v.name] == ["kernel"]


def test_embeddings_as_stored():
    layer = keras.layers.ReversibleEmbedding(4, 2)
    layer.build(None)
    layer.quantize("int8")
    assert layer._embeddings.dtype == "int8", moved("ReversibleEmbedding._embeddings")


def test_what_calibration_sees():
    """It wraps `call`, which is not what a layer runs that is to be calibrated."""
    from keras.src.quantizers import awq_core, gptq_core

    for stream in (gptq_core.stream_hessians, awq_core.stream_activations):
        layer = keras.layers.Dense(3)
        layer.build((None, 3))
        with stream({"dense": layer}, {"dense": None}):
            assert vars(layer)["call"] is layer.call, moved(stream.__name__)
            assert "quantized_call" not in vars(layer), moved(stream.__name__)


def test_what_calibration_rounds_to():
    """GPTQ and AWQ look the function up in these modules; the place to begin is `hash`'s."""
    from keras.src.quantizers import awq, gptq_core, quantizers

    name = "compute_quantization_parameters"
    for user in (awq.awq_quantize_matrix, quantizers.GPTQQuantizer.find_params):
        assert name in user.__code__.co_names, moved(name)
    assert "hash" in gptq_core.get_dataloader.__code__.co_names, moved("get_dataloader")


def test_filters_of_quantize():
    from keras.src.quantizers.utils import should_quantize_layer

    layer = keras.layers.Dense(3, name="query")
    for filters in ("^query$", ["key", "query"], lambda layer: layer.name == "query", None):
        assert should_quantize_layer(layer, filters), moved("should_quantize_layer")
    assert not should_quantize_layer(layer, "key"), moved("should_quantize_layer")


def test_autocast_scope():
    from keras.src.backend.common.variables import AutocastScope

    variable = keras.Variable([1.0])
    for dtype, wanted in (("float16", "float16"), (None, "float32")):
        with AutocastScope(dtype):
            received = keras.backend.standardize_dtype(variable.value.dtype)
        assert received == wanted, moved("AutocastScope")


def test_compute_output_spec(x):
    from keras.src.backend import compute_output_spec

    spec = compute_output_spec(lambda a, b: a + b, x, x)
    assert spec.shape == (None, 3), moved("keras.src.backend.compute_output_spec")


def test_variables_without_values():
    with keras.StatelessScope(initialize_variables=False):
        variable = keras.Variable("ones", shape=(2,))
    assert variable._value is None, moved("Variable._value")
    assert hasattr(variable, "_initialize_layout"), moved("Variable._initialize_layout")
    variable._deferred_initialize()
    assert variable.numpy().tolist() == [1, 1], moved("Variable._deferred_initialize")
    variable._direct_assign(keras.ops.zeros(2))
    assert variable.numpy().tolist() == [0, 0], moved("Variable._direct_assign")


# None is forgotten.


def test_byte_pair_tokenizers_of_keras_hub():
    cls, table = keras_hub.tokenizers.BytePairTokenizer, {"a": 0, "b": 1, "ab": 2}
    tokenizer = cls(vocabulary=table, merges=["a b"])
    assert tokenizer._tokenizer.get_vocab() == table, moved("BytePairTokenizer._tokenizer")
    names = ("_set_vocabulary_and_merges_tokenizers", "_tokenize_tf", "_tokenize_tokenizers")
    for name in names:
        assert callable(getattr(cls, name, None)), moved(f"BytePairTokenizer.{name}")
    tokenizer._set_vocabulary_and_merges_tokenizers({"a": 0}, [])
    assert tokenizer._tokenizer.get_vocab() == {"a": 0}, moved("BytePairTokenizer._tokenizer")


def test_every_private_name_the_engine_uses_is_pinned_here():
    trees = [ast.parse(path.read_text()) for path in sorted(ENGINE.glob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    attributes = [n for n in nodes if isinstance(n, ast.Attribute)]
    names = {n.attr for n in attributes} - {n.attr for n in attributes if is_on_self(n)}
    names |= {n.value for n in nodes if isinstance(n, ast.Constant)} & ATTRIBUTES
    names = {n for n in names if n.startswith("_") and not n.startswith("__")}
    assert names - {"_fields"} == ATTRIBUTES
    imported = {
        node.module: alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module.startswith("keras.src")
        for alias in node.names
    }
    assert imported == IMPORTS


def is_on_self(node):
    return isinstance(node.value, ast.Name) and node.value.id == "self"
