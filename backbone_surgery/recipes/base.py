"""The base of a recipe: the backbone that an edit was made on, and what tells it from others.

Of the backbone itself a recipe keeps the way it was changed: LoRA factors, and the scales of a
quantisation. Of all other weights it keeps a digest.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import keras
import numpy as np

from backbone_surgery.errors import RecipeError
from backbone_surgery.opening.open import find_family
from backbone_surgery.opening.quantizing import check_lora
from backbone_surgery.presets import keep_preset
from backbone_surgery.recipes.quantization import is_held, quantization, quantize_like
from backbone_surgery.weights.arrays import of_value, of_variable
from backbone_surgery.weights.owner import check_backbone, copy_backbone, lora
from backbone_surgery.weights.paths import is_lora, variable_paths
from backbone_surgery.weights.transfer import assign_in_place
from backbone_surgery.weights.tree import digest


def base_facts(owner: keras.Model, preset: str | None) -> dict[str, Any]:
    """Say what the base of a recipe is: its family, config, digest, LoRA and quantisation."""
    check_backbone(owner, "save_recipe")
    changes = {"quantization": quantization(owner), "lora": lora(owner)}
    if changes["lora"] or any(map(is_lora, variable_paths(owner))):
        check_lora(owner, "save_recipe")
    return {**_facts(owner), **changes, "preset": preset, "digest": _digest(owner)}


def owner_deltas(owner: keras.Model) -> dict[str, keras.Variable]:
    """Return the weights of a backbone that a recipe holds, by path.

    These are LoRA factors, with the biases of the same layers, which are trained along with them,
    the scales of a quantisation, and all that was calibrated.
    """
    paths = variable_paths(owner)
    quantized = quantization(owner)
    tuned = {path.rpartition(".")[0] for path in paths if is_lora(path)}

    def is_delta(path: str) -> bool:
        layer, _, name = path.rpartition(".")
        own = layer in tuned and name not in ("kernel", "embeddings")
        return own or is_held(path, quantized)

    return {path: v for path, v in paths.items() if is_delta(path)}


def fitted_base(
    backbone: keras.Model, base: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> keras.Model:
    """Return the backbone for a recipe: a copy with its LoRA and quantisation, if it has any.

    One that the recipe was not made on is refused.
    """
    check_backbone(backbone, "load_recipe")
    _check_facts(backbone, base)
    if base["lora"] or base["quantization"]:
        same, described = quantization(backbone), base["quantization"]
        quantize = partial(quantize_like, described=same) if same else None
        copy = copy_backbone(backbone, quantize)
        keep_preset(copy, backbone)
        backbone = copy
        if described and not same:
            quantize_like(backbone, described)
        if base["lora"]:
            names = base["lora"]["layers"]
            backbone.enable_lora(base["lora"]["rank"], target_layer_names=names)
    own = _digest(backbone)
    if own != base["digest"]:
        raise _other_base("weights of the digest", base["digest"], own)
    assign(owner_deltas(backbone), arrays, "owner.")
    return backbone


def assign(variables: Mapping[str, Any], arrays: Mapping[str, np.ndarray], at: str) -> None:
    """Assign the arrays named by `at` and a path to the variables, after checking them all."""
    own = {name: str(of_value(a)) for name, a in arrays.items() if name.startswith(at)}
    wanted = {f"{at}{path}": str(of_variable(v)) for path, v in variables.items()}
    for name in sorted(own.keys() | wanted.keys()):
        if own.get(name) != wanted.get(name):
            raise RecipeError(
                f"load_recipe at '{name[:80]}': expected {wanted.get(name, 'no such array')}. "
                f"Received {own.get(name, 'none')}. The recipe was made on another model, or is "
                "damaged."
            )
    for path, variable in variables.items():
        assign_in_place(variable, arrays[f"{at}{path}"].copy())


def _facts(backbone: keras.Model) -> dict[str, Any]:
    """Return kind, dtype and config of a backbone as JSON."""
    policy = backbone.dtype_policy
    mixed = policy.compute_dtype != policy.variable_dtype
    return {
        "family": find_family(backbone).name,
        "class": type(backbone).__name__,
        "dtype": f"mixed_{policy.compute_dtype}" if mixed else policy.compute_dtype,
        "config": json.loads(json.dumps(backbone.get_config())),
    }


def _digest(owner: keras.Model) -> str:
    """Return the digest of the weights that a recipe does not hold."""
    held = owner_deltas(owner)
    return digest({path: v for path, v in variable_paths(owner).items() if path not in held})


def _check_facts(backbone: keras.Model, base: Mapping[str, Any]) -> None:
    """Check the kind, config and dtype of a backbone before its weights are looked at."""
    facts = _facts(backbone)
    own, wanted = ({**x, **x["config"], "dtype": x["dtype"]} for x in (facts, base))
    for key in (*("family", "class", "dtype"), *sorted(facts["config"].keys() | base["config"])):
        if key not in ("name", "trainable") and own.get(key) != wanted.get(key):
            raise _other_base(f"a backbone with {key}", wanted.get(key), own.get(key))
    if lora(backbone) and not base["lora"]:
        raise _other_base("a backbone", "without LoRA", "one with it")
    quantized, like = quantization(backbone), base["quantization"]
    if quantized and like and None in (quantized["config"], like["config"]):
        quantized = {**quantized, "config": like["config"]}  # of a file, which does not say it
    if quantized not in (None, like):
        ways = [
            x and f"{x['mode']}, inputs of {len(x['rounding'])} layers" for x in (like, quantized)
        ]
        raise _other_base("a backbone that is quantised to", *ways)


def _other_base(what: str, wanted: Any, received: Any) -> RecipeError:
    return RecipeError(
        f"load_recipe at 'base': expected {what} {str(wanted)[:200]}. Received "
        f"{str(received)[:200]}. Pass the backbone that the recipe was made on, with the weights "
        "it had then."
    )
