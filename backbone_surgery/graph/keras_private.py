"""Private Keras that is needed beside the graph itself: twins, weights and names."""

import collections
import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
from keras import tree
from keras.src.backend import compute_output_spec
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import AutocastScope
from keras.src.models.functional import Functional
from keras.src.ops.operation import Operation
from keras.src.utils.tracking import DotNotTrackScope


def new_layer(cls: type, *_args: Any, **_kwargs: Any) -> Any:
    """Return an instance of a layer class that is built and keeps no config of itself.

    It is for classes to have as `__new__`. To be able to rebuild a layer from its config, Keras
    reads the signature of the class for each instance, and it wraps the methods `build` and
    `quantize`. A graph has dozens of layers without weights for each block.
    """
    instance = super(Operation, cls).__new__(cls)
    vars(instance).update(_lock=True, _auto_config=None)
    return instance


def new_input(shape: tuple, **kwargs: Any) -> keras.KerasTensor:
    """Make what `keras.Input(batch_shape=shape, **kwargs)` makes, in a third of the time."""
    layer = new_layer(keras.layers.InputLayer)
    with untracked():
        layer.__init__(batch_shape=shape, **kwargs)
    return layer.output


def untracked() -> contextlib.AbstractContextManager[None]:
    """Spare Keras to look for variables and layers in each attribute that is set inside."""
    return DotNotTrackScope()


@contextlib.contextmanager
def autocasting(layer: keras.Layer) -> Iterator[None]:
    """Let the variables read inside take the dtype that they take when the layer is called."""
    casts = layer.autocast and keras.backend.is_float_dtype(layer.compute_dtype)
    with AutocastScope(layer.compute_dtype if casts else None):
        yield


def as_stored() -> contextlib.AbstractContextManager:
    """Let the variables read inside have the dtype in which they are stored."""
    return AutocastScope(None)


def infer(function: Callable[..., Any], *args: Any) -> Any:
    """Return the shapes and dtypes of what a function gives for symbolic tensors.

    None of them counts as sparse, as Keras takes `x * 2.0` to be, whatever `x` is.
    """

    def dense(x: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype) if isinstance(x, keras.KerasTensor) else x

    return compute_output_spec(function, *tree.map_structure(dense, args))


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

    def run(
        self: Any, inputs: Any, operation_fn: Callable[..., Any] = lambda op: op, **kwargs: Any
    ) -> Any:
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


def variables_of(layer: keras.Layer) -> list[keras.Variable]:
    """List all variables of a layer, as its `variables` does, in half the time.

    Generation asks at each call of a program.
    """
    found: dict[int, keras.Variable] = {}
    seen: set[keras.Layer] = set()
    to_visit = [layer]
    while to_visit:
        layer = to_visit.pop()
        if layer in seen:
            continue
        seen.add(layer)
        for variable in layer._trainable_variables:
            found[id(variable)] = variable
        for variable in layer._non_trainable_variables:
            found[id(variable)] = variable
        for generator in layer._seed_generators:
            found[id(generator.state)] = generator.state
        if layer._layers:
            to_visit += layer._layers[::-1]
    return list(found.values())


def array_of(variable: keras.Variable) -> Any:
    """Return the array of a variable; `None` if it has none, where `value` would make one."""
    return variable._value


def put_array(variable: keras.Variable, array: Any) -> None:
    """Put an array in the place of that of a variable, as it lies in memory."""
    variable._value = array


def drop_kernel(layer: keras.Layer) -> None:
    """Take from a layer that is built for GPTQ or AWQ the kernel that it would be calibrated on."""
    del layer._kernel
    layer.is_gptq_calibrated = layer.quantization_mode == "gptq"
    layer.is_awq_calibrated = layer.quantization_mode == "awq"


def stored_kernel(layer: keras.Layer) -> Any:
    """Return the kernel of a `Dense` or an `EinsumDense` as it is stored, narrow if it is."""
    return layer._kernel


def stored_embeddings(embedding: keras.Layer) -> Any:
    """Return the embeddings of a layer as they are stored, narrow if they are, without LoRA."""
    return embedding._embeddings


def reserve_names(names: Iterable[str]) -> None:
    """Keep Keras from making up any of these names in this thread.

    Keras numbers the names that it makes up, such as `multiply_3`, in each thread by itself and
    from the start again after `keras.utils.clear_session`. So a new node of a graph could get the
    name of an old one that was made in another thread.
    """
    counts = global_state.get_global_attribute(
        "object_name_uids", default=collections.defaultdict(int), set_to_default=True
    )
    for name in names:
        stem, _, number = name.rpartition("_")
        if stem and number.isdecimal():
            counts[stem] = max(counts[stem], int(number) + 1)
        else:
            counts[name] = max(counts[name], 1)


@contextlib.contextmanager
def names_given_back() -> Iterator[None]:
    """Let Keras make up the names again that it makes up inside, for what is made to be dropped."""
    counts = dict(global_state.get_global_attribute("object_name_uids") or {})
    try:
        yield
    finally:
        again = collections.defaultdict(int, counts)
        global_state.set_global_attribute("object_name_uids", again)


def is_auto_named(layer: keras.Layer) -> bool:
    """Tell whether Keras made up the name of a layer, out of the name of its class."""
    return is_made_up(layer.name, type(layer).__name__)


def is_made_up(name: str, class_name: str) -> bool:
    """Tell whether a name is what Keras makes up for a layer of a class."""
    stem = re.sub(r"_\d+$", "", name)
    return stem.replace("_", "") == class_name.replace("_", "").lower()


@contextlib.contextmanager
def without_values(
    scope: Callable[..., keras.StatelessScope] = keras.StatelessScope,
) -> Iterator[list[keras.Variable]]:
    """Let the layers made inside have variables of their shapes, and no memory for them.

    Yields:
        The variables, when the layers are made.
    """
    made: list[keras.Variable] = []
    with scope(initialize_variables=False):
        before = list(global_state.get_global_attribute("uninitialized_variables") or ())
        try:
            yield made
        finally:
            now = global_state.get_global_attribute("uninitialized_variables") or ()
            made.extend(now[len(before) :])
            global_state.set_global_attribute("uninitialized_variables", before)


@contextlib.contextmanager
def values_as_assigned() -> Iterator[None]:
    """Let the variables made inside have the values that they are assigned inside.

    Keras gives each variable an initial value when it makes it: random numbers, by a program that
    is compiled for each shape, and memory. For weights that are read from a file right after, all
    of this is for nothing. Here only those that were assigned nothing get one, at the end.
    """
    if keras.config.backend() != "jax":  # others write into an array that must be there
        yield
        return
    with without_values(_Assigning) as made:
        yield
    for variable in made:
        if variable._value is None:
            variable._deferred_initialize()


class _Assigning(keras.StatelessScope):
    """Assigns to the variables themselves, as if there were no scope."""

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        variable._initialize_layout()
        variable._direct_assign(value)
