"""Captures: in one pass, in chunks over a cache, and during generation, they are the same."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.caching.test_rewire import left_padded
from tests.helpers import make_deep_gpt2, ragged, relative
from tests.reference import run_chunks

EXACT = 1e-5
ALL = ("embeddings", "blocks.*.*", "blocks.*", "final_norm")


@pytest.fixture(scope="module")
def lm():
    return bs.CachedCausalLM(bs.operate(make_deep_gpt2(), [bs.Capture(*ALL)]))


def captured(model, inputs):
    outputs = model.predict_on_batch(inputs)["captures"]
    return {k: np.asarray(v, "float32") for k, v in outputs.items()}


def test_captures_are_the_tensors_at_the_sites(rng):
    backbone = make_deep_gpt2()
    edited = bs.operate(backbone, [bs.Capture("blocks.*", "final_norm")])
    assert edited.report[0].sites == ("blocks.0", "blocks.1", "blocks.2", "final_norm")
    inputs = left_padded(rng, [9, 9], 9)
    got = edited.predict_on_batch(inputs)
    by_hand = keras.Model(backbone.input, [b.output for b in backbone.transformer_layers])
    for i, wanted in enumerate(by_hand.predict_on_batch(inputs)):
        assert relative(got["captures"][f"blocks.{i}"], wanted) <= EXACT
    wanted = bs.open_backbone(backbone).predict_on_batch(inputs)
    assert np.array_equal(got["hidden_states"], wanted)
    assert np.array_equal(got["captures"]["final_norm"], wanted)


def test_attention_pattern_is_softmax_of_query_and_key(rng):
    backbone = make_deep_gpt2()
    edited = bs.operate(backbone, [bs.Capture("blocks.1.attention_*", "blocks.1.*", name="all")])
    inputs = left_padded(rng, [7, 7], 7)
    got = {k.removeprefix("all/blocks.1."): v for k, v in captured(edited, inputs).items()}
    scores = np.einsum("bthd,bshd->bhts", got["query"], got["key"]) / np.sqrt(8)
    weights = np.exp(scores) * np.tril(np.ones((7, 7)))
    pattern = weights / weights.sum(-1, keepdims=True)
    assert relative(got["attention_pattern"], pattern) <= EXACT
    mixed = np.einsum("bhts,bshd->bthd", pattern, got["value"])
    assert relative(got["head_outputs"], mixed) <= EXACT


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "chunks",
    [pytest.param([12], marks=pytest.mark.slow), [5, 1, 6], [1] * 12],
    ids=["one", "cut", "each"],
)
def test_cached_captures_are_the_uncached_ones(lm, rng, chunks):
    inputs = left_padded(rng, [12, 7], 12)
    mask = inputs["padding_mask"].astype(bool)
    wanted = captured(lm.backbone, inputs)
    assert set(wanted) == set(bs.sites(lm.backbone))
    hidden, got = run_chunks(lm.backbone_with_cache, inputs, chunks)
    assert np.array_equal(hidden, got["final_norm"])
    for path, value in got.items():
        if path.endswith("attention_pattern"):
            value, wanted[path] = (np.moveaxis(x, 2, 1) for x in (value, wanted[path]))
        assert relative(value, wanted[path], mask) <= EXACT, path


def test_order_of_the_list_decides_what_is_captured(rng):
    backbone = make_deep_gpt2()
    steer = bs.Steer("mood", {1: np.ones(32)}, strength=2.0)
    rewrites = [bs.Capture("blocks.1", name="before"), steer, bs.Capture("blocks.1")]
    edited = bs.operate(backbone, rewrites)
    got = captured(edited, left_padded(rng, [6], 6))
    assert relative(got["blocks.1"], got["before/blocks.1"] + 2) <= EXACT
    with pytest.raises(bs.SurgeryError, match=r"'blocks.1': expected captures under names of"):
        bs.operate(backbone, [*rewrites, bs.Capture("blocks.1")])


@pytest.mark.slow
def test_a_later_edit_of_an_earlier_block_is_captured(rng):
    """The order of the list counts at one site; from site to site it is that of the graph."""
    backbone = make_deep_gpt2()
    steer = bs.Steer("mood", {1: rng.normal(0, 5, 32)})
    capture = bs.Capture("blocks.0", "blocks.2", "final_norm")
    inputs = left_padded(rng, [6], 6)
    plain = captured(bs.operate(backbone, [capture]), inputs)
    before = captured(bs.operate(backbone, [capture, steer]), inputs)
    after = captured(bs.operate(backbone, [steer, capture]), inputs)
    assert np.array_equal(before["blocks.0"], plain["blocks.0"])
    for path in ("blocks.2", "final_norm"):
        assert relative(before[path], plain[path]) > 0.1
        assert relative(before[path], after[path]) <= EXACT


def assert_captures_of(backbone, finished, captures, site_paths):
    """Compare with an uncached pass over each row's finished text, the last token left out."""
    for i, ids in enumerate(finished):
        length = captures.lengths[i]
        alone = {"token_ids": ids[None, :length], "padding_mask": np.ones((1, length), "int32")}
        wanted = captured(backbone, alone)
        assert np.array_equal(captures.token_ids[i, :length], ids[:length])
        row = captures.row(i)
        for path in site_paths:
            assert relative(row[path], wanted[path][0]) <= EXACT, path


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["greedy", "beam"])
def test_captures_of_generation_are_those_of_the_finished_text(lm, rng, sampler):
    lm.compile(sampler=sampler)
    lengths = (3, 8)
    inputs = ragged(rng, lengths, 8)
    options = {"max_new_tokens": 10, "stop_token_ids": None}
    plain = lm.generate(inputs, **options)
    got, captures = lm.generate(inputs, return_captures=True, **options)
    assert np.array_equal(got["token_ids"], plain["token_ids"])
    assert captures.lengths.tolist() == [n + 9 for n in lengths]
    assert captures["blocks.0.attention_pattern"].shape == (2, 4, 17, 17)
    assert not captures["blocks.0"][0, 12:].any()
    rows = [got["token_ids"][i, : n + 10] for i, n in enumerate(lengths)]
    assert_captures_of(lm.backbone, rows, captures, bs.sites(lm.backbone))
    assert np.allclose(
        captures.mean()["blocks.1"],
        np.concatenate([captures.row(i)["blocks.1"] for i in range(2)]).mean(0),
    )


@pytest.mark.slow
def test_captures_of_rows_that_stop_at_different_times_and_in_parts(lm, rng):
    lm.compile(sampler="greedy")
    inputs = ragged(rng, (4, 6, 3), 6)
    free = lm.generate(inputs, max_new_tokens=10, stop_token_ids=None)["token_ids"]
    options = {"max_new_tokens": 10, "stop_token_ids": (int(free[0, 6]), int(free[2, 8]))}
    got, captures = lm.generate(inputs, return_captures=True, batch_size=2, **options)
    ends = got["padding_mask"].sum(axis=1)
    assert len(set(ends.tolist())) > 1
    assert np.array_equal(captures.lengths, ends - 1)
    rows = [got["token_ids"][i, :n] for i, n in enumerate(ends)]
    assert_captures_of(lm.backbone, rows, captures, ["blocks.1", "blocks.1.attention_pattern"])


@pytest.mark.slow
def test_captures_of_a_prompt_alone(lm, rng):
    lm.compile(sampler="greedy")
    inputs = ragged(rng, (4, 16), 16)
    got, captures = lm.generate(inputs, max_new_tokens=0, stop_token_ids=None, return_captures=True)
    assert np.array_equal(got["token_ids"], inputs["token_ids"])
    assert captures.lengths.tolist() == [4, 16]
    rows = [inputs["token_ids"][0, :4], inputs["token_ids"][1]]
    assert_captures_of(lm.backbone, rows, captures, ["blocks.1"])


def test_captures_are_read_as_a_dict_is():
    values = {name: np.arange(6.0).reshape(2, 3, 1) for name in ("blocks.0", "blocks.1")}
    captures = bs.GeneratedActivations(np.ones((2, 3), int), np.array([3, 2]), values)
    assert [*captures] == [*captures.keys()] == ["blocks.0", "blocks.1"]
    assert len(captures) == 2
    assert "blocks.1" in captures
    assert "blocks.2" not in captures
    assert dict(captures) == dict(captures.items()) == captures.values == values
    assert captures.row(np.int64(-1))["blocks.0"].tolist() == [[3], [4]]
    for index in (2, -3, slice(0, 1), True, 1.0):
        with pytest.raises(bs.SurgeryError, match=r"'row': expected an int from -2 to 1.*Received"):
            captures.row(index)


@pytest.mark.slow
def test_asking_for_captures_is_one_more_program_and_no_other_call_compiles(rng):
    edited = bs.operate(make_deep_gpt2(), [bs.Capture("blocks.1")])
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler="greedy")
    options = {"max_new_tokens": 6, "stop_token_ids": None}
    for with_captures, compiled in ((False, 1), (True, 2), (True, 2), (False, 2)):
        lm.generate(ragged(rng, (3, 4), 4), return_captures=with_captures, **options)
        assert lm.programs.compilations == {"prefill": compiled, "decode": compiled}
    header = lm.programs.compiled("decode")[-1].as_text().split("\n", 1)[0]
    assert header.count("may-alias") + header.count("must-alias") >= 2 * 3 + 1


@pytest.mark.slow
def test_a_capturing_model_trains_and_is_checked(rng):
    backbone = make_deep_gpt2()
    edited = bs.operate(backbone, [bs.Capture("blocks.*")])
    assert max(bs.check(edited).errors.values()) <= EXACT
    ids = rng.integers(1, 60, (4, 9))
    x, y = {"token_ids": ids[:, :-1], "padding_mask": np.ones((4, 8), "int32")}, ids[:, 1:]
    losses = []
    for task in (bs.CachedCausalLM(edited), bs.CachedCausalLM(make_deep_gpt2())):
        task.compile(sampler="greedy", optimizer=keras.optimizers.SGD(0.1))
        losses.append(task.fit(x, y, epochs=2, shuffle=False, verbose=0).history["loss"])
    assert np.allclose(*losses, rtol=1e-5)


def test_pictures_show_captures_as_outputs(lm):
    for model in (lm.backbone, lm.backbone_with_cache):
        text = bs.to_mermaid(model, expand_nested=True)
        assert text.count("blocks.1.attention_pattern_output") == 1


def test_errors(rng):
    backbone = make_deep_gpt2()
    with pytest.raises(bs.SurgeryError, match="expected at least one site selector"):
        bs.Capture()
    with pytest.raises(bs.SelectorError, match=r"'blocks.1.quary'.*Did you mean"):
        bs.operate(backbone, [bs.Capture("blocks.0", "blocks.1.quary")])
    lm = bs.CachedCausalLM(backbone)
    lm.compile(sampler="greedy")
    with pytest.raises(bs.SurgeryError, match="expected a backbone that captures something"):
        lm.generate(ragged(rng, (3,), 3), stop_token_ids=None, return_captures=True)
    capturing = bs.CachedCausalLM(bs.operate(backbone, [bs.Capture("blocks.0")]))
    capturing.compile(sampler="greedy")
    options = {"max_new_tokens": 1, "stop_token_ids": None, "return_captures": True}
    _, captures = capturing.generate(ragged(rng, (3,), 3), **options)
    with pytest.raises(bs.SurgeryError, match=r"captures at 'blocks.1': expected a site"):
        captures["blocks.1"]
