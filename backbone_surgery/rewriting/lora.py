"""Lora: a LoRA adapter beside linear layers, of a folder of PEFT or a new one."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import keras
import numpy as np

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.graph.emission import Emitted
from backbone_surgery.rewriting.amounts import bind_amounts
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.low_rank import Adapter
from backbone_surgery.rewriting.peft_files import MERGE, read_peft
from backbone_surgery.rewriting.peft_layers import linear_nodes, parts_of, paths_of
from backbone_surgery.rewriting.rewrite import Rewrite, Rows, Surgery


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True)
class Lora(Rewrite):
    """Put a LoRA adapter beside linear layers: one that PEFT trained, or a new one.

    Reads the folder that `save_pretrained` of PEFT (https://github.com/huggingface/peft) wrote of
    a LoRA adapter (Hu et al. 2021, https://arxiv.org/abs/2106.09685): y becomes y + strength ·
    scale · (x A) B, for each linear layer that the folder has factors for, in attention and MLP.
    The strength is a control, a number or one for each row: a batch can hold rows with and without
    the adapter, and with others. A strength of 0 is bit-equal to no edit.

    A `rank` instead of a folder makes a new adapter, which changes nothing until `fit` has trained
    it. `save_peft` writes either for PEFT, and for all that reads its folders.

    Ranks and alphas that differ between layers and `use_rslora` are honoured. All else that changes
    the result is refused, such as DoRA, biases, whole modules that were trained along, experts of a
    mixture, and layers with their activation inside (the first of GPT-2's MLP). Dropout is for
    PEFT's training, and left out in `fit`.

    The adapter is trainable: `fit` trains it alone. The files are read once: `edited.rewrites[i]`
    holds the `adapters`, and no path.

    Attributes:
        name: name of the control, and what the names of the layers begin with.
        path: the folder.
        strength: the default of the control. `fit` trains at it: at 0 there is no gradient.
        adapters: `{"blocks.3.query": adapter}`, with linear layers as KerasHub names them, to use
            instead of reading `path`.
        rank: of a new adapter, at most the smaller of inputs and outputs of each layer.
        alpha: of a new adapter: scale is alpha / rank; by default 1.
        target_modules: beside which linear layers of the graph a new adapter goes, by the names of
            `transformers`, such as `"down_proj"`, by KerasHub's, or by what they
            make, such as `"query"`; queries and values by default, in Qwen 3.5 with keys.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.Lora("french", rank=2)])
        >>> list(edited.rewrites[0].adapters)
        ['blocks.0.query', 'blocks.0.value', 'blocks.1.query', 'blocks.1.value']
    """

    name: str
    path: str | os.PathLike[str] = ""
    strength: float = 1.0
    adapters: Mapping[str, keras.layers.Layer] = field(default_factory=dict)
    rank: int | None = None
    alpha: float | None = None
    target_modules: tuple[str, ...] | None = None

    files: ClassVar[tuple[str, ...]] = ("path",)

    def __post_init__(self) -> None:
        fields = Fields(self, "name")
        fields.name()
        fields.number("strength")
        fields.instance("path", str | os.PathLike, "the path of a folder")  # type: ignore[arg-type]
        fields.layers("adapters", Adapter, "{layer path: adapter}")
        fields.integer("rank", smallest=1, optional=True)
        fields.number("alpha", optional=True)
        fields.strings("target_modules", optional=True)
        sources = {"path": os.fspath(self.path), "adapters": self.adapters, "rank": self.rank}
        given = [name for name, value in sources.items() if value]
        if len(given) != 1:
            raise fields.refuse(
                "one of `path`, `adapters` and `rank`",
                given or None,
                "Pass the folder that `save_pretrained` of PEFT wrote, or the rank of a new one.",
            )
        if self.rank is None and (self.alpha, self.target_modules) != (None, None):
            raise fields.refuse(
                "`alpha` and `target_modules` with a `rank` alone",
                given[0],
                "Leave them out: the adapter that is there has its own.",
            )

    @property
    def control(self) -> str:
        """The name of the control."""
        return self.name

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind a strength: a number, or one for each row."""
        value = self.strength if value is None else value
        bound = bind_amounts(value, f"controls at '{self.name}'", rows.batch)
        return {f"{self.name}_strength": bound}

    def rebuild(self, surgery: Surgery) -> tuple[Any, Emitted]:
        """Replay the graph with the adapters, all of them."""
        rebuilt = super().rebuild(surgery)
        if unused := sorted(set(surgery.once("adapters", dict)) - set(surgery.fired)):
            raise SurgeryError(
                f"Lora at '{self.name}': expected a graph with all layers that the adapter is for. "
                f"Received one without {shown(unused)}. Fold the adapter into the weights by "
                "`bs.merge`, and take blocks out of the backbone that it returns; or pass by "
                "`adapters` those of `edited.rewrites[i].adapters` whose layers are left."
            )
        return rebuilt

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Declare the control, then put an adapter beside each layer that it is for."""
        nodes = dict(linear_nodes(surgery.model.owner))
        adapters = surgery.once("adapters", lambda: self._adapters(surgery, nodes))
        chosen = {id(self._layer(path, nodes)): path for path in adapters}
        strength = surgery.control(f"{self.name}_strength", np.float32(self.strength))

        def visit(layer: Any, *args: Any, **kwargs: Any) -> Any:
            path = chosen.get(id(layer))
            if path is None:
                return graph.KEEP
            y = layer(*args, **kwargs)
            surgery.train(adapters[path])
            surgery.fired.append(path)
            return adapters[path](args[0], y, strength)

        return visit

    def applied(self, surgery: Surgery) -> "Lora":
        """Return the rewrite with its adapters alone."""
        adapters = surgery.once("adapters", dict)
        return replace(self, path="", adapters=adapters, rank=None, alpha=None, target_modules=None)

    def _layer(self, path: str, nodes: Mapping[str, Any]) -> Any:
        """Return a layer of the model that an adapter fits beside."""
        if path not in nodes:
            raise SurgeryError(
                f"Lora at '{self.name}': expected adapters of linear layers of this model. "
                f"Received one of '{path}'. Use adapters of this architecture."
            )
        layer = nodes[path].operation
        if layer.activation not in (None, keras.activations.linear):
            raise SurgeryError(
                f"Lora at '{self.name}': expected adapters of layers that are linear. Received one "
                f"of '{path}', which has its activation inside. "
                f"{MERGE if self.path else 'Leave it out.'}"
            )
        sizes = [
            math.prod(x[0].shape[2:]) for x in (nodes[path].input_tensors, nodes[path].outputs)
        ]
        adapter = self.adapters.get(path)
        if adapter is not None and adapter.built:
            own = [adapter.down.shape[0], adapter.up.shape[1]]
            if own != sizes:
                raise SurgeryError(
                    f"Lora at '{self.name}': expected an adapter of '{path}' from {sizes[0]} to "
                    f"{sizes[1]} numbers. Received one from {own[0]} to {own[1]}. Use adapters of "
                    "this architecture."
                )
        return layer

    def _adapters(
        self, surgery: Surgery, nodes: Mapping[str, Any]
    ) -> Mapping[str, keras.layers.Layer]:
        """Return the adapters: those that are there, new ones, or those of the files."""
        if self.adapters:
            return self.adapters
        policy, adapters = surgery.model.dtype_policy, {}
        if self.rank is not None:
            scale = (self.rank if self.alpha is None else self.alpha) / self.rank
            run = {id(node.operation) for node in graph.all_nodes(surgery.model)}
            left = {path for path, node in nodes.items() if id(node.operation) in run}
            for path in paths_of(self.name, self.target_modules, surgery.model, nodes, left):
                adapters[path] = self._adapter(path, nodes, self.rank, scale, policy)
            return adapters
        for (block, module), factors in read_peft(self.path).items():
            for path, part in parts_of(self.name, block, module, factors, nodes):
                rank = part.down.shape[1]
                adapters[path] = self._adapter(path, nodes, rank, part.scale, policy)
                adapters[path].down.assign(part.down)
                adapters[path].up.assign(part.up)
        return adapters

    def _adapter(
        self, path: str, nodes: Mapping[str, Any], rank: int, scale: float, policy: Any
    ) -> Adapter:
        """Make an adapter for a layer."""
        self._layer(path, nodes)
        shapes = [x[0].shape for x in (nodes[path].input_tensors, nodes[path].outputs)]
        smaller = min(math.prod(shape[2:]) for shape in shapes)
        if self.rank is not None and self.rank > smaller:
            raise SurgeryError(
                f"Lora at '{self.name}': expected a rank from 1 to {smaller}, the smaller of "
                f"inputs and outputs of '{path}'. Received {self.rank}. Ranks such as 4 or 8 are "
                "usual."
            )
        name = f"{self.name}_{path.replace('.', '_')}"
        adapter = Adapter(rank, scale, dtype=policy, name=name)
        adapter.build(*shapes)
        return adapter
