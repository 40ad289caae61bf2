"""Prediction that leaves the weights where they are.

On JAX, `keras.Model.predict_on_batch` hands the buffers of the weights over to the compiled
function, and puts what comes back in their place. Meanwhile nobody else can read them: a text that
is generated in another thread would fail.
"""

from typing import Any

import keras
from keras import tree

from backbone_surgery import hosts


def predict(model: keras.Model, inputs: Any) -> Any:
    """Run a model, compiled, as `predict_on_batch`; other threads may use its weights meanwhile.

    Args:
        model: any Keras model.
        inputs: arrays, in the structure of the inputs of the model.

    Returns:
        NumPy arrays in the structure of its outputs, whole in each process of a mesh.

    Raises:
        SurgeryError: the processes of a mesh pass different inputs.
    """
    if keras.config.backend() != "jax":
        return model.predict_on_batch(inputs)
    if "_predict" not in vars(model):
        object.__setattr__(model, "_predict", _compiled(model))
    hosts.agree("predict", {"inputs": inputs})
    outputs = vars(model)["_predict"]([v.value for v in model.variables], inputs)
    return tree.map_structure(hosts.to_numpy, outputs)


def _compiled(model: keras.Model) -> Any:
    import jax

    def run(weights: list[Any], inputs: Any) -> Any:
        with keras.StatelessScope(state_mapping=zip(model.variables, weights, strict=True)):
            return model(inputs, training=False)

    return jax.jit(run)
