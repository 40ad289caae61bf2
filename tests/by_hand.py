"""Steering by hand: KerasHub's own layers with something added after each block, uncached."""

import keras
import keras_hub
import numpy as np
from keras import tree


class _AddOne(keras.layers.Layer):
    """Add `extra[:, :, index]`."""

    def __init__(self, index, **kwargs):
        super().__init__(**kwargs)
        self.index = index

    def call(self, x, extra):
        return x + extra[:, :, self.index]

    def compute_output_spec(self, x, extra):
        return keras.KerasTensor(x.shape, x.dtype)


def model_by_hand(backbone):
    """A model on `token_ids`, `padding_mask` and `extra` float[batch, time, blocks, hidden].

    Gives the final hidden states, the logits, and the output of each block.
    """
    blocks = backbone.transformer_layers
    x = tree.flatten(blocks[0].input)[0]
    mask = backbone.input["padding_mask"]
    extra = keras.Input((None, len(blocks), x.shape[-1]), name="extra")
    states = []
    for i, block in enumerate(blocks):
        decoder = isinstance(block, keras_hub.layers.TransformerDecoder)
        argument = "decoder_padding_mask" if decoder else "padding_mask"
        x = _AddOne(i)(block(x, **{argument: mask}), extra)
        states.append(x)
    x = backbone.layer_norm(x)
    outputs = {
        "hidden_states": x,
        "logits": backbone.token_embedding(x, reverse=True),
        "blocks": states,
    }
    return keras.Model({**backbone.input, "extra": extra}, outputs)


def generate_by_hand(model, rows, steps, addition):
    """Greedy, uncached, one row and one token at a time.

    `addition(row index, prompt length, time)` gives `extra` of that row, float[time, blocks,
    hidden].
    """
    width = max(map(len, rows)) + steps
    found = []
    for i, row in enumerate(rows):
        ids = np.zeros((1, width), "int32")
        ids[0, : len(row)] = row
        extra = addition(i, len(row), width)[None].astype("float32")
        for length in range(len(row), len(row) + steps):
            mask = (np.arange(width) < length)[None]
            logits = model.predict_on_batch(
                {"token_ids": ids, "padding_mask": mask, "extra": extra}
            )["logits"]
            ids[0, length] = np.argmax(np.asarray(logits)[0, length - 1])
        found.append(ids[0, : len(row) + steps])
    return found
