"""A rewrite finds its sites by the nodes that hold them, in whatever order the graph is walked."""

import numpy as np
import pytest

import backbone_surgery as bs
from tests.helpers import make_gpt2

INPUTS = {"token_ids": np.array([[5, 6, 7]], "int32"), "padding_mask": np.ones((1, 3), "int32")}


@pytest.mark.slow
def test_blocks_side_by_side_are_told_apart_where_a_condition_watches_the_second():
    states = {}

    def side_by_side(layer, x, *args, **kwargs):
        if layer.name == "transformer_layer_0":
            states["first"] = x
        if layer.name == "transformer_layer_1":
            return x + layer(states["first"], *args, **kwargs)
        return layer(x, *args, **kwargs)

    edited = bs.operate(make_gpt2(num_layers=2), [side_by_side])
    capture = bs.Capture("blocks.*")
    expected = bs.operate(edited, [capture])(INPUTS)["captures"]
    # What a condition watches is walked first: here the second block comes before the first.
    watched = bs.operate(edited, [bs.Condition("wet", np.ones(32), 0.3, at="blocks.1")])
    captured = bs.operate(watched, [capture])(INPUTS)["captures"]
    assert set(captured) == {"blocks.0", "blocks.1"}
    assert not np.allclose(captured["blocks.0"], captured["blocks.1"])
    for path, value in captured.items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_uses_of_one_block_are_told_apart():
    backbone = make_gpt2(num_layers=2)
    twice = bs.operate(backbone, [bs.Repeat("blocks.0")])
    captured = bs.operate(twice, [bs.Capture("blocks.1")])(INPUTS)["captures"]
    both = bs.operate(twice, [bs.Capture("blocks.*")])(INPUTS)["captures"]
    assert list(captured) == ["blocks.1"]
    np.testing.assert_array_equal(captured["blocks.1"], both["blocks.1"])
    assert not np.allclose(both["blocks.0"], both["blocks.1"])


def one_by_one(backbone, rewrites):
    for rewrite in rewrites:
        backbone = bs.operate(backbone, [rewrite])
    return backbone


@pytest.mark.slow
def test_rewrites_of_one_list_do_what_they_do_one_by_one(rng):
    backbone = make_gpt2(num_layers=2)
    mean = {f"blocks.{i}.value": rng.normal(size=(4, 8)) for i in range(2)}
    rewrites = [
        bs.Knockout("cut", queries=(2, None), keys=(0, 2)),
        bs.Steer("mood", {i: rng.normal(size=32) for i in range(2)}),
        bs.Capture("blocks.*", "blocks.1.attention_pattern"),
        bs.Skip("blocks.*", amount=0.5),
        bs.Ablate("blocks.*.attention_pattern", heads=[1]),
        bs.Ablate("blocks.*.value", heads=[2], to="mean", values=mean, name="mean"),
        bs.LowRank("blocks.*.value", rank=2),
        bs.LowRank("blocks.*", rank=2, name="whole", strength=2.0),
        bs.Capture("blocks.*", "blocks.1.attention_pattern", name="later"),
        bs.Condition("wet", rng.normal(size=32), -0.9, at="blocks.0", signed=True),
        bs.Steer("dry", {1: rng.normal(size=32)}, when="wet"),
        bs.Steer("taught", {0: rng.normal(size=32)}, trainable=True),
        bs.Reft("taught_too", rank=2, at="blocks.1"),
        bs.ProjectOut("none", rng.normal(size=(2, 32))),
        bs.Patch("blocks.1.mlp_output", positions=(1,)),
    ]
    together = bs.operate(backbone, rewrites)
    for layer in together.trained_layers:
        for weight in layer.trainable_variables:
            weight.assign(rng.normal(size=weight.shape))
    apart = one_by_one(backbone, together.rewrites)
    assert [fired.sites for fired in together.report] == [fired.sites for fired in apart.report]
    assert bs.sites(together) == bs.sites(apart)
    assert list(together.defaults) == list(apart.defaults)
    assert together.trained_layers == apart.trained_layers
    assert len(together.trained_layers) == 6
    inputs = {**INPUTS, "patch_value_0": rng.normal(size=(1, 1, 32)).astype("float32")}
    outputs, expected = together(inputs), apart(inputs)
    assert list(outputs["captures"]) == list(expected["captures"])
    np.testing.assert_array_equal(outputs["hidden_states"], expected["hidden_states"])
    for path, value in expected["captures"].items():
        np.testing.assert_array_equal(outputs["captures"][path], value)
    assert not np.allclose(outputs["captures"]["blocks.0"], outputs["captures"]["later/blocks.0"])


def test_errors_of_one_list_are_those_of_its_rewrites():
    backbone = make_gpt2(num_layers=2)
    low_rank = bs.LowRank("blocks.*.query", rank=2)
    with pytest.raises(bs.SurgeryError, match=r"LowRank at 'blocks.0.query'.*second one named"):
        bs.operate(backbone, [low_rank, bs.Skip("blocks.1"), low_rank])
    with pytest.raises(bs.SurgeryError, match="control 'skip': expected a name that no other"):
        bs.operate(backbone, [bs.Skip("blocks.1"), low_rank, bs.Skip("blocks.0")])
    with pytest.raises(bs.SurgeryError, match=r"at 'blocks.7'.*matches nothing"):
        bs.operate(backbone, [bs.Skip("blocks.1"), low_rank, bs.Capture("blocks.7")])
