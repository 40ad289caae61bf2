"""Analysis: questions asked of a language model, answered by rewrites and few batched passes."""

from backbone_surgery.analysis.attribution import Attribution, attribution
from backbone_surgery.analysis.logit_lens import LogitLens, logit_lens
from backbone_surgery.analysis.patch_grid import PatchGrid, patch_grid

__all__ = ["Attribution", "LogitLens", "PatchGrid", "attribution", "logit_lens", "patch_grid"]
