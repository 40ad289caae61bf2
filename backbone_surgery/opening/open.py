"""Pass 1, open: turn each decoder block of a backbone into a nested model of its own sub-layers."""

from typing import Any

import keras
from keras import tree

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, UnknownArchitectureError, shown
from backbone_surgery.graph.twin import Twin
from backbone_surgery.opening import site
from backbone_surgery.opening.family import Family, known_families, refusal_of
from backbone_surgery.opening.head import BeforeHead
from backbone_surgery.opening.layers import TokenPositions
from backbone_surgery.opening.model import EditedBackbone


@graph.building()
def open_backbone(backbone: keras.Model) -> EditedBackbone:
    """Open a backbone: the same function of the same variables, with its insides in the graph.

    Every decoder block becomes a nested Functional named after the block, made of the block's own
    sub-layers and of a `Site` at each place that a rewrite can touch. What else is in the graph
    stays: a layer that was put after a block is still there.

    Args:
        backbone: a `keras_hub` backbone, a Functional model cloned from one, or a model that was
            opened before (which is returned as it is).

    Returns:
        A new model on `token_ids` int[batch, time] and `padding_mask` int[batch, time], which
        gives hidden states float[batch, time, hidden_dim]. Padding may be on either side. A
        backbone that takes images too is opened for text alone.

    Raises:
        UnknownArchitectureError: no family knows the decoder blocks of the graph.
        SurgeryError: the graph is not that of a backbone.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> bs.sites(bs.open_backbone(backbone))[:3]
        ['embeddings', 'blocks.0.attention_norm', 'blocks.0.query']
    """
    if isinstance(backbone, EditedBackbone):
        return backbone
    family = find_family(backbone)
    graph.share(backbone)
    inputs = _inputs(backbone)
    _check_names(backbone, family)
    if len(tree.flatten(backbone.output)) != 1:
        raise SurgeryError(
            f"open at '{backbone.name}': expected one output, the hidden states. Received "
            f"{len(tree.flatten(backbone.output))}. Build the model with that output alone, and "
            "hand out other tensors by a rewrite."
        )
    end = graph.node_of(tree.flatten(backbone.output)[0]).operation.name
    if family.ends_in and end != family.ends_in:
        raise SurgeryError(
            f"open at '{backbone.name}': expected a backbone that ends in '{family.ends_in}', the "
            f"layer that gives its logits. Received one that ends in '{end}'. Leave the logits as "
            "they are."
        )
    positions = TokenPositions(name="positions")(inputs["token_ids"], inputs["padding_mask"])
    opener = _Opener(family, positions, backbone)
    inputs, mapping = opener.begin(backbone, inputs)
    outputs, _ = graph.replay(backbone.output, mapping, opener.visit, per_use=True)
    outputs = tree.flatten(outputs)[0]
    return EditedBackbone(
        inputs,
        site.Site("final_norm")(outputs),
        owner=backbone,
        family=family,
        name=f"opened_{backbone.name}",
    )


def sites(model: keras.Model) -> list[str]:
    """List the site paths of a model, in the order in which they run.

    Args:
        model: a backbone, or what `open_backbone`, `operate` or `rewire` made of one.

    Returns:
        Paths such as `embeddings`, `blocks.3.attention_output` and `blocks.3`, the residual
        stream after block 3. The blocks are counted in the graph as it is.
    """
    opened = open_backbone(getattr(model, "source", model))  # of a cached graph
    return [place.path for place in site.places(opened)]


def find_family(model: keras.Model) -> Family:
    """Find the family of a model by the decoder blocks in its graph.

    Raises:
        UnknownArchitectureError: there is none, with the list of those known, or the reason why
            the architecture is not opened.
    """
    if not isinstance(model, keras.Model):
        raise SurgeryError(
            f"open: expected a backbone or another Functional model. Received {shown(model)} of "
            f"type {type(model).__name__}. Pass `causal_lm.backbone`, say."
        )
    if hasattr(model, "backbone") and hasattr(model, "preprocessor"):
        raise SurgeryError(
            f"open at '{model.name}': expected a backbone. Received the task "
            f"{type(model).__name__}. Pass its `.backbone`."
        )
    if isinstance(getattr(model, "source", None), EditedBackbone):
        raise SurgeryError(
            f"open at '{model.name}': expected a backbone. Received a cached graph, which `rewire` "
            "made of one. Edit its `.source`, and rewire that."
        )
    refusal = refusal_of(model)
    if refusal is not None:
        raise UnknownArchitectureError(
            f"open at '{model.name}': expected a decoder-only language model with its decoder "
            f"blocks in the graph. Received {refusal}"
        )
    families = [f for f in known_families() if any(f.owns(x) for x in f.layers(model))]
    if len(families) > 1:
        raise SurgeryError(
            f"open at '{model.name}': expected decoder blocks of one architecture. Received "
            f"blocks that {' and '.join(f.name for f in families)} claim. Give the families a "
            "`claims` that tells their blocks apart, or take the other blocks out of the graph."
        )
    if families:
        return families[0]
    layers = [node.operation for node in graph.all_nodes(model)]
    classes = sorted({type(layer).__name__ for layer in layers if isinstance(layer, keras.Layer)})
    known = ", ".join(f"{f.name} ({f.block.__name__})" for f in known_families())
    raise UnknownArchitectureError(
        f"open at '{model.name}': expected a graph with decoder blocks of a known architecture: "
        f"{known}. Received the architecture of {type(model).__name__}, with layers "
        f"{', '.join(classes)}. To add an architecture, describe it with "
        "`backbone_surgery.register_family`; see docs/architecture.md."
    )


class _Opener:
    """The callback of the opening pass.

    Attributes:
        used: ids of the tensors of the backbone that a layer of it is given.
        lent: what blocks lend to later ones, by the id of the tensor that stands for all of it.
    """

    def __init__(self, family: Family, positions: keras.KerasTensor, backbone: keras.Model) -> None:
        self.family, self.positions = family, positions
        self.names: dict[str, int] = {}
        self.used = {id(t) for node in graph.all_nodes(backbone) for t in node.input_tensors}
        self.lent: dict[int, tuple[keras.KerasTensor, ...]] = {}

    def begin(self, backbone: keras.Model, inputs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return the inputs that stay, and a mapping to what stands for those of the backbone."""
        numbers = [inputs[name] for name in self.family.position_inputs if name in inputs]
        mapping = {id(t): self.positions for t in numbers}
        inputs = {name: t for name, t in inputs.items() if id(t) not in mapping}
        if self.family.image_nodes(backbone):
            no_image = keras.ops.zeros_like(inputs["padding_mask"])
            mapping.update((id(t), no_image) for t in inputs.values())
            inputs = {name: inputs[name] for name in ("token_ids", "padding_mask")}
        mapping.update((id(t), t) for t in inputs.values())
        for image_and_text, text in self.family.without_images(backbone):
            (mapping[id(image_and_text)],), _ = graph.replay([text], mapping, self.visit)
        return inputs, mapping

    def visit(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        spell_out = self.family.spelling(layer)
        is_block = self.family.owns(layer)
        if isinstance(layer, Twin) and (is_block or spell_out is not None):
            raise SurgeryError(
                f"open at '{layer.name}': expected a decoder block as it was made. Received one "
                "that `rewrite_nested` rewrote inside, which opening would pass by. Open the "
                "backbone first, and rewrite its nodes with a clone_fn in `operate`."
            )
        if is_block:
            return self._open(layer, args, kwargs)
        if self.family.ends_in and layer.name == self.family.ends_in:
            return BeforeHead(layer)(*args, **kwargs)
        if spell_out is not None:
            for block in filter(self.family.owns, graph.sublayers(layer)):
                self.family.check(block)
            return spell_out(layer, self._run, *args, **kwargs)
        if isinstance(layer, self.family.position_layers) and "positions" not in kwargs:
            return layer(*args, positions=self.positions, **kwargs)
        return graph.KEEP

    def _open(self, block: Any, args: tuple, kwargs: dict[str, Any]) -> list[keras.KerasTensor]:
        """Open a block; its first output is the hidden states, the others are what it lends."""
        x, padding_mask, further = self.family.arguments(block, args, kwargs)
        further = {name: self.lent.get(id(value), value) for name, value in further.items()}
        if not self.names:
            x = site.Site("embeddings")(self.family.embed(block, x))
        others = graph.visited_node()[-1].outputs[1:]
        lends = any(id(t) in self.used for t in others)
        x, *lent = self._run(block, x, padding_mask, lends, **further)
        if not lent and not lends:
            return [x] * (1 + len(others))
        if not lent and len(further) != 1:
            raise SurgeryError(
                f"open at '{block.name}': expected `open_block` to return the hidden states and "
                "what is lent, since a later block is given it. Received the hidden states alone. "
                "Return both where `lends` is true, but for a block that hands on the one argument "
                "of `further` that it is given."
            )
        if not lent:
            return [x] + tree.flatten(further)[:1] * len(others)
        self.lent[id(lent[0])] = tuple(lent)
        return [x] + [lent[0]] * len(others)

    def _run(
        self, block: Any, x: Any, padding_mask: Any, lends: bool = False, **further: Any
    ) -> list[keras.KerasTensor]:
        """Run a block, opened, under a name that no other has."""
        name = self._unique(block.name)
        return self.family.open(block, name, x, padding_mask, self.positions, further, lends)

    def _unique(self, name: str) -> str:
        count = self.names.get(name, 0)
        self.names[name] = count + 1
        return f"{name}_use_{count}" if count else name


def _inputs(model: keras.Model) -> dict[str, keras.KerasTensor]:
    """Return the inputs of a backbone's graph by name."""
    inputs = {t.name: t for t in tree.flatten(model.input)}
    missing = [name for name in ("token_ids", "padding_mask") if name not in inputs]
    if missing:
        raise SurgeryError(
            f"open at '{model.name}': expected inputs named `token_ids` and `padding_mask`. "
            f"Received {sorted(inputs)}. Keep the inputs of the backbone."
        )
    return inputs


def _check_names(backbone: keras.Model, family: Family) -> None:
    """Refuse a layer with the name of an input of the cached graph: Keras would fail on two."""
    ours = {"positions", "cache_mask", "cache_update_index"} - set(family.position_inputs)
    taken = [x.operation.name for x in graph.graph_nodes(backbone) if x.operation.name in ours]
    if taken:
        raise SurgeryError(
            f"open at '{backbone.name}': expected layers of other names than {sorted(ours)}, which "
            f"are inputs of a cached graph. Received '{taken[0]}'. Rename the layer."
        )
