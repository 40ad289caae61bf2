"""Merging: fold an edit into the weights of a new backbone, where weights can hold it.

A linear layer y = xW + b that writes a site can hold two kinds of edit at that site: adding s·v
makes its bias b + s·v, and taking out directions with the orthonormal basis B makes it W - s(WBᵀ)B,
b - s(bBᵀ)B (for one direction Arditi et al. 2024, arXiv:2406.11717, section 4). So can a token
embedding that does not make the logits too. What is added to a residual sum can as well be added to
one of its terms.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
import keras_hub
import numpy as np

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.numbers import check_flag
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.open import open_backbone
from backbone_surgery.opening.site import block_of, places
from backbone_surgery.rewriting import Lora, ProjectOut, Steer
from backbone_surgery.rewriting.directions import orthonormal_basis
from backbone_surgery.rewriting.peft_layers import linear_nodes
from backbone_surgery.weights.owner import (
    TIED,
    check_backbone,
    check_tied,
    copy_backbone,
    is_quantized,
)
from backbone_surgery.weights.paths import resolve, variable_paths
from backbone_surgery.weights.transfer import assign_in_place
from backbone_surgery.weights.writers import Writers


def merge(edited: Any, untie_embeddings: bool = False) -> keras_hub.models.Backbone:
    """Fold LoRA, steering and ablated directions of an edited model into a new backbone.

    LoRA factors are folded into their kernels, and so is a `Lora`, at the strength it was made
    with. Of `Steer` and `ProjectOut` those are folded that act always, at the strength they were
    made with, on all tokens: what adds a vector where a bias can take it; and what takes
    directions out where a linear layer writes the site, as for `attention_output` and `mlp_output`,
    or a token embedding that is not tied to the logits, or is untied here.

    Args:
        edited: what `operate` made, or a backbone with LoRA.
        untie_embeddings: whether the new backbone has weights of its own for the logits, where the
            token embedding of the old one makes them: then directions can be taken out of the
            embedding. For backbones with the argument `tie_word_embeddings`.

    Returns:
        A new backbone of the same class and config, but for `tie_word_embeddings`, which computes
        the same without any edit, up to rounding. Nothing that was given is changed.

    Raises:
        SurgeryError: naming everything that weights cannot hold; or there is nothing to untie.

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
    check_flag("merge", "untie_embeddings", untie_embeddings)
    if untie_embeddings:
        check_tied(owner, "merge")
    folds = _folds(edited, untie_embeddings)
    new = copy_backbone(owner, untied=untie_embeddings)
    names = {id(v): path for path, v in variable_paths(owner).items()}
    variables = variable_paths(new)
    for layer in graph.layers_within(owner):
        for weight in graph.own_weights(layer) if getattr(layer, "lora_enabled", False) else ():
            if weight.name in ("kernel", "embeddings"):
                # The attribute of that name is the sum of the weight and the factors' product.
                assign_in_place(variables[names[id(weight)]], getattr(layer, weight.name))
    if untie_embeddings:
        head = variables["token_embedding.reverse_embeddings"]
        assign_in_place(head, np.transpose(np.asarray(owner.token_embedding.embeddings)))
    for fold in folds:
        for variable in fold.variables:
            target = variables[names[id(variable)]]
            assign_in_place(target, fold.apply(np.array(target, "float32")))
    return new


@dataclass(frozen=True)
class _Sum:
    """An adapter to be folded into the layer that it stands beside."""

    layer: Any
    adapter: Any
    strength: float

    order: ClassVar[int] = 0

    @property
    def variables(self) -> list[keras.Variable]:
        """What it changes."""
        return [w for w in graph.own_weights(self.layer) if w.name == "kernel"]

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
    """Directions to be folded into what writes their site: one to add, or some to take out."""

    variables: list[keras.Variable]
    directions: np.ndarray
    strength: float
    ablate: bool
    residual: bool = False

    @property
    def order(self) -> int:
        """What is added to a sum comes after what happens to the term that takes it."""
        return 2 if self.residual else 1

    def apply(self, value: np.ndarray) -> np.ndarray:
        """Return a new kernel, bias or table, whose last axis is that of the directions."""
        if not self.ablate:
            return value + np.float32(self.strength) * self.directions[0]
        basis = orthonormal_basis(self.directions).astype("float32")
        return value - np.float32(self.strength) * (value @ basis.T) @ basis


def _folds(edited: EditedBackbone, untied: bool) -> list[_Sum | _Fold]:
    """Return what to fold, in order, or refuse with everything that cannot be."""
    opened = open_backbone(edited.owner)
    tensors = {place.path: place.tensor for place in places(opened)}
    linear = {path: node.operation for path, node in linear_nodes(opened)}
    writers = Writers(opened, untied)
    folds: list[_Sum | _Fold] = []
    refused: dict[str, list[str]] = {}
    for i, (rewrite, fired) in enumerate(zip(edited.rewrites, edited.report, strict=True)):
        name = getattr(rewrite, "name", None) or getattr(rewrite, "__name__", "")
        kind = type(rewrite).__name__ + (f" '{name}'" if name else "")
        shown = f"rewrites.{i} ({kind})"
        if type(rewrite) is Lora:
            adapters = rewrite.adapters.items()
            folds += [_Sum(linear[path], x, rewrite.strength) for path, x in adapters]
            continue
        if reason := _reason(rewrite):
            refused.setdefault(f"{shown}: {reason}", [])
            continue
        ablate = type(rewrite) is ProjectOut or rewrite.mode == "ablate"
        for path in fired.sites:
            fold = _fold(rewrite, path, tensors[path], ablate, writers)
            if isinstance(fold, str):
                refused.setdefault(f"{shown}: {fold}", []).append(path)
            else:
                folds.append(fold)
    if refused:
        listed = "; ".join(reason + _at(paths) for reason, paths in refused.items())
        raise SurgeryError(
            f"merge at '{edited.name}': expected edits that weights can hold. Received {listed}. "
            "Leave these out, or keep all as edits by `save_recipe`."
        )
    return sorted(folds, key=lambda fold: fold.order)


def _at(paths: list[str]) -> str:
    """Say at which sites, a few of them by name."""
    if not paths:
        return ""
    more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
    return f" (at {', '.join(paths[:2])}{more})"


def _reason(rewrite: Any) -> str | None:
    """Say why a rewrite can never be folded, if so."""
    if type(rewrite) not in (ProjectOut, Steer):
        return "is neither steering nor an adapter"
    if rewrite.tokens not in ("all", (0, None), (None, None)):
        return f"acts on tokens {rewrite.tokens!r} only"
    if type(rewrite) is ProjectOut:
        return None
    if rewrite.renormalize:
        return "renormalises what it steers"
    return None if rewrite.condition is None else "acts on a condition"


def _fold(
    rewrite: Any, path: str, tensor: keras.KerasTensor, ablate: bool, writers: Writers
) -> _Fold | str:
    """Return what to fold for one site, or why nothing can be."""
    rows = rewrite.directions
    rows = rows if type(rewrite) is ProjectOut else rows[block_of(path)][None]
    if not np.isfinite(rows).all():
        return "a direction is not finite"
    if ablate:
        written_by = writers.all_that_write(tensor)
        if isinstance(written_by, str) and path == "embeddings":
            return (
                f"{written_by}: name other sites by `at`, and these stay as they are, or pass "
                f"untie_embeddings=True if the backbone has `{TIED}`"
            )
        if isinstance(written_by, str):
            return written_by
        return _Fold(written_by, rows, rewrite.strength, True)
    found, residual = writers.biases(tensor)
    if not found:
        return "no layer with a bias writes that site, or the sum there"
    return _Fold(found, rows, rewrite.strength, False, residual)
