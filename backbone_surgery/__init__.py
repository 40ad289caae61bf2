"""Surgery on LLM backbones, with the KV cache rewired automatically."""

from backbone_surgery.graph import clone_layer_graph, collect, emit
from backbone_surgery.opening import open_backbone
from backbone_surgery.operate import operate
from backbone_surgery.rewire import rewire
from backbone_surgery.cache import new_cache
from backbone_surgery.rewrites import Steer
from backbone_surgery import sites as _sites
from backbone_surgery.generation.causal_lm import CachedCausalLM
def sites(model):
    return [p.path for p in _sites.places(model)]
