"""The rewrites: edits as frozen data. One idea per file."""

from backbone_surgery.rewrites.ablate import Ablate
from backbone_surgery.rewrites.capture import Capture
from backbone_surgery.rewrites.condition import Condition
from backbone_surgery.rewrites.control import Control, Schedule
from backbone_surgery.rewrites.depth import Remove, Reorder, Repeat, Skip
from backbone_surgery.rewrites.insert import Insert, Replace
from backbone_surgery.rewrites.low_rank import LowRank
from backbone_surgery.rewrites.patch import Patch
from backbone_surgery.rewrites.rewrite import Rewrite, Rows, SiteRewrite, Surgery
from backbone_surgery.rewrites.sparse_autoencoder import SparseAutoencoder
from backbone_surgery.rewrites.steer import Steer
from backbone_surgery.rewrites.wrap import Wrap

__all__ = [
    "Ablate",
    "Capture",
    "Condition",
    "Control",
    "Insert",
    "LowRank",
    "Patch",
    "Remove",
    "Reorder",
    "Repeat",
    "Replace",
    "Rewrite",
    "Rows",
    "Schedule",
    "SiteRewrite",
    "Skip",
    "SparseAutoencoder",
    "Steer",
    "Surgery",
    "Wrap",
]
