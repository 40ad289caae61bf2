"""Backbones that compute as Hugging Face does where those of KerasHub have no setting for it.

`from_preset` makes them of folders of Hugging Face that need one. KerasHub loads a preset of them
where this library is imported.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import keras_hub
from keras import ops
from keras_hub.src.models.gpt_neo_x.gpt_neo_x_decoder import GPTNeoXDecoder
from keras_hub.src.models.phi3.phi3_decoder import Phi3Decoder
from keras_hub.src.models.phi3.phi3_layernorm import Phi3LayerNorm
from keras_hub.src.models.phi3.phi3_rotary_embedding import Phi3SuScaledRotaryEmbedding
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
        self.token_embedding = _table(vocabulary_size, hidden_dim, tie_word_embeddings, dtype)
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
        before = (self.token_embedding, self.embeddings_dropout)
        super(keras_hub.models.GPTNeoXBackbone, self).__init__(
            **_connected(before, self.transformer_layers, self.layer_norm),
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


@keras.saving.register_keras_serializable("backbone_surgery")
class Phi3Backbone(keras_hub.models.Phi3Backbone):
    """Phi-3 with windows, as Phi-3 mini, or a tied head and partly rotated heads, as Phi-4 mini.

    Args:
        sliding_window: how many latest tokens a token sees, itself among them; `None` for all.
        partial_rotary_factor: which share of each head is rotated, its first features.
        tie_word_embeddings: whether the head is the table of tokens.
        **kwargs: see `keras_hub.models.Phi3Backbone`.
    """

    def __init__(
        self,
        vocabulary_size: int,
        num_layers: int,
        hidden_dim: int,
        sliding_window: int | None = None,
        partial_rotary_factor: float = 1.0,
        tie_word_embeddings: bool = False,
        dtype: Any = None,
        name: str | None = None,
        trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        kwargs = {**_PHI_3, **kwargs}
        epsilon = kwargs["layer_norm_epsilon"]
        self.token_embedding = _table(vocabulary_size, hidden_dim, tie_word_embeddings, dtype)
        self.transformer_layers = [
            _Phi3Decoder(
                sliding_window,
                partial_rotary_factor,
                hidden_dim=hidden_dim,
                kernel_initializer=_small(0.02),
                dtype=dtype,
                name=f"transformer_layer_{i}",
                **kwargs,
            )
            for i in range(num_layers)
        ]
        self.layer_norm = Phi3LayerNorm(epsilon, dtype=dtype, name="sequence_output_layernorm")
        super(keras_hub.models.Phi3Backbone, self).__init__(
            **_connected((self.token_embedding,), self.transformer_layers, self.layer_norm),
            dtype=dtype,
            name=name,
            trainable=trainable,
        )
        self.vocabulary_size, self.num_layers = vocabulary_size, num_layers
        self.hidden_dim, self.sliding_window = hidden_dim, sliding_window
        self.partial_rotary_factor = partial_rotary_factor
        self.tie_word_embeddings = tie_word_embeddings
        for key, value in kwargs.items():
            setattr(self, key, value)

    def get_config(self) -> dict[str, Any]:
        """Return the config, with what KerasHub's has not."""
        names = ("sliding_window", "partial_rotary_factor", "tie_word_embeddings")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


class _Phi3Decoder(Phi3Decoder):
    """A block of Phi-3 with a window, and with heads that are rotated in part."""

    rope_scaling_type: str | None

    def __init__(
        self, sliding_window: int | None, partial_rotary_factor: float, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.sliding_window = sliding_window
        self.partial_rotary_factor = partial_rotary_factor

    def build(self, decoder_sequence_shape: Any) -> None:
        kind = self.rope_scaling_type
        self.rope_scaling_type = None  # KerasHub's is for whole heads
        super().build(decoder_sequence_shape)
        self.rope_scaling_type = kind
        rotary = self.attention.rotary_embedding_layer
        if kind == "su":
            rotary = Phi3SuScaledRotaryEmbedding(
                self.rope_scaling_short_factor,
                self.rope_scaling_long_factor,
                self.max_sequence_length,
                self.pretraining_sequence_length,
                max_wavelength=self.rope_max_wavelength,
                dtype=self.dtype_policy,
            )
        head_dim = self.hidden_dim // self.num_query_heads
        self.rotary_dim = int(head_dim * self.partial_rotary_factor)
        if self.rotary_dim < head_dim:
            rotary = FirstFeaturesRotary(rotary, self.rotary_dim)
        # Keras gives a layer that is built no other one; this has no weights.
        object.__setattr__(self.attention, "rotary_embedding_layer", rotary)

    def _compute_self_attention_mask(self, **kwargs: Any) -> Any:
        mask = super()._compute_self_attention_mask(**kwargs)  # [batch, queries, keys]
        if self.sliding_window is None:
            return mask
        _, queries, keys = ops.shape(mask)
        start = kwargs["attention_cache_update_index"]
        latest = ops.arange(queries)[:, None] + (0 if start is None else start)
        is_near = latest - ops.arange(keys)[None] < self.sliding_window
        return ops.logical_and(ops.cast(mask, "bool"), is_near)

    def get_config(self) -> dict[str, Any]:
        """Return the config, with what KerasHub's has not."""
        names = ("sliding_window", "partial_rotary_factor")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


class FirstFeaturesRotary(keras.layers.Layer):
    """Rotate the first features of each head, by positions that begin at an index.

    Args:
        rotary: a `keras_hub.layers.RotaryEmbedding`.
        features: how many features are rotated.
    """

    def __init__(self, rotary: keras.layers.Layer, features: int) -> None:
        super().__init__(dtype=rotary.dtype_policy)
        self.rotary, self.features = rotary, features

    def call(self, inputs: Any, start_index: Any = 0) -> Any:
        """Return heads of the shape of `inputs`, float[batch, time, heads, head_dim]."""
        first, others = ops.split(inputs, [self.features], axis=-1)
        return ops.concatenate([self.rotary(first, start_index=start_index), others], axis=-1)


_ACTIVATIONS = {"gelu": keras.activations.gelu, "gelu_approximate": gelu_approximate}
_INPUTS = ("token_ids", "padding_mask")
_NEO_X = {
    "rotary_percentage": 0.25,
    "rotary_max_wavelength": 10000,
    "layer_norm_epsilon": 1e-5,
    "max_sequence_length": 512,
}

_PHI_3 = {
    "layer_norm_epsilon": 1e-6,
    "dropout": 0.0,
    "max_sequence_length": 4096,
    "pretraining_sequence_length": 4096,
    "rope_max_wavelength": 10000,
    "rope_scaling_type": None,
    "rope_scaling_short_factor": None,
    "rope_scaling_long_factor": None,
}


def _table(size: int, width: int, is_tied: bool, dtype: Any) -> keras.layers.Layer:
    return keras.layers.ReversibleEmbedding(
        size,
        width,
        tie_weights=is_tied,
        embeddings_initializer=_small(0.01),
        dtype=dtype,
        name="token_embedding",
    )


def _connected(
    before: Sequence[Callable[[Any], Any]],
    blocks: Sequence[keras.layers.Layer],
    norm: keras.layers.Layer,
) -> dict[str, Any]:
    """Return the inputs and the outputs of a backbone: tokens through its layers, one by one."""
    ids, mask = (keras.Input((None,), dtype="int32", name=x) for x in _INPUTS)
    x = ids
    for layer in before:
        x = layer(x)
    for block in blocks:
        x = block(x, decoder_padding_mask=mask)
    return {"inputs": dict(zip(_INPUTS, (ids, mask), strict=True)), "outputs": norm(x)}


def _small(stddev: float) -> keras.initializers.Initializer:
    return keras.initializers.RandomNormal(stddev=stddev)


def _hand_on_scale(backbone: Any) -> None:
    """Tell the attention of each block, which KerasHub leaves at True."""
    for block in backbone.transformer_layers:
        block.attention.query_head_dim_normalize = backbone.query_head_dim_normalize


def rotated_share(text: Mapping[str, Any]) -> float:
    """Return which share of each head a model of Hugging Face rotates, by its settings."""
    rotary = text.get("rope_scaling") or text.get("rope_parameters") or {}
    return rotary.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1.0


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
    if kind == "phi3":
        window = text.get("sliding_window")
        tied = bool(text.get("tie_word_embeddings", False))
        part = rotated_share(text)
        if window is not None or tied or part != 1:
            return partial(
                Phi3Backbone,
                sliding_window=window,
                partial_rotary_factor=part,
                tie_word_embeddings=tied,
            )
    if kind in ("gemma2", "gemma3_text") and text["query_pre_attn_scalar"] != text["head_dim"]:
        return GemmaBackbone if kind == "gemma2" else Gemma3Backbone
    return usual
