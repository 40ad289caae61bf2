"""How a backbone is quantised, as a recipe says it, and the same done to another backbone."""

import json
from collections.abc import Mapping
from typing import Any

import keras

from backbone_surgery import graph
from backbone_surgery.errors import RecipeError, SurgeryError
from backbone_surgery.opening.int4 import policy_of
from backbone_surgery.opening.packed_axes import laid_out
from backbone_surgery.recipes.configs import check_config
from backbone_surgery.weights.paths import variable_paths

_COMPUTED = ("int8", "int4")
_CALIBRATED = {"gptq": keras.quantizers.GPTQConfig, "awq": keras.quantizers.AWQConfig}


def quantization(owner: keras.Model) -> dict[str, Any] | None:
    """Return mode, config and layers of a backbone's quantisation; `None` if it has none.

    What Keras loads from a file has no config. Of such layers, `rounding` lists those that quantise
    their inputs too.

    Raises:
        SurgeryError: it has several, or one that a recipe cannot hold.
    """
    layers = {path: x for path, x in _layers(owner).items() if x.quantization_mode is not None}
    if not layers:
        return None
    modes = {_mode(x) for x in layers.values()}
    mode = next(iter(modes))
    kind = mode.partition("/")[0]
    configs = [None if kind in _CALIBRATED else _config(x) for x in layers.values()]
    one = len(modes) == 1 and all(config == configs[0] for config in configs)
    if not one or kind not in (*_COMPUTED, *_CALIBRATED):
        raise SurgeryError(
            f"recipe at '{owner.name}': expected a backbone that is not quantised, or in one way, "
            f"to int8, int4, GPTQ or AWQ. Received one quantised to {', '.join(sorted(modes))}, "
            f"{'in one way' if one else 'in several ways'}. Quantise all of it alike."
        )
    raw = [path for path, x in layers.items() if kind in _CALIBRATED and not _is_calibrated(x)]
    if raw:
        raise SurgeryError(
            f"recipe at '{owner.name}': expected layers that are calibrated. Received '{raw[0]}' "
            f"among others, which is to be quantised by {kind} and was not: `quantize` was cut "
            "off. Load the model anew, and quantise it."
        )
    rounding = sorted(path for path, x in layers.items() if getattr(x, "inputs_quantizer", None))
    described = {"mode": mode, "config": configs[0], "layers": sorted(layers)}
    return {**described, "rounding": rounding}


def is_held(path: str, described: Mapping[str, Any] | None) -> bool:
    """Tell whether a weight belongs to a quantisation, so that a recipe holds it.

    int8 and int4 can be computed again, all but their scales, to the last bit. What was calibrated
    can't.
    """
    if described is None:
        return False
    layer, _, name = path.rpartition(".")
    calibrated = described["mode"].partition("/")[0] in _CALIBRATED
    return layer in described["layers"] if calibrated else name.endswith("_scale")


def quantize_like(backbone: keras.Model, described: Mapping[str, Any]) -> None:
    """Quantise a backbone as a recipe says; what was calibrated has no values yet."""
    kind, *numbers = described["mode"].split("/")
    if kind in _CALIBRATED:
        bits, group = (int(number) for number in numbers)
        config = _CALIBRATED[kind](None, None, weight_bits=bits, group_size=group)
    else:
        check_config(described["config"], "base.quantization")
        config = keras.saving.deserialize_keras_object(described["config"])
    layers = _layers(backbone)
    for path in described["layers"]:
        if path not in layers:
            raise RecipeError(
                f"load_recipe at 'base.quantization': expected layers of the backbone. Received "
                f"'{str(path)[:80]}'. The recipe was made on another model, or is damaged."
            )
    chosen = {path: layers[path] for path in described["layers"]}
    with laid_out(backbone, chosen.values(), kind, config):
        for layer in chosen.values():
            layer.quantize(kind, config=config)
    for path, layer in chosen.items():
        if kind in _CALIBRATED:
            graph.drop_kernel(layer)
        elif config is None and hasattr(layer, "inputs_quantizer"):
            rounds = path in described["rounding"]
            layer.inputs_quantizer = keras.quantizers.AbsMaxQuantizer(axis=-1) if rounds else None


def _layers(owner: keras.Model) -> dict[str, keras.layers.Layer]:
    """Return the layers that hold weights themselves, by path."""
    paths = {id(v): path for path, v in variable_paths(owner).items()}
    layers = {}
    for layer in graph.layers_within(owner):
        own = [paths[id(v)] for v in graph.own_weights(layer) if id(v) in paths]
        if own:
            layers[own[0].rpartition(".")[0]] = layer
    return layers


def _config(layer: keras.layers.Layer) -> Any:
    """Return how a layer was quantised, as JSON."""
    return json.loads(json.dumps(keras.saving.serialize_keras_object(layer.quantization_config)))


def _is_calibrated(layer: keras.layers.Layer) -> bool:
    """Tell whether GPTQ or AWQ has been done with a layer."""
    return getattr(layer, f"is_{layer.quantization_mode}_calibrated", True)


def _mode(layer: keras.layers.Layer) -> str:
    """Return how a layer is quantised, as Keras writes it: `int8`, `int4/128`, `gptq/4/128`."""
    return policy_of(layer).get_config()["mode"]
