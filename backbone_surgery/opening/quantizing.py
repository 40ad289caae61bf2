"""Quantising the backbone under an edit, as KerasHub's own task quantises it."""

import copy
import types
from typing import Any

import keras
import keras_hub

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError


def quantize(owner: keras.Model, mode: str | None, config: Any, **kwargs: Any) -> None:
    """Quantise all of a backbone, whatever an edit of it leaves out.

    GPTQ and AWQ calibrate each block of the backbone in turn, without the edit, where KerasHub's
    task for the architecture says that its blocks are.

    Args:
        owner: of the weights.
        mode: see `keras.Model.quantize`, as for what follows.
        config: a quantization config, which says the mode too, and for GPTQ and AWQ the texts.
        **kwargs: `filters`.

    Raises:
        SurgeryError: KerasHub does not say where the blocks are; or the layouts of a distribution
            that is set do not fit what int4 makes.
    """
    _check_layouts(owner, getattr(config, "mode", mode))
    if getattr(config, "quantization_layer_structure", owner) is not None:
        owner.quantize(mode, config=config, **kwargs)
        return
    config = copy.copy(config)
    config.quantization_layer_structure = _structure(owner, config.mode)
    try:
        owner.quantize(mode, config=config, **kwargs)
    finally:
        config.quantization_layer_structure = None  # the layers keep this config


def _check_layouts(owner: keras.Model, mode: str | None) -> None:
    """Refuse int4 where kernels are laid out: it packs them into arrays of two axes.

    Keras would stop midway, with some layers quantised and others not.
    """
    parallel = keras.distribution.distribution()
    if mode != "int4" or not isinstance(parallel, keras.distribution.ModelParallel):
        return
    layouts = (parallel.get_variable_layout(variable) for variable in owner.variables)
    if any(axis is not None for layout in layouts for axis in layout.axes):
        raise SurgeryError(
            f"quantize at '{owner.name}': expected int8 where a `ModelParallel` is set, whose "
            "layouts are for kernels as they come. Received int4, which packs them. Quantise "
            "outside of its scope: what is packed is then on each device whole."
        )


def check_saves(owner: keras.Model) -> None:
    """Refuse to have Keras save a backbone in GPTQ or AWQ, whose zero points it leaves out.

    Raises:
        SurgeryError: it is quantised in one of these ways.
    """
    modes = {layer.quantization_mode for layer in graph.layers_within(owner)} & {"gptq", "awq"}
    if modes:
        raise SurgeryError(
            f"save_weights at '{owner.name}': expected weights that Keras saves whole. Received "
            f"some quantised to {modes.pop()}, of which it leaves out the zero points. Use "
            "`save_recipe`."
        )


def _structure(owner: keras.Model, mode: str) -> dict[str, Any]:
    """Return the layers before the blocks, and the blocks, as KerasHub's task has them."""
    for task in vars(keras_hub.models).values():
        if getattr(task, "backbone_cls", None) is type(owner) and hasattr(task, "generate"):
            view = types.SimpleNamespace(backbone=owner)
            structure = task.get_quantization_layer_structure(view, mode)
            if structure is not None:
                return structure
    raise SurgeryError(
        f"quantize at '{owner.name}': expected a backbone whose blocks KerasHub can calibrate one "
        f"by one. Received a {type(owner).__name__}. Name them in `quantization_layer_structure` "
        "of the config, or take int8 or int4."
    )
