"""Blocks skipped, repeated, reordered and removed equal the same chain of blocks by hand."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.helpers import make_deep_gpt2, ragged, relative
from tests.reference import by_hand, run, run_chunks, tokens

EXACT = 1e-5

ORDERS = {
    "repeat": (bs.Repeat("blocks.1:3", times=2), [0, 1, 2, 1, 2]),
    "repeat one": (bs.Repeat("blocks.0", times=3), [0, 0, 0, 1, 2]),
    "remove": (bs.Remove("blocks.1"), [0, 2]),
    "remove last": (bs.Remove("blocks.2"), [0, 1]),
    "reorder": (bs.Reorder([-1, 0, 0]), [2, 0, 0]),
}


def chain(order):
    def between(x, blocks):
        for i in order:
            x = blocks[i](x)
        return x

    return between


@pytest.fixture(scope="module")
def gpt2():
    """One backbone for all tests that change nothing of it."""
    return make_deep_gpt2()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ORDERS))
def test_a_new_order_is_that_chain_of_blocks(gpt2, rng, name):
    rewrite, order = ORDERS[name]
    edited = bs.operate(gpt2, [rewrite])
    inputs = tokens(rng)
    wanted = run(by_hand(gpt2, chain(order)), inputs)
    assert relative(run(edited, inputs), wanted) <= EXACT
    assert relative(run(gpt2, inputs), wanted) > 1e-3
    assert [p for p in bs.sites(edited) if p.count(".") == 1] == [
        f"blocks.{i}" for i in range(len(order))
    ]
    cached = bs.rewire(edited)
    assert len(cached.output["cache"]) == len(order)
    for chunks in ([9], [4, 1, 4]):
        assert relative(run_chunks(cached, inputs, chunks)[0], wanted) <= EXACT


AGAIN = {
    "repeat a block": ([bs.Repeat("blocks.0")] * 2, [0, 0, 0, 1, 2]),
    "repeat a group": ([bs.Repeat("blocks.0:2")] * 2, [0, 1, 0, 1, 0, 1, 2]),
    "reorder": ([bs.Reorder([0, 0, 1]), bs.Reorder([0, 0, 1, 2])], [0, 0, 0, 1]),
    "three times": ([bs.Repeat("blocks.2")] * 3, [0, 1, 2, 2, 2, 2]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] if "repeat" in x else []) for x in AGAIN]
)
def test_what_was_repeated_is_repeated_again(gpt2, rng, name):
    """At once or by one call after another: the same chain of blocks, over a cache too."""
    rewrites, order = AGAIN[name]
    edited, one_by_one = bs.operate(gpt2, rewrites), gpt2
    for rewrite in rewrites:
        one_by_one = bs.operate(one_by_one, [rewrite])
    inputs = tokens(rng)
    wanted = np.asarray(by_hand(gpt2, chain(order))(inputs))
    for model in (edited, one_by_one):
        assert relative(model(inputs), wanted) <= EXACT
    cached = bs.rewire(edited)
    assert len(cached.output["cache"]) == len(order)
    assert relative(run_chunks(cached, inputs, [4, 5], compiled=False)[0], wanted) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", list(AGAIN))
def test_what_was_repeated_again_generates_as_that_chain_of_blocks(gpt2, rng, name):
    rewrites, order = AGAIN[name]
    lm = bs.CachedCausalLM(bs.operate(gpt2, rewrites))
    lm.compile(sampler="greedy")
    ids = tokens(rng, 2, 5)["token_ids"]
    prompts = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    got = lm.generate(prompts, max_new_tokens=10, stop_token_ids=None)["token_ids"]
    whole = {"token_ids": got[:, :-1], "padding_mask": np.ones_like(got[:, :-1])}
    logits = run(by_hand(gpt2, chain(order)), whole) @ np.asarray(gpt2.token_embedding.embeddings).T
    assert np.array_equal(logits[:, 4:].argmax(-1), got[:, 5:])


@pytest.mark.slow
def test_each_use_of_a_repeated_block_is_a_site_of_its_own(gpt2, rng):
    steer = bs.Steer("mood", {2: np.ones(32)}, strength=3.0)
    edited = bs.operate(gpt2, [bs.Repeat("blocks.1", times=2), steer])

    def between(x, blocks):
        x = blocks[1](blocks[1](blocks[0](x))) + 3.0
        return blocks[2](x)

    inputs = tokens(rng)
    wanted = run(by_hand(gpt2, between), inputs)
    assert relative(run(edited, inputs), wanted) <= EXACT
    assert relative(run_chunks(bs.rewire(edited), inputs, [4, 1, 4])[0], wanted) <= EXACT


@pytest.mark.slow
def test_what_was_done_inside_a_block_goes_with_it(rng):
    backbone = make_deep_gpt2()
    steer = bs.Steer("mood", {0: np.ones(32)}, strength=3.0)
    edited = bs.operate(backbone, [steer, bs.Repeat("blocks.0", times=2)])
    inputs = tokens(rng)

    def between(x, blocks):
        for _ in range(2):
            x = blocks[0](x) + 3.0
        return blocks[2](blocks[1](x))

    wanted = run(by_hand(backbone, between), inputs)
    assert relative(run(edited, inputs), wanted) <= EXACT
    with pytest.raises(bs.SurgeryError, match=r"nothing uses mood_strength, .* any more"):
        bs.operate(backbone, [steer, bs.Remove("blocks.0")])


@pytest.mark.slow
def test_what_a_clone_fn_put_behind_a_block_goes_with_it(rng):
    backbone = make_deep_gpt2()
    dense = keras.layers.Dense(32, name="extra")

    def insert(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        return dense(result) if layer is backbone.transformer_layers[0] else result

    edited = bs.operate(backbone, [insert, bs.Reorder([0, 0, 2, 1])])

    def between(x, blocks):
        x = dense(blocks[0](dense(blocks[0](x))))
        return blocks[1](blocks[2](x))

    inputs = tokens(rng)
    wanted = run(by_hand(backbone, between), inputs)
    assert relative(run(edited, inputs), wanted) <= EXACT
    assert relative(run_chunks(bs.rewire(edited), inputs, [4, 1, 4])[0], wanted) <= EXACT


@pytest.mark.slow
def test_skip_takes_blocks_out_row_by_row(gpt2, rng):
    edited = bs.operate(gpt2, [bs.Skip("blocks.1:")])
    inputs = tokens(rng, rows=4)
    amounts = np.array([[0, 0], [1, 1], [1, 0], [0.25, 0.5]], "float32")
    got = run(edited, {**inputs, "skip_amount": amounts})
    opened = bs.open_backbone(gpt2)
    assert np.array_equal(got[0], run(opened, inputs)[0])
    assert relative(got[1], run(by_hand(gpt2, chain([0])), inputs)[1]) <= EXACT
    assert relative(got[2], run(by_hand(gpt2, chain([0, 2])), inputs)[2]) <= EXACT

    def partly(x, blocks):
        x = blocks[0](x)
        x = x + 0.75 * (blocks[1](x) - x)
        return x + 0.5 * (blocks[2](x) - x)

    assert relative(got[3], run(by_hand(gpt2, partly), inputs)[3]) <= EXACT
    assert np.array_equal(run(edited, inputs)[1], got[1])
    cached = run_chunks(bs.rewire(edited), inputs, [4, 1, 4], skip_amount=amounts)[0]
    assert relative(cached, got) <= EXACT


@pytest.mark.slow
def test_skip_is_a_control_of_generation(rng):
    backbone = make_deep_gpt2()
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Skip("blocks.1")]))
    without = bs.CachedCausalLM(bs.operate(backbone, [bs.Remove("blocks.1")]))
    plain = bs.CachedCausalLM(backbone)
    inputs, options = ragged(rng, (3, 6), 6), {"max_new_tokens": 8, "stop_token_ids": None}
    for model in (lm, without, plain):
        model.compile(sampler="greedy")
    got = lm.generate(inputs, controls={"skip": [0, 1]}, **options)["token_ids"]
    assert np.array_equal(got[0], plain.generate(inputs, **options)["token_ids"][0])
    assert np.array_equal(got[1], without.generate(inputs, **options)["token_ids"][1])
    assert np.array_equal(lm.generate(inputs, **options)["token_ids"][1], got[1])
    assert lm.programs.compilations == {"prefill": 1, "decode": 1}
    with pytest.raises(bs.SurgeryError, match=r"'skip': expected finite numbers.*\[2, 1\]"):
        lm.generate(inputs, controls={"skip": np.zeros((2, 2))}, **options)
    with pytest.raises(bs.SurgeryError, match="'skip': expected finite numbers"):
        lm.generate(inputs, controls={"skip": "much"}, **options)


def test_capture_before_and_after_skip(rng):
    backbone = make_deep_gpt2()
    rewrites = [bs.Capture("blocks.1", name="before"), bs.Skip("blocks.1"), bs.Capture("blocks.*")]
    edited = bs.operate(backbone, rewrites)
    got = edited.predict_on_batch(tokens(rng))["captures"]
    assert np.array_equal(got["blocks.1"], got["blocks.0"])
    assert not np.array_equal(got["before/blocks.1"], got["blocks.0"])


@pytest.mark.slow
def test_repeated_blocks_generate_as_the_uncached_graph_does(rng):
    edited = bs.operate(make_deep_gpt2(), [bs.Repeat("blocks.1:", times=2), bs.Capture("blocks.*")])
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler="greedy")
    ids = tokens(rng, 1, 5)["token_ids"]
    prompt = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    got, captures = lm.generate(prompt, max_new_tokens=7, stop_token_ids=None, return_captures=True)
    row = {"token_ids": got["token_ids"][:, :-1], "padding_mask": np.ones((1, 11), "int32")}
    wanted = edited.predict_on_batch(row)
    assert relative(captures["blocks.4"], wanted["captures"]["blocks.4"]) <= EXACT
    logits = wanted["hidden_states"] @ np.asarray(lm.opened.token_embedding.embeddings).T
    assert np.array_equal(logits[0, 4:].argmax(-1), got["token_ids"][0, 5:])


@pytest.mark.parametrize(
    ("rewrites", "words"),
    [
        (
            [bs.Repeat("blocks.1.query")],
            r"Repeat at 'blocks.1.query': expected a selector of whole",
        ),
        ([bs.Skip("final_norm")], r"Skip at 'final_norm': .* Select among blocks.0, blocks.1"),
        ([bs.Remove("blocks.7")], r"select at 'blocks.7': .* The blocks are blocks.0 ... blocks.2"),
        ([bs.Remove("blocks.*")], "expected at least one block to stay"),
        ([bs.Reorder([0, 1, 2])], "in another order than they have"),
        ([bs.Reorder([0, 3])], "expected numbers from 0 to 2"),
        ([bs.Reorder([])], "expected at least one block to stay"),
        ([bs.Capture("blocks.0"), bs.Remove("blocks.1")], "Put `Capture` and `Condition` after it"),
    ],
)
def test_errors(gpt2, rewrites, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(gpt2, rewrites)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: bs.Repeat("blocks.1", times=1), "`times` to be an integer of 2 or more"),
        (lambda: bs.Repeat("blocks.1", times=2.0), "`times` to be an integer of 2 or more"),
        (lambda: bs.Reorder(1), "expected numbers of blocks, each an integer. Received 1"),
        (lambda: bs.Reorder([True]), r"each an integer. Received \[True\]"),
        (lambda: bs.Reorder({2, 0}), r"each an integer. Received \{0, 2\}"),
        (lambda: bs.Reorder({2: 0, 0: 1}.keys()), "each an integer. Received dict_keys"),
        (lambda: bs.Reorder(b"\x01\x00"), r"each an integer. Received b'\\x01\\x00'"),
        (lambda: bs.Reorder(iter(int, 1)), "expected at most 1000 blocks"),
        (lambda: bs.Remove(1), "Remove at 1: expected a site selector"),
        (lambda: bs.Skip("blocks.1", amount=np.nan), "`amount` to be a finite number"),
    ],
)
def test_what_cannot_be_used_is_refused_when_it_is_built(build, words):
    with pytest.raises(bs.SurgeryError, match=words):
        build()


def test_integers_of_numpy_are_those_of_python():
    assert bs.Repeat("blocks.1", times=np.int64(2)) == bs.Repeat("blocks.1", times=2)
    assert bs.Reorder(np.array([1, 0, -1])) == bs.Reorder((1, 0, -1))


def test_a_connection_past_a_block_is_refused(rng):
    backbone, kept = make_deep_gpt2(), []

    def remember(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        if layer is backbone.transformer_layers[0]:
            kept.append(result)
        if layer is backbone.transformer_layers[2]:
            return keras.layers.Add(name="past")([result, kept[0]])
        return result

    with pytest.raises(bs.SurgeryError, match="a connection past a block"):
        bs.operate(backbone, [remember, bs.Remove("blocks.0")])
