"""Features: the one feature of a sparse autoencoder that tells the sides of pairs apart best.

Source: SAE-A of AxBench, Wu et al. 2025, arXiv:2501.17148, which chooses features by AUROC too.
"""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.rewriting.autoencoder_files import Autoencoder, read_autoencoder
from backbone_surgery.rewriting.autoencoder_layers import encoder_of
from backbone_surgery.vectors.activations import TokenStates, measure, read_texts
from backbone_surgery.vectors.detection import auroc
from backbone_surgery.vectors.vector import ControlVector


def read_autoencoders(paths: Any, blocks: list[int], size: int) -> dict[int, Autoencoder]:
    """Read the autoencoders of some blocks, `{block: folder}`.

    Raises:
        SurgeryError: no such mapping, a block that the model lacks, or another size.
    """
    if not isinstance(paths, Mapping) or not paths or not set(paths) <= set(blocks):
        raise SurgeryError(
            f"tune at 'autoencoders': expected folders by block, of blocks {blocks[0]} to "
            f"{blocks[-1]}. Received {shown(paths)}. Pass {{4: 'folder'}} for method 'sae', and "
            "leave it out otherwise."
        )
    read = {block: read_autoencoder(path) for block, path in paths.items()}
    for block, autoencoder in read.items():
        if len(autoencoder.shift) != size:
            raise SurgeryError(
                f"tune at 'autoencoders': expected one for hidden states of size {size} at block "
                f"{block}. Received one of size {len(autoencoder.shift)}. Use one of this model."
            )
    return read


def feature_vector(
    lm: CachedCausalLM, pairs: Any, autoencoders: Mapping[int, Autoencoder]
) -> ControlVector:
    """Return the decoder row of the best feature of each autoencoder, from second to first side.

    A feature is good as far as its AUROC on the last tokens of the texts is from 1/2: the chance
    that it is larger in a first text than in a second. Of equals, the one whose means differ most
    is taken. What is larger in the second texts is taken with the opposite sign. `info` names the
    features.

    Args:
        lm: the model.
        pairs: `[(positive text, negative text), ...]`.
        autoencoders: as of `read_autoencoders`.
    """
    rows = read_texts(lm, [text for pair in pairs for text in pair], "tune")
    last = np.array([len(row) - 1 for row in rows], "int32")
    states = measure(lm, rows, TokenStates, "tune", tokens=last)
    directions, chosen = {}, {}
    for block, autoencoder in autoencoders.items():
        features = encode(states[f"blocks.{block}"], autoencoder)
        best, sign = best_feature(features[::2], features[1::2])
        directions[block] = sign * autoencoder.decoder[best]
        chosen[f"feature_{block}"] = str(best)
    return ControlVector(directions, chosen)


def encode(states: np.ndarray, autoencoder: Autoencoder) -> np.ndarray:
    """Return the features of hidden states float32[rows, size], float32[rows, latents]."""
    return keras.ops.convert_to_numpy(encoder_of(autoencoder, "tune_encoder")(states))


def best_feature(first: np.ndarray, second: np.ndarray) -> tuple[int, int]:
    """Return the feature that tells two sides apart best, and the sign towards the first.

    Args:
        first: float32[texts, latents].
        second: float32[texts, latents].
    """
    apart = np.array([auroc(a, b) for a, b in zip(first.T, second.T, strict=True)]) - 0.5
    differences = first.mean(axis=0) - second.mean(axis=0)
    best = int(np.lexsort((np.abs(differences), np.abs(apart)))[-1])
    return best, 1 if apart[best] >= 0 else -1
