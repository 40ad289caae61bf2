"""Backbones that compute as Hugging Face does where those of KerasHub have no setting for it.

`from_preset` makes them of folders of Hugging Face that need one. KerasHub loads a preset of them
where this library is imported.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import keras_hub
from keras_hub.src.models.gpt_neo_x.gpt_neo_x_decoder import GPTNeoXDecoder
from keras_hub.src.utils.keras_utils import gelu_approximate


@keras.saving.register_keras_serializable("backbone_surgery")
class GptOssBackbone(keras_hub.models.GptOssBackbone):
    """GPT-OSS with windows on blocks that are named; KerasHub has them on every other one.

    Args:
        layer_types: "sliding_attention" or "full_attention" for each block.
        **kwargs: see `keras_hub.models.GptOssBackbone`.
    """

    def __init__(self, layer_types: Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layer_types = [*layer_types]
        for block, kind in zip(self.transformer_layers, layer_types, strict=True):
            window = self.sliding_window if kind == "sliding_attention" else None
            block.sliding_window = block.self_attention_layer.sliding_window = window

    def get_config(self) -> dict[str, Any]:
        """Return the config, with the types of the blocks."""
        return {**super().get_config(), "layer_types": [*self.layer_types]}


@keras.saving.register_keras_serializable("backbone_surgery")
class GemmaBackbone(keras_hub.models.GemmaBackbone):
    """Gemma 2 whose queries are scaled as `query_head_dim_normalize` says; see KerasHub."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        _hand_on_scale(self)


@keras.saving.register_keras_serializable("backbone_surgery")
class Gemma3Backbone(keras_hub.models.Gemma3Backbone):
    """Gemma 3 whose queries are scaled as `query_head_dim_normalize` says; see KerasHub."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        _hand_on_scale(self)


@keras.saving.register_keras_serializable("backbone_surgery")
class GPTNeoXBackbone(keras_hub.models.GPTNeoXBackbone):
    """GPT-NeoX with the exact GELU and a head of its own, as Pythia has; KerasHub has neither.

    Args:
        activation: of the MLPs: "gelu" is exact, and "gelu_approximate" is KerasHub's own.
        tie_word_embeddings: whether the head is the table of tokens.
        **kwargs: see `keras_hub.models.GPTNeoXBackbone`.
    """

    def __init__(
        self,
        vocabulary_size: int,
        num_layers: int,
        hidden_dim: int,
        activation: str = "gelu",
        tie_word_embeddings: bool = False,
        dtype: Any = None,
        name: str | None = None,
        trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        kwargs = {"dropout": 0.0, **_NEO_X, **kwargs}
        epsilon = kwargs["layer_norm_epsilon"]
        self.token_embedding = keras_hub.layers.ReversibleEmbedding(
            vocabulary_size,
            hidden_dim,
            tie_weights=tie_word_embeddings,
            embeddings_initializer=_small(0.01),
            dtype=dtype,
            name="token_embedding",
        )
        self.embeddings_dropout = keras.layers.Dropout(
            kwargs["dropout"], dtype=dtype, name="embeddings_dropout"
        )
        self.transformer_layers = [
            GPTNeoXDecoder(
                activation=_ACTIVATIONS[activation],
                kernel_initializer=_small(0.02),
                dtype=dtype,
                name=f"transformer_layer_{i}",
                **kwargs,
            )
            for i in range(num_layers)
        ]
        self.layer_norm = keras.layers.LayerNormalization(
            epsilon=epsilon, dtype=dtype, name="layer_norm"
        )
        ids, mask = (keras.Input((None,), dtype="int32", name=x) for x in _INPUTS)
        x = self.embeddings_dropout(self.token_embedding(ids))
        for block in self.transformer_layers:
            x = block(x, decoder_padding_mask=mask)
        super(keras_hub.models.GPTNeoXBackbone, self).__init__(
            inputs=dict(zip(_INPUTS, (ids, mask), strict=True)),
            outputs=self.layer_norm(x),
            dtype=dtype,
            name=name,
            trainable=trainable,
        )
        self.vocabulary_size, self.num_layers = vocabulary_size, num_layers
        self.hidden_dim, self.activation = hidden_dim, activation
        self.tie_word_embeddings = tie_word_embeddings
        for key, value in kwargs.items():
            setattr(self, key, value)

    def get_config(self) -> dict[str, Any]:
        """Return the config, with the activation, and whether the head is tied."""
        own = {"activation": self.activation, "tie_word_embeddings": self.tie_word_embeddings}
        return {**super().get_config(), **own}


_ACTIVATIONS = {"gelu": keras.activations.gelu, "gelu_approximate": gelu_approximate}
_INPUTS = ("token_ids", "padding_mask")
_NEO_X = {
    "rotary_percentage": 0.25,
    "rotary_max_wavelength": 10000,
    "layer_norm_epsilon": 1e-5,
    "max_sequence_length": 512,
}


def _small(stddev: float) -> keras.initializers.Initializer:
    return keras.initializers.RandomNormal(stddev=stddev)


def _hand_on_scale(backbone: Any) -> None:
    """Tell the attention of each block, which KerasHub leaves at True."""
    for block in backbone.transformer_layers:
        block.attention.query_head_dim_normalize = backbone.query_head_dim_normalize


def maker(kind: str, text: Mapping[str, Any], usual: type) -> Callable[..., keras.Model]:
    """Return what makes the backbone for a model of Hugging Face.

    Args:
        kind: its model type.
        text: the settings of the part that reads text.
        usual: KerasHub's class.
    """
    if kind == "gpt_oss" and text.get("sliding_window") is not None:
        types = text["layer_types"]
        if types != ["sliding_attention" if i % 2 else "full_attention" for i in range(len(types))]:
            return partial(GptOssBackbone, layer_types=types)
    if kind == "gpt_neox":
        tied = bool(text.get("tie_word_embeddings", False))
        exact = text.get("hidden_act", "gelu") == "gelu"
        activation = "gelu" if exact else "gelu_approximate"
        if exact or not tied:
            return partial(GPTNeoXBackbone, activation=activation, tie_word_embeddings=tied)
    if kind in ("gemma2", "gemma3_text") and text["query_pre_attn_scalar"] != text["head_dim"]:
        return GemmaBackbone if kind == "gemma2" else Gemma3Backbone
    return usual
