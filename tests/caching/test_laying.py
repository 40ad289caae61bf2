"""Weights are laid in another order where a chip would turn them, and no others."""

import keras_hub
import pytest

import backbone_surgery as bs
from backbone_surgery.caching.laying import layers_to_lay, weights_to_lay


def to_lay(hidden_dim, platform, lora=False):
    """Return `{path: order}` for a Llama of two heads; its table for logits is one of its own."""
    sizes = {"hidden_dim": hidden_dim, "intermediate_dim": 32, "num_key_value_heads": 1}
    backbone = keras_hub.models.LlamaBackbone(50, 1, 2, **sizes)
    model = bs.rewire(bs.operate(backbone, []))
    layers = layers_to_lay(model)
    if lora:
        backbone.token_embedding.enable_lora(4)
    return {variable.path: order for variable, order in weights_to_lay(layers, platform)}


HEADS = [f"transformer_layer_0/self_attention/{name}/kernel" for name in ("query", "key", "value")]


@pytest.mark.parametrize("lora", [False, True])
def test_a_tpu_has_wide_heads_first_and_odd_tables_row_by_row(lora):
    assert to_lay(256, "tpu", lora) == dict.fromkeys(HEADS, (1, 0, 2))
    assert to_lay(192, "tpu", lora) == {"token_embedding/embeddings": (0, 1)}
    assert to_lay(128, "tpu", lora) == {}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_other_chips_have_them_as_they_come(platform):
    assert to_lay(256, platform) == to_lay(192, platform) == {}
