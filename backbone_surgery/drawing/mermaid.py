"""Pictures as Mermaid text, which needs no package: many viewers of Markdown draw it."""

from collections.abc import Iterator

import keras

from backbone_surgery.drawing.colours import COLOURS
from backbone_surgery.drawing.picture import Node, Picture, make_picture


def to_mermaid(model: keras.Model, expand_nested: bool = False) -> str:
    """Write a model as a Mermaid flowchart, which many viewers of Markdown draw.

    Args:
        model: as for `plot_model`.
        expand_nested: as for `plot_model`.

    Returns:
        The text, beginning with `flowchart TD`.

    Raises:
        SurgeryError: the model is not Functional.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> print(bs.to_mermaid(bs.rewire(backbone)).splitlines()[0])
        flowchart TD
    """
    return "\n".join(_lines(make_picture(model, expand_nested)))


def _lines(picture: Picture) -> Iterator[str]:
    yield "flowchart TD"
    yield from _inside(picture, None, "    ")
    for source, target in picture.edges:
        yield f"    n{source} --> n{target}"
    for kind, colour in COLOURS.items():
        members = [f"n{i}" for i, node in enumerate(picture.nodes) if node.kind == kind]
        if members:
            yield f"    classDef {kind} fill:{colour},color:#fff,stroke:{colour}"
            yield f"    class {','.join(members)} {kind}"


def _inside(picture: Picture, parent: int | None, indent: str) -> Iterator[str]:
    for i, node in enumerate(picture.nodes):
        if node.frame == parent:
            yield f"{indent}n{i}{_box(node)}"
    for i, frame in enumerate(picture.frames):
        if frame.parent == parent:
            yield f'{indent}subgraph s{i}["{_escape(frame.name)}"]'
            yield from _inside(picture, i, indent + "    ")
            yield f"{indent}end"


def _box(node: Node) -> str:
    opening, closing = ("([", "])") if node.kind in ("input", "output", "cache") else ("[", "]")
    return f'{opening}"{_escape(node.name)}<br/>{_escape(node.description)}"{closing}'


def _escape(text: str) -> str:
    """Write the characters that end a label, or begin a tag, as Mermaid's entities."""
    return "".join(f"#{ord(c)};" if c in '"#&<>' else c for c in text)
