"""Ablating experts equals KerasHub's own layers, in which the expert gives or is given nothing."""

import contextlib

import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.opening.experts import TopExperts
from tests.families import ROWS
from tests.helpers import ragged, relative
from tests.recording import patched, sublayer
from tests.reference import run_chunks, tokens

LAYERS = {
    "mixtral": {
        "router": "_sparse_moe_block._sparse_feedforward_gate_dense",
        "expert_weights": "_sparse_moe_block.expert_bank",
    },
    "gpt_oss": {
        "router": "sparse_moe_block.router.router_dense",
        "expert_weights": "sparse_moe_block.experts",
    },
}
"""The router, and the bank: an expert of no weight is as one that gives zeros."""
ROWS_AND_TIME = (3, 9)
MASKS = np.zeros((3, 2, 4), "float32")
MASKS[1, :, 2] = MASKS[2, 0, [0, 3]] = 1


def upstream(name, backbone, inputs, site):
    """Run KerasHub's own layers, with the experts of `MASKS` ablated in each row."""
    blocks = [layer for layer in backbone.layers if layer.name.startswith("transformer_layer")]
    with contextlib.ExitStack() as stack:
        for block, mask in zip(blocks, np.moveaxis(MASKS, 1, 0), strict=True):
            by_token = np.repeat(mask, ROWS_AND_TIME[1], axis=0).astype(bool)

            def without(x, by_token=by_token):
                x = np.array(x)
                if site == "router":
                    return np.where(by_token, -1e9, x)
                return np.where(by_token.T[..., None], 0, x)

            layer = sublayer(block, LAYERS[name][site])
            stack.enter_context(patched(layer, without))
        return np.asarray(backbone(inputs))


@pytest.mark.parametrize("site", ["router", "expert_weights"])
@pytest.mark.parametrize("name", [pytest.param("gpt_oss", marks=pytest.mark.slow), "mixtral"])
def test_experts_are_ablated_row_by_row(name, site, rng):
    backbone = ROWS[name].make()
    inputs = tokens(rng, *ROWS_AND_TIME)
    edited = bs.operate(backbone, [bs.Ablate(f"blocks.*.{site}", experts=[2])])
    got = edited.predict_on_batch({**inputs, "ablate_experts": MASKS})
    plain = bs.open_backbone(backbone).predict_on_batch(inputs)
    assert relative(got[0], plain[0]) <= 1e-6  # XLA fuses the softmax in another way
    wanted = upstream(name, backbone, inputs, site)
    assert relative(got, wanted) <= 5e-6
    assert relative(plain, wanted) > 1e-3
    assert np.array_equal(got[1], edited.predict_on_batch(inputs)[1])  # the expert named
    chunks = run_chunks(bs.rewire(edited), inputs, [4, 1, 1, 3], ablate_experts=MASKS)[0]
    assert relative(chunks, wanted) <= 5e-6


@pytest.mark.slow
def test_another_expert_takes_the_place_of_one_that_is_never_chosen(rng):
    backbone = ROWS["mixtral"].make()
    capture = bs.Capture("blocks.*.router", "blocks.*.expert_weights")
    edited = bs.operate(backbone, [bs.Ablate("blocks.*.router", experts=1), capture])
    captures = edited.predict_on_batch(tokens(rng, 2, 9))["captures"]
    for block in range(2):
        assert np.isneginf(captures[f"blocks.{block}.router"][..., 1]).all()
        weights = captures[f"blocks.{block}.expert_weights"]
        assert not weights[..., 1].any()
        assert (np.count_nonzero(weights, axis=-1) == 2).all()
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_two_that_leave_none_together_are_experts_that_give_zero(name, rng):
    backbone = ROWS[name].make()
    halves = [(0, 1), (2, 3)]
    rewrites = [
        bs.Ablate("blocks.*.router", experts=half, name=f"half_{half[0]}") for half in halves
    ]
    edited = bs.operate(backbone, rewrites)
    without = bs.operate(backbone, [bs.Ablate("blocks.*.expert_weights")])
    inputs = tokens(rng, 1, 6)
    wanted = without.predict_on_batch(inputs)
    assert np.isfinite(wanted).all()
    assert relative(edited.predict_on_batch(inputs), wanted) <= 1e-6
    assert relative(run_chunks(bs.rewire(edited), inputs, [4, 1, 1])[0], wanted) <= 5e-6


@pytest.mark.parametrize(
    ("chosen_first", "normalize"), [(False, True), (False, False), (True, True)]
)
def test_where_no_expert_is_left_none_is_chosen(chosen_first, normalize):
    logits = np.array([[[-np.inf, 1.0, 0.5], [-np.inf] * 3]], "float32")
    weights = np.array(TopExperts(2, normalize, chosen_first)(logits))
    assert weights[0, 0].any()
    assert np.array_equal(weights[0, 1], np.zeros(3))


@pytest.mark.slow
def test_in_generation_row_by_row(rng):
    backbone = ROWS["qwen3_moe"].make()
    options = {"max_new_tokens": 6, "stop_token_ids": None}
    edited = bs.operate(backbone, [bs.Ablate("blocks.*.router", experts=range(1, 8))])
    lm, plain = bs.CachedCausalLM(edited), bs.CachedCausalLM(backbone)
    for task in (lm, plain):
        task.compile(sampler="greedy")
    inputs = ragged(rng, (5, 5), 5)
    got = lm.generate(inputs, controls={"ablate": [1, 0]}, **options)["token_ids"]
    wanted = plain.generate(inputs, **options)["token_ids"]
    assert np.array_equal(got[1], wanted[1])
    assert not np.array_equal(got[0], wanted[0])
    everything = np.ones((1, 2, 8))
    with pytest.raises(bs.SurgeryError, match=r"'ablate': expected experts to be left.*all 8"):
        lm.generate(inputs, controls={"ablate": {"experts": everything}}, **options)
    with pytest.raises(bs.SurgeryError, match=r"experts, and `start` .*Received \['heads'\]"):
        lm.generate(inputs, controls={"ablate": {"heads": 1}}, **options)
    with pytest.raises(bs.SurgeryError, match="expected 1 to ablate an expert, 0 to leave it"):
        lm.generate(inputs, controls={"ablate": 0.5}, **options)


@pytest.fixture(scope="module")
def mixtral():
    return ROWS["mixtral"].make(num_layers=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"at": "blocks.0.router"}, "experts to be left for the router.*all 4.*'expert_weights'"),
        ({"at": "blocks.0.router", "experts": [0, 1, 2, 3]}, "experts to be left for the router"),
        ({"at": "blocks.0.router", "experts": [4]}, "expected experts from 0 to 3"),
        ({"at": "blocks.0.router", "experts": []}, "`experts` to be an expert, counted from 0"),
        (
            {"at": "blocks.0.router", "heads": [1]},
            "expected no heads, since it has 4 experts.*sites with heads are blocks.0.query,",
        ),
        (
            {"at": "blocks.0.query", "experts": [1]},
            "no experts, since it has 4 heads.*with experts are blocks.0.router, blocks.0.expert_w",
        ),
        ({"at": "blocks.0.query", "heads": [1], "experts": [1]}, "expected `heads` or `experts`"),
        ({"at": "blocks.0.*"}, "as many heads each, or experts.*'blocks.0.router': '4 experts'"),
    ],
)
def test_errors(mixtral, options, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(mixtral, [bs.Ablate(**options)])
