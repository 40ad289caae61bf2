"""Patching grid, logit lens and attribution equal one pass for each number they give."""

from unittest import mock

import jax
import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from tests import compilations
from tests.analysis.cells import logits_of_cells
from tests.helpers import FAMILIES, make_deep_gpt2, make_gpt2, relative
from tests.numpy_models import Model, weights_of

compile_ = jax.stages.Lowered.compile
CLEAN, CORRUPTED = [3, 14, 15, 9, 2], [3, 14, 26, 9, 2]


@pytest.fixture(scope="module", params=["gpt2", "gemma2"])
def lm(request):
    return bs.CachedCausalLM(FAMILIES[request.param](num_layers=2))


@pytest.fixture(scope="module")
def plain():
    """One model for all tests that change nothing of it."""
    return bs.CachedCausalLM(make_deep_gpt2())


def unembed(lm, hidden):
    logits = hidden @ weights_of(lm.backbone.token_embedding)[0].T
    cap = getattr(lm.backbone, "final_logit_soft_cap", None)
    return np.tanh(logits / cap) * cap if cap else logits


def logits_of(lm, model, ids):
    return unembed(lm, model(np.array([ids])))


LONG = list(range(1, 22))


@pytest.mark.slow
@pytest.mark.parametrize(
    "at",
    ["blocks.*.key", "blocks.*", "blocks.*.mlp_output", "blocks.*.*ue*"],
)
def test_rows_of_a_grid_begin_where_their_patch_is(lm, at):
    """A text of three pieces, in batches that do not divide them, by one pass for each cell."""
    other = [LONG[0], LONG[1] + 30, *LONG[2:]]
    got = bs.patch_grid(lm, other, LONG, metric=7, at=at, batch_size=5)
    cells = [(0, 1), (0, 7), (1, 8), (0, 15), (1, 16), (1, 20), (0, 20), (1, 3)]
    wanted = logits_of_cells(lm, other, LONG, at, cells)[:, 7]
    assert np.abs([got.values[cell] for cell in cells] - wanted).max() <= 1e-4


@pytest.mark.slow
def test_edits_before_and_after_a_cut_stay_with_their_controls(rng):
    """A block that runs twice, steering on both sides of it, a condition and a capture."""
    edits = [
        bs.Repeat("blocks.1"),
        bs.Condition("told", rng.normal(size=32), 0.1, at="blocks.0"),
        bs.Steer("mood", {b: rng.normal(size=32) for b in (1, 2, 3)}, when="told"),
        bs.Capture("blocks.2"),
    ]
    lm = bs.CachedCausalLM(bs.operate(make_deep_gpt2(), edits))
    strength = {"mood_strength": np.full(3, 1.5, "float32")}
    other = [*LONG[:3], 40, *LONG[4:]]
    for at in ("blocks.*", "blocks.1:3.head_outputs"):
        got = bs.patch_grid(lm, other, LONG, 7, at=at, controls={"mood": 1.5})
        cells = [(s, t) for s in range(len(got.sites)) for t in (3, 20)]
        wanted = logits_of_cells(lm, other, LONG, at, cells, strength)[:, 7]
        assert np.abs([got.values[cell] for cell in cells] - wanted).max() <= 1e-4
        assert not np.allclose(got.values, bs.patch_grid(lm, other, LONG, 7, at=at).values)


@pytest.mark.slow
def test_blocks_that_are_alike_are_compiled_once(plain):
    """Of as many programs for each start: what is before the first site, a block, and the end."""
    with mock.patch.object(jax.stages.Lowered, "compile", autospec=True) as compiled:
        compiled.side_effect = compile_
        bs.patch_grid(plain, [9, *LONG[1:8]], LONG[:8], 7)
        assert compiled.call_count == 3 + 2
        bs.patch_grid(plain, [8, *LONG[1:8]], LONG[:8], 7)
        assert compiled.call_count == 3 + 2


def test_patch_grid_is_one_patched_pass_for_each_cell(lm):
    got = bs.patch_grid(lm, CLEAN, CORRUPTED, metric=(7, 8), batch_size=4)
    assert got.sites == ["blocks.0", "blocks.1"]
    assert got.tokens == [str(i) for i in CORRUPTED]
    reference = Model(lm.backbone)

    def metric(model, ids):
        last = logits_of(lm, model, ids)[0, -1]
        return last[7] - last[8]

    clean = metric(reference, CLEAN)
    states = reference.captures()
    assert abs(got.clean - clean) <= 1e-4
    assert abs(got.corrupted - metric(reference, CORRUPTED)) <= 1e-4
    for s, site in enumerate(got.sites):
        for t in range(5):
            model = Model(lm.backbone)

            def put(x, _, t=t, site=site):
                x = x.copy()
                x[0, t] = states[site][0, t]
                return x

            model.blocks[s].at("block", put)
            assert abs(got.values[s, t] - metric(model, CORRUPTED)) <= 1e-4, (site, t)
    assert (got.values[:, :2] == np.float32(got.corrupted)).all()
    assert np.allclose(got.recovered[-1, -1], 1, atol=1e-4)


def test_patch_grid_by_head_is_one_patched_pass_for_each_head(lm):
    at = "blocks.*.head_outputs"
    got = bs.patch_grid(lm, CLEAN, CORRUPTED, metric=(7, 8), at=at, batch_size=3, by_head=True)
    reference = Model(lm.backbone)
    reference(np.array([CLEAN]))
    states = reference.captures()
    heads = states[got.sites[0]].shape[2]
    assert got.values.shape == (2, heads)
    assert got.columns == [str(i) for i in range(heads)]
    assert repr(got).startswith(f"PatchGrid(2 sites x {heads} heads")
    for s, h in np.ndindex(got.values.shape):
        model = Model(lm.backbone)

        def put(x, _, s=s, h=h):
            x = x.copy()
            x[:, :, h] = states[got.sites[s]][:, :, h]
            return x

        model.blocks[s].at("head_outputs", put)
        last = logits_of(lm, model, CORRUPTED)[0, -1]
        assert abs(got.values[s, h] - (last[7] - last[8])) <= 1e-4, (s, h)
    for where in ("blocks.*", "blocks.*.*_output"):
        with pytest.raises(bs.SurgeryError, match="sites of as many heads each, such as 'blocks"):
            bs.patch_grid(lm, CLEAN, CORRUPTED, 7, at=where, by_head=True)


@pytest.mark.slow
def test_patch_grid_of_other_sites_and_metrics(lm):
    seen = []

    def metric(logits):
        seen.append(np.shape(logits))
        return logits[:, 7]

    got = bs.patch_grid(lm, CLEAN, CORRUPTED, metric, at="blocks.*.head_outputs", batch_size=100)
    wanted = bs.patch_grid(lm, CLEAN, CORRUPTED, 7, at="blocks.*.head_outputs")
    assert np.allclose(got.values, wanted.values, atol=1e-5)
    assert seen[-1] == (2 * 16, 60)  # of as many tokens as are run, so that others compile nothing


def test_logit_lens_reads_each_block_by_the_final_norm(lm):
    got = bs.logit_lens(lm, CLEAN)
    reference = Model(lm.backbone)
    final = logits_of(lm, reference, CLEAN)
    norm = keras.Sequential([lm.backbone.layer_norm])
    for i, site in enumerate(got.sites):
        x = np.asarray(reference.captures()[site], "float32")
        logits = unembed(lm, np.asarray(norm(x), "float64"))
        exp = np.exp(logits - logits.max(-1, keepdims=True))[0]
        p = exp / exp.sum(-1, keepdims=True)
        assert np.array_equal(got.token_ids[i], p.argmax(-1))
        assert relative(got.probabilities[i], p.max(-1)) <= 1e-4
        assert relative(got.entropies[i], -(p * np.log(p + 1e-300)).sum(-1)) <= 1e-3
    assert np.array_equal(got.token_ids[-1], final[0].argmax(-1))
    assert got.labels[0] == [str(i) for i in got.token_ids[0]]


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "ask",
    [
        lambda lm, pair, i: bs.attribution(lm, pair[0], target=i),
        lambda lm, pair, i: bs.attribution(lm, pair[0], target=(i, 3)),
        lambda lm, pair, i: bs.logit_lens(lm, pair[0]),
        lambda lm, pair, i: bs.direct_logit_attribution(lm, pair[0], target=i),
        lambda lm, pair, i: bs.patch_grid(lm, *pair, metric=i),
        lambda lm, pair, i: bs.edge_attribution(lm, *pair, metric=7, steps=2),
        lambda lm, pair, i: bs.edge_patching(lm, *pair, metric=i, by_head=True),
    ],
    ids=["attribution", "of two tokens", "lens", "direct", "grid", "edges", "patched edges"],
)
def test_another_text_and_token_compile_nothing(lm, ask):
    """Nor does a text of a few tokens more."""
    ask(lm, (CLEAN, CORRUPTED), 7)
    with compilations.counted() as compiled:
        ask(lm, (CORRUPTED, CLEAN), 9)
        ask(lm, ([8, *CLEAN, 8], [8, *CORRUPTED, 8]), 9)
        assert not compiled
        jax.jit(lambda x: x * 3)(len(compiled))  # counted, so that this can fail
        assert compiled


@pytest.mark.slow
@pytest.mark.parametrize("length", [16, 17, 18])
def test_texts_as_long_as_the_positions_of_a_model(length):
    """Padding does not go past them, and nothing is read from it."""
    lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(60, 2, 2, 16, 32, max_sequence_length=18))
    rng = np.random.default_rng(length)
    clean = rng.integers(0, 60, length).tolist()
    corrupted = [*clean[:3], (clean[3] + 1) % 60, *clean[4:]]
    ends = [logits_of(lm, Model(lm.backbone), ids)[0, -1, 7] for ids in (clean, corrupted)]
    grid = bs.patch_grid(lm, clean, corrupted, metric=7)
    edges = bs.edge_patching(lm, clean, corrupted, 7, receivers="logits")
    for got in (grid, edges):
        assert (got.clean, got.corrupted) == pytest.approx(ends, abs=1e-4)
    assert grid.values.shape == (2, length)
    assert grid.values[-1, -1] == pytest.approx(ends[0], abs=1e-4)
    assert bs.attribution(lm, clean, 7).metric == pytest.approx(ends[0], abs=1e-4)
    last = bs.logit_lens(lm, clean)
    assert last.probabilities.shape == (2, length)
    assert last.token_ids[-1, -1] == logits_of(lm, Model(lm.backbone), clean)[0, -1].argmax()
    with pytest.raises(bs.SurgeryError, match="18"):
        bs.attribution(lm, [1] * 19, 7)


def test_attribution_is_gradient_times_activation(lm):
    got = bs.attribution(lm, CLEAN, target=7, at="blocks.*")
    reference = Model(lm.backbone)
    assert abs(got.metric - logits_of(lm, reference, CLEAN)[0, -1, 7]) <= 1e-4
    for site in range(2):
        for token in (2, 4):
            values = []
            for step in (1e-4, -1e-4):
                model = Model(lm.backbone)

                def scale(x, _, token=token, step=step):
                    x = x.copy()
                    x[0, token] *= 1 + step
                    return x

                model.blocks[site].at("block", scale)
                values.append(logits_of(lm, model, CLEAN)[0, -1, 7])
            slope = (values[0] - values[1]) / 2e-4
            assert abs(got.values[site, token] - slope) <= 1e-3 * max(abs(slope), 1)
    assert not got.values[1, :4].any()
    last = bs.attribution(lm, CLEAN, target=7, at="final_norm")
    assert abs(last.values[0, -1] - last.metric) <= 1e-4


@pytest.mark.parametrize("role", ["head_outputs", "key"])
def test_attribution_by_head_sums_over_tokens(lm, role):
    """By finite differences: the metric, as all that a head gives is scaled."""
    at = f"blocks.*.{role}"
    got = bs.attribution(lm, CLEAN, target=7, at=at, by_head=True)
    by_token = bs.attribution(lm, CLEAN, target=7, at=at)
    assert np.abs(got.values.sum(1) - by_token.values.sum(1)).max() <= 1e-4
    heads = got.values.shape[1]
    assert got.columns == [str(head) for head in range(heads)]
    assert repr(got).startswith(f"Attribution(2 sites x {heads} heads")
    for head in (0, heads - 1):
        values = []
        for step in (1e-4, -1e-4):
            model = Model(lm.backbone)

            def scale(x, _, head=head, step=step):
                x = x.copy()
                x[:, :, head] *= 1 + step
                return x

            model.blocks[0].at(role, scale)
            values.append(logits_of(lm, model, CLEAN)[0, -1, 7])
        slope = (values[0] - values[1]) / 2e-4
        assert abs(got.values[0, head] - slope) <= 1e-3 * max(abs(slope), 1)


@pytest.mark.slow
def test_controls_reach_the_analyses():
    backbone = make_deep_gpt2()
    vector = np.random.default_rng(1).normal(size=32)
    steered = bs.CachedCausalLM(bs.operate(backbone, [bs.Steer("mood", {2: vector})]))
    plain = bs.CachedCausalLM(backbone)
    zero, one = ({"mood": s} for s in (0.0, 1.0))
    wanted = bs.attribution(plain, CLEAN, target=7)
    assert np.allclose(
        bs.attribution(steered, CLEAN, 7, controls=zero).values, wanted.values, atol=1e-5
    )
    assert not np.allclose(bs.attribution(steered, CLEAN, 7, controls=one).values, wanted.values)
    lens = bs.logit_lens(plain, CLEAN)
    assert np.allclose(bs.logit_lens(steered, CLEAN, controls=zero).entropies, lens.entropies)
    assert not np.allclose(bs.logit_lens(steered, CLEAN, controls=one).entropies, lens.entropies)


def test_nothing_is_left_behind(lm):
    before = [np.asarray(v).copy() for v in lm.backbone.variables]
    picture = bs.to_mermaid(lm.opened, expand_nested=True)
    bs.patch_grid(lm, CLEAN, CORRUPTED, 7)
    bs.logit_lens(lm, CLEAN)
    assert bs.to_mermaid(lm.opened, expand_nested=True) == picture
    for old, new in zip(before, lm.backbone.variables, strict=True):
        assert np.array_equal(old, new)


@pytest.mark.slow
def test_figures(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lm = bs.CachedCausalLM(bs.operate(make_gpt2(), [bs.Capture("blocks.0.attention_pattern")]))
    lm.compile(sampler="greedy")
    prompt = {"token_ids": np.array([CLEAN]), "padding_mask": np.ones((1, 5))}
    options = {"max_new_tokens": 3, "stop_token_ids": None, "return_captures": True}
    _, captures = lm.generate(prompt, **options)
    grid = bs.patch_grid(lm, CLEAN, CORRUPTED, 7)
    lens = bs.logit_lens(lm, CLEAN)
    attribution = bs.attribution(lm, CLEAN, 7)
    edges = bs.edge_patching(lm, CLEAN, CORRUPTED, 7)
    ends = f"; clean {grid.clean:.4g}, corrupted {grid.corrupted:.4g})"
    assert repr(grid) == f"PatchGrid(2 sites x 5 tokens{ends}"
    assert repr(lens) == "LogitLens(2 sites x 5 tokens)"
    assert repr(attribution) == f"Attribution(2 sites x 5 tokens; metric {attribution.metric:.4g})"
    blocks = ["blocks.0", "blocks.1"]
    clean, corrupted = [str(i) for i in CLEAN], [str(i) for i in CORRUPTED]
    seen = [str(i) for i in captures.token_ids[0]]
    assert seen[:5] == clean
    assert len(seen) == 7
    pattern = bs.plot_attention(captures, "blocks.0.attention_pattern", head=1)
    for name, ax, rows, across in (
        ("grid", bs.plot_grid(grid), blocks, corrupted),
        ("attribution", bs.plot_grid(attribution), blocks, clean),
        ("edges", bs.plot_grid(edges), edges.senders, edges.receivers),
        ("lens", bs.plot_lens(lens), blocks, clean),
        ("attention", pattern, seen, seen),
    ):
        ax.figure.savefig(tmp_path / f"{name}.png")
        assert [t.get_text() for t in ax.get_xticklabels()] == across
        assert [t.get_text() for t in ax.get_yticklabels()] == rows
        assert np.shape(ax.images[0].get_array()) == (len(rows), len(across))
        pyplot.close(ax.figure)
    with pytest.raises(bs.SurgeryError, match="plot_grid: expected a `PatchGrid`"):
        bs.plot_grid(lens)
    with pytest.raises(bs.SurgeryError, match="plot_lens: expected a `LogitLens`"):
        bs.plot_lens(grid)
    with pytest.raises(bs.SurgeryError, match=r"'ax': expected axes .* Received 'grid\.png'"):
        bs.plot_grid(grid, "grid.png")
    with pytest.raises(bs.SurgeryError, match="a head from 0 to 3"):
        bs.plot_attention(captures, "blocks.0.attention_pattern", head=9)
    with pytest.raises(bs.SurgeryError, match="expected `GeneratedActivations`"):
        bs.plot_attention(3, "blocks.0.attention_pattern")
    with pytest.raises(bs.SurgeryError, match=r"a row from 0 to 0. Received 9"):
        bs.plot_attention(captures, "blocks.0.attention_pattern", row=9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda lm: bs.patch_grid(lm, [1, 2], [1, 2, 3], 7), "two different texts of as many"),
        (lambda lm: bs.patch_grid(lm, [1, 2], [1, 2], 7), "two different texts of as many"),
        (lambda lm: bs.patch_grid(lm, [1, 2], [1, 3], 99), "an id from 0 to 59"),
        (lambda lm: bs.patch_grid(lm, [1, 2], [1, 3], (1, 2, 3)), "a pair"),
        (lambda lm: bs.patch_grid(lm, [1, 2], [1, 3], 7, at="blocks.0.*"), "attention_pattern"),
        (lambda lm: bs.patch_grid(lm, [1, 2], [1, 3], lambda x: x[0, 0]), r"shape \[\]. Index"),
        (lambda lm: bs.attribution(lm, [1, 2], lambda x: x), r"shape \[1, 60\]. Index"),
        (
            lambda lm: bs.patch_grid(lm, [1, 2], [1, 3], 7, batch_size=0),
            "a positive int. Received 0",
        ),
        (
            lambda lm: bs.patch_grid(lm, [1, 2], [1, 3], lambda x: 0 * x[:, 0]).recovered,
            "tells the texts apart. Received 0.0",
        ),
        (lambda lm: bs.logit_lens(lm, [[1, 2], [1, 3]]), "expected one text. Received 2"),
        (lambda lm: bs.logit_lens(lm, [1], at="blocks.0.query"), "'blocks.0.query': expected a"),
        (lambda lm: bs.attribution(lm, [1, 2], "dog"), "at 'target': .*Received 'dog'"),
        (
            lambda lm: bs.attribution(lm, [1], 7, at="blocks.0.attention_pattern"),
            "with a value for",
        ),
        *(
            (lambda lm, f=f: f(lm, {"x": 1}), f"{name} at control 'x': expected a control")
            for name, f in {
                "attribution": lambda lm, c: bs.attribution(lm, [1], 7, controls=c),
                "logit_lens": lambda lm, c: bs.logit_lens(lm, [1], controls=c),
                "patch_grid": lambda lm, c: bs.patch_grid(lm, [1, 2], [1, 3], 7, controls=c),
            }.items()
        ),
        (lambda lm: bs.logit_lens(lm, {"token_ids": 1}), "^logit_lens: expected a dict"),
    ],
)
def test_errors(plain, call, words):
    with pytest.raises(bs.SurgeryError, match=words):
        call(plain)


@pytest.mark.slow
def test_edits_of_generated_tokens_are_analysed_with_a_prompt_length(rng):
    """By default all tokens are a prompt, so that such an edit does nothing."""
    steer = bs.Steer("mood", {0: rng.normal(size=32)}, tokens="generated", strength=3.0)
    lm = bs.CachedCausalLM(bs.operate(make_gpt2(), [steer]))
    ids = np.array([CLEAN])
    wanted = np.asarray(lm.score(ids, prompt_lengths=3))[0]
    assert relative(np.asarray(lm.score(ids))[0], wanted) > 0.01
    given = {"prompt_length": 3}
    assert abs(bs.patch_grid(lm, CLEAN, CORRUPTED, 7, **given).clean - wanted[-1, 7]) <= 1e-4
    assert abs(bs.attribution(lm, CLEAN, 7, **given).metric - wanted[-1, 7]) <= 1e-4
    assert abs(bs.direct_logit_attribution(lm, CLEAN, 7, **given).metric - wanted[-1, 7]) <= 1e-4
    lens = bs.logit_lens(lm, CLEAN, **given)
    assert np.array_equal(lens.token_ids[-1], wanted.argmax(-1))
    for wrong in (6, -1, 1.5, True, "all"):
        with pytest.raises(bs.SurgeryError, match="'prompt_length': expected an int from 0 to 5"):
            bs.logit_lens(lm, CLEAN, prompt_length=wrong)
