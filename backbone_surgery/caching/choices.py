"""Choices taken from another run, for comparing two runs of a model that chooses.

Which experts a token is given is a step function of the logits of the router, and which features of
a sparse autoencoder or a transcoder are kept is one of their values. In half precision two runs
round differently, so that here and there another one is chosen, and what follows differs by far
more than by rounding. So the second run is given the scores of the first to choose by, and its own
scores are compared by themselves.
"""

from typing import Any

import keras
from keras import ops, tree

from backbone_surgery import graph
from backbone_surgery.graph.emission import emit
from backbone_surgery.opening.experts import TopExperts
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.rewriting.autoencoder_layers import Encoder


def chooses(model: EditedBackbone) -> bool:
    """Tell whether a layer of a model chooses."""
    layers = [node.operation for node in graph.all_nodes(model)]
    return any(isinstance(layer, TopExperts | Encoder) for layer in layers)


def with_choices(model: EditedBackbone, is_given: bool) -> EditedBackbone:
    """Return the model with the scores that it chooses by among its captures, as `scores_0`, ...

    Args:
        model: an opened graph.
        is_given: whether it chooses by inputs `scores_0_given`, ..., float[batch, time, choices],
            instead of by these scores.
    """
    inputs = {t.name: t for t in tree.flatten(model.input)}
    mapping = {id(t): t for t in inputs.values()}
    seen: list[str] = []

    def visit(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(layer, TopExperts | Encoder):
            return graph.KEEP
        (x,) = args
        name = f"scores_{len(seen)}"
        seen.append(name)
        scores = _Scores(layer, name=name)(x) if isinstance(layer, Encoder) else x
        emit(name, scores)
        if not is_given:
            return graph.KEEP
        given = keras.Input(scores.shape[1:], dtype=scores.dtype, name=f"{name}_given")
        inputs[given.name] = given
        if isinstance(layer, Encoder):
            return Kept(layer, name=layer.name)(scores, given)
        return layer(_Given(name=f"{name}_taken")(scores, given))

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


class _OfEncoder(keras.layers.Layer):
    """A part of what an encoder computes, which stays the owner of the weights."""

    def __init__(self, encoder: Encoder, **kwargs: Any) -> None:
        super().__init__(dtype=encoder.dtype_policy, autocast=False, **kwargs)
        self.encoder = encoder
        self.built = True

    def compute_output_spec(self, x, *given):
        return self.encoder.compute_output_spec(x)


class _Scores(_OfEncoder):
    """Return the features before some are kept."""

    def call(self, x):
        return self.encoder.score(x)


class Kept(_OfEncoder):
    """Keep those features that other ones would have kept."""

    def call(self, scores, given):
        """Return the features, zero where the given scores would not keep them."""
        is_kept = ops.not_equal(self.encoder.keep(given), 0)
        return ops.where(is_kept, ops.relu(scores), 0.0)
