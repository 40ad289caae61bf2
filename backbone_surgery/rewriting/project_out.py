"""ProjectOut: take directions out of hidden states, wherever they are written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening.site import Place, is_written
from backbone_surgery.rewriting.control import Control, Tokens, read_tokens
from backbone_surgery.rewriting.directions import basis_rows, orthonormal_basis
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.ranged import RangedRewrite
from backbone_surgery.rewriting.rewrite import Rows, Surgery
from backbone_surgery.rewriting.site_layer import SiteLayer, along
from backbone_surgery.rewriting.steering import in_range


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True, eq=False)
class ProjectOut(RangedRewrite):
    """Take one direction, or the span of several, out of hidden states.

    h becomes h - strength · Bᵀ(B h), where the rows of B are an orthonormal basis of the span. By
    default this happens to all that is written to the residual stream: the embeddings, and what
    each block adds. The basis is an input of the graph, float32[batch, rank, hidden_dim]. A
    strength of 0 is bit-equal to no edit. `merge` folds it into the weights where they can hold it.

    `Steer(mode="ablate")` takes out a direction of its own at each block.

    Source: directional ablation, Arditi et al. 2024, arXiv:2406.11717, for one direction.

    Attributes:
        name: name of the control: a strength, for all rows or one for each, or a `Control` of
            strength, directions and tokens.
        directions: float[hidden_dim], or float[directions, hidden_dim], of any length, and at any
            angle to each other.
        at: a selector, or several, of sites of hidden states; by default of `embeddings`, and of
            all that blocks add: `attention_output`, `mlp_output`, `per_layer_output` of Gemma 4
            and 3n, and of Gemma 3n `laurel_output`, and `other_streams` before the blocks.
        tokens: which tokens are edited, as of `Steer`.
        strength: the default of the control: 1 takes all of it out.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
        >>> import backbone_surgery as bs, keras_hub, numpy as np
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.ProjectOut("refusal", np.ones(8))])
        >>> edited.report[0].sites[:3]
        ('embeddings', 'blocks.0.attention_output', 'blocks.0.mlp_output')
    """

    name: str
    directions: Any
    at: Any = None
    tokens: Tokens = "all"
    strength: float = 1.0
    parts: ClassVar[tuple[str, ...]] = ("strength", "directions", "tokens")

    def __post_init__(self) -> None:
        fields = Fields(self, "name")
        fields.name()
        fields.strings("at", optional=True)
        fields.number("strength")
        fields.keep("tokens", read_tokens(self.tokens, fields.where))
        fields.span("directions")

    @property
    def basis(self) -> np.ndarray:
        """What is taken out, as orthonormal rows: float32[rank, hidden_dim]."""
        return orthonormal_basis(self.directions).astype("float32")

    def choose(self, surgery: Surgery) -> list[Place]:
        """Return the sites that any of the selectors picks, in the order in which they run."""
        if self.at is None:
            beside = surgery.model.family.beside  # it begins before the blocks, as embeddings do
            return [p for p in surgery.places if is_written(p.path) or p.path == beside]
        chosen = {place.path for at in self.at for place in surgery.select(at)}
        return [place for place in surgery.places if place.path in chosen]

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Declare the controls, then visit the sites."""
        self.declare(surgery)
        surgery.control(f"{self.name}_basis", self.basis)
        return super().visitor(surgery)

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind a strength, or a `Control`. `None` takes the fields of the rewrite."""
        bound = super().bind(value, rows)
        directions = value.directions if isinstance(value, Control) else None
        if directions is None:
            return bound
        where, size = f"controls at '{self.name}'", self.directions.shape[1]
        basis = basis_rows(directions, rows.batch, len(self.basis), size, where)
        return {**bound, f"{self.name}_basis": basis}

    def before(self, end: int, bound: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Leave out what acts on generated tokens alone, or on tokens from `end` on."""
        acts = super().before(end, bound)
        is_idle = f"{self.name}_strength" in acts
        return {**acts, f"{self.name}_basis": np.zeros(0)} if is_idle else acts

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put a projection at the site."""
        size = self.directions.shape[1]
        is_states = len(x.shape) == 3 or place.path.split(".")[-1] == surgery.model.family.beside
        if not is_states or x.shape[-1] != size:
            raise SurgeryError(
                f"ProjectOut at '{place.path}': expected directions of the size that stands there, "
                f"{list(x.shape[2:])}. Received directions of size {size}. Select sites of that "
                f"size by `at`. {surgery.sites_of((size,), place)}"
            )
        basis = surgery.inputs[f"{self.name}_basis"]
        layer = Projection(name=self.layer_name(place))
        return layer(x, surgery.positions, *self.declared(surgery), basis)


class Projection(SiteLayer):
    """Take the span of some directions out of hidden states.

    Call arguments:
        x: float[batch, time, hidden_dim], or of several streams float[batch, time, streams,
            hidden_dim].
        positions: int32[batch, time].
        strength: float32[batch].
        tokens: int32[batch, 3], as of `SteeringScale`.
        basis: float32[batch, rank, hidden_dim], with orthonormal rows, or rows of zero.
    """

    def call(self, x, positions, strength, tokens, basis):
        """Edit the tokens in range; leave the others, and strength 0, exactly as they are."""
        h, shape = ops.cast(x, "float32"), ops.shape(x)
        scale = ops.where(in_range(positions, tokens), strength[:, None], 0.0)
        scale = ops.reshape(scale, (*shape[:2], *[1] * (len(shape) - 2)))
        part = along(ops.reshape(h, (shape[0], -1, shape[-1])), basis)
        edited = ops.cast(h - scale * ops.reshape(part, shape), x.dtype)
        return ops.where(ops.not_equal(scale, 0), edited, x)
