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
