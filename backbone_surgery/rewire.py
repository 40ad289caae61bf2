"""Pass 3, rewire: give each attention of a graph a key/value cache of its own."""

from typing import Any

import keras
from keras import tree

from backbone_surgery import attention, graph
from backbone_surgery.backbone import BackboneWithCache
from backbone_surgery.emission import emit
from backbone_surgery.errors import SurgeryError
from backbone_surgery.layers import ChunkMask, TokenPositions
from backbone_surgery.opening import open_backbone
from backbone_surgery.projection import HeadProjection, projects_heads
from backbone_surgery.rewrites.condition import CachedLatch, Latch


def rewire(backbone: keras.Model) -> BackboneWithCache:
    """Derive from a backbone's graph the same graph with cache inputs and outputs.

    The cached graph is a clone of the one it was derived from, edits included, over the same
    variables. Slots are counted from the graph: each attention node has one. The tokens can be run
    in chunks of any sizes; the hidden states are the same.

    Args:
        backbone: a backbone, a Functional model cloned from one, or an edited backbone.

    Returns:
        A Functional `keras.Model` named `backbone_with_cache`. Its inputs are a dict:
        `token_ids` int32[batch, time]; `cache`, a list of `{"key", "value"}` of
        float[batch, length, num_key_value_heads, head_dim]; `cache_update_index` int32[], the
        slot of the first token; `positions` int32[batch, time], the number of each token within
        its row; `cache_mask` bool[batch, length], false where a slot holds padding; and the
        controls. Its outputs are `{"hidden_states", "cache"}`, and `captures` where there are any.
        For each `Condition` of the graph `cache` ends with a `{"found"}` of bool[batch, length].

    Raises:
        SurgeryError: the graph cannot be opened, or holds no attention.

    Example:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> len(bs.rewire(backbone).output["cache"])
        2
    """
    opened = open_backbone(backbone)
    rewirer = _Rewirer(opened.compute_dtype)
    inputs = rewirer.inputs
    controls = {
        t.name: t for t in tree.flatten(opened.input) if t.name not in ("token_ids", "padding_mask")
    }
    chunk_mask = ChunkMask(name="chunk_mask")(
        inputs["token_ids"], inputs["cache_mask"], inputs["cache_update_index"]
    )
    values = {"token_ids": inputs["token_ids"], "padding_mask": chunk_mask, **controls}
    mapping = {id(t): values[t.name] for t in tree.flatten(opened.input)}
    outputs, emitted = graph.replay(opened.output, mapping, rewirer.visit, per_use=True)
    if not rewirer.keys:
        raise SurgeryError(
            f"rewire at '{backbone.name}': expected a graph with attention in it. Received one "
            "without any. Keep at least one decoder block."
        )
    caches = _entries(rewirer.keys, rewirer.values, rewirer.found)
    updates = ([emitted[t.name][0] for t in made] for made in rewirer.made)
    return BackboneWithCache(
        {**inputs, **controls, "cache": caches},
        {
            **(outputs if isinstance(outputs, dict) else {"hidden_states": outputs}),
            "cache": _entries(*updates),
        },
        source=opened,
    )


def _entries(keys: list, values: list, found: list) -> list[dict[str, Any]]:
    pairs = [{"key": k, "value": v} for k, v in zip(keys, values, strict=True)]
    return [*pairs, *({"found": f} for f in found)]


class _Rewirer:
    """The callback of the rewiring pass."""

    def __init__(self, compute_dtype: str) -> None:
        self.compute_dtype = compute_dtype
        self.projections: dict[int, HeadProjection] = {}
        self.inputs = {
            "token_ids": keras.Input((None,), dtype="int32", name="token_ids"),
            "positions": keras.Input((None,), dtype="int32", name="positions"),
            "cache_mask": keras.Input((None,), dtype="bool", name="cache_mask"),
            "cache_update_index": keras.Input(
                batch_shape=(), dtype="int32", name="cache_update_index"
            ),
        }
        self.keys: list[keras.KerasTensor] = []
        self.values: list[keras.KerasTensor] = []
        self.found: list[keras.KerasTensor] = []
        self.made = (self.keys, self.values, self.found)

    def visit(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(layer, TokenPositions):
            return self.inputs["positions"]
        if isinstance(layer, attention.SelfAttention):
            return self._attend(layer, *args[:3])
        if isinstance(layer, attention.AttentionPattern):
            return self._attend_pattern(layer, *args[:2])
        if isinstance(layer, attention.AttentionMix):
            return self._attend_mix(layer, *args)
        if isinstance(layer, Latch):
            return self._latch(layer, *args)
        if projects_heads(layer, self.compute_dtype):
            if id(layer) not in self.projections:  # one, however often the layer runs
                self.projections[id(layer)] = HeadProjection(layer)
            return self.projections[id(layer)](*args, **kwargs)
        return graph.KEEP

    def _attend(self, layer: Any, query: Any, key: Any, value: Any) -> Any:
        key_cache, value_cache = self._key_cache(key), self._value_cache(value)
        cached = attention.CachedSelfAttention(**_like(layer))
        index, mask = self.inputs["cache_update_index"], self.inputs["cache_mask"]
        mixed, keys, values = cached(query, key, value, key_cache, value_cache, index, mask)
        emit(key_cache.name, keys)
        emit(value_cache.name, values)
        return mixed

    def _attend_pattern(self, layer: Any, query: Any, key: Any) -> Any:
        key_cache = self._key_cache(key)
        cached = attention.CachedAttentionPattern(**_like(layer))
        index, mask = self.inputs["cache_update_index"], self.inputs["cache_mask"]
        pattern, keys = cached(query, key, key_cache, index, mask)
        emit(key_cache.name, keys)
        return pattern

    def _attend_mix(self, layer: Any, pattern: Any, value: Any) -> Any:
        value_cache = self._value_cache(value)
        cached = attention.CachedAttentionMix(**_like(layer))
        mixed, values = cached(pattern, value, value_cache, self.inputs["cache_update_index"])
        emit(value_cache.name, values)
        return mixed

    def _latch(self, layer: Any, found: Any) -> Any:
        cache = _cache_input(self.found, f"cache_{layer.name}", found)
        cached = CachedLatch(name=f"cached_{layer.name}")
        met, updated = cached(found, cache, self.inputs["cache_update_index"])
        emit(cache.name, updated)
        return met

    def _key_cache(self, like: keras.KerasTensor) -> keras.KerasTensor:
        return _cache_input(self.keys, f"cache_{len(self.keys)}_key", like)

    def _value_cache(self, like: keras.KerasTensor) -> keras.KerasTensor:
        return _cache_input(self.values, f"cache_{len(self.values)}_value", like)


def _cache_input(
    made: list[keras.KerasTensor], name: str, like: keras.KerasTensor
) -> keras.KerasTensor:
    tensor = keras.Input((None, *like.shape[2:]), dtype=like.dtype, name=name)
    made.append(tensor)
    return tensor


def _like(layer: Any) -> dict[str, Any]:
    return {**layer.settings(), "dtype": layer.dtype_policy, "name": f"cached_{layer.name}"}
