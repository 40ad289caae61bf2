"""Pictures of a model in a file: placed by `layout`, drawn by matplotlib."""

from pathlib import Path
from typing import Any

import keras

from backbone_surgery.drawing.colours import COLOURS
from backbone_surgery.drawing.layout import (
    WITHOUT_EXTRAS,
    Arrow,
    Box,
    Layout,
    Point,
    Size,
    lay_out,
)
from backbone_surgery.drawing.picture import Node, Picture, make_picture
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.extras import import_extra
from backbone_surgery.files import picture_path, save_picture
from backbone_surgery.numbers import is_int

_RANKDIRS = ("TB", "LR")
_MOST_DPI = 2400

Font = dict[str, Any]
Label = list[tuple[str, Font]]
"""Lines of text, each with its font."""

_FAMILY = ["DejaVu Sans", "sans-serif"]  # matplotlib brings the first; a viewer may lack it
_NAME: Font = {"family": _FAMILY, "size": 10, "weight": "bold"}
_DETAIL: Font = {"family": _FAMILY, "size": 8}
# In points.
_LINE = 13.0
_PADDING = (9.0, 3.0)
_MARGIN = 8.0

_FRAME = "#f6f8fa"


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
    if not is_int(dpi) or not 1 <= dpi <= _MOST_DPI:
        raise SurgeryError(
            f"plot_model: expected dpi to be an integer from 1 to {_MOST_DPI}. Received "
            f"{shown(dpi)}. 96 is that of a screen, 300 that of a print."
        )
    import_extra("plot_model", "matplotlib", WITHOUT_EXTRAS)
    picture = make_picture(model, expand_nested)
    labels = [_label(node, show_shapes) for node in picture.nodes]
    sizes = [_size(label) for label in labels]
    titles = [(_width(frame.name, _NAME), _LINE) for frame in picture.frames]
    layout = lay_out(picture, sizes, titles, rankdir)
    _draw(picture, layout, labels, sizes, path, dpi)
    return _image(path)


def _label(node: Node, show_shapes: bool) -> Label:
    details = [node.description, *(node.shapes if show_shapes else ())]
    return [(node.name, _NAME), *((text, _DETAIL) for text in details)]


def _size(label: Label) -> Size:
    width = max(_width(text, font) for text, font in label)
    return width + 2 * _PADDING[0], len(label) * _LINE + 2 * _PADDING[1]


def _width(text: str, font: Font) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    return text_to_path.get_text_width_height_descent(text, FontProperties(**font), False)[0]


def _draw(
    picture: Picture,
    layout: Layout,
    labels: list[Label],
    sizes: list[Size],
    path: Path,
    dpi: int,
) -> Any:
    """Draw into a file; returns the figure."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    width, height = layout.size
    figure = Figure(((width + 2 * _MARGIN) / 72, (height + 2 * _MARGIN) / 72), facecolor="white")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(-_MARGIN, width + _MARGIN), ylim=(-_MARGIN, height + _MARGIN))
    ax.axis("off")
    frames = list(zip(picture.frames, layout.frames, strict=True))
    for _, box in frames:
        _draw_frame(ax, box)
    curves = [_draw_arrow(ax, arrow) for arrow in layout.arrows]
    for frame, box in frames:
        _draw_title(ax, frame.name, box, curves)
    for node, label, center, size in zip(picture.nodes, labels, layout.centers, sizes, strict=True):
        _draw_node(ax, COLOURS[node.kind], label, center, size)
    # Text stays text, to be searched and selected.
    with rc_context({"svg.fonttype": "none", "pdf.fonttype": 42}):
        save_picture(figure, path, "plot_model", dpi=dpi)
    return figure


def _draw_frame(ax: Any, box: Box) -> None:
    left, bottom, right, top = box
    size = (right - left, top - bottom)
    _draw_box(ax, (left, bottom), size, 6, facecolor=_FRAME, edgecolor="#8c959f")


def _draw_title(ax: Any, title: str, box: Box, curves: list[Any]) -> None:
    """Write the title of a frame where the fewest arrows come in: to the left, or to the right."""
    from matplotlib.transforms import Bbox

    left, _, right, top = box
    width = _width(title, _NAME)

    def crossings(start: float) -> int:
        place = Bbox.from_extents(start - 2, top - 18, start + width + 2, top - 2)
        return sum(curve.intersects_bbox(place, filled=False) for curve in curves)

    start = min(left + 10, right - 10 - width, key=crossings)
    patch = {"facecolor": _FRAME, "edgecolor": "none", "pad": 1}
    ax.text(start, top - 10, title, va="center", parse_math=False, bbox=patch, **_NAME)


def _draw_node(ax: Any, colour: str, label: Label, center: Point, size: Size) -> None:
    (x, y), (width, height) = center, size
    _draw_box(ax, (x - width / 2, y - height / 2), size, 3, facecolor=colour, edgecolor="none")
    place = {"ha": "center", "va": "center_baseline", "color": "white", "parse_math": False}
    for i, (text, font) in enumerate(label):
        top = y + height / 2 - _PADDING[1]
        ax.text(x, top - (i + 0.5) * _LINE, text, **place, **font)


def _draw_box(ax: Any, corner: Point, size: Size, radius: float, **style: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    ax.add_artist(FancyBboxPatch(corner, *size, f"round,pad=0,rounding_size={radius}", **style))


def _draw_arrow(ax: Any, arrow: Arrow) -> Any:
    """Draw an arrow, and return its path."""
    from matplotlib.patches import PathPatch, Polygon
    from matplotlib.path import Path as Curve

    colour, width = ("#8c959f", 0.8) if arrow.is_side else ("#24292f", 1.4)
    codes = [Curve.MOVETO, *[Curve.CURVE4] * (len(arrow.curve) - 1)]
    curve = Curve(arrow.curve, codes)
    ax.add_artist(PathPatch(curve, fill=False, edgecolor=colour, lw=width))
    if arrow.tip is not None:
        (x, y), (tip_x, tip_y) = arrow.curve[-1], arrow.tip
        dx, dy = 0.35 * (tip_x - x), 0.35 * (tip_y - y)
        head = [arrow.tip, (x - dy, y + dx), (x + dy, y - dx)]
        ax.add_artist(Polygon(head, facecolor=colour, edgecolor="none"))
    return curve


def _image(path: Path) -> Any:
    """Return the picture for a notebook to show."""
    try:
        from IPython import get_ipython
        from IPython.display import Image
    except ImportError:
        return None
    return Image(filename=str(path)) if get_ipython() and path.suffix.lower() == ".png" else None
