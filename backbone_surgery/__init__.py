"""Surgery on LLM backbones, with the KV cache rewired automatically.

Open a KerasHub backbone's layer graph, change it, derive a cached graph from the changed one, and
generate from that at compiled speed. Layers are shared at every step, never copied.
"""

import backbone_surgery.startup  # noqa: F401 - first, before Keras is imported

# isort: split
from backbone_surgery.analysis import (
    Attribution,
    LogitLens,
    PatchGrid,
    attribute,
    logit_lens,
    patch_grid,
)
from backbone_surgery.backbone import BackboneWithCache, EditedBackbone
from backbone_surgery.cache import new_cache
from backbone_surgery.checking import CheckReport, check
from backbone_surgery.emission import collect, emit
from backbone_surgery.errors import (
    CacheMismatchError,
    RecipeError,
    SelectorError,
    SurgeryError,
    UnknownArchitectureError,
    WeightMismatchError,
)
from backbone_surgery.figures import plot_attention, plot_grid, plot_lens
from backbone_surgery.generation.captures import Captures
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.compile_cache import compile_cache
from backbone_surgery.graph import clone_layer_graph
from backbone_surgery.nested import rewrite_nested
from backbone_surgery.opening import open_backbone, sites
from backbone_surgery.operate import operate
from backbone_surgery.plotting import plot_model, to_mermaid
from backbone_surgery.rewire import rewire
from backbone_surgery.rewrites import (
    Ablate,
    Capture,
    Condition,
    Control,
    Insert,
    LowRank,
    Patch,
    Remove,
    Reorder,
    Repeat,
    Replace,
    Rewrite,
    Schedule,
    SiteRewrite,
    Skip,
    SparseAutoencoder,
    Steer,
    Wrap,
)
from backbone_surgery.sweep import Sweep, sweep
from backbone_surgery.vectors import ControlVector, contrast_pairs
from backbone_surgery.version import __version__
from backbone_surgery.weights.describe import register_rewrite
from backbone_surgery.weights.digest import weights_digest
from backbone_surgery.weights.merge import merge
from backbone_surgery.weights.recipe import load_recipe, save_recipe
from backbone_surgery.weights.report import TransferReport
from backbone_surgery.weights.transfer import transfer_weights
from backbone_surgery.weights.tree import weight_tree

__all__ = [
    "Ablate",
    "Attribution",
    "BackboneWithCache",
    "CacheMismatchError",
    "CachedCausalLM",
    "Capture",
    "Captures",
    "CheckReport",
    "Condition",
    "Control",
    "ControlVector",
    "EditedBackbone",
    "Insert",
    "LogitLens",
    "LowRank",
    "Patch",
    "PatchGrid",
    "RecipeError",
    "Remove",
    "Reorder",
    "Repeat",
    "Replace",
    "Rewrite",
    "Schedule",
    "SelectorError",
    "SiteRewrite",
    "Skip",
    "SparseAutoencoder",
    "Steer",
    "SurgeryError",
    "Sweep",
    "TransferReport",
    "UnknownArchitectureError",
    "WeightMismatchError",
    "Wrap",
    "__version__",
    "attribute",
    "check",
    "clone_layer_graph",
    "collect",
    "compile_cache",
    "contrast_pairs",
    "emit",
    "load_recipe",
    "logit_lens",
    "merge",
    "new_cache",
    "open_backbone",
    "operate",
    "patch_grid",
    "plot_attention",
    "plot_grid",
    "plot_lens",
    "plot_model",
    "register_rewrite",
    "rewire",
    "rewrite_nested",
    "save_recipe",
    "sites",
    "sweep",
    "to_mermaid",
    "transfer_weights",
    "weight_tree",
    "weights_digest",
]
