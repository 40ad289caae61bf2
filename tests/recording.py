"""What the layers of an unopened backbone give, and what it gives if they gave something else."""

import contextlib
import functools
import operator

import numpy as np
from keras import ops


def sublayer(block, path):
    """Return a sub-layer of a block by the names of attributes, such as `mlp.gate_proj`."""
    return operator.attrgetter(path)(block)


@contextlib.contextmanager
def patched(layer, function):
    """Have a layer give `function(what it gives)`, when a model is called eagerly."""
    call = layer.call

    @functools.wraps(call)
    def patched_call(*args, **kwargs):
        return function(call(*args, **kwargs))

    object.__setattr__(layer, "call", patched_call)
    try:
        yield
    finally:
        object.__delattr__(layer, "call")


def on_first(function, x, stream=None):
    """Apply a function to what a layer gives, or to the first where it gives several.

    Args:
        function: it.
        x: what the layer gives.
        stream: which of several streams, stacked, the function is for.
    """
    first, *others = x if isinstance(x, tuple) else (x,)
    if stream is None:
        made = function(first)
    else:
        made = ops.stack([function(s) if i == stream else s for i, s in enumerate(first)])
    return (made, *others) if others else made


def recorded(model, inputs, layers):
    """Call a model eagerly, and return what each of some layers gives: `{name: array}`."""
    seen = {}
    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():

            def record(x, name=name):
                seen[name] = np.asarray(ops.convert_to_numpy(x[0] if isinstance(x, tuple) else x))
                return x

            stack.enter_context(patched(layer, record))
        model(inputs)
    return seen
