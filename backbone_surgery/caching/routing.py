"""Routing taken from another run, for comparing two runs of a mixture of experts.

Which experts a token is given is a step function of the logits of the router. In half precision two
runs round differently, so that here and there another expert is chosen, and what follows differs by
far more than by rounding. So the second run is given the logits of the first, and its own logits
are compared by themselves.
"""

from typing import Any

import keras
from keras import tree

from backbone_surgery import graph
from backbone_surgery.graph.emission import emit
from backbone_surgery.opening.experts import TopExperts
from backbone_surgery.opening.model import EditedBackbone


def with_routing(model: EditedBackbone, is_given: bool) -> EditedBackbone:
    """Return the model with the logits of its routers among its captures, as `routing_0` and so on.

    Args:
        model: an opened graph.
        is_given: whether the experts are chosen by inputs of the same names, float[batch, time,
            experts], instead of by these logits.
    """
    inputs = {t.name: t for t in tree.flatten(model.input)}
    mapping = {id(t): t for t in inputs.values()}
    seen: list[str] = []

    def visit(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(layer, TopExperts):
            return graph.KEEP
        (logits,) = args
        seen.append(f"routing_{len(seen)}")
        emit(seen[-1], logits)
        if not is_given:
            return graph.KEEP
        inputs[seen[-1]] = keras.Input(logits.shape[1:], dtype=logits.dtype, name=seen[-1])
        return layer(_Given(name="given_routing")(logits, inputs[seen[-1]]))

    outputs, emitted = graph.replay(model.output, mapping, visit, per_use=True)
    captures = {name: tensors[0] for name, tensors in emitted.items()}
    return EditedBackbone(
        inputs,
        {"hidden_states": model.hidden_states(outputs), "captures": captures},
        owner=model.owner,
        family=model.family,
        defaults=model.defaults,
    )


class _Given(keras.layers.Layer):
    """Return the second of two tensors of one shape."""

    def call(self, x, given):
        return given

    def compute_output_spec(self, x, given):
        return keras.KerasTensor(given.shape, given.dtype)
