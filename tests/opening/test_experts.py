"""Mixtures of experts are trained as KerasHub trains them, and choose as it does."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery import graph
from backbone_surgery.opening.experts import BalancedLoad, TopExperts
from tests.families import ROWS
from tests.helpers import ragged, relative

MIXTURES = [name for name, row in ROWS.items() if "router" in row.layers]


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_training_adds_the_loss_that_kerashub_adds(name, rng):
    """In rows with padding, and in no evaluation; the weights move as upstream."""
    row = ROWS[name]
    backbone = row.make()
    x = ragged(rng, (9, 4, 12), 12)
    x["padding_mask"] = x["padding_mask"].astype("int32")
    y = rng.integers(1, 60, (3, 12))
    weights = backbone.get_weights()

    def train(task):
        backbone.set_weights(weights)
        task.compile(
            optimizer=keras.optimizers.SGD(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        # What a token of padding gives is nothing to compare.
        options = {"sample_weight": x["padding_mask"], "verbose": 0}
        evaluated = task.evaluate(x, y, return_dict=True, **options)["loss"]
        losses = task.fit(x, y, epochs=2, shuffle=False, **options).history["loss"]
        return evaluated, losses, backbone.get_weights()

    ours = bs.CachedCausalLM(backbone)
    evaluated, losses, moved = train(ours)
    wanted = train(row.task(backbone=backbone, preprocessor=None))
    np.testing.assert_allclose([evaluated, *losses], [wanted[0], *wanted[1]], rtol=1e-5)
    for a, b in zip(moved, wanted[2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    layers = (node.operation for node in graph.all_nodes(ours.opened))
    is_balanced = any(isinstance(layer, BalancedLoad) for layer in layers)
    assert (abs(losses[0] - evaluated) > 1e-4) == is_balanced


@pytest.mark.slow
def test_windows_of_qwen2_moe_are_those_of_this_machine(rng):
    """KerasHub's own cached decoding fails with a window, so the table leaves it out."""
    make = ROWS["qwen2_moe"].make
    backbone = make(use_sliding_window_attention=True, sliding_window_size=4)
    inputs = ragged(rng, [20, 11], 20)
    inputs["padding_mask"] = inputs["padding_mask"].astype("int32")
    real = inputs["padding_mask"].astype(bool)
    wanted = backbone.predict_on_batch(inputs)
    got = bs.open_backbone(backbone).predict_on_batch(inputs)
    assert relative(got, wanted, real) <= 5e-6
    assert relative(make().predict_on_batch(inputs), wanted, real) > 1e-3
    assert max(bs.check(backbone).errors.values()) <= 3e-5


def test_top_experts():
    logits = np.log(np.array([[[0.1, 0.4, 0.2, 0.3]]], "float32"))
    plain = TopExperts(2, normalize=False)(logits)
    np.testing.assert_allclose(plain, [[[0, 0.4, 0, 0.3]]], atol=1e-6)
    for layer in (TopExperts(2), TopExperts(2, chosen_first=True), TopExperts(2, upcast=True)):
        np.testing.assert_allclose(layer(logits), [[[0, 4 / 7, 0, 3 / 7]]], atol=1e-6)


def test_router_logits_as_outputs_are_refused_by_name():
    backbone = ROWS["mixtral"].make(num_layers=1, output_router_logits=True)
    with pytest.raises(bs.SurgeryError, match=r"`output_router_logits=True`.*'blocks\.\*\.router'"):
        bs.open_backbone(backbone)


def test_noise_of_routers_is_refused_by_name():
    backbone = ROWS["mixtral"].make(num_layers=1, router_jitter_noise=0.1)
    with pytest.raises(bs.SurgeryError, match="`router_jitter_noise`, where KerasHub fails"):
        bs.open_backbone(backbone)
