"""Gemma 4, and the text-only view of one with images or sounds.

Local blocks have a window. Global ones have heads of another size, of which they rotate a part; in
the large models they make keys and values by one projection, and the sites `key` and `value` are
both what it gives. In the small models the last blocks have no keys and values, nor sites for them:
they attend to those of an earlier block, which keeps them for all. There each block also takes an
input of its own for each token, made of its id and of its embedding before the site `embeddings`.

KerasHub multiplies with the kernels of the MLP instead of calling its layers, so what it computes
after int8 quantisation is wrong (LoRA counts); here the layers are called. In float16 KerasHub
clips the stream: such a backbone is refused, as is one whose tokens attend to later ones, and that
of a drafter. KerasHub's task has a `final_logit_cap` of its own. It is not the backbone's, so it is
seen here in a preset alone: make the backbone with `final_logit_soft_cap` for the same logits. That
task fails with beam search, which works here.
"""

from keras import layers
from keras_hub.src.models.gemma4.gemma4_decoder_block import Gemma4TextDecoderBlock
from keras_hub.src.models.gemma4.gemma4_layers import (
    Gemma4InterleaveEmbeddings,
    Gemma4VNorm,
    RMSNormalization,
)
from keras_hub.src.utils.keras_utils import gelu_approximate

from backbone_surgery.families.gemma4_mlp import gemma4_mlp
from backbone_surgery.families.gemma_block import refuse_gemma_block
from backbone_surgery.families.parts import GatedProduct, PartialRotary, Scaled
from backbone_surgery.opening.attention import SelfAttention, SharedKeysAndValues
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.site import Site


def open_block(block, stream, padding_mask, positions, lends=False, **further):
    """Spell out one block; `shared_kv` in `further` is the keys and values of an earlier one."""
    policy = block.dtype_policy
    x = Site("attention_norm")(block.pre_attention_norm(stream))
    borrowed = further.get("shared_kv")
    query, lent = _project(block.attention, x, positions, borrowed)
    if lends and borrowed is None:
        keep = SharedKeysAndValues(query.shape[2], dtype=policy, name="shared_keys_and_values")
        lent = keep(*lent)
    x = _attend(block, query, lent, padding_mask, keeps_state=not lends and borrowed is None)
    x = layers.Add(dtype=policy, name="attention_residual")([stream, x])
    residual = Site("residual_mid")(x)
    x = gemma4_mlp(block, residual, padding_mask)
    x = layers.Add(dtype=policy, name="mlp_residual")([residual, x])
    if "per_layer_input" in further:
        product = GatedProduct(gelu_approximate, dtype=policy, name="per_layer_product")
        made = product(block.per_layer_input_gate(x), further["per_layer_input"])
        made = block.post_per_layer_input_norm(block.per_layer_up_proj(made))
        made = Site("per_layer_output")(made)
        x = layers.Add(dtype=policy, name="per_layer_residual")([x, made])
    x = Scaled(block.layer_scalar, dtype=policy, name="layer_scalar")(x)
    return (x, *lent) if lends else x


def _project(layer, x, positions, borrowed):
    """Return the queries, and the keys and values, which may be borrowed."""

    def rotate(heads, name):
        settings = {"dtype": layer.dtype_policy, "name": name}
        return PartialRotary(layer.rope_layer, layer.rotary_dim, 2, **settings)(heads, positions)

    query = layer.query_norm(Site("query")(layer.query_dense(x)))
    query = rotate(query, "query_rotary")
    if borrowed is not None:
        return query, borrowed
    raw_key = layer.key_dense(x)
    raw_value = raw_key if layer.attention_k_eq_v else layer.value_dense(x)
    key = rotate(layer.key_norm(Site("key")(raw_key)), "key_rotary")
    return query, (key, layer.value_norm(Site("value")(raw_value)))


def _attend(block, query, keys_and_values, padding_mask, keeps_state):
    layer, windowed = block.attention, block.attention.use_sliding_window_attention
    key, value = keys_and_values
    x = SelfAttention(
        num_heads=query.shape[2],
        num_key_value_heads=key.shape[2],
        head_dim=query.shape[3],
        scale=1.0,
        logit_soft_cap=layer.logit_soft_cap,
        sliding_window_size=layer.sliding_window_size if windowed else None,
        keeps_state=keeps_state,
        dropout=layer.dropout_layer if layer.dropout > 0 else None,
        dtype=block.dtype_policy,
        name="self_attention",
    )(query, key, value, padding_mask)
    x = block.post_attention_norm(layer.output_dense(Site("head_outputs")(x)))
    x = Site("attention_output")(x)
    return block.attention_dropout(x) if block.dropout else x


def _refuse(block):
    if block.attention.is_kv_shared_layer and not block.is_kv_shared_layer:
        return (
            "a block with keys and values. Received one of a drafter, which reads the cache of "
            "another model. Use that model"
        )
    return refuse_gemma_block(block)


FAMILY = Family(
    name="gemma4",
    block=Gemma4TextDecoderBlock,
    open_block=open_block,
    pointwise_layers=(RMSNormalization, Gemma4VNorm),
    refuse=_refuse,
    ignored=("vision_mask", "positions"),
    further=("per_layer_input", "shared_kv"),
    position_inputs=("position_ids",),
    images=Gemma4InterleaveEmbeddings,
    stop_tokens=("<turn|>",),
    model_types=("gemma4", "gemma4_text"),
)
