"""The base of a recipe: the backbone that an edit was made on, and what sets it apart.

What a recipe keeps of the backbone itself is the way it was changed: LoRA factors and the scales
of a quantisation. All other weights are told by their digest.
"""

import json
import warnings
from collections.abc import Mapping
from typing import Any

import keras
import keras_hub

from backbone_surgery import graph
from backbone_surgery.errors import RecipeError, SurgeryError
from backbone_surgery.opening import find_family
from backbone_surgery.weights.arrays import Array
from backbone_surgery.weights.digest import digest
from backbone_surgery.weights.nodes import describe_nodes
from backbone_surgery.weights.paths import is_lora, variable_paths
from backbone_surgery.weights.sizes import Bounded, check_arrays
from backbone_surgery.weights.transfer import transfer_weights
from backbone_surgery.weights.tree import of_variable

_NOT_COMPARED = ("name", "trainable", "dtype")


def base_facts(owner: keras.Model, preset: str | None) -> dict[str, Any]:
    """Say what the base of a recipe is: its family, config, digest, LoRA and quantisation."""
    return {
        "family": find_family(owner).name,
        "class": type(owner).__name__,
        "config": _config(owner),
        "preset": preset,
        "dtype": _dtype(owner),
        "quantization": quantization(owner),
        "lora": lora(owner),
        "digest": base_digest(owner),
    }


def base_digest(owner: keras.Model) -> str:
    """Return the digest of the weights that a recipe does not hold."""
    held = owner_deltas(owner)
    paths = variable_paths(owner).items()
    return digest({path: of_variable(v) for path, v in paths if path not in held})


def owner_deltas(owner: keras.Model) -> dict[str, keras.Variable]:
    """Return the weights of a backbone that a recipe does hold, by path.

    These are LoRA factors, with the biases of the same layers, which are trained along with them,
    and the scales of a quantisation.
    """
    paths = variable_paths(owner)
    quantized = quantization(owner) is not None
    tuned = {path.rpartition(".")[0] for path in paths if is_lora(path)}

    def is_delta(path: str) -> bool:
        layer, _, name = path.rpartition(".")
        if name.endswith("_scale"):
            return quantized
        return layer in tuned and name not in ("kernel", "embeddings")

    return {path: v for path, v in paths.items() if is_delta(path)}


def fitted_base(
    backbone: keras.Model, base: Mapping[str, Any], deltas: Mapping[str, Array]
) -> keras.Model:
    """Return the backbone that a recipe is to be applied to.

    Where the recipe holds LoRA factors or scales, that is a copy of the one given; else it is the
    one given. Nothing that was given is changed.

    Raises:
        RecipeError: the backbone is not the one that the recipe was made on.
    """
    _check_facts(backbone, base)
    if base["lora"] or base["quantization"]:
        backbone = copy_backbone(backbone)
        if base["quantization"] != quantization(backbone):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Layer .* does not have a .*quantize")
                backbone.quantize(base["quantization"])
        if base["lora"]:
            rank, names = base["lora"]["rank"], base["lora"]["layers"]
            with graph.deferred(Bounded(deltas, "owner.")):
                backbone.enable_lora(rank, target_layer_names=names)
                check_arrays(owner_deltas(backbone), deltas, "owner.")
    found = base_digest(backbone)
    if found != base["digest"]:
        raise _other_base("weights of the digest", base["digest"], found)
    assign(owner_deltas(backbone), deltas, "owner.")
    return backbone


def assign(variables: Mapping[str, keras.Variable], arrays: Mapping[str, Array], at: str) -> None:
    """Assign arrays to variables of the same paths, shapes and dtypes, after checking them all.

    Args:
        variables: by path.
        arrays: by `at` and path.
        at: what the names of the arrays begin with.
    """
    check_arrays(variables, arrays, at)
    for path, variable in variables.items():
        variable.assign(arrays[f"{at}{path}"].read().copy())


def copy_backbone(backbone: keras.Model) -> keras.Model:
    """Make another backbone of the same config and weights, without LoRA."""
    if not isinstance(backbone, keras_hub.models.Backbone):
        raise SurgeryError(
            f"copy of '{backbone.name}': expected a keras_hub Backbone, which its config "
            f"describes. Received {type(backbone).__name__}. Edit the backbone itself by `operate`."
        )
    copy = type(backbone).from_config(backbone.get_config())
    transfer_weights(copy, backbone, rename=lambda path: None if is_lora(path) else path)
    return copy


def lora(owner: keras.Model) -> dict[str, Any] | None:
    """Return rank and layer names of the LoRA of a backbone, as `enable_lora` takes them.

    Raises:
        SurgeryError: its layers have LoRA of several kinds.
    """
    layers = [x for x in graph.layers_within(owner) if getattr(x, "lora_enabled", False)]
    if not layers:
        return None
    kinds = {(x.lora_rank, x.lora_alpha) for x in layers}
    names = sorted({x.name for x in layers})
    same_name = [x for x in graph.layers_within(owner) if x.name in names]
    rank, alpha = next(iter(kinds))
    if len(kinds) > 1 or rank != alpha or len(same_name) > len(layers):
        raise SurgeryError(
            f"save_recipe at '{owner.name}': expected LoRA of one rank, with alpha equal to it, on "
            "all layers of a name, as `enable_lora` of the backbone makes it. Received "
            f"(rank, alpha) {sorted(kinds)} on {len(layers)} layers. Enable LoRA through the "
            "backbone."
        )
    return {"rank": rank, "layers": names}


def quantization(owner: keras.Model) -> str | None:
    """Return how a backbone is quantised.

    Raises:
        SurgeryError: in a way that a recipe cannot hold.
    """
    modes = {getattr(layer, "quantization_mode", None) for layer in graph.layers_within(owner)}
    modes.discard(None)
    if modes - {"int8"}:
        raise SurgeryError(
            f"recipe at '{owner.name}': expected a backbone that is not quantised, or to int8. "
            f"Received one quantised to {', '.join(sorted(map(str, modes)))}. Make the recipe "
            "before quantising."
        )
    return "int8" if modes else None


def _config(owner: keras.Model) -> dict[str, Any]:
    """Return the config of a backbone as JSON; of a plain graph, its nodes in order."""
    if not isinstance(owner, keras_hub.models.Backbone):
        return describe_nodes(owner)
    return json.loads(json.dumps(owner.get_config()))


def _dtype(owner: keras.Model) -> str:
    policy = owner.dtype_policy
    mixed = policy.compute_dtype != policy.variable_dtype
    return f"mixed_{policy.compute_dtype}" if mixed else policy.compute_dtype


def _check_facts(backbone: keras.Model, base: Mapping[str, Any]) -> None:
    """Check the kind, config and dtype of a backbone before its weights are looked at."""
    for what, found in (
        ("family", find_family(backbone).name),
        ("class", type(backbone).__name__),
        ("dtype", _dtype(backbone)),
    ):
        if found != base[what]:
            raise _other_base(f"a backbone of {what}", base[what], found)
    # The first recipes of plain graphs have no config.
    wanted = base["config"] or {}
    own = _config(backbone) if wanted else {}
    for key in sorted((own.keys() | wanted.keys()) - set(_NOT_COMPARED)):
        if own.get(key) != wanted.get(key):
            raise _other_base(f"a backbone with {key}", wanted.get(key), own.get(key))
    if lora(backbone) and not base["lora"]:
        raise _other_base("a backbone", "without LoRA", "one with it")
    if quantization(backbone) not in (None, base["quantization"]):
        raise _other_base("a backbone that is quantised to", base["quantization"], "int8")


def _other_base(what: str, wanted: Any, found: Any) -> RecipeError:
    return RecipeError(
        f"load_recipe at 'base': expected {what} {str(wanted)[:200]}. Received {str(found)[:200]}. "
        "Pass the backbone that the recipe was made on, with the weights it had then."
    )
