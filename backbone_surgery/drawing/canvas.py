"""What is drawn on: a page of matplotlib, and boxes, texts and arrows in points (1/72 inch)."""

from pathlib import Path
from typing import Any

from backbone_surgery.drawing.layout import Arrow, Point, Size
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.files import save_picture
from backbone_surgery.numbers import is_int

_MOST_DPI = 2400

Font = dict[str, Any]
Label = list[tuple[str, Font]]
"""Lines of text, each with its font."""

_FAMILY = ["DejaVu Sans", "sans-serif"]  # matplotlib brings the first; a viewer may lack it
NAME: Font = {"family": _FAMILY, "size": 10, "weight": "bold"}
DETAIL: Font = {"family": _FAMILY, "size": 8}
# In points.
LINE = 13.0
_PADDING = (9.0, 3.0)
_MARGIN = 8.0


def check_dpi(dpi: Any, operation: str) -> None:
    """Refuse what are no dots per inch."""
    if not is_int(dpi) or not 1 <= dpi <= _MOST_DPI:
        raise SurgeryError(
            f"{operation}: expected dpi to be an integer from 1 to {_MOST_DPI}. Received "
            f"{shown(dpi)}. 96 is that of a screen, 300 that of a print."
        )


def new_page(size: Size) -> Any:
    """Return axes that fill a figure of a size in points, with a margin around it."""
    from matplotlib.figure import Figure

    width, height = size
    figure = Figure(((width + 2 * _MARGIN) / 72, (height + 2 * _MARGIN) / 72), facecolor="white")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(-_MARGIN, width + _MARGIN), ylim=(-_MARGIN, height + _MARGIN))
    ax.axis("off")
    return ax


def save_page(ax: Any, path: Path, operation: str, dpi: int) -> Any:
    """Save a page, and return the picture for a notebook to show."""
    from matplotlib import rc_context

    # Text stays text, to be searched and selected.
    with rc_context({"svg.fonttype": "none", "pdf.fonttype": 42}):
        save_picture(ax.figure, path, operation, dpi=dpi)
    try:
        from IPython import get_ipython
        from IPython.display import Image
    except ImportError:
        return None
    return Image(filename=str(path)) if get_ipython() and path.suffix.lower() == ".png" else None


def size_of(label: Label) -> Size:
    """Return width and height of a node with a label."""
    width = max(text_width(text, font) for text, font in label)
    return width + 2 * _PADDING[0], len(label) * LINE + 2 * _PADDING[1]


def text_width(text: str, font: Font) -> float:
    """Return the width of a line of text."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    return text_to_path.get_text_width_height_descent(text, FontProperties(**font), False)[0]


def draw_node(ax: Any, colour: str, label: Label, center: Point, size: Size) -> None:
    """Draw a box with a label."""
    (x, y), (width, height) = center, size
    draw_box(ax, (x - width / 2, y - height / 2), size, 3, facecolor=colour, edgecolor="none")
    place = {"ha": "center", "va": "center_baseline", "color": "white", "parse_math": False}
    for i, (text, font) in enumerate(label):
        top = y + height / 2 - _PADDING[1]
        ax.text(x, top - (i + 0.5) * LINE, text, **place, **font)


def draw_box(ax: Any, corner: Point, size: Size, radius: float, **style: Any) -> None:
    """Draw a box with round corners."""
    from matplotlib.patches import FancyBboxPatch

    ax.add_artist(FancyBboxPatch(corner, *size, f"round,pad=0,rounding_size={radius}", **style))


def draw_arrow(ax: Any, arrow: Arrow, colour: str, width: float) -> Any:
    """Draw an arrow, and return its path."""
    from matplotlib.patches import PathPatch, Polygon
    from matplotlib.path import Path as Curve

    codes = [Curve.MOVETO, *[Curve.CURVE4] * (len(arrow.curve) - 1)]
    curve = Curve(arrow.curve, codes)
    ax.add_artist(PathPatch(curve, fill=False, edgecolor=colour, lw=width))
    if arrow.tip is not None:
        (x, y), (tip_x, tip_y) = arrow.curve[-1], arrow.tip
        dx, dy = 0.35 * (tip_x - x), 0.35 * (tip_y - y)
        head = [arrow.tip, (x - dy, y + dx), (x + dy, y - dx)]
        ax.add_artist(Polygon(head, facecolor=colour, edgecolor="none"))
    return curve
