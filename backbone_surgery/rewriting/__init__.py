"""The rewrites: edits as frozen data. One idea per file."""

from backbone_surgery.rewriting.ablate import Ablate
from backbone_surgery.rewriting.capture import Capture
from backbone_surgery.rewriting.clamp import Clamp
from backbone_surgery.rewriting.condition import Condition
from backbone_surgery.rewriting.control import Control, Schedule
from backbone_surgery.rewriting.depth import Remove, Reorder, Repeat, Skip
from backbone_surgery.rewriting.insert import Insert, Replace
from backbone_surgery.rewriting.knockout import Knockout
from backbone_surgery.rewriting.lora import Lora
from backbone_surgery.rewriting.low_rank import LowRank
from backbone_surgery.rewriting.patch import Patch
from backbone_surgery.rewriting.project_out import ProjectOut
from backbone_surgery.rewriting.reft import Reft
from backbone_surgery.rewriting.rewrite import Rewrite, Rows, SiteRewrite, Surgery
from backbone_surgery.rewriting.sparse_autoencoder import SparseAutoencoder
from backbone_surgery.rewriting.steer import Steer
from backbone_surgery.rewriting.transcoder import Transcoder
from backbone_surgery.rewriting.wrap import Wrap

__all__ = [
    "Ablate",
    "Capture",
    "Clamp",
    "Condition",
    "Control",
    "Insert",
    "Knockout",
    "Lora",
    "LowRank",
    "Patch",
    "ProjectOut",
    "Reft",
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
    "Transcoder",
    "Wrap",
]
