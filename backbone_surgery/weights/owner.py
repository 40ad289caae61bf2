"""The backbone that owns the weights: a copy of it, and its LoRA."""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import keras_hub

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening.placement import placement_of
from backbone_surgery.weights.paths import is_lora, variable_paths
from backbone_surgery.weights.transfer import transfer_weights
from backbone_surgery.weights.tree import weight_tree

TIED = "tie_word_embeddings"


def check_backbone(model: keras.Model, operation: str) -> None:
    """Refuse a model that is no keras_hub Backbone, which its config would describe."""
    if not isinstance(model, keras_hub.models.Backbone):
        raise SurgeryError(
            f"{operation} at '{model.name}': expected an edit of a keras_hub Backbone. Received "
            f"one of a {type(model).__name__}. Edit the backbone itself by `operate`."
        )


def check_tied(backbone: keras.Model, operation: str) -> None:
    """Refuse a backbone whose logits cannot get weights of their own."""
    if not getattr(backbone, TIED, False):
        known = "which has no such argument" if not hasattr(backbone, TIED) else "where it is False"
        raise SurgeryError(
            f"{operation} at 'untie_embeddings': expected a backbone with `{TIED}=True`. Received "
            f"a {type(backbone).__name__}, {known}. Leave it out."
        )


def copy_backbone(
    backbone: keras.Model,
    quantize: Callable[[keras.Model], object] | None = None,
    untied: bool = False,
) -> keras.Model:
    """Make another backbone of the same config and weights, without LoRA, on the same devices.

    Args:
        backbone: what to copy.
        quantize: quantises the copy as the backbone is, if it is; the values are copied after that.
        untied: whether the logits get weights of their own, those of the token embedding.
    """
    config = {**left_out(backbone), **backbone.get_config(), **({TIED: False} if untied else {})}
    if is_quantized(backbone):  # its config does not say of which dtype it was before
        policy = backbone.dtype_policy
        config["dtype"] = getattr(policy, "default_policy", policy).name
    with graph.values_as_assigned():
        copy = type(backbone).from_config(config)
        if quantize is None:
            _lay_out_as(copy, backbone)
    if quantize is not None:
        quantize(copy)
        _lay_out_as(copy, backbone)
    source: Any = backbone
    if untied:
        source = weight_tree(backbone)
        table = source["token_embedding"]
        table["reverse_embeddings"] = table["embeddings"].T
    transfer_weights(copy, source, rename=lambda path: None if is_lora(path) else path)
    return copy


def _lay_out_as(copy: keras.Model, backbone: keras.Model) -> None:
    """Have zeros for the weights of a copy where those of a backbone on a mesh lie."""
    if placement_of(backbone.variables) is None:
        return
    import jax.numpy as jnp

    originals = variable_paths(backbone)
    for path, variable in variable_paths(copy).items():
        if path in originals:
            sharding = originals[path].value.sharding
            variable.assign(jnp.zeros(variable.shape, variable.dtype, device=sharding))
        else:  # of the logits, which are untied: it lies as the embeddings do
            variable.assign(jnp.transpose(backbone.token_embedding.embeddings))


def left_out(backbone: keras.Model) -> dict[str, Any]:
    """Return the arguments of a backbone that its config leaves out, as Llama's does some."""
    takes, config = inspect.signature(type(backbone).__init__).parameters, backbone.get_config()
    return {k: v for k, v in vars(backbone).items() if k in takes and k not in config}


def lora(owner: keras.Model) -> dict[str, Any] | None:
    """Return rank and layer names of a backbone's LoRA, which must be as `enable_lora` makes it."""
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


def is_quantized(owner: keras.Model) -> bool:
    """Tell whether any layer of a backbone is quantised."""
    return any(x.quantization_mode is not None for x in graph.layers_within(owner))
