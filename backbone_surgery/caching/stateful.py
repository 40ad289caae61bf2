"""`WithState`: a stateful layer as a node of the cached graph, with its state going in and out."""

from collections.abc import Mapping
from typing import Any

import keras
from keras import ops, tree

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError


def is_own(layer: Any) -> bool:
    """Tell whether a layer is of a class of this library."""
    return type(layer).__module__.startswith("backbone_surgery.")


class WithState(keras.layers.Layer):
    """Run a layer by its `call_with_state`. The layer stays the owner of its weights.

    Args:
        layer: a `Stateful` layer, built.

    Call arguments:
        inputs: what `call_with_state` asks for by name, and `state`.

    Returns:
        What the layer returns, and its state after these tokens.
    """

    __new__ = graph.new_layer

    def __init__(self, layer: Any, **kwargs) -> None:
        # The state keeps its own dtypes, whatever the layer computes in.
        super().__init__(dtype=layer.dtype_policy, autocast=False, **kwargs)
        self.layer = layer
        self.built = True
        self.supports_masking = True
        self.expected: list[keras.KerasTensor] = []

    def call(self, inputs):
        """Run the layer as Keras runs it: arguments and variables in the dtype of its policy."""
        inputs = dict(inputs)
        state = inputs.pop("state")
        inputs = tree.map_structure(self._autocast, inputs)
        with graph.autocasting(self.layer):
            outputs, updated = self.layer.call_with_state(**inputs, state=state)
        self._check_state(state, updated)
        return outputs, updated

    def compute_output_spec(self, inputs):
        """Return what `call` of the layer gives, and the state as it is."""
        state = {k: keras.KerasTensor(t.shape, t.dtype) for k, t in inputs["state"].items()}
        return self.expected, state

    def check(self, inputs: dict[str, Any]) -> None:
        """Trace the call, and check that it gives what `compute_output_spec` says.

        Raises:
            SurgeryError: the `call_with_state` of the layer is not right.
        """
        try:
            outputs, _ = graph.infer(self.call, inputs)
        except SurgeryError:
            raise
        except Exception as error:  # whatever the code of a user runs into
            received = f"one that fails with {type(error).__name__}: {error}"
            raise self._refuse("runs", received) from error
        shapes = [t.shape for t in tree.flatten(outputs)]
        if shapes != [t.shape for t in tree.flatten(self.expected)]:
            raise self._refuse("gives what `call` gives", f"one that gives shapes {shapes}")

    def compute_mask(self, inputs, previous_mask):
        """Pass on no Keras mask: padding is told by `padding_mask` and `cache_mask`."""
        return None

    def _autocast(self, x: Any) -> Any:
        layer = self.layer
        floats = hasattr(x, "dtype") and keras.backend.is_float_dtype(x.dtype)
        return ops.cast(x, layer.input_dtype) if layer.autocast and floats else x

    def _check_state(self, state: Mapping[str, Any], updated: Any) -> None:
        """Refuse a new state that cannot take the place of the old one."""
        if not isinstance(updated, Mapping) or set(updated) != set(state):
            received = sorted(updated) if isinstance(updated, Mapping) else type(updated).__name__
            raise self._refuse(f"returns the state {sorted(state)}", f"one that returns {received}")
        for name, array in state.items():
            old, new = (
                (tuple(x.shape), keras.backend.standardize_dtype(x.dtype))
                for x in (array, updated[name])
            )
            if old != new:
                raise self._refuse(f"keeps '{name}' as {old}", f"one that makes it {new}")

    def _refuse(self, rule: str, received: str) -> SurgeryError:
        return SurgeryError(
            f"rewire at '{self.layer.name}': expected a `call_with_state` that {rule}. Received "
            f"{received}. See docs/state.md."
        )
