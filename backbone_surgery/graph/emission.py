"""Emission: how a tensor gets out of a graph being cloned, from any depth of nesting.

While a graph is cloned there is one scope of emitted tensors for each model being rebuilt; the
engine carries what is in it up into the scope around it.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import keras

from backbone_surgery.errors import SurgeryError

Emitted = dict[str, list[keras.KerasTensor]]

_emitted: contextvars.ContextVar[Emitted] = contextvars.ContextVar("emitted")
_collector: contextvars.ContextVar[Emitted] = contextvars.ContextVar("collector")


def emit(name: str, tensor: keras.KerasTensor) -> None:
    """Hand a tensor out of the graph being cloned, under a name, from any depth of nesting.

    Only callable inside a `clone_fn`. See `collect` for where the tensor arrives.

    Args:
        name: the name under which it arrives.
        tensor: a symbolic tensor of the graph being built.

    Raises:
        SurgeryError: called outside a `clone_fn`, or with no symbolic tensor.
    """
    scope = _emitted.get(None)
    if scope is None:
        raise SurgeryError(
            f"emit at '{name}': expected to be called from a clone_fn while a graph is being "
            "cloned. Received a call outside of one. Move it into the clone_fn."
        )
    if not isinstance(tensor, keras.KerasTensor):
        raise SurgeryError(
            f"emit at '{name}': expected a symbolic tensor. Received {tensor!r} of type "
            f"{type(tensor).__name__}. Emit the tensors of a structure one by one."
        )
    scope.setdefault(name, []).append(tensor)


@contextlib.contextmanager
def collect() -> Iterator[Emitted]:
    """Collect what a `clone_fn` emits: `{name: [one top-level tensor per use]}`.

    A nested model that is used three times emits three tensors under one name.

    Examples:
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
    with _scope(_collector) as collected:
        yield collected


def emitting() -> contextlib.AbstractContextManager[Emitted]:
    """Open the scope of one model being rebuilt: what is emitted arrives in it."""
    return _scope(_emitted)


def hand_on(emitted: Emitted) -> None:
    """Emit all that was emitted in a scope, in the scope around it."""
    for name, tensors in emitted.items():
        for tensor in tensors:
            emit(name, tensor)


def hand_over(emitted: Emitted) -> None:
    """Hand what a whole clone emitted to the collector around it."""
    collector = _collector.get(None)
    if collector is None:
        raise SurgeryError(
            f"clone_layer_graph: expected a collector for the emitted tensors {sorted(emitted)}. "
            "Received none. Wrap the call: `with backbone_surgery.collect() as taps:`."
        )
    for name, tensors in emitted.items():
        collector.setdefault(name, []).extend(tensors)


@contextlib.contextmanager
def _scope(variable: contextvars.ContextVar[Emitted]) -> Iterator[Emitted]:
    emitted: Emitted = {}
    token = variable.set(emitted)
    try:
        yield emitted
    finally:
        variable.reset(token)
