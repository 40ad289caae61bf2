"""The rewrites: edits as frozen data. One idea per file."""

from backbone_surgery.rewrites.capture import Capture
from backbone_surgery.rewrites.depth import Remove, Reorder, Repeat, Skip
from backbone_surgery.rewrites.rewrite import Rewrite, Rows, SiteRewrite, Surgery
from backbone_surgery.rewrites.steer import Steer

__all__ = [
    "Capture",
    "Remove",
    "Reorder",
    "Repeat",
    "Rewrite",
    "Rows",
    "SiteRewrite",
    "Skip",
    "Steer",
    "Surgery",
]
