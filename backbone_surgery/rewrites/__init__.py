"""The rewrites: edits as frozen data. One idea per file."""

from backbone_surgery.rewrites.condition import Condition
from backbone_surgery.rewrites.control import Control, Schedule
from backbone_surgery.rewrites.rewrite import Rewrite, Rows, SiteRewrite, Surgery
from backbone_surgery.rewrites.steer import Steer

__all__ = [
    "Condition",
    "Control",
    "Rewrite",
    "Rows",
    "Schedule",
    "SiteRewrite",
    "Steer",
    "Surgery",
]
