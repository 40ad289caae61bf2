"""GPT-2 and Gemma in plain NumPy, with edits: what the rewrites are compared with.

A model is a list of blocks. Editing one is putting functions at its sites, wrapping what a block
does, or changing the list; nothing of the package is used.
"""

import copy
from functools import partial

import numpy as np


def weights_of(layer):
    return [np.asarray(w, "float64") for w in layer.get_weights()]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def layer_norm(layer, x):
    gamma, beta = weights_of(layer)
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + layer.epsilon) * gamma + beta


def rms_norm(layer, x):
    (scale,) = weights_of(layer)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + layer.epsilon) * (1 + scale)


def rotate(x):
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] / 10000 ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[None, :, None], np.sin(angles)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(query, key, value, scale, site, logit_soft_cap=None, sliding_window_size=None):
    """Causal attention; key and value heads are shared by groups of query heads."""
    groups = query.shape[2] // key.shape[2]
    key, value = np.repeat(key, groups, axis=2), np.repeat(value, groups, axis=2)
    scores = np.einsum("bthd,bshd->bhts", query, key) * scale
    if logit_soft_cap:
        scores = np.tanh(scores / logit_soft_cap) * logit_soft_cap
    time = scores.shape[-1]
    distance = np.arange(time)[:, None] - np.arange(time)[None]
    mask = (distance >= 0) & (distance < (sliding_window_size or time))
    exp = np.exp(scores - scores.max(-1, keepdims=True)) * mask
    pattern = site("attention_pattern", exp / exp.sum(-1, keepdims=True))
    return np.einsum("bhts,bshd->bthd", pattern, value)


class Block:
    """One use of a decoder block: functions at its sites, and what it does as a whole."""

    def __init__(self, run):
        self.hooks, self.seen, self.whole = {}, {}, partial(type(self)._core, run=run)

    def _core(self, x, run):
        return run(x, self.site)

    def site(self, role, x, source=None):
        for hook in self.hooks.get(role, []):
            x = hook(x, source)
        self.seen[role] = x
        return x

    def at(self, role, hook):
        """Put `hook(x, source)` at a site; at `block`, the source is the block's input."""
        if role == "block":
            inner = self.whole
            self.whole = lambda block, x: hook(inner(block, x), x)
        else:
            self.hooks.setdefault(role, []).append(hook)

    def wrap(self, wrapper):
        """Make the block `wrapper(x, block)`."""
        inner = self.whole
        self.whole = lambda block, x: wrapper(x, lambda z: inner(block, z))

    def copy(self):
        new = copy.copy(self)
        new.hooks, new.seen = {k: list(v) for k, v in self.hooks.items()}, {}
        return new

    def __call__(self, x):
        self.seen["block"] = self.whole(self, x)
        return self.seen["block"]


def gpt2_block(layer, x, site):
    attention, residual = layer._self_attention_layer, x
    x = site("attention_norm", layer_norm(layer._self_attention_layer_norm, x))
    q, k, v = (
        site(n, np.einsum("btd,dnh->btnh", x, w) + b, x)
        for n, (w, b) in (
            (name, weights_of(getattr(attention, f"{name}_dense")))
            for name in ("query", "key", "value")
        )
    )
    mixed = site("head_outputs", attend(q, k, v, q.shape[-1] ** -0.5, site))
    w, b = weights_of(attention.output_dense)
    out = site("attention_output", np.einsum("btnh,nhd->btd", mixed, w) + b, mixed)
    residual = site("residual_mid", out + residual)
    x = site("mlp_norm", layer_norm(layer._feedforward_layer_norm, residual))
    w, b = weights_of(layer._feedforward_intermediate_dense)
    hidden = site("mlp_hidden", gelu(x @ w + b), x)
    w, b = weights_of(layer._feedforward_output_dense)
    return residual + site("mlp_output", hidden @ w + b, hidden)


def gemma_block(layer, x, site):
    attention, residual = layer.attention, x
    x = site("attention_norm", rms_norm(layer.pre_attention_norm, x))
    q, k, v = (
        site(n, np.einsum("btd,ndh->btnh", x, weights_of(getattr(attention, f"{n}_dense"))[0]), x)
        for n in ("query", "key", "value")
    )
    size = attention.sliding_window_size if attention.use_sliding_window_attention else None
    scale = q.shape[-1] ** -0.5
    cap = attention.logit_soft_cap
    mixed = site("head_outputs", attend(rotate(q), rotate(k), v, scale, site, cap, size))
    out = np.einsum("btnh,nhd->btd", mixed, weights_of(attention.output_dense)[0])
    if layer.use_post_attention_norm:
        out = rms_norm(layer.post_attention_norm, out)
    residual = site("residual_mid", site("attention_output", out, mixed) + residual)
    x = site("mlp_norm", rms_norm(layer.pre_ffw_norm, residual))
    gate, up = (x @ weights_of(dense)[0] for dense in (layer.gating_ffw, layer.gating_ffw_2))
    hidden = site("mlp_hidden", gelu(gate) * up, x)
    out = hidden @ weights_of(layer.ffw_linear)[0]
    if layer.use_post_ffw_norm:
        out = rms_norm(layer.post_ffw_norm, out)
    return residual + site("mlp_output", out, hidden)


class Model:
    """A backbone in NumPy.

    Attributes:
        blocks: what runs, in order.
    """

    def __init__(self, backbone):
        self.backbone = backbone
        self.gpt2 = "GPT2" in type(backbone).__name__
        run = gpt2_block if self.gpt2 else gemma_block
        self.blocks = [Block(partial(run, layer)) for layer in backbone.transformer_layers]

    def __call__(self, token_ids):
        """Return the hidden states, float64[batch, time, hidden_dim]."""
        x = weights_of(self.backbone.token_embedding)[0][token_ids]
        if self.gpt2:
            x = x + weights_of(self.backbone.position_embedding)[0][: x.shape[1]]
        else:
            x = x * np.sqrt(x.shape[-1])
        for block in self.blocks:
            x = block(x)
        norm = layer_norm if self.gpt2 else rms_norm
        return norm(self.backbone.layer_norm, x)

    @property
    def hidden_size(self):
        """How wide `mlp_hidden` is."""
        layer = self.backbone.transformer_layers[0]
        down = layer._feedforward_output_dense if self.gpt2 else layer.ffw_linear
        return down.kernel.shape[0]

    def captures(self):
        """Return what stood at each site in the last run, by path."""
        pairs = enumerate(self.blocks)
        return {
            f"blocks.{i}" if role == "block" else f"blocks.{i}.{role}": value
            for i, block in pairs
            for role, value in block.seen.items()
        }
