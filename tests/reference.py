"""Hand-written edits: Keras models over the layers of an unedited backbone, to compare with."""

import keras
import numpy as np

import backbone_surgery as bs


def block_of(backbone, index):
    """Return `x -> block(x)` for one block of a backbone, called as the backbone calls it."""
    layer = backbone.transformer_layers[index]
    gpt2 = type(layer).__name__ == "TransformerDecoder"
    name = "decoder_padding_mask" if gpt2 else "padding_mask"
    return lambda x: layer(x, **{name: backbone.input["padding_mask"]})


def stream_of(backbone):
    """Return the symbolic hidden states that the first block of a backbone is given."""
    return backbone.transformer_layers[0]._inbound_nodes[0].input_tensors[0]


def by_hand(backbone, between):
    """Make a model of a backbone whose blocks are replaced by `between(x, blocks)`."""
    x = stream_of(backbone)
    blocks = [block_of(backbone, i) for i in range(len(backbone.transformer_layers))]
    return keras.Model(backbone.input, backbone.layer_norm(between(x, blocks)))


def run(model, inputs):
    """Run one pass, and return the hidden states."""
    outputs = model.predict_on_batch(inputs)
    outputs = outputs["hidden_states"] if isinstance(outputs, dict) else outputs
    return np.asarray(outputs, "float32")


def tokens(rng, rows=2, width=9, vocabulary=60):
    """Random rows without padding: what every model here takes alike."""
    ids = rng.integers(1, vocabulary, (rows, width)).astype("int32")
    return {"token_ids": ids, "padding_mask": np.ones_like(ids)}


def run_chunks(model, inputs, chunks, room=3, compiled=True, **controls):
    """Run a cached graph chunk by chunk; return the hidden states, and the captures.

    Captured patterns are cut to the tokens: the end of the cache is left out. What is not compiled
    is run one operation at a time, which is quicker where many graphs are made of one backbone.
    """
    call = model.predict_on_batch if compiled else model
    ids, mask = inputs["token_ids"], inputs["padding_mask"].astype(bool)
    batch, width = ids.shape
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    cache, start, parts = bs.new_cache(model, batch, width + room), 0, []
    for chunk in chunks:
        step = slice(start, start + chunk)
        result = call(
            {
                "token_ids": ids[:, step],
                "cache": cache,
                "cache_update_index": np.int32(start),
                "positions": positions[:, step],
                "cache_mask": np.pad(mask, ((0, 0), (0, room)), constant_values=True),
                **controls,
            }
        )
        cache, start = result["cache"], start + chunk
        parts.append({"hidden_states": result["hidden_states"], **result.get("captures", {})})
    assert start == width
    joined = {}
    for path in parts[0]:
        pattern = path.endswith("attention_pattern")
        value = np.concatenate([np.asarray(p[path], "float32") for p in parts], 2 if pattern else 1)
        joined[path] = value[..., :width] if pattern else value
    return joined.pop("hidden_states"), joined
