"""Backbones that compute as Hugging Face does where those of KerasHub have no setting for it.

`from_preset` makes them of folders of Hugging Face that need one. KerasHub loads a preset of them
where this library is imported.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import keras_hub


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
    if kind in ("gemma2", "gemma3_text") and text["query_pre_attn_scalar"] != text["head_dim"]:
        return GemmaBackbone if kind == "gemma2" else Gemma3Backbone
    return usual
