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
    SelectorError,
    SurgeryError,
    UnknownArchitectureError,
)
from backbone_surgery.figures import plot_attention, plot_grid, plot_lens
from backbone_surgery.generation.captures import Captures
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.graph import clone_layer_graph
from backbone_surgery.opening import open_backbone, sites
from backbone_surgery.operate import operate
from backbone_surgery.plotting import plot_model, to_mermaid
from backbone_surgery.rewire import rewire
from backbone_surgery.rewrites import (
    Ablate,
    Capture,
    Insert,
    LowRank,
    Patch,
    Remove,
    Reorder,
    Repeat,
    Replace,
    Rewrite,
    SiteRewrite,
    Skip,
    SparseAutoencoder,
    Steer,
    Wrap,
)

__version__ = "0.1.0"

__all__ = [
    "Ablate",
    "Attribution",
    "BackboneWithCache",
    "CacheMismatchError",
    "CachedCausalLM",
    "Capture",
    "Captures",
    "CheckReport",
    "EditedBackbone",
    "Insert",
    "LogitLens",
    "LowRank",
    "Patch",
    "PatchGrid",
    "Remove",
    "Reorder",
    "Repeat",
    "Replace",
    "Rewrite",
    "SelectorError",
    "SiteRewrite",
    "Skip",
    "SparseAutoencoder",
    "Steer",
    "SurgeryError",
    "UnknownArchitectureError",
    "Wrap",
    "attribute",
    "check",
    "clone_layer_graph",
    "collect",
    "emit",
    "logit_lens",
    "new_cache",
    "open_backbone",
    "operate",
    "patch_grid",
    "plot_attention",
    "plot_grid",
    "plot_lens",
    "plot_model",
    "rewire",
    "sites",
    "to_mermaid",
]
