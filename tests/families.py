"""The families as rows: to test another one with everything here, add a row to `ROWS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras_hub
import numpy as np

VOCABULARY = 60


def _spread(backbone, seed):
    """Give the weights values large enough for the greedy choice to be clear."""
    rng = np.random.default_rng(seed)
    for variable in backbone.trainable_variables:
        value = np.asarray(variable)
        if value.ndim > 1:
            value = rng.normal(0, 1 / np.sqrt(np.prod(value.shape[:-1])) + 0.15, value.shape)
        else:
            value = value + rng.normal(0, 0.1, value.shape)
        variable.assign(value.astype(value.dtype))
    return backbone


def make_gpt2(seed=0, **kwargs):
    config = {
        "vocabulary_size": VOCABULARY,
        "num_layers": 2,
        "num_heads": 4,
        "hidden_dim": 32,
        "intermediate_dim": 64,
        "max_sequence_length": 64,
        "dropout": 0.0,
    }
    return _spread(keras_hub.models.GPT2Backbone(**{**config, **kwargs}), seed)


def make_deep_gpt2(seed=0, **kwargs):
    """One of three blocks, for what takes more than two: to be swapped, say, and to stay."""
    return make_gpt2(seed, **{"num_layers": 3, **kwargs})


def make_gemma(seed=0, **kwargs):
    config = {
        "vocabulary_size": VOCABULARY,
        "num_layers": 2,
        "num_query_heads": 4,
        "num_key_value_heads": 1,
        "hidden_dim": 32,
        "intermediate_dim": 96,
        "head_dim": 8,
    }
    return _spread(keras_hub.models.GemmaBackbone(**{**config, **kwargs}), seed)


def make_gemma2(seed=0, **kwargs):
    config = {
        "num_layers": 2,
        "num_key_value_heads": 2,
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
        "attention_logit_soft_cap": 50.0,
        "final_logit_soft_cap": 30.0,
        "use_sliding_window_attention": True,
        "sliding_window_size": 6,
    }
    return make_gemma(seed, **{**config, **kwargs})


@dataclass(frozen=True)
class Row:
    """A family under test.

    Attributes:
        make: `(seed=0, **config) -> backbone`, tiny and random.
        task: KerasHub's own task of the family: an independent way to generate.
        shapes: configs of odd shapes, which are opened too.
    """

    make: Callable[..., Any]
    task: type
    shapes: tuple[dict[str, Any], ...] = ()


ROWS = {
    "gpt2": Row(
        make_gpt2,
        keras_hub.models.GPT2CausalLM,
        ({"num_heads": 2, "num_layers": 1, "hidden_dim": 24},),
    ),
    "gemma": Row(
        make_gemma,
        keras_hub.models.GemmaCausalLM,
        ({"num_key_value_heads": 4, "head_dim": 16},),
    ),
    "gemma2": Row(
        make_gemma2,
        keras_hub.models.GemmaCausalLM,
        ({"sliding_window_size": 3, "num_key_value_heads": 1},),
    ),
}
"""The first is the one that tests outside of `test_families.py` run on by default."""

FAMILIES = {name: row.make for name, row in ROWS.items()}
TASKS = {name: row.task for name, row in ROWS.items()}
