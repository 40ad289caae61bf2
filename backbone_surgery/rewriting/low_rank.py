"""LowRank: trainable adapters beside projections, owned by the rewrite, the backbone frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.numbers import is_int, read_number
from backbone_surgery.opening.site import Place
from backbone_surgery.rewriting.amounts import bind_amounts
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.rewrite import Rows, SiteRewrite, Surgery
from backbone_surgery.rewriting.sources import source_of


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True, eq=False)
class LowRank(SiteRewrite):
    """Add a trainable map of low rank beside the computation of each chosen site.

    What stands at the site becomes y + scale · (x A) B. Here x is the input of the computation of
    y, A is float[inputs, rank], and B is float[rank, outputs], zero at first. At `query`, `key`,
    `value` and, without a norm behind it, `attention_output` and `mlp_output` that is LoRA (Hu et
    al. 2021, https://arxiv.org/abs/2106.09685). Unlike `backbone.enable_lora` it changes nothing
    on the backbone: `fit` on the edited model trains the adapters alone, and the backbone and its
    other models stay as they are.

    `edited.rewrites[i].adapters` holds the adapters. Apply that rewrite to another graph, and it
    puts the same, trained adapters there.

    With a `strength`, the maps are multiplied by a control too: y + strength · scale · (x A) B. A
    strength of 0 is bit-equal to no edit, and one graph learns both ways, at 1 and at -1.

    Attributes:
        at: site selector.
        rank: rank of each map, at most the smaller of inputs and outputs.
        alpha: scale is alpha / rank; by default 1.
        name: what the names of the layers begin with. Two `LowRank` at one site need two names.
        adapters: `{site path: adapter}` to use instead of new ones. Sites may share one.
        strength: the default of a control named `name`, for all rows or one for each. By default
            there is no such control. `fit` trains at it: at 0 there is no gradient.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.LowRank("blocks.*.query", rank=4)])
        >>> sum(v.shape[0] * v.shape[1] for v in edited.trainable_variables)
        128
    """

    at: str
    rank: int
    alpha: float | None = None
    name: str = "low_rank"
    adapters: Mapping[str, keras.layers.Layer] = field(default_factory=dict)
    strength: float | None = None

    def __post_init__(self) -> None:
        fields = Fields(self)
        fields.selector()
        fields.integer("rank", smallest=1)
        fields.number("alpha", optional=True)
        fields.number("strength", optional=True)
        if not isinstance(self.name, str) or "/" in self.name:
            raise fields.refuse("`name` to be a name of layers, without '/'", self.name, "Rename.")
        if self.strength is not None:
            fields.name()
        fields.layers("adapters", Adapter, "{site path: adapter}")

    @property
    def control(self) -> str | None:
        """The name of the control, where there is a strength."""
        return None if self.strength is None else self.name

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind a strength, for all rows or one for each. `None` takes that of the rewrite."""
        if self.strength is None:
            return super().bind(value, rows)
        strength = self.strength if value is None else value
        bound = bind_amounts(strength, f"controls at '{self.name}'", rows.batch)
        return {f"{self.name}_strength": bound}

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Check that each adapter has a site, and declare the control; then visit the sites."""
        paths = [place.path for place in self.choose(surgery)]
        if self.adapters and set(self.adapters) != set(paths):
            raise SurgeryError(
                f"LowRank at '{self.at}': expected an adapter for exactly the selected sites "
                f"{paths}. Received adapters for {shown(list(self.adapters))}. Leave `adapters` "
                "out to start with new ones."
            )
        if self.strength is not None:
            surgery.control(f"{self.name}_strength", np.float32(self.strength))
        return super().visitor(surgery)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put an adapter beside the computation."""
        try:
            source = source_of(x, place, surgery, "LowRank")
        except SurgeryError as error:
            near = [p.path for p in surgery.places if p.block == place.block and _fits(p, surgery)]
            raise SurgeryError(f"{error} Here these are {', '.join(near) or 'none'}.") from None
        smaller = min(int(np.prod(t.shape[2:])) for t in (source, x))
        if self.rank > smaller:
            raise SurgeryError(
                f"LowRank at '{place.path}': expected a rank from 1 to {smaller}, the smaller of "
                f"inputs and outputs. Received {self.rank}. Ranks such as 4 or 8 are usual."
            )
        others = {x.name: x for x in surgery.trained_so_far}
        adapter = self.adapters.get(place.path) or Adapter(
            self.rank,
            (self.rank if self.alpha is None else self.alpha) / self.rank,
            dtype=surgery.model.dtype_policy,
            name=f"{self.name}_{place.path.replace('.', '_')}",
        )
        if others.get(adapter.name, adapter) is not adapter:
            raise SurgeryError(
                f"LowRank at '{place.path}': expected layers of different names. Received a second "
                f"one named '{adapter.name}'. Give one of the rewrites another `name`."
            )
        shapes = (source.shape[2:], x.shape[2:])
        if adapter.built and adapter.shapes != shapes:
            raise SurgeryError(
                f"LowRank at '{place.path}': expected an adapter from {shapes[0]} to {shapes[1]}. "
                f"Received one from {adapter.shapes[0]} to {adapter.shapes[1]}. Use adapters of "
                "this architecture."
            )
        surgery.train(adapter)
        surgery.once("adapters", dict)[place.path] = adapter
        if self.strength is None:
            return adapter(source, x)
        return adapter(source, x, surgery.inputs[f"{self.name}_strength"])

    def applied(self, surgery: Surgery) -> "LowRank":
        """Return the rewrite with its adapters."""
        return replace(self, adapters=surgery.once("adapters", dict))


def _fits(place: Place, surgery: Surgery) -> bool:
    try:
        source_of(place.tensor, place, surgery, "LowRank")
    except SurgeryError:
        return False
    return True


@keras.saving.register_keras_serializable("backbone_surgery")
class Adapter(keras.layers.Layer):
    """Add a map of low rank of one tensor to another.

    Args:
        rank: rank of the map.
        scale: what its result is multiplied by.

    Call arguments:
        x: float[batch, time, ...], what the map is applied to.
        y: float[batch, time, ...], what it is added to.
        strength: float32[batch], what the map is multiplied by too; 1 if left out.
    """

    def __init__(self, rank: int, scale: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not is_int(rank) or rank < 1 or read_number(scale) is None:  # of a recipe, say
            raise SurgeryError(
                f"Adapter at '{self.name}': expected a rank of 1 or more and a finite scale. "
                f"Received {shown(rank)} and {shown(scale)}. Check the file that they come from."
            )
        self.rank, self.scale = rank, scale
        self.shapes: tuple = ()

    def build(self, x_shape, y_shape, strength_shape=None):
        """Create A, normal with variance 1 / inputs, and B, zero."""
        self.shapes = (tuple(x_shape[2:]), tuple(y_shape[2:]))
        inputs, outputs = (int(np.prod(shape)) for shape in self.shapes)
        normal = keras.initializers.RandomNormal(stddev=inputs**-0.5)
        # An optimizer's small steps are lost in half precision.
        whole = {"dtype": "float32"}
        self.down = self.add_weight((inputs, self.rank), normal, name="down", **whole)
        self.up = self.add_weight((self.rank, outputs), "zeros", name="up", **whole)

    def call(self, x, y, strength=None):
        """Return y + strength · scale · (x A) B; y itself where the strength is zero."""
        batch, time = ops.shape(x)[:2]
        flat = ops.reshape(x, (batch, time, self.down.shape[0]))
        change = ops.matmul(ops.matmul(flat, self.down), self.up) * self.scale
        change = ops.cast(ops.reshape(change, ops.shape(y)), y.dtype)
        if strength is None:
            return y + change
        strength = ops.cast(ops.reshape(strength, (-1, *[1] * (len(y.shape) - 1))), y.dtype)
        return ops.where(ops.equal(strength, 0), y, y + strength * change)

    def compute_output_spec(self, x, y, strength=None):
        """Keep the shape and dtype of `y`."""
        return keras.KerasTensor(y.shape, y.dtype)

    def get_config(self):
        """Return rank and scale."""
        return {**super().get_config(), "rank": self.rank, "scale": self.scale}
