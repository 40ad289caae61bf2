"""Heads that are kept several times, as on more devices than there are heads: the same results."""

import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.caching.repeated_heads import times_of_heads
from backbone_surgery.caching.rewire import rewire_for
from tests.families import ROWS
from tests.helpers import relative
from tests.reference import run, run_chunks, tokens

EDITS = {
    "none": [],
    "pattern": [bs.Ablate("blocks.0.attention_pattern", heads=[1, 6]), bs.Capture("blocks.*.key")],
}


@pytest.mark.parametrize("edits", EDITS)
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama"])
def test_hidden_states_and_captures_are_those_of_the_backbone(name, edits, rng):
    backbone = ROWS[name].make(num_query_heads=8, num_key_value_heads=2)
    edited = bs.operate(backbone, EDITS[edits])
    model = rewire_for(edited, devices=4)
    heads = [x.shape[2] for entry in bs.new_cache(model, 1, 8) for x in entry.values()]
    assert heads == [4] * len(heads)
    inputs = tokens(rng, width=12)
    got, captures = run_chunks(model, inputs, [7, 1, 1, 3], compiled=False)
    assert relative(got, run(edited, inputs)) <= 1e-5
    plain, wanted = run_chunks(bs.rewire(edited), inputs, [12], compiled=False)
    assert relative(got, plain) <= 1e-5
    assert captures.keys() == wanted.keys()
    for path, value in captures.items():
        assert value.shape[2] == 2  # what stands at a site is not repeated
        assert relative(value, wanted[path]) <= 1e-5


@pytest.mark.parametrize(
    ("heads", "devices", "times"),
    [
        ((8, 2), 1, 1),
        ((8, 2), 2, 1),
        ((8, 2), 4, 2),
        ((8, 2), 8, 4),
        ((8, 2), 16, 1),  # queries do not divide
        ((24, 8), 12, 1),  # queries of one device would need keys of two heads
        ((8, 1), 4, 1),  # a single head is everywhere
        ((8, 8), 16, 1),
    ],
)
def test_how_often_heads_are_kept(heads, devices, times):
    assert times_of_heads(*heads, devices) == times


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [False, True])
def test_heads_that_a_block_lends_to_others_are_repeated_once(pattern, rng):
    lends = {"num_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    backbone = ROWS["gemma4"].make(num_query_heads=8, num_key_value_heads=2, **lends)
    paths = ["blocks.1", "blocks.3"]  # one that lends, and one that borrows of it
    ablated = [bs.Ablate(f"{x}.attention_pattern", heads=[1, 6], name=f"no_{x[-1]}") for x in paths]
    edited = bs.operate(backbone, ablated if pattern else [])
    model = rewire_for(edited, devices=8)
    assert [[x.shape[2] for x in entry.values()] for entry in model.states] == [[8, 8], [8, 8]]
    inputs = tokens(rng, width=12)
    got, _ = run_chunks(model, inputs, [7, 1, 1, 3], compiled=False)
    assert relative(got, run(edited, inputs)) <= 1e-5


@pytest.mark.slow
def test_a_plan_counts_one_head_a_device():
    backbone = ROWS["llama"].make(num_query_heads=8, num_key_value_heads=2)
    sizes = {"batch": 2, "length": 16}
    two, eight = (bs.plan(backbone, {"batch": 1, "model": n}, **sizes) for n in (2, 8))
    assert eight.cache_bytes == two.cache_bytes
    cache = bs.new_cache(bs.rewire(backbone), two.rows, two.slots)
    assert 2 * two.cache_bytes == sum(np.asarray(x).nbytes for e in cache for x in e.values())
