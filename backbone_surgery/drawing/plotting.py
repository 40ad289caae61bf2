"""Pictures of a model in a file: placed by `layout`, drawn by matplotlib."""

from typing import Any

import keras

from backbone_surgery.drawing.canvas import (
    DETAIL,
    LINE,
    NAME,
    Label,
    check_dpi,
    draw_arrow,
    draw_box,
    draw_node,
    new_page,
    save_page,
    size_of,
    text_width,
)
from backbone_surgery.drawing.colours import COLOURS
from backbone_surgery.drawing.layout import WITHOUT_EXTRAS, Box, Layout, Size, lay_out
from backbone_surgery.drawing.picture import Node, Picture, make_picture
from backbone_surgery.errors import SurgeryError
from backbone_surgery.extras import import_extra
from backbone_surgery.files import picture_path

_RANKDIRS = ("TB", "LR")
_FRAME = "#f6f8fa"
_STROKES = {False: ("#24292f", 1.4), True: ("#8c959f", 0.8)}
"""Colour and width of an arrow, and of one at the side."""


def plot_model(
    model: keras.Model,
    to_file: str = "model.png",
    expand_nested: bool = False,
    show_shapes: bool = False,
    rankdir: str = "TB",
    dpi: int = 96,
) -> Any:
    """Draw a model, such as a backbone with its caches, into a file.

    Caches are blue, attention is orange, and layers that came into a backbone by surgery are green:
    those that `operate` put in, and in a graph that was cloned by hand and then opened or rewired,
    those of classes that are not Keras's. The residual stream is straight.

    Args:
        model: a backbone, an edited backbone, a backbone with cache, or any Functional model.
        to_file: the file; its ending says the format: .png, .svg, .pdf, .jpg or .jpeg.
        expand_nested: whether to draw what is inside each block, in a frame of its own, or one
            node for each block.
        show_shapes: whether to write into each node the dtypes and shapes that it gives.
        rankdir: `"TB"` draws from top to bottom, `"LR"` from left to right.
        dpi: dots per inch of a .png or .jpg file.

    Returns:
        In a notebook the image of a png file, else `None`.

    Raises:
        SurgeryError: the file cannot be written, the model is not Functional, or matplotlib or
            pygraphviz is missing or cannot be loaded.
    """
    path = picture_path(to_file, "plot_model")
    if rankdir not in _RANKDIRS:
        raise SurgeryError(
            f"plot_model: expected rankdir to be one of {', '.join(_RANKDIRS)}. Received "
            f"{rankdir!r}. Pass 'TB' to draw from top to bottom."
        )
    check_dpi(dpi, "plot_model")
    import_extra("plot_model", "matplotlib", WITHOUT_EXTRAS)
    picture = make_picture(model, expand_nested)
    labels = [_label(node, show_shapes) for node in picture.nodes]
    sizes = [size_of(label) for label in labels]
    titles = [(text_width(frame.name, NAME), LINE) for frame in picture.frames]
    layout = lay_out(picture, sizes, titles, rankdir)
    return save_page(_draw(picture, layout, labels, sizes), path, "plot_model", dpi)


def _label(node: Node, show_shapes: bool) -> Label:
    details = [node.description, *(node.shapes if show_shapes else ())]
    return [(node.name, NAME), *((text, DETAIL) for text in details)]


def _draw(picture: Picture, layout: Layout, labels: list[Label], sizes: list[Size]) -> Any:
    """Draw a picture; returns the axes."""
    ax = new_page(layout.size)
    frames = list(zip(picture.frames, layout.frames, strict=True))
    for _, box in frames:
        _draw_frame(ax, box)
    curves = [draw_arrow(ax, arrow, *_STROKES[arrow.is_side]) for arrow in layout.arrows]
    for frame, box in frames:
        _draw_title(ax, frame.name, box, curves)
    for node, label, center, size in zip(picture.nodes, labels, layout.centers, sizes, strict=True):
        draw_node(ax, COLOURS[node.kind], label, center, size)
    return ax


def _draw_frame(ax: Any, box: Box) -> None:
    left, bottom, right, top = box
    size = (right - left, top - bottom)
    draw_box(ax, (left, bottom), size, 6, facecolor=_FRAME, edgecolor="#8c959f")


def _draw_title(ax: Any, title: str, box: Box, curves: list[Any]) -> None:
    """Write the title of a frame where the fewest arrows come in: to the left, or to the right."""
    from matplotlib.transforms import Bbox

    left, _, right, top = box
    width = text_width(title, NAME)

    def crossings(start: float) -> int:
        place = Bbox.from_extents(start - 2, top - 18, start + width + 2, top - 2)
        return sum(curve.intersects_bbox(place, filled=False) for curve in curves)

    start = min(left + 10, right - 10 - width, key=crossings)
    patch = {"facecolor": _FRAME, "edgecolor": "none", "pad": 1}
    ax.text(start, top - 10, title, va="center", parse_math=False, bbox=patch, **NAME)
