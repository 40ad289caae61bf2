"""Private KerasHub that makes tokens of text by byte pairs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

__all__ = ["use_backend"]


def use_backend(tokenizer: Any, make: Callable[[dict[str, int], list[str]], Any]) -> None:
    """Have a byte-pair tokenizer of KerasHub work by another one, wherever it is used.

    KerasHub has code of its own for `tf.data`; there too, the other one is asked.

    Args:
        tokenizer: a `keras_hub.tokenizers.BytePairTokenizer`, with or without a vocabulary.
        make: returns a `tokenizers.Tokenizer` for a vocabulary and its merges. It is called again
            whenever the tokenizer is given others.
    """
    tokenizer._set_vocabulary_and_merges_tokenizers = partial(_set, tokenizer, make)
    tokenizer._tokenize_tf = partial(_tokenize_in_graph, tokenizer)
    if tokenizer.vocabulary is not None:
        tokenizer._tokenizer = make(tokenizer.vocabulary, tokenizer.merges)


def _set(tokenizer: Any, make: Callable[..., Any], vocabulary: Any, merges: Any) -> None:
    """As upstream, with the other tokenizer in the place of KerasHub's."""
    type(tokenizer)._set_vocabulary_and_merges_tokenizers(tokenizer, vocabulary, merges)
    tokenizer._tokenizer = make(vocabulary, merges)


def _tokenize_in_graph(tokenizer: Any, inputs: Any) -> Any:
    """Return what upstream does from inside of a TensorFlow graph, such as that of `tf.data`."""
    import tensorflow as tf

    rank = tf.convert_to_tensor(inputs).shape.rank
    if rank is not None and rank > 1:
        raise ValueError(f"expected a string or a batch of strings, received rank {rank}")
    texts = tf.reshape(inputs, [-1])
    dtype, length = tf.as_dtype(tokenizer.compute_dtype), tokenizer.sequence_length

    def encode(texts: Any) -> Any:
        rows = tokenizer._tokenize_tokenizers([x.decode(errors="replace") for x in texts.numpy()])
        if length:
            return tf.constant(np.asarray(rows).tolist(), dtype, shape=(len(rows), length))
        return tf.ragged.constant(rows, dtype, ragged_rank=1)

    dense = tf.TensorSpec([None, length], dtype)
    ragged = tf.RaggedTensorSpec([None, None], dtype, ragged_rank=1)
    tokens = tf.py_function(encode, [texts], Tout=dense if length else ragged)
    if length:
        tokens = tf.ensure_shape(tokens, [None, length])
    return tokens[0] if rank == 0 else tokens
