"""The texts that GPTQ and AWQ calibrate on: read whole before a layer is touched."""

from typing import Any

import keras
import numpy as np

from backbone_surgery.errors import SurgeryError, shown, shown_ids
from backbone_surgery.numbers import read_int32


def read_texts(config: Any, vocabulary: int) -> list[np.ndarray]:
    """Return the token ids of each text of a GPTQ or AWQ config, as Keras would read them.

    Args:
        config: it.
        vocabulary: how many tokens the model knows.

    Raises:
        SurgeryError: there is no text, or one that is neither text with a tokenizer nor token ids
            that the model has.
    """
    try:
        texts = None if isinstance(config.dataset, str | bytes) else list(config.dataset)
    except TypeError:
        texts = None
    if not texts:
        raise SurgeryError(
            f"quantize at 'config': expected a dataset of texts, or of token ids. Received "
            f"{shown(config.dataset)}. Pass a list of some."
        )
    if any(isinstance(text, str) for text in texts) and not hasattr(config.tokenizer, "tokenize"):
        raise SurgeryError(
            "quantize at 'config': expected a tokenizer with a method `tokenize` for texts. "
            f"Received {shown(config.tokenizer)}. Pass `preprocessor.tokenizer`, or token ids as "
            "the dataset."
        )
    return [_read_text(i, text, config.tokenizer, vocabulary) for i, text in enumerate(texts)]


def _read_text(index: int, text: Any, tokenizer: Any, vocabulary: int) -> np.ndarray:
    ids = tokenizer.tokenize(text) if isinstance(text, str) else text
    ids = keras.ops.convert_to_numpy(ids) if keras.ops.is_tensor(ids) else ids
    read = read_int32(ids, 0, vocabulary - 1)
    if read is None:
        raise SurgeryError(
            f"quantize at 'config', text {index}: expected token ids from 0 to {vocabulary - 1}. "
            f"Received {shown_ids(ids)}. Tokenize by the tokenizer of this model."
        )
    return read.reshape(-1)
