"""Weights are laid in another order where a chip would turn them, and no others."""

import jax
import keras_hub
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import backbone_surgery as bs
from backbone_surgery.caching.laying import layers_to_lay, weights_to_lay


def to_lay(hidden_dim, platform, lora=False):
    """Return `{path: order}` for a Llama of two heads; its table for logits is one of its own."""
    sizes = {"hidden_dim": hidden_dim, "intermediate_dim": 32, "num_key_value_heads": 1}
    backbone = keras_hub.models.LlamaBackbone(50, 1, 2, **sizes)
    model = bs.rewire(bs.operate(backbone, []))
    layers = layers_to_lay(model, platform)
    if lora:
        backbone.token_embedding.enable_lora(4)
    return {v.path: order for v, order in weights_to_lay(layers, lambda v: v.value)}


HEADS = [f"transformer_layer_0/self_attention/{name}/kernel" for name in ("query", "key", "value")]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_tpu_has_wide_heads_first_and_odd_tables_row_by_row(lora):
    assert to_lay(256, "tpu", lora) == dict.fromkeys(HEADS, (1, 0, 2))
    assert to_lay(192, "tpu", lora) == {"token_embedding/embeddings": (0, 1)}
    assert to_lay(128, "tpu", lora) == {}


def orders_of_experts(inner_dim, platform, devices=1):
    """Return the orders of what an expert of 128 inputs makes and reads, shared by its features."""
    sizes = {"num_query_heads": 2, "num_key_value_heads": 2, "num_experts": 2}
    backbone = keras_hub.models.MixtralBackbone(
        50, 1, hidden_dim=128, intermediate_dim=inner_dim, **sizes
    )
    mesh = jax.sharding.AbstractMesh((devices,), ("model",))

    def array_of(variable):
        axis = 1 if "output" in variable.path else 2
        spec = PartitionSpec(*(("model" if i == axis else None) for i in range(3)))
        return jax.ShapeDtypeStruct(variable.shape, "float32", sharding=NamedSharding(mesh, spec))

    layers = layers_to_lay(bs.rewire(bs.operate(backbone, [])), platform)
    laid = list(weights_to_lay(layers, array_of))
    return [order for variable, order in laid if "/experts/" in variable.path]


@pytest.mark.slow
def test_a_tpu_never_has_experts_last():
    """But what an expert makes, unless its inputs leave fewer lanes empty."""
    assert orders_of_experts(256, "tpu") == [(0, 1, 2)] * 3
    assert orders_of_experts(96, "tpu") == [(0, 2, 1), (0, 2, 1), (0, 1, 2)]
    assert orders_of_experts(256, "tpu", devices=4) == [(0, 2, 1), (0, 2, 1), (0, 1, 2)]
    assert orders_of_experts(96, "gpu") == []


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_other_chips_have_them_as_they_come(platform):
    assert to_lay(256, platform) == to_lay(192, platform) == {}
