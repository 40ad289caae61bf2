"""Logits have the gradients of a product with the kernel, also where hidden states are rounded."""

import jax
import keras
import numpy as np
import pytest
from keras import ops
from keras.quantizers import AbsMaxQuantizer, Int4QuantizationConfig, Int8QuantizationConfig

from backbone_surgery.opening.logits import logits_of
from tests.helpers import relative

CONFIGS = {
    "int8": Int8QuantizationConfig(activation_quantizer=None),
    "int4": Int4QuantizationConfig(block_size=None),
    "int4 in groups": Int4QuantizationConfig(block_size=4),
}


@pytest.mark.by_default(1)
@pytest.mark.usefixtures("no_collecting")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_gradients_pass_what_is_rounded(rng, config, tied):
    """As an int8 table rounds unless it is told not to, and an int4 one of a preset does."""
    table = keras.layers.ReversibleEmbedding(9, 10, tie_weights=tied, logit_soft_cap=3.0)
    table.build()
    for variable in table.variables:
        variable.assign(rng.normal(size=variable.shape))
    table.quantize(config=config)
    states, weights = (rng.normal(size=(2, 3, n)).astype("float32") for n in (10, 9))

    def gradient(rounding):
        table.inputs_quantizer = rounding
        return jax.grad(lambda x: ops.sum(logits_of(table, x) * weights))(states)

    received = gradient(AbsMaxQuantizer(axis=-1))
    assert np.any(received)
    assert relative(received, gradient(None)) <= 0.03
