"""Merging: fold an edit into the weights of a new backbone, where weights can hold it.

A linear layer y = xW + b that writes a site can hold two kinds of steering at that site: adding
s·v makes its bias b + s·v, and taking a direction v̂ out makes it W - s(Wv̂)v̂ᵀ, b - s(b·v̂)v̂ (Arditi
et al. 2024, "Refusal in language models is mediated by a single direction", section 4). What is
added to a residual sum can as well be added to one of its terms.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
import keras_hub
import numpy as np

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.open import open_backbone
from backbone_surgery.opening.site import Site, block_of, places
from backbone_surgery.rewriting import Lora, Steer
from backbone_surgery.rewriting.peft_layers import linear_nodes
from backbone_surgery.weights.owner import check_backbone, copy_backbone, is_quantized
from backbone_surgery.weights.paths import resolve, variable_paths
from backbone_surgery.weights.transfer import assign_in_place


def merge(edited: Any) -> keras_hub.models.Backbone:
    """Fold the LoRA and the steering of an edited model into a new backbone.

    LoRA factors are folded into their kernels, and so is a `Lora`, at the strength it was made
    with. Of `Steer` those are folded that act always, at the strength they were made with, on all
    tokens: `"add"` where a bias can take the vector, and `"ablate"` at sites that a linear layer
    writes, such as `attention_output` and `mlp_output`.

    Args:
        edited: what `operate` made, or a backbone with LoRA.

    Returns:
        A new backbone of the same class and config, which computes the same without any edit, up
        to rounding. Nothing that was given is changed.

    Raises:
        SurgeryError: naming everything that weights cannot hold.

    Examples:
        >>> import backbone_surgery as bs, keras_hub, numpy as np
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.Steer("mood", {1: np.ones(8)})])
        >>> type(bs.merge(edited)).__name__
        'GPT2Backbone'
    """
    edited = open_backbone(resolve(edited, "merge"))
    owner = edited.owner
    check_backbone(owner, "merge")
    if is_quantized(owner):
        raise SurgeryError(
            f"merge at '{owner.name}': expected a backbone with floats as weights. Received a "
            "quantised one. Merge before quantising."
        )
    folds = _folds(edited)
    new = copy_backbone(owner)
    names = {id(v): path for path, v in variable_paths(owner).items()}
    variables = variable_paths(new)
    for layer in graph.layers_within(owner):
        for weight in graph.own_weights(layer) if getattr(layer, "lora_enabled", False) else ():
            if weight.name in ("kernel", "embeddings"):
                # The attribute of that name is the sum of the weight and the factors' product.
                assign_in_place(variables[names[id(weight)]], getattr(layer, weight.name))
    for fold in folds:
        # With LoRA on, `layer.kernel` is a sum: the variable is found by its name.
        for variable in graph.own_weights(fold.layer):
            if variable.name in fold.changes:
                target = variables[names[id(variable)]]
                assign_in_place(target, fold.apply(np.array(target, "float32")))
    return new


@dataclass(frozen=True)
class _Sum:
    """An adapter to be folded into the layer that it stands beside."""

    layer: Any
    adapter: Any
    strength: float

    changes: ClassVar[tuple[str, ...]] = ("kernel",)
    order: ClassVar[int] = 0

    def apply(self, value: np.ndarray) -> np.ndarray:
        """Return a new kernel."""
        product = np.asarray(self.adapter.down) @ np.asarray(self.adapter.up)
        product = product * np.float32(self.strength * self.adapter.scale)
        if isinstance(self.layer, keras.layers.Dense):
            return value + product
        inputs, kernel, outputs = re.split(",|->", self.layer.equation)
        axes = [a for a in inputs if a in kernel] + [a for a in outputs if a in kernel]
        sizes = dict(zip(kernel, value.shape, strict=True))
        product = product.reshape([sizes[a] for a in axes])
        return value + product.transpose([axes.index(a) for a in kernel])


@dataclass(frozen=True)
class _Fold:
    """One direction to be folded into the layer that writes its site."""

    layer: Any
    direction: np.ndarray
    strength: float
    ablate: bool
    residual: bool

    @property
    def changes(self) -> tuple[str, ...]:
        """The names of the variables it changes."""
        return ("bias", "kernel") if self.ablate else ("bias",)

    @property
    def order(self) -> int:
        """What is added to a sum comes after what happens to the term that takes it."""
        return 2 if self.residual else 1

    def apply(self, value: np.ndarray) -> np.ndarray:
        """Return a new kernel or bias, whose last axis is that of the direction."""
        if not self.ablate:
            return value + np.float32(self.strength) * self.direction
        unit = self.direction / max(float(np.linalg.norm(self.direction)), 1e-12)
        return value - np.float32(self.strength) * (value @ unit)[..., None] * unit


def _folds(edited: EditedBackbone) -> list[_Sum | _Fold]:
    """Return what to fold, in order, or refuse with everything that cannot be."""
    opened = open_backbone(edited.owner)
    tensors = {place.path: place.tensor for place in places(opened)}
    linear = {path: node.operation for path, node in linear_nodes(opened)}
    folds: list[_Sum | _Fold] = []
    refused = []
    for i, (rewrite, fired) in enumerate(zip(edited.rewrites, edited.report, strict=True)):
        name = getattr(rewrite, "name", None) or getattr(rewrite, "__name__", "")
        kind = type(rewrite).__name__ + (f" '{name}'" if name else "")
        shown = f"rewrites.{i} ({kind})"
        if type(rewrite) is Lora:
            adapters = rewrite.adapters.items()
            folds += [_Sum(linear[path], x, rewrite.strength) for path, x in adapters]
            continue
        if reason := _reason(rewrite):
            refused.append(f"{shown}: {reason}")
            continue
        for path in fired.sites:
            layer, residual = _writer(tensors[path], rewrite.mode)
            if layer is None:
                refused.append(f"{shown} at '{path}': {_NO_LAYER[rewrite.mode]}")
                continue
            vector = np.asarray(rewrite.directions[block_of(path)], "float32")
            if not np.isfinite(vector).all():
                refused.append(f"{shown} at '{path}': its direction is not finite")
                continue
            folds.append(_Fold(layer, vector, rewrite.strength, rewrite.mode == "ablate", residual))
    if refused:
        raise SurgeryError(
            f"merge at '{edited.name}': expected edits that weights can hold. Received "
            f"{'; '.join(refused)}. Leave these out, or keep all as edits by `save_recipe`."
        )
    return sorted(folds, key=lambda fold: fold.order)


_NO_LAYER = {
    "add": "no layer with a bias writes that site, or the sum there",
    "ablate": "no linear layer writes that site",
}


def _reason(rewrite: Any) -> str | None:
    """Say why a rewrite can never be folded, if so."""
    if type(rewrite) is not Steer:
        return "is neither steering nor an adapter"
    if rewrite.mode not in _NO_LAYER:
        return f"has mode {rewrite.mode!r}"
    if rewrite.tokens not in ("all", (0, None), (None, None)):
        return f"acts on tokens {rewrite.tokens!r} only"
    if rewrite.renormalize:
        return "renormalises what it steers"
    return None if rewrite.when is None else "acts on a condition"


def _writer(tensor: keras.KerasTensor, mode: str) -> tuple[Any, bool]:
    """Find the linear layer that writes a site, or for adding one that writes a term of its sum."""
    node = _source(tensor)
    if _is_linear(node.operation):
        fits = mode == "ablate" or node.operation.bias is not None
        return (node.operation if fits else None), False
    if mode == "add" and isinstance(node.operation, keras.layers.Add):
        for layer in (_source(term).operation for term in node.input_tensors):
            if _is_linear(layer) and layer.bias is not None:
                return layer, True
    return None, False


def _source(tensor: keras.KerasTensor) -> Any:
    """Return the node that made a tensor, looking through sites and dropout."""
    node = graph.node_of(tensor)
    while isinstance(node.operation, Site | keras.layers.Dropout):
        node = graph.node_of(node.input_tensors[0])
    return node


def _is_linear(layer: Any) -> bool:
    dense = isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense)
    return dense and layer.activation in (None, keras.activations.linear)
