"""The rewrites: edits as frozen data. One idea per file."""

from backbone_surgery.rewrites.rewrite import Rewrite, Rows, SiteRewrite, Surgery
from backbone_surgery.rewrites.steer import Steer

__all__ = ["Rewrite", "Rows", "SiteRewrite", "Steer", "Surgery"]
