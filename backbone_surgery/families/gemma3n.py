"""Gemma 3n, and the text-only view of one with images or sounds: several streams (AltUp), Laurel.

One layer of the backbone holds all blocks, and another one embeds tokens, images and sounds: both
are spelled out. The site at the end of a block is the active stream, and `other_streams` the
others, in order. A block runs on what it predicts of the active stream: it adds attention and
Laurel, a small product of two matrices that reads what attention does, and divides by the root of
2. What it makes of its input for each layer goes to all streams but the first.

The last blocks may have no keys and values, nor sites for them: they attend to those of the last
block before of their type, local or global. The logits come of the plain embedding of tokens, which
KerasHub multiplies with as it is stored, so its own logits after quantisation are wrong.
"""

import math

from keras import layers
from keras_hub.src.models.gemma3n.gemma3n_backbone import Gemma3nMultimodalEmbeddingProcessor
from keras_hub.src.models.gemma3n.gemma3n_text_decoder import Gemma3nTextDecoderBlock
from keras_hub.src.models.gemma3n.gemma3n_text_model import Gemma3nTextModel
from keras_hub.src.models.gemma3n.rms_normalization import Gemma3nRMSNorm

from backbone_surgery import graph
from backbone_surgery.families.altup import (
    AddToStreams,
    AsLargeAs,
    CorrectStreams,
    MeanStream,
    PredictStreams,
    StackStreams,
    TakeStream,
    Tanh,
)
from backbone_surgery.families.parts import (
    GatedProduct,
    JoinHeads,
    KnownTokens,
    Scaled,
    SplitHeads,
    Times,
)
from backbone_surgery.families.pre_norm import gated_mlp, rotary
from backbone_surgery.families.tied_head import TiedHead
from backbone_surgery.opening.attention import SelfAttention, SharedKeysAndValues
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.site import Site


def open_block(block, stream, padding_mask, positions, lends=False, **further):
    """Spell out one block; `shared_kv` in `further` is the keys and values of an earlier one."""
    policy, altup = block.dtype_policy, block.altup
    weights = altup.prediction_coefs(_route(altup, stream, "prediction"))
    predict = PredictStreams(dtype=policy, name="predicted_streams")
    stream, others = predict(weights, stream, further["other_streams"])
    x = Site("attention_norm")(block.input_layernorm(stream))
    attended, lent = _attend(block, x, padding_mask, positions, lends, further.get("shared_kv"))
    summed = layers.Add(dtype=policy, name="attention_residual")([stream, attended])
    summed = layers.Add(dtype=policy, name="laurel_residual")([summed, _laurel(block, x)])
    residual = Times(1 / math.sqrt(2), dtype=policy, name="residual_scale")(summed)
    residual = Site("residual_mid")(residual)
    x = _mlp(block, Site("mlp_norm")(block.pre_feedforward_layernorm(residual)))
    made = layers.Add(dtype=policy, name="mlp_residual")([residual, x])
    weights = altup.correction_coefs(_route(altup, made, "correction"))
    correct = CorrectStreams(dtype=policy, name="corrected_streams")
    stream, others = correct(weights, stream, others, made)
    made = _per_layer(block, stream, further["per_layer_input"])
    others = AddToStreams(dtype=policy, name="per_layer_residual")(made, others)
    return stream, others, *(lent if lends else ())


def _route(altup, x, name):
    """Return what the weights of streams are made of."""
    policy = altup.dtype_policy
    scale = Times(altup.router_input_scale, dtype=policy, name=f"{name}_router_scale")
    x = altup.modality_router(scale(altup.router_norm(x)))
    return Tanh(dtype=policy, name=f"{name}_router_tanh")(x)


def _attend(block, x, padding_mask, positions, lends, borrowed):
    """Return what attention adds to the stream, and the keys and values."""
    layer, policy = block.attention, block.dtype_policy
    rotate = rotary(layer.rotary_embedding, positions)

    def heads(role, projection):
        split = SplitHeads(layer.head_dim, dtype=policy, name=f"{role}_heads")
        return Site(role)(split(projection(x)))

    query = rotate(layer.q_norm(heads("query", layer.q_proj)), "query_rotary")
    lent = borrowed
    if borrowed is None:
        key = rotate(layer.k_norm(heads("key", layer.k_proj)), "key_rotary")
        lent = key, layer.v_norm(heads("value", layer.v_proj))
        if lends:
            keep = SharedKeysAndValues(query.shape[2], dtype=policy, name="shared_keys_and_values")
            lent = keep(*lent)
    x = SelfAttention(
        num_heads=query.shape[2],
        num_key_value_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim,
        scale=1.0,
        sliding_window_size=layer.sliding_window,
        keeps_state=not lends and borrowed is None,
        dropout=layer.dropout if layer.dropout.rate > 0 else None,
        dtype=policy,
        name="self_attention",
    )(query, *lent, padding_mask)
    x = JoinHeads(dtype=policy, name="joined_heads")(Site("head_outputs")(x))
    return Site("attention_output")(block.post_attention_layernorm(layer.o_proj(x))), lent


def _laurel(block, x):
    laurel = block.laurel
    made = laurel.post_laurel_norm(laurel.linear_right(laurel.linear_left(x)))
    made = layers.Add(dtype=block.dtype_policy, name="laurel_sum")([x, made])
    return Site("laurel_output")(made)


def _mlp(block, x):
    mlp = block.mlp

    def activation(gate):
        return mlp.act_fn(mlp._gaussian_topk(gate) if mlp.activation_sparsity > 0 else gate)

    # What is less than the mean by some deviations is nothing: devices add these up.
    activation.sums = 2 if mlp.activation_sparsity > 0 else 0

    def down(x):
        return block.post_feedforward_layernorm(mlp.down_proj(x))

    return gated_mlp(x, mlp.gate_proj, mlp.up_proj, down, activation, block.dtype_policy)


def _per_layer(block, stream, per_layer_input):
    """Return what a block makes of its own input for each token, and of the active stream."""
    policy = block.dtype_policy
    if block.altup_correct_scale:
        scale = block.altup.correct_output_scale
        stream = Scaled(scale, dtype=policy, name="corrected_scale")(stream)
    product = GatedProduct(block.act_fn, dtype=policy, name="per_layer_product")
    made = product(block.per_layer_input_gate(stream), per_layer_input)
    made = block.post_per_layer_input_norm(block.per_layer_projection(made))
    return Site("per_layer_output")(made)


def spell_embeddings(layer, _, inputs):
    """Spell out the embeddings of text, and the inputs that each block takes of a token."""
    model, ids = layer.language_model, inputs["token_ids"]
    policy = model.dtype_policy

    def embed(table, ids):
        return Times(table.embed_scale, dtype=policy, name=table.name)(table.embedding(ids))

    embedded = embed(model.embed_tokens, ids)
    known = KnownTokens(layer.vocab_size_per_layer_input, name="known_tokens")(ids)

    def build(ids):  # nested, since both tables have one name
        return embed(model.embed_tokens_per_layer, ids)

    def split(x, name):
        settings = {"dtype": policy, "name": f"{name}_by_layer"}
        return SplitHeads(model.hidden_size_per_layer_input, **settings)(x)

    looked_up = split(graph.nest("per_layer_embeddings", build, known), "embeddings")
    made = model.per_layer_model_projection(embedded)
    scale = model.per_layer_projection_scale
    made = Times(scale, dtype=policy, name="per_layer_projection_scale")(made)
    made = model.per_layer_projection_norm(split(made, "projection"))
    made = layers.Add(dtype=policy, name="per_layer_sum")([made, looked_up])
    scale = model.per_layer_input_scale
    return embedded, Times(scale, dtype=policy, name="per_layer_input_scale")(made)


def spell_model(model, run_block, input_ids, padding_mask, embedded, per_layer_inputs):
    """Spell out what runs the blocks: streams made of the embeddings, and one made of them."""
    policy = model.dtype_policy
    x = Site("embeddings")(embedded)
    streams = [_project(projection, x, x, policy) for projection in model.altup_projections]
    others = Site("other_streams")(StackStreams(dtype=policy, name="stacked_streams")(*streams))
    shared_from = _shared_from(model)
    lenders = {kind: i for i, kind in enumerate(model.layer_types[:shared_from])}
    lent = {}
    for i, (block, kind) in enumerate(
        zip(model.transformer_layers, model.layer_types, strict=True)
    ):
        take = TakeStream(i, dtype=policy, name=f"per_layer_input_{i}")
        further = {"other_streams": others, "per_layer_input": take(per_layer_inputs)}
        if i >= shared_from:
            further["shared_kv"] = lent[kind]
        lends = lenders.get(kind) == i and kind in model.layer_types[shared_from:]
        x, others, *kept = run_block(block, x, padding_mask, lends=lends, **further)
        if lends:
            lent[kind] = tuple(kept)
    count = model.altup_num_inputs - 1
    streams = [TakeStream(i, dtype=policy, name=f"stream_{i}")(others) for i in range(count)]
    pairs = zip(model.altup_unembed_projections, streams, strict=True)
    streams = [_project(projection, stream, x, policy) for projection, stream in pairs]
    return model.final_normalization(MeanStream(dtype=policy, name="mean_stream")(x, *streams))


def _project(projection, x, other, policy):
    """Project a stream, and scale it to the size of another one."""
    return AsLargeAs(dtype=policy, name=f"{projection.name}_scale")(projection(x), other)


def _shared_from(model):
    """Return the first block without keys and values."""
    count = len(model.transformer_layers)
    return next((i for i, x in enumerate(model.transformer_layers) if x.is_kv_shared_layer), count)


def refuse(block):
    """Say why a block cannot be opened, if it cannot."""
    if block.altup.altup_num_inputs < 2:
        return "two streams or more. Received `altup_num_inputs=1`. Use Gemma 3, which has one"
    if block.altup.altup_active_idx != 0:
        found = block.altup.altup_active_idx
        return f"the first stream to be the active one, as published. Received index {found}"
    return None


def head(owner):
    """Return the layer that makes logits."""
    model = next(x for x in FAMILY.layers(owner) if isinstance(x, Gemma3nTextModel))
    return TiedHead(model.embed_tokens.embedding, model.final_logit_soft_cap)


FAMILY = Family(
    name="gemma3n",
    block=Gemma3nTextDecoderBlock,
    open_block=open_block,
    pointwise_layers=(Gemma3nRMSNorm,),
    refuse=refuse,
    embeddings="embed_tokens",
    further=("other_streams", "per_layer_input", "shared_kv"),
    beside="other_streams",
    spelled_out={
        Gemma3nMultimodalEmbeddingProcessor: spell_embeddings,
        Gemma3nTextModel: spell_model,
    },
    images=Gemma3nMultimodalEmbeddingProcessor,
    head=head,
    stop_tokens=("<end_of_turn>",),
    model_types=("gemma3n", "gemma3n_text"),
)
