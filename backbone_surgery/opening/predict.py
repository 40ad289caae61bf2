"""Prediction that leaves the weights where they are.

On JAX, `keras.Model.predict_on_batch` hands the buffers of the weights over to the compiled
function, and puts what comes back in their place. Meanwhile nobody else can read them: a text that
is generated in another thread would fail.
"""

from typing import Any

import keras
from keras import tree

from backbone_surgery import hosts, target
from backbone_surgery.opening.model import arrays_in_place
from backbone_surgery.opening.once import lora_settings, made_once
from backbone_surgery.opening.placement import placement_of
from backbone_surgery.products import with_fast_products

_CONSTANTS_APART = "jax_use_simplified_jaxpr_constants"
"""A setting of JAX that is off. With it constants are no part of the text of a program."""


class SharedPrograms:
    """Compiled programs of models of which some are alike, such as the blocks of a backbone.

    Weights are arguments of a program. So models that lower to the same text, constants included,
    are run by one.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._by_text: dict[Any, Any] = {}

    def of(self, run: Any, weights: list[Any], inputs: Any) -> Any:
        """Return the program of a function that JAX compiles, for arguments like these."""
        import jax

        kinds = [(x.shape, x.dtype, getattr(x, "sharding", None)) for x in weights]
        kinds += [(x.shape, x.dtype, getattr(x, "sharding", None)) for x in tree.flatten(inputs)]
        key = (run, target.precision_of_jax(), *kinds)
        if key not in self._known:
            lowered = run.lower(weights, inputs)
            own = run if getattr(jax.config, _CONSTANTS_APART) else None
            structure = jax.tree.structure((weights, inputs))
            text = own, structure, hosts.digest(lowered.as_text())
            if text not in self._by_text:
                self._by_text[text] = lowered.compile()
            self._known[key] = self._by_text[text]
        return self._known[key]


def predict(model: keras.Model, inputs: Any, programs: SharedPrograms | None = None) -> Any:
    """Run a model, compiled, as `predict_on_batch`; other threads may use its weights meanwhile.

    Args:
        model: any Keras model.
        inputs: arrays, in the structure of the inputs of the model. On a mesh, rows are split over
            its batch axis where they divide by it.
        programs: shared with models that may be alike, to compile less.

    Returns:
        NumPy arrays in the structure of its outputs, whole in each process of a mesh.

    Raises:
        SurgeryError: the processes of a mesh pass different inputs, or models.
    """
    if keras.config.backend() != "jax":
        return model.predict_on_batch(tree.map_structure(keras.ops.convert_to_numpy, inputs))
    key = "predict", lora_settings(model)
    run, digests = made_once(model, key, lambda: (_compiled(model), {}))
    variables = model.variables
    weights = arrays_in_place(variables)
    placement = placement_of(variables)
    placed = inputs if placement is None else placement.put(inputs, by_rows=True)
    if hosts.span(model):
        shapes = str(tree.map_structure(lambda x: (x.shape, x.dtype), placed))
        if shapes not in digests:
            digests[shapes] = hosts.digest(run.lower(weights, placed).as_text())
        # The inputs as they came: of those that are placed, each process has its own rows.
        hosts.agree(model, "predict", {"inputs": inputs, "model": digests[shapes]})
    if programs is not None:
        run = programs.of(run, weights, placed)
    return tree.map_structure(hosts.to_numpy, run(weights, placed))


def _compiled(model: keras.Model) -> Any:
    import jax

    def run(weights: list[Any], inputs: Any) -> Any:
        def forward(inputs: Any) -> Any:
            with keras.StatelessScope(state_mapping=zip(model.variables, weights, strict=True)):
                return model(inputs, training=False)

        if placement_of(model.variables) is not None:
            return forward(inputs)
        return with_fast_products(forward, model, target.platform_of(model.variables))(inputs)

    # What is not used stays an argument, or programs of one text could take different ones.
    return jax.jit(run, keep_unused=True)
