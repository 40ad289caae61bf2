"""What a family is: how one architecture's decoder block and positions are opened.

The families that come with the package are one file each in `families/`. A family of your own is
one `Family`, given to `register_family`; docs/architecture.md has an example that runs.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import keras_hub
from keras import tree

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.graph.twin import Twin
from backbone_surgery.numbers import fits, is_int
from backbone_surgery.opening.once import made_once
from backbone_surgery.opening.site import BesideInput, BlockInput, Site

OpenBlock = Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """One architecture: which layer is its decoder block, and how to open it.

    Attributes:
        name: such as `gpt2`.
        block: class of the decoder block. A subclass with a `call` of its own is another block.
        open_block: `(block, hidden_states, padding_mask, positions) -> hidden_states`, on symbolic
            tensors float[batch, time, hidden], int[batch, time], int32[batch, time]. It calls the
            block's own sub-layers, and `SelfAttention` for attention, and puts a `Site` at each
            place but the last. See `further` too.
        hidden_states: name of the block's argument for the hidden states.
        padding_mask: name of the block's argument for the padding mask.
        claims: `(block) -> bool`, for a class that several architectures build their blocks of:
            whether this block is of this one.
        position_layers: classes of layers outside of the block that number the tokens by
            themselves unless they are given `positions=`.
        pointwise_layers: classes of KerasHub layers of this architecture that work on each token
            alone; others are probed once, when a graph is rewired.
        refuse: `(block) -> reason`, or `None` when the block can be opened.
        embeddings: name of the layer whose output `score` hands to `layer_intercept_fn` with index
            -1, as KerasHub's own task for this family does.
        embed: `(block, hidden_states) -> hidden_states`: what the first block does before the
            residual stream begins; nothing by default.
        ends_in: name of the layer that gives logits at the end of a backbone: the opened graph ends
            before it. Such a family has a `head` too.
        ignored: names of arguments of the block that say nothing about a text, such as a mask of
            images, or a `kwargs` that the backbone fills with its own options.
        further: names of other arguments of the block, which `open_block` is given by name where
            the backbone gives them. Where a later block is given something else of a block than the
            hidden states, such as its keys and values, `open_block` of that block is called with
            `lends=True`, and returns the hidden states and what is lent: tensors, of which the
            later block is given a tuple. One that returns the hidden states alone hands on what it
            was given, one argument.
        beside: the one of `further` that goes from each block to the next beside the hidden states,
            as they do: `open_block` returns it after them. It is a site of this name, too.
        spelled_out: `{class: function}` for layers outside of the blocks whose sub-layers are to be
            in the graph, such as one that holds all blocks. `(layer, run_block, *args, **kwargs)`
            returns what a call of the layer does, and puts the site `embeddings`.
            `run_block(block, hidden_states, padding_mask, lends=False, **further)` runs a block,
            opened, and returns a list of what `open_block` does.
        position_inputs: names of inputs of the backbone that number the tokens of each row.
        images: class of the layer that puts images into the text: it is given `text_embeddings=`,
            or is spelled out without images. In either case the text alone is opened.
        head: `(owner) -> layer`, which makes logits in reverse as a `ReversibleEmbedding` does; by
            default the one in the graph.
        most_positions: `(block) -> int`, where a block limits how long a row can be; `None` if not.
        stop_tokens: tokens that end a text beside the tokenizer's own end token, as text.
        sampler: the sampler that KerasHub's own task for this family takes by default.
        model_types: the names that Hugging Face and llama.cpp have for the architecture.
        model_type: `(block) -> one of them`; the first by default.

    Raises:
        SurgeryError: a field that could not open a block.
    """

    name: str
    block: type[keras.layers.Layer]
    open_block: OpenBlock
    hidden_states: str = "x"
    padding_mask: str = "padding_mask"
    claims: Callable[[Any], bool] = lambda block: True
    position_layers: tuple[type[keras.layers.Layer], ...] = ()
    pointwise_layers: tuple[type[keras.layers.Layer], ...] = ()
    refuse: Callable[[Any], str | None] = lambda block: None
    embeddings: str = "token_embedding"
    embed: Callable[[Any, Any], Any] = lambda block, hidden_states: hidden_states
    ends_in: str = ""
    ignored: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    beside: str = ""
    spelled_out: Mapping[type, OpenBlock] = field(default_factory=dict)
    position_inputs: tuple[str, ...] = ()
    images: type[keras.layers.Layer] | None = None
    head: Callable[[Any], Any] | None = None
    most_positions: Callable[[Any], int | None] = lambda block: None
    stop_tokens: tuple[str, ...] = ()
    sampler: str = "greedy"
    model_types: tuple[str, ...] = ()
    model_type: Callable[[Any], str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise self._wrong("a name that is an identifier", repr(self.name))
        if not _is_kind(self.block):
            raise self._wrong("`block` to be a class of Keras layers", repr(self.block))
        functions = ("open_block", "claims", "refuse", "embed", "most_positions")
        optional = [x for x in ("model_type", "head") if getattr(self, x) is not None]
        for name in (*functions, *optional):
            if not callable(getattr(self, name)):
                raise self._wrong(f"`{name}` to be a function", repr(getattr(self, name)))
        for name in ("position_layers", "pointwise_layers"):
            classes = getattr(self, name)
            classes = tuple(classes) if isinstance(classes, list | tuple) else (classes,)
            if not all(_is_kind(x) for x in classes):
                raise self._wrong(f"`{name}` to be classes of Keras layers", repr(classes))
            object.__setattr__(self, name, classes)
        if self.images is not None and not _is_kind(self.images):
            raise self._wrong("`images` to be a class of Keras layers", repr(self.images))
        self._check_names()
        if self.spelled_out:
            self._check_spelled_out()
            return  # blocks are called by these functions, not as in the graph
        parameters = list(inspect.signature(self.block.call).parameters)
        for name in (self.hidden_states, self.padding_mask, *self.ignored, *self.further):
            if name not in parameters:
                received = f"'{name}', where `call` takes {', '.join(parameters[1:])}"
                raise self._wrong("the names of arguments of the block", received)

    def _check_names(self) -> None:
        """Take a string for a tuple of it; refuse what is no name."""
        for name in ("embeddings", "ends_in", "sampler", "beside"):
            if not isinstance(getattr(self, name), str):
                raise self._wrong(f"`{name}` to be a string", repr(getattr(self, name)))
        for name in ("ignored", "further", "position_inputs", "stop_tokens", "model_types"):
            names = getattr(self, name)
            names = tuple(names) if isinstance(names, list | tuple) else (names,)
            if not all(isinstance(x, str) and x for x in names):
                raise self._wrong(f"`{name}` to be strings", repr(names))
            object.__setattr__(self, name, names)
        if self.beside and not (self.beside in self.further and self.spelled_out):
            rule = "`beside` to be one of `further`, of a family with `spelled_out`"
            raise self._wrong(rule, repr(self.beside))
        if self.ends_in and self.head is None:
            raise self._wrong("a `head` beside `ends_in`", f"'{self.ends_in}' alone")

    def _check_spelled_out(self) -> None:
        given = self.spelled_out
        pairs = given.items() if isinstance(given, Mapping) else [(given, None)]
        if not all(_is_kind(kind) and callable(function) for kind, function in pairs):
            raise self._wrong("`spelled_out` to be functions by classes of layers", repr(given))

    def _wrong(self, rule: str, received: str) -> SurgeryError:
        return SurgeryError(
            f"Family at '{self.name}': expected {rule}. Received {received}. Describe the decoder "
            "block as docs/architecture.md does."
        )

    def owns(self, layer: Any) -> bool:
        """Tell whether a layer is a decoder block of this architecture."""
        if not isinstance(layer, self.block):
            return False
        # A twin is a block that was rewritten inside; opening it is refused, with the reason.
        unchanged = getattr(layer.call, "__func__", None) is self.block.call
        return (unchanged or isinstance(layer, Twin)) and bool(self.claims(layer))

    def spelling(self, layer: Any) -> OpenBlock | None:
        """Return the function that spells a layer out, if there is one."""
        kinds = self.spelled_out.items()
        return next((spell for kind, spell in kinds if isinstance(layer, kind)), None)

    def layers(self, model: keras.Model) -> Iterator[Any]:
        """Yield the layers in a graph, and those of the layers that are spelled out."""
        for node in graph.all_nodes(model):
            yield node.operation
            if self.spelling(node.operation) is not None:
                yield from graph.sublayers(node.operation)

    def check(self, block: keras.layers.Layer) -> None:
        """Refuse a block that cannot be opened."""
        reason = self.refuse(block)
        if reason is not None:
            raise SurgeryError(f"open at '{block.name}': expected {reason}.")

    def arguments(
        self, block: keras.layers.Layer, args: tuple, kwargs: dict
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Split the call of a block into hidden states, padding mask, and `further` arguments."""
        self.check(block)
        bound = inspect.signature(block.call).bind(*args, **kwargs).arguments
        hidden_states = bound.pop(self.hidden_states)
        padding_mask = bound.pop(self.padding_mask, None)
        for name in self.ignored:
            bound.pop(name, None)
        further = {name: bound.pop(name, None) for name in self.further}
        plain = {"use_causal_mask": True, "cache_update_index": 0, "training": None}
        other = {k: v for k, v in bound.items() if v is not None and v is not plain.get(k, None)}
        if padding_mask is None or other:
            received = "no mask" if padding_mask is None else ", ".join(sorted(other))
            raise SurgeryError(
                f"open at '{block.name}': expected a call with hidden states and "
                f"`{self.padding_mask}` alone. Received {received}. Call the block as the "
                "backbone does."
            )
        return hidden_states, padding_mask, {k: v for k, v in further.items() if v is not None}

    def image_nodes(self, model: keras.Model) -> list[Any]:
        """List the calls of layers in a graph that put images into a text."""
        nodes = graph.graph_nodes(model) if self.images is not None else ()
        mixing = [node for node in nodes if isinstance(node.operation, self.images or ())]
        return [node for node in mixing if len(node.input_tensors) > 1]

    def without_images(self, model: keras.Model) -> list[tuple[Any, Any]]:
        """Pair what each layer gives that puts images into a text with the text alone."""
        mixing = [(n.outputs[0], n.arguments.kwargs) for n in self.image_nodes(model)]
        return [(t, given["text_embeddings"]) for t, given in mixing if "text_embeddings" in given]

    def open(
        self,
        block: keras.layers.Layer,
        name: str,
        hidden_states: keras.KerasTensor,
        padding_mask: keras.KerasTensor,
        positions: keras.KerasTensor,
        further: dict[str, Any],
        lends: bool,
    ) -> list[keras.KerasTensor]:
        """Run a decoder block as a nested model of its sub-layers.

        Returns:
            The hidden states, what goes beside them, and what the block lends to later ones.
        """
        settings = {"lends": True} if lends else {}

        def build(x: Any, padding_mask: Any, positions: Any, *others: Any) -> Any:
            given = tree.pack_sequence_as(further, list(others))
            if self.beside:
                given[self.beside] = BesideInput()(given[self.beside])
            made = self.open_block(
                block, BlockInput()(x), padding_mask, positions, **given, **settings
            )
            made = tree.flatten(made)
            self._check_made(made, x, lends)
            made[0] = Site("block")(made[0])
            if self.beside:
                made[1] = Site(self.beside)(made[1])
            return made

        tensors = (hidden_states, padding_mask, positions, *tree.flatten(further))
        return tree.flatten(graph.nest(name, build, *tensors))

    def _check_made(self, made: list[Any], x: keras.KerasTensor, lends: bool) -> None:
        """Check what `open_block` returned, flat, for the hidden states `x`."""
        wanted = (None, None, x.shape[-1])
        symbolic = all(isinstance(t, keras.KerasTensor) for t in made)
        count = 2 if self.beside else 1
        is_right = len(made) >= count and (lends or len(made) == count)
        if symbolic and is_right and fits(made[0].shape, wanted):
            return
        received = [list(t.shape) if isinstance(t, keras.KerasTensor) else shown(t) for t in made]
        beside = f", `{self.beside}`" if self.beside else ""
        raise SurgeryError(
            f"open by family '{self.name}': expected `open_block` to return the hidden states, a "
            f"symbolic tensor {list(wanted)}{beside}{', and what is lent' if lends else ' alone'}. "
            f"Received {', '.join(map(str, received))}. Return what the block gives on."
        )

    def token_embedding(self, model: keras.Model) -> Any:
        """Find the layer that embeds token ids, and in reverse gives the logits.

        Args:
            model: an `EditedBackbone`.
        """
        make = self.head
        if make is not None:
            return made_once(model.owner, "head", lambda: make(model.owner))
        embeddings = list(dict.fromkeys(_embeddings(model)))
        if len(embeddings) != 1:
            raise SurgeryError(
                f"open at '{model.name}': expected one `keras.layers.ReversibleEmbedding` in the "
                f"graph, to make logits with. Received {len(embeddings)}. Keep the backbone's own "
                "token embedding in the graph."
            )
        return embeddings[0]

    def model_types_of(self, owner: keras.Model) -> tuple[str, ...]:
        """Return the names that Hugging Face and llama.cpp have for the architecture of a model.

        The first is Hugging Face's.
        """
        if self.model_type is None:
            return self.model_types or (self.name,)
        return (self.model_type(next(x for x in self.layers(owner) if self.owns(x))),)

    def policy(self, owner: keras.Model) -> Any:
        """Return the dtype policy of a model; of one that was built by hand, that of its blocks.

        To such a model Keras gives the policy of the process, whatever its layers compute in.
        """
        if isinstance(owner, keras_hub.models.Backbone):
            return owner.dtype_policy
        return next(x for x in self.layers(owner) if self.owns(x)).dtype_policy

    def max_positions(self, opened: keras.Model, owner: keras.Model) -> int | None:
        """Return how many positions a model has learned, or `None` when it has no limit.

        Args:
            opened: the opened graph, whose own layers of positions count.
            owner: what it was opened from, whose blocks may set a limit too.
        """
        layers = (node.operation for node in graph.all_nodes(opened))
        positions = [x for x in layers if isinstance(x, self.position_layers)]
        # A layer that computes positions, such as `SinePositionEncoding`, has no last one.
        limits = [
            *(getattr(x, "sequence_length", None) for x in positions),
            *(self.most_positions(x) for x in self.layers(owner) if self.owns(x)),
        ]
        wrong = [limit for limit in limits if limit is not None and not is_int(limit)]
        if wrong:
            raise self._wrong("`most_positions` to return an int or None", repr(wrong[0]))
        return min((limit for limit in limits if limit is not None), default=None)


def _is_kind(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, keras.layers.Layer)


def _embeddings(model: keras.Model) -> list[keras.layers.Layer]:
    layers = (node.operation for node in graph.all_nodes(model))
    inner = (getattr(layer, "token_embedding", layer) for layer in layers)
    return [layer for layer in inner if isinstance(layer, keras.layers.ReversibleEmbedding)]


_families: dict[str, Family] = {}


def register_family(family: Family) -> Family:
    """Make an architecture known: from now on its backbones can be opened.

    Args:
        family: describes the architecture.

    Returns:
        The family.

    Raises:
        SurgeryError: it is no `Family`, or another one of its name is known.
    """
    if not isinstance(family, Family):
        raise SurgeryError(
            f"register_family: expected a `backbone_surgery.Family`. Received {family!r} of type "
            f"{type(family).__name__}. Describe the architecture with one."
        )
    if _families.setdefault(family.name, family) != family:
        raise SurgeryError(
            f"register_family at '{family.name}': expected a name that no other family has. "
            f"Received one that is known already, for {_families[family.name].block.__name__}. "
            "Give the family another name."
        )
    return family


def known_families() -> tuple[Family, ...]:
    """Return the families that were registered, in order."""
    return tuple(_families.values())


_refusals: list[Callable[[keras.Model], str | None]] = []


def register_refusal(refuse: Callable[[keras.Model], str | None]) -> None:
    """Make architectures known that cannot be opened.

    Args:
        refuse: `(model) -> words`: which architecture it is, why it is not opened and what to use
            instead, such as "a model of images, which takes no text. Use a language model."; `None`
            for any other model.
    """
    _refusals.append(refuse)


def refusal_of(model: keras.Model) -> str | None:
    """Say why a model is of an architecture that is not opened, if it is."""
    return next((words for refuse in _refusals if (words := refuse(model))), None)
