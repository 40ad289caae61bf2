"""Attention edges that are cut, against a softmax over the scores that are left, in plain NumPy."""

import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.controls import bind_controls
from tests.families import ROWS
from tests.helpers import make_gpt2, ragged

CUT = {"queries": (3, None), "keys": (1, 3)}
PATTERN = "blocks.0.attention_pattern"
OPTIONS = {"max_new_tokens": 8, "stop_token_ids": None}


def captured(backbone, rewrites, inputs, sites, **controls):
    edited = bs.operate(backbone, [*rewrites, bs.Capture(*sites)])
    found = edited.predict_on_batch({**inputs, **controls})["captures"]
    return {path: np.asarray(x, "float64") for path, x in found.items()}


def by_softmax(query, key, is_cut):
    """Return the pattern of GPT-2 without the edges of a mask [batch, heads, queries, keys]."""
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    later = np.triu(np.ones(scores.shape[-2:], bool), 1)
    scores = np.where(is_cut | later, -np.inf, scores)
    highest = scores.max(axis=-1, keepdims=True)
    shares = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
    return shares / np.maximum(shares.sum(axis=-1, keepdims=True), 1e-300)


@pytest.mark.parametrize(("sharper", "most"), [(1, 1e-6), (8, 1e-3)])
def test_it_is_a_softmax_over_what_is_left(rng, sharper, most):
    """Also where next to nothing is left: of what the softmax rounded to zero, say."""
    backbone = make_gpt2()
    for name in ("_query_dense", "_key_dense"):
        dense = getattr(backbone.transformer_layers[0]._self_attention_layer, name)
        dense.kernel.assign(sharper * np.array(dense.kernel))
    inputs = {"token_ids": rng.integers(1, 60, (2, 7)), "padding_mask": np.ones((2, 7), "int32")}
    heads = np.zeros((2, backbone.num_layers, 4), "float32")
    heads[0, 0, 1] = heads[1, 0, 2] = 1
    tokens = {
        "cut_queries": np.array([[3, 7, 7], [0, 7, 7]], "int32"),
        "cut_keys": np.array([[1, 3, 7], [0, 7, 7]], "int32"),  # the second row looks nowhere
    }
    sites = ("blocks.0.query", "blocks.0.key", PATTERN)
    before = captured(backbone, [], inputs, sites)
    after = captured(backbone, [bs.Knockout("cut")], inputs, sites, cut_heads=heads, **tokens)
    is_cut = np.zeros((2, 4, 7, 7), bool)
    is_cut[0, 1, 3:, 1:3] = is_cut[1, 2] = True
    wanted = by_softmax(*(before[path] for path in sites[:2]), is_cut)
    np.testing.assert_allclose(after[PATTERN], wanted, atol=most)
    left = 1 - (before[PATTERN] * is_cut)[0, 1].sum(axis=-1).max()
    assert (left < 1e-6) == (sharper > 1)
    np.testing.assert_array_equal(after[PATTERN][0, [0, 2, 3]], before[PATTERN][0, [0, 2, 3]])
    np.testing.assert_array_equal(after[PATTERN][0, 1, :3], before[PATTERN][0, 1, :3])
    assert not after[PATTERN][1, 2].any()


@pytest.mark.slow
def test_sinks_keep_their_share(rng):
    """A sink is one more score: what is left is divided by it and the edges that are left."""
    backbone = ROWS["gpt_oss"].make()
    inputs = {"token_ids": rng.integers(1, 60, (2, 7)), "padding_mask": np.ones((2, 7), "int32")}
    before = captured(backbone, [], inputs, (PATTERN,))[PATTERN]
    after = captured(backbone, [bs.Knockout("cut", **CUT)], inputs, (PATTERN,))[PATTERN]
    lost = before[:, :, 3:, 1:3].sum(axis=-1, keepdims=True)
    wanted = before[:, :, 3:] / (1 - lost)
    wanted[..., 1:3] = 0
    np.testing.assert_allclose(after[:, :, 3:], wanted, atol=2e-4)  # as NumPy subtracts
    assert (wanted.sum(axis=-1) < 0.99).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ROWS if name != "rwkv7"])
def test_cached_equals_uncached(name):
    report = bs.check(bs.operate(ROWS[name].make(), [bs.Knockout("cut", **CUT, heads=[0, 1])]))
    assert report


@pytest.mark.slow
def test_several_act_together_whatever_comes_after(rng):
    """In one list and one after the other; an `Ablate` of another head comes after."""
    backbone = make_gpt2()
    inputs = {"token_ids": rng.integers(1, 60, (2, 7)), "padding_mask": np.ones((2, 7), "int32")}
    first, second = bs.Knockout("a", **CUT), bs.Knockout("b", (4, None), (0, 1))
    heads = bs.Ablate("blocks.*.attention_pattern", heads=[1])
    sites = ("blocks.0.query", "blocks.0.key", PATTERN)
    found = captured(backbone, [first, second, heads], inputs, sites)
    is_cut = np.zeros((2, 4, 7, 7), bool)
    is_cut[:, :, 3:, 1:3] = is_cut[:, :, 4:, 0] = True
    wanted = by_softmax(*(found[path] for path in sites[:2]), is_cut)
    wanted[:, 1] = 0
    np.testing.assert_allclose(found[PATTERN], wanted, atol=1e-6)
    after = bs.operate(bs.operate(bs.operate(backbone, [first]), [second]), [heads])
    again = captured(after, [], inputs, (PATTERN,))[PATTERN]
    np.testing.assert_array_equal(again, found[PATTERN])
    for order in ([heads, first, second], [first, heads, second]):
        others = captured(backbone, order, inputs, (PATTERN,))[PATTERN]
        np.testing.assert_array_equal(others, found[PATTERN])
    after = bs.operate(bs.operate(backbone, [heads]), [first, second])
    again = captured(after, [], inputs, (PATTERN,))[PATTERN]
    np.testing.assert_array_equal(again, found[PATTERN])


@pytest.fixture(scope="module")
def lm():
    lm = bs.CachedCausalLM(bs.operate(make_gpt2(), [bs.Knockout("cut", heads=[0, 1, 2, 3])]))
    lm.compile(sampler="greedy")
    return lm


@pytest.mark.slow
@pytest.mark.parametrize(
    "control",
    [
        {"heads": [1, 0, 1], "queries": (-1, None), "keys": (0, 2)},
        {"queries": "generated", "keys": ["prompt", (1, 3), (-2, -1)]},
        {"heads": 1, "queries": "last", "keys": (-3, -1)},
    ],
)
def test_generated_tokens_are_those_of_the_uncached_graph(lm, rng, control):
    lengths = [4, 7, 5]
    prompts = ragged(rng, lengths, 7)
    got = lm.generate(prompts, controls={"cut": control}, **OPTIONS)["token_ids"]
    plain = lm.generate(prompts, controls={"cut": 0}, **OPTIONS)["token_ids"]
    assert (got != plain).any()
    mask = (np.arange(got.shape[1]) < np.array(lengths)[:, None] + 8).astype("int32")
    logits = lm.score(
        np.where(mask, got, 0),
        padding_mask=mask,
        prompt_lengths=lengths,
        controls={"cut": control},
    )
    best = np.asarray(logits).argmax(axis=-1)
    for row, n in enumerate(lengths):
        assert got[row, n : n + 8].tolist() == best[row, n - 1 : n + 7].tolist()
    assert lm.programs.compilations == {"prefill": 1, "decode": 1}


@pytest.mark.slow
def test_the_engine_gives_the_same(lm, rng):
    lm = bs.CachedCausalLM(lm.backbone)  # the other tests count what is compiled
    lm.compile(sampler="greedy")
    engine = bs.Engine(lm, rows=2, length=64, prefill_chunk=8)
    prompt = rng.integers(1, 60, 20)
    row = {"token_ids": prompt[None], "padding_mask": np.ones((1, 20), "int32")}
    for control in (
        {"queries": "generated", "keys": (0, 5)},
        {"queries": "last", "keys": (2, 9)},
        {"queries": (4, None), "keys": (0, 2)},
        0,
    ):
        wanted = lm.generate(row, controls={"cut": control}, **OPTIONS)["token_ids"][0, :28]
        request = engine.submit(row, controls={"cut": control}, **OPTIONS)
        np.testing.assert_array_equal(request.result(), wanted)


def test_one_that_is_off_until_a_call_says_so(rng):
    """Heads that a call names are cut, whatever the default is; a mask may be for all rows."""
    edges = bs.Knockout("cut", heads=[1], amount=0)
    units = bs.Ablate("blocks.*.head_outputs", heads=[2], amount=0)
    edited = bs.operate(make_gpt2(num_layers=2), [edges, units])
    assert not edited.defaults["cut_heads"].any()
    assert not edited.defaults["ablate_heads"].any()
    mask = np.eye(2, 4)
    bound = bind_controls(edited, {"cut": [1, 0], "ablate": {"heads": mask}}, np.array([3, 4]))
    assert bound["cut_heads"].tolist() == [[[0, 1, 0, 0]] * 2, [[0] * 4] * 2]
    assert bound["ablate_heads"].tolist() == [mask.tolist()] * 2
    bound = bind_controls(edited, {"cut": mask, "ablate": 1}, np.array([3, 4]))
    assert bound["cut_heads"].tolist() == [mask.tolist()] * 2
    assert bound["ablate_heads"].tolist() == [[[0, 0, 1, 0]] * 2] * 2
    with pytest.raises(bs.SurgeryError, match="`amount` to be 1 or 0"):
        bs.Knockout("cut", amount=0.5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: bs.Knockout("a", heads=[4]), r"expected heads from 0 to 3. Received \[4\]"),
        (lambda: bs.Knockout("a", heads=[-1]), "`heads` to be a head, counted from 0"),
        (lambda: bs.Knockout("a", at="blocks.*.query"), r"Received \['blocks.0.query"),
        (
            lambda: bs.Knockout("a", queries=(0, 3), keys=(3, 6)),
            r"queries \(0, 3\) and keys \(3, 6\). Exchange them",
        ),
        (
            lambda: bs.Knockout("a", queries="prompt", keys="generated"),
            "keys that queries can look at",
        ),
        (lambda: bs.Knockout("a", queries="later"), "`queries`: expected tokens 'all'"),
        (lambda: bs.Knockout("a", keys=(3, 3)), "`keys`: expected tokens 'all'"),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(make_gpt2(), [make()])


@pytest.mark.parametrize(
    ("control", "words"),
    [
        (0.5, "'a': expected 1 to knock out the edges of a head"),
        ({"head": 1}, r"'a': expected a dict of some of heads, .* Received \['head'\]"),
        (bs.Control(tokens="last"), "Received a Control. See `Knockout`"),
        ({"keys": ["all", "all"]}, "'a', `keys`: expected tokens for 1 rows"),
        (np.ones((1, 3)), "'a': expected finite numbers"),
    ],
)
def test_controls_that_do_not_fit_are_refused(control, words):
    edited = bs.operate(make_gpt2(), [bs.Knockout("a")])
    with pytest.raises(bs.SurgeryError, match=words):
        bind_controls(edited, {"a": control}, np.array([3]))


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((0, 3), (2, 6)),
        ((3, None), (7, 9)),
        ((0, 3), "last"),
        ((-2, None), (9, 12)),
        ("all", (4, 5)),
    ],
)
def test_edges_that_some_prompts_have_are_no_mistake(queries, keys):
    assert bs.Knockout("cut", queries=queries, keys=keys).keys == keys
