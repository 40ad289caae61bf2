"""Pictures of a model: through Keras's drawing, or as Mermaid text, which needs nothing."""

import shutil
from pathlib import Path
from typing import Any

import keras

from backbone_surgery.errors import SurgeryError
from backbone_surgery.picture import COLOURS, Picture, kind, make_picture, mermaid_lines

_FORMATS = (".png", ".svg", ".pdf", ".jpg", ".dot")


def plot_model(
    model: keras.Model,
    to_file: str = "model.png",
    expand_nested: bool = False,
    show_shapes: bool = False,
    rankdir: str = "TB",
    dpi: int = 96,
) -> Any:
    """Draw a model, such as a backbone with its caches, into a file.

    Caches are blue, attention is orange, and layers that came in by surgery are green.

    Args:
        model: a backbone, an edited backbone, a backbone with cache, or any Functional model.
        to_file: the file; its ending says the format: .png, .svg, .pdf, .jpg or .dot.
        expand_nested: whether to draw what is inside each block, in a frame of its own, or one
            node for each block.
        show_shapes: whether to write shapes into the nodes.
        rankdir: `"TB"` draws from top to bottom, `"LR"` from left to right.
        dpi: resolution.

    Returns:
        In a notebook the image of a png file, else `None`.

    Raises:
        SurgeryError: `pydot` or the program `dot` is missing, with how to get it.
    """
    if shutil.which("dot") is None or not _has_pydot():
        raise SurgeryError(
            "plot_model: expected the package `pydot` and the program `dot` of Graphviz. Received "
            "a system where one is missing. Run `pip install pydot`, and get Graphviz by "
            "`apt install graphviz`, `brew install graphviz` or `conda install graphviz`; or use "
            "`backbone_surgery.to_mermaid(model)`, which needs neither."
        )
    path = Path(to_file)
    if path.suffix not in _FORMATS or not path.parent.is_dir():
        raise SurgeryError(
            f"plot_model at '{to_file}': expected a file in a folder that exists, ending in one of "
            f"{', '.join(_FORMATS)}. Received another. Choose such a name."
        )
    picture = make_picture(model, expand_nested)
    dot = keras.utils.model_to_dot(
        picture.model,
        show_shapes=show_shapes,
        show_layer_names=True,
        expand_nested=expand_nested,
        rankdir=rankdir,
        dpi=dpi,
        splines="spline",
    )
    _restyle(dot, picture)
    dot.write(str(path), format=path.suffix.lstrip("."))
    return _image(path)


def to_mermaid(model: keras.Model, expand_nested: bool = False) -> str:
    """Write a model as a Mermaid flowchart, which many viewers of Markdown draw by themselves.

    Args:
        model: as for `plot_model`.
        expand_nested: as for `plot_model`.

    Returns:
        The text, beginning with `flowchart TD`.

    Example:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> print(bs.to_mermaid(bs.rewire(backbone)).splitlines()[0])
        flowchart TD
    """
    return "\n".join(mermaid_lines(make_picture(model, expand_nested)))


def _restyle(dot: Any, picture: Picture) -> None:
    """Colour Keras's nodes by kind, and draw arrows past the inputs of nested models."""
    import pydot

    layers = dict(picture.nodes)
    for model, inner in picture.frames:
        layers.update(inner)
        frame = next(
            s for s in _subgraphs(dot) if s.get_name().strip('"') == f"cluster_{model.name}"
        )
        frame.set("style", "rounded,filled")
        frame.set("fillcolor", "#f6f8fa")
        frame.set("fontname", "Helvetica-Bold")
    for part in [dot, *_subgraphs(dot)]:
        for edge in part.get_edges():
            part.del_edge(edge.get_source(), edge.get_destination())
        for node in part.get_nodes():
            name = node.get_name().strip('"')
            layer = layers.get(int(name)) if name.isdigit() else None
            if layer is not None:
                label = node.get("label").replace(
                    'bgcolor="black"', f'bgcolor="{COLOURS[kind(layer)]}"'
                )
                node.set("label", label)
                node.set("shape", "plaintext")
            elif name.isdigit():
                part.del_node(node)
    dot.set("concentrate", False)
    dot.set("nodesep", 0.3)
    for source, target in picture.edges:
        style = _EDGES[
            "side" if {"input", "cache"} & {kind(layers[source]), kind(layers[target])} else "main"
        ]
        dot.add_edge(pydot.Edge(str(source), str(target), **style))


_EDGES: dict[str, dict[str, Any]] = {
    "main": {"color": "#24292f", "penwidth": "2", "weight": "20"},
    "side": {"color": "#8c959f", "penwidth": "1", "weight": "1"},
}
"""The residual stream is drawn as a straight spine; what feeds it from the side is lighter."""


def _subgraphs(dot: Any) -> list[Any]:
    found = []
    for sub in dot.get_subgraphs():
        found += [sub, *_subgraphs(sub)]
    return found


def _has_pydot() -> bool:
    try:
        import pydot  # noqa: F401
    except ImportError:
        return False
    return True


def _image(path: Path) -> Any:
    """Return the picture for a notebook to show."""
    try:
        from IPython import get_ipython
        from IPython.display import Image
    except ImportError:
        return None
    return Image(filename=str(path)) if get_ipython() and path.suffix == ".png" else None
