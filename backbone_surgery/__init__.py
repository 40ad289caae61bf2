"""Surgery on LLM backbones, with the KV cache rewired automatically.

Open a KerasHub backbone's layer graph, change it, derive a cached graph from the changed one, and
generate from that at compiled speed. Layers are shared at every step, never copied.
"""

import backbone_surgery.startup

# isort: split
import backbone_surgery.families  # noqa: F401 - they register themselves
from backbone_surgery.analysis.attribution import Attribution, attribution
from backbone_surgery.analysis.attribution_graph import AttributionGraph, attribution_graph
from backbone_surgery.analysis.circuit import Faithfulness, faithfulness
from backbone_surgery.analysis.direct import DirectLogitAttribution, direct_logit_attribution
from backbone_surgery.analysis.edges import Edges, edge_attribution, edge_patching
from backbone_surgery.analysis.logit_lens import LogitLens, logit_lens
from backbone_surgery.analysis.patch_grid import PatchGrid, patch_grid
from backbone_surgery.byte_pairs import repair_tokenizer
from backbone_surgery.caching.cache import new_cache
from backbone_surgery.caching.check import CheckReport, check
from backbone_surgery.caching.model import BackboneWithCache
from backbone_surgery.caching.rewire import rewire
from backbone_surgery.datasets.generating import generate_dataset
from backbone_surgery.datasets.harvesting import harvest
from backbone_surgery.drawing.attribution_graphs import plot_attribution_graph
from backbone_surgery.drawing.circuits import plot_circuit
from backbone_surgery.drawing.figures import plot_attention, plot_grid, plot_lens
from backbone_surgery.drawing.mermaid import to_mermaid
from backbone_surgery.drawing.plotting import plot_model
from backbone_surgery.errors import (
    CacheMismatchError,
    RecipeError,
    SelectorError,
    SurgeryError,
    UnknownArchitectureError,
    WeightMismatchError,
)
from backbone_surgery.generation.captures import GeneratedActivations
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.formats.response_format import ResponseFormat
from backbone_surgery.generation.penalties import Penalties
from backbone_surgery.generation.sweep import Sweep, sweep
from backbone_surgery.graph.emission import collect, emit
from backbone_surgery.graph.replay import clone_layer_graph
from backbone_surgery.meshes.layout_map import layout_map
from backbone_surgery.opening.attention import SelfAttention
from backbone_surgery.opening.family import Family, register_family
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.open import open_backbone, sites
from backbone_surgery.opening.site import Site
from backbone_surgery.opening.state import Stateful, StateSpec
from backbone_surgery.planning.compilers import CompiledProgram
from backbone_surgery.planning.plan import plan
from backbone_surgery.planning.result import Plan
from backbone_surgery.recipes.peft import save_peft
from backbone_surgery.recipes.recipe import load_recipe, save_recipe
from backbone_surgery.rewriting import (
    Ablate,
    Capture,
    Clamp,
    Condition,
    Control,
    Insert,
    Knockout,
    Lora,
    LowRank,
    Patch,
    ProjectOut,
    Reft,
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
    Transcoder,
    Wrap,
)
from backbone_surgery.rewriting.nested import rewrite_nested
from backbone_surgery.rewriting.operate import operate
from backbone_surgery.serving.engine import Engine
from backbone_surgery.serving.logprobs import TokenLogprobs
from backbone_surgery.serving.request import EngineRequest
from backbone_surgery.serving.scheduler import EngineStats, QueueFullError
from backbone_surgery.serving.serve import serve
from backbone_surgery.tuning import Trial, Tuning, tune
from backbone_surgery.tuning.subspace import FoundSubspace, find_subspace
from backbone_surgery.vectors import ControlVector, contrast_pairs, score_detection
from backbone_surgery.vectors.finding import FoundCondition, find_condition
from backbone_surgery.version import __version__
from backbone_surgery.weights.merge import merge
from backbone_surgery.weights.report import TransferReport
from backbone_surgery.weights.transfer import transfer_weights
from backbone_surgery.weights.tree import weight_tree, weights_digest

__all__ = [
    "Ablate",
    "Attribution",
    "AttributionGraph",
    "BackboneWithCache",
    "CacheMismatchError",
    "CachedCausalLM",
    "Capture",
    "CheckReport",
    "Clamp",
    "CompiledProgram",
    "Condition",
    "Control",
    "ControlVector",
    "DirectLogitAttribution",
    "Edges",
    "EditedBackbone",
    "Engine",
    "EngineRequest",
    "EngineStats",
    "Faithfulness",
    "Family",
    "FoundCondition",
    "FoundSubspace",
    "GeneratedActivations",
    "Insert",
    "Knockout",
    "LogitLens",
    "Lora",
    "LowRank",
    "Patch",
    "PatchGrid",
    "Penalties",
    "Plan",
    "ProjectOut",
    "QueueFullError",
    "RecipeError",
    "Reft",
    "Remove",
    "Reorder",
    "Repeat",
    "Replace",
    "ResponseFormat",
    "Rewrite",
    "Schedule",
    "SelectorError",
    "SelfAttention",
    "Site",
    "SiteRewrite",
    "Skip",
    "SparseAutoencoder",
    "StateSpec",
    "Stateful",
    "Steer",
    "SurgeryError",
    "Sweep",
    "TokenLogprobs",
    "Transcoder",
    "TransferReport",
    "Trial",
    "Tuning",
    "UnknownArchitectureError",
    "WeightMismatchError",
    "Wrap",
    "__version__",
    "attribution",
    "attribution_graph",
    "check",
    "clone_layer_graph",
    "collect",
    "contrast_pairs",
    "direct_logit_attribution",
    "edge_attribution",
    "edge_patching",
    "emit",
    "faithfulness",
    "find_condition",
    "find_subspace",
    "generate_dataset",
    "harvest",
    "layout_map",
    "load_recipe",
    "logit_lens",
    "merge",
    "new_cache",
    "open_backbone",
    "operate",
    "patch_grid",
    "plan",
    "plot_attention",
    "plot_attribution_graph",
    "plot_circuit",
    "plot_grid",
    "plot_lens",
    "plot_model",
    "register_family",
    "repair_tokenizer",
    "rewire",
    "rewrite_nested",
    "save_peft",
    "save_recipe",
    "score_detection",
    "serve",
    "sites",
    "sweep",
    "to_mermaid",
    "transfer_weights",
    "tune",
    "weight_tree",
    "weights_digest",
]
