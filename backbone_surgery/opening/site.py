"""Sites: the named places of an opened graph, and the selectors that pick some of them.

A site is a `Site` layer, an identity that the opened graph carries at each place a user may want
to touch. Being a node of the graph it survives every clone, and a rewrite at a site is nothing
more than another node put before it.

The attention pattern is a site too, but one without a node of its own: it is inside `SelfAttention`
until a rewrite asks for it, and only then is that layer split in two. So is the state of a
recurrence; see `HasInnerSite`.

Paths are read off the graph as it is: a nested model that holds a `Site("block")` is a decoder
block, and blocks are counted in the order in which they run.
"""

import fnmatch
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import keras

from backbone_surgery import graph
from backbone_surgery.errors import SelectorError, SurgeryError, closest, shown
from backbone_surgery.opening.layers import DirectLayer

BLOCK = "block"
"""Role of the site at the output of a decoder block: its path is the block's own."""

PATTERN = "attention_pattern"
"""Role of the attention pattern, float[batch, heads, time, keys]."""

_NUMBER = r"-?\d{1,9}"
_SELECTOR = re.compile(
    rf"blocks\.(?P<blocks>\*|{_NUMBER}|({_NUMBER})?:({_NUMBER})?)(?:\.(?P<role>[a-z_*]+))?"
)
_STREAM = re.compile(r"embeddings|blocks\.\d+(\.residual_mid)?")
_WRITTEN = re.compile(r"embeddings|blocks\.\d+\.(attention|laurel|mlp|per_layer)_output")


class Identity(DirectLayer):
    """A node that hands its input on: it costs nothing once compiled."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, inputs):
        return inputs

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def get_config(self) -> dict:
        """Refuse, as `keras.models.clone_model` of an opened graph asks for it."""
        raise SurgeryError(
            f"get_config at '{self.name}': expected a layer of a model that can be rebuilt from "
            "configs. Received a place in an opened graph, which shares the layers of its "
            "backbone. Copy the graph with `clone_layer_graph`, or apply the rewrites again with "
            "`operate`."
        )


class Site(Identity):
    """Mark a place in an opened graph.

    Args:
        role: what the tensor is, such as `attention_output`: the last part of the site's path.

    Raises:
        SurgeryError: the role is no identifier.
    """

    def __init__(self, role: str, **kwargs) -> None:
        if not isinstance(role, str) or not role.isidentifier():
            raise SurgeryError(
                f"Site at 'role': expected a name of letters, digits and underscores, the last "
                f"part of a path. Received {shown(role)}. Pass 'mlp_output', say."
            )
        kwargs.setdefault("name", f"site_{role}")
        super().__init__(**kwargs)
        self.role = role


class BlockInput(Identity):
    """Mark the hidden states that an opened block was given. No site: they are that of a block."""

    def __init__(self, **kwargs) -> None:
        kwargs.setdefault("name", "block_input")
        super().__init__(**kwargs)


class BesideInput(Identity):
    """Mark what an opened block was given beside the hidden states, see `Family.beside`."""

    def __init__(self, **kwargs) -> None:
        kwargs.setdefault("name", "beside_input")
        super().__init__(**kwargs)


@runtime_checkable
class HasInnerSite(Protocol):
    """A layer with a site inside: it is split in two where a rewrite asks for the site.

    Attributes:
        inner_site: role of the site.
    """

    inner_site: str

    def inner_shape(self, *args: Any) -> tuple[Any, ...]:
        """Return the shape of what stands at the site, for the arguments of `call`."""

    def split_around(self, edit: Callable[[Any], Any], *args: Any) -> Any:
        """Call the two halves of the layer instead of it, and `edit` between them."""


@dataclass(frozen=True)
class Place:
    """A site of one graph: its path, and its node, after the nested models that it is in."""

    path: str
    nodes: tuple[Any, ...]

    @property
    def tensor(self) -> keras.KerasTensor:
        """The tensor of the node that holds the site."""
        return self.nodes[-1].outputs[0]

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of what stands at the site."""
        layer = self.nodes[-1].operation
        if isinstance(layer, HasInnerSite):
            return layer.inner_shape(*self.nodes[-1].arguments.args)
        return self.tensor.shape

    @property
    def block(self) -> int | None:
        """Index of the decoder block the site is in; `None` outside of the blocks."""
        return block_of(self.path)

    @property
    def is_pattern(self) -> bool:
        """Whether the site is an attention pattern: its columns are tokens too."""
        return is_pattern(self.path)


def block_of(path: str) -> int | None:
    """Return the index of the decoder block that a path is in; `None` outside of the blocks."""
    parts = path.split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


def is_pattern(path: str) -> bool:
    """Tell whether a path, or the name of a capture, is that of an attention pattern."""
    return re.split("[./]", path)[-1] == PATTERN


def is_stream(path: str) -> bool:
    """Tell whether a path is that of the residual stream itself, and not of what is added to it."""
    return _STREAM.fullmatch(path) is not None


def is_written(path: str) -> bool:
    """Tell whether what stands at a path is added to the residual stream, or begins it."""
    return _WRITTEN.fullmatch(path) is not None


def places(model: keras.Model) -> list[Place]:
    """List the sites of an opened graph, in the order in which they run."""
    blocks = iter(range(10**9))
    return list(_walk(model, "", blocks, ()))


def _walk(
    model: keras.Model, prefix: str, blocks: Iterator[int], around: tuple[Any, ...]
) -> Iterator[Place]:
    for node in graph.graph_nodes(model):
        layer = node.operation
        nested = graph.as_functional(layer)
        if isinstance(layer, Site):
            path = prefix.rstrip(".") if layer.role == BLOCK else prefix + layer.role
            yield Place(path, (*around, node))
        elif isinstance(layer, HasInnerSite):
            yield Place(prefix + layer.inner_site, (*around, node))
        elif nested is not None:
            inner = f"blocks.{next(blocks)}." if is_block(nested) else prefix
            yield from _walk(nested, inner, blocks, (*around, node))


def is_block(nested: Any) -> bool:
    """Tell whether a layer is an opened decoder block."""
    functional = graph.as_functional(nested)
    operations = functional.operations if functional is not None else ()
    return any(isinstance(op, Site) and op.role == BLOCK for op in operations)


def stream_index(block: keras.Model, mark: type = BlockInput) -> int | None:
    """Return which input of an opened block is its hidden states; `None` if it uses none.

    Args:
        block: it.
        mark: `BesideInput`, for what goes beside them.
    """
    inputs = {id(t): i for i, t in enumerate(block.inputs)}
    for node in graph.graph_nodes(block):
        if isinstance(node.operation, mark):
            return inputs.get(id(node.input_tensors[0]))
    return None


def select(selector: str, paths: list[str]) -> list[str]:
    """Return the paths that a selector picks, in graph order.

    Selectors are paths with a choice of blocks: `blocks.3`, `blocks.-1.query`,
    `blocks.*.head_outputs`, `blocks.4:8.mlp_output`, `embeddings`. A colon selects as Python slices
    do; a `*` in the last part matches any of the roles.

    Raises:
        SelectorError: the selector is malformed or matches nothing.
    """
    if not isinstance(selector, str):
        raise SelectorError(
            f"select: expected a site selector such as 'blocks.*.head_outputs'. Received "
            f"{shown(selector)} of type {type(selector).__name__}. Pass a string."
        )
    match = _SELECTOR.fullmatch(selector)
    count = 1 + max((b for p in paths if (b := block_of(p)) is not None), default=-1)
    chosen = _blocks(match["blocks"], count) & set(range(count)) if match else set()
    if match is None:
        picked = [p for p in paths if p == selector]
    else:
        picked = [p for p in paths if _matches(p, chosen, match["role"])]
    if not picked:
        patterns = [re.sub(r"^blocks\.\d+", "blocks.*", p) for p in paths]
        hint = closest(selector, dict.fromkeys(patterns))
        if match and match["role"] == PATTERN and not any(map(is_pattern, paths)):
            hint = "The model has no attention, and so no patterns."
        if match and count and not chosen:
            hint = f"The blocks are blocks.0 ... blocks.{count - 1}."
        raise SelectorError(
            f"select at '{selector}': expected a selector that matches a site. Received one that "
            f"matches nothing among {len(paths)} sites. {hint}"
        )
    return picked


def _blocks(text: str, count: int) -> set[int]:
    if text == "*":
        return set(range(count))
    if ":" in text:
        start, stop = (int(part) if part else None for part in text.split(":"))
        return set(range(count)[start:stop])
    index = int(text)
    return {index + count if index < 0 else index}


def _matches(path: str, blocks: set[int], role: str | None) -> bool:
    if block_of(path) not in blocks:
        return False
    _, _, *own = path.split(".")
    if role is None or not own:
        return role is None and not own
    return fnmatch.fnmatchcase(own[0], role)
