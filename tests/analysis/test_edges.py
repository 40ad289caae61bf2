"""Edges equal what rewrites give, edge by edge; and those of a sender make up all that it does."""

import re

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.analysis.gradients import metric_gradients
from backbone_surgery.analysis.question import make_metric, read_text
from backbone_surgery.analysis.stream import Streams
from backbone_surgery.opening import family
from tests.families import ROWS
from tests.helpers import make_deep_gpt2, make_gpt2
from tests.opening.test_family import OWN, make_own

CLEAN, CORRUPTED = [3, 14, 15, 9, 2], [3, 7, 15, 9, 2]
PAIR = (7, 8)
HEADS = ("query", "key", "value", "head_outputs")
WRITTEN = re.compile("embeddings|(attention|laurel|mlp|per_layer)_output")


def inputs_of(ids):
    return {"token_ids": np.array([ids]), "padding_mask": np.ones((1, len(ids)), "int32")}


class ByRewrites:
    """Edges by `Capture` and `Patch` alone, one uncached pass after another."""

    def __init__(self, lm, controls=None):
        self.lm, self.paths = lm, list(bs.sites(lm.opened))
        self.controls = controls or {}
        self.clean, self.base = (self.seen(ids) for ids in (CLEAN, CORRUPTED))
        self.corrupted = self.metric({})

    def run(self, ids, patches, captured=()):
        edits = [bs.Patch(path, name=f"p{i}") for i, path in enumerate(patches)]
        model = bs.operate(self.lm.opened, [*edits, *(bs.Capture(p, name="c") for p in captured)])
        given = {**inputs_of(ids), **self.controls}
        for i, value in enumerate(patches.values()):
            given[f"p{i}_positions"] = np.arange(len(ids))[None, None]
            given[f"p{i}_value_0"] = value[None]
        return model, model.predict_on_batch(given)

    def seen(self, ids, patches=None, paths=None):
        paths = paths or [p for p in self.paths if not p.endswith(("pattern", "state"))]
        _, outputs = self.run(ids, patches or {}, paths)
        return {p: np.asarray(outputs["captures"][f"c/{p}"])[0] for p in paths}

    def metric(self, patches):
        model, outputs = self.run(CORRUPTED, patches)
        last = model.hidden_states(outputs)[:, -1]
        logits = np.asarray(self.lm.opened.token_embedding(last, reverse=True))[0]
        return logits[PAIR[0]] - logits[PAIR[1]]

    def written(self, sender):
        """Return what changes in the stream if a sender writes what it writes in the clean text."""
        path, _, head = sender.rstrip("]").partition("[")
        if not head:
            return self.clean[path] - self.base[path]
        exchanged, to = self.base[path].copy(), path.replace("head_outputs", "attention_output")
        exchanged[:, int(head)] = self.clean[path][:, int(head)]
        return self.seen(CORRUPTED, {path: exchanged}, [to])[to] - self.base[to]

    def edge(self, sender, receiver, hold_mlps=True):
        path, _, head = receiver.rstrip("]").partition("[")
        to = sender.partition("[")[0].replace("head_outputs", "attention_output")
        wanted = WRITTEN if hold_mlps else re.compile("^embeddings|attention_output")
        held = {p: self.base[p] for p in self.paths if p != path and wanted.search(p)}
        held[to] = self.base[to] + self.written(sender)
        if path == "logits":
            return self.metric(held) - self.corrupted
        made = self.seen(CORRUPTED, held, [path])[path]
        if head:
            whole = self.base[path].copy()
            whole[:, int(head)] = made[:, int(head)]
            made = whole
        return self.metric({path: made}) - self.corrupted


def check_against_rewrites(lm, by_head, stride, **more):
    got = bs.edge_patching(lm, CLEAN, CORRUPTED, PAIR, by_head=by_head, batch_size=3, **more)
    wanted = ByRewrites(lm)
    assert abs(got.corrupted - wanted.corrupted) <= 1e-4
    known = [tuple(cell) for cell in np.argwhere(~np.isnan(got.values))]
    for s, r in known[::stride]:
        edge = wanted.edge(got.senders[s], got.receivers[r], **more)
        assert abs(got.values[s, r] - edge) <= 1e-4, (got.senders[s], got.receivers[r])
    assert np.nanmax(np.abs(got.values)) > 0.01
    return got


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_neo_x"])
def test_edges_are_those_of_rewrites(family):
    lm = bs.CachedCausalLM(ROWS[family].make())
    got = check_against_rewrites(lm, False, 4)
    assert got.senders[:2] == ["embeddings", "blocks.0.attention_output"]
    assert got.receivers[-1] == "logits"
    assert got.is_exact
    assert f"Edges({len(got.senders)} senders x {len(got.receivers)} receivers;" in repr(got)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3"])
def test_edges_by_head_are_those_of_rewrites(family):
    lm = bs.CachedCausalLM(ROWS[family].make())
    got = check_against_rewrites(lm, True, 9 if family == "qwen3" else 41)
    assert {"blocks.0.head_outputs[1]", "blocks.0.mlp_output"} <= {*got.senders}
    assert {"blocks.1.query[0]", "blocks.1.key[0]", "blocks.1.value[0]"} <= {*got.receivers}


@pytest.mark.slow
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("make", [make_deep_gpt2, ROWS["gemma2"].make, ROWS["gemma4"].make])
def test_mlps_hand_on_what_reaches_them_where_they_are_not_held(make, by_head):
    lm = bs.CachedCausalLM(make())
    asked = lm, CLEAN, CORRUPTED, PAIR
    got = check_against_rewrites(lm, by_head, 37 if by_head else 5, hold_mlps=False)
    held = bs.edge_patching(*asked, by_head=by_head).values
    assert (np.isnan(held) == np.isnan(got.values)).all()
    assert np.nanmax(np.abs(held - got.values)) > 1e-3


def nodes(lm, senders):
    """Return the change of what each sender writes, times the gradient with respect to it."""
    wanted, text = ByRewrites(lm), read_text(lm, CORRUPTED, "test")
    metric = make_metric(lm, PAIR, "test")
    at = tuple(dict.fromkeys(sender.partition("[")[0] for sender in senders))
    (got,) = metric_gradients(lm, "test", [text], {}, at, metric, "test")
    gradients = dict(zip(got.sites, got.gradients, strict=True))
    values = []
    for sender in senders:
        path, _, head = sender.rstrip("]").partition("[")
        product = (wanted.clean[path] - wanted.base[path]) * gradients[path]
        values.append((product[:, int(head)] if head else product).sum())
    return np.array(values)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(ROWS))
def test_edges_of_a_sender_make_up_all_that_it_does(family):
    """Every way from it begins by one of its edges."""
    lm = bs.CachedCausalLM(ROWS[family].make())
    got = bs.edge_attribution(lm, CLEAN, CORRUPTED, PAIR)
    wanted = nodes(lm, got.senders)
    assert np.abs(np.nansum(got.values, axis=1) - wanted).max() <= 1e-3 * np.abs(wanted).max()
    assert not np.isnan(got.values[0]).any()
    assert not got.is_exact


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "falcon", "gpt_oss"])
def test_edges_of_a_head_make_up_all_that_it_does(family):
    lm = bs.CachedCausalLM(ROWS[family].make())
    got = bs.edge_attribution(lm, CLEAN, CORRUPTED, PAIR, by_head=True)
    wanted = nodes(lm, got.senders)
    assert np.abs(np.nansum(got.values, axis=1) - wanted).max() <= 1e-3 * np.abs(wanted).max()


@pytest.mark.slow
@pytest.mark.parametrize("by_head", [False, True])
def test_attribution_is_patching_to_first_order(by_head):
    """Of two tokens that are nearly the same, so that first order is all that there is."""
    backbone = make_gpt2(num_layers=2)
    table = np.array(backbone.token_embedding.embeddings)
    table[CLEAN[1]] = table[CORRUPTED[1]] + 1e-2 * table[CLEAN[1]]
    backbone.token_embedding.embeddings.assign(table)
    lm = bs.CachedCausalLM(backbone)
    attributed = bs.edge_attribution(lm, CLEAN, CORRUPTED, PAIR, by_head=by_head).values
    patched = bs.edge_patching(lm, CLEAN, CORRUPTED, PAIR, by_head=by_head).values
    assert (np.isnan(attributed) == np.isnan(patched)).all()
    assert np.nanmax(np.abs(attributed - patched)) <= 0.03 * np.nanmax(np.abs(patched))
    assert np.nanmax(np.abs(patched)) > 1e-3


@pytest.mark.slow
def test_integrated_gradients_come_nearer():
    lm = bs.CachedCausalLM(make_gpt2(num_layers=2))
    patched = bs.edge_patching(lm, CLEAN, CORRUPTED, PAIR).values
    off = [
        np.nansum(np.abs(bs.edge_attribution(lm, CLEAN, CORRUPTED, PAIR, steps=n).values - patched))
        for n in (1, 8)
    ]
    assert off[1] < 0.5 * off[0]


@pytest.mark.slow
def test_edges_of_an_edited_model():
    """A direction taken out of the stream, and a block of another kind, are passed as they are."""
    backbone = make_deep_gpt2()
    direction = np.random.default_rng(0).normal(size=backbone.hidden_dim)
    edits = [
        bs.ProjectOut("out", direction, at="blocks.1"),
        bs.Replace("blocks.2", keras.layers.Rescaling(0.5)),
    ]
    lm = bs.CachedCausalLM(bs.operate(backbone, edits))
    got = bs.edge_attribution(lm, CLEAN, CORRUPTED, PAIR)
    assert not any(path.startswith("blocks.2") for path in got.senders + got.receivers)
    wanted = nodes(lm, got.senders)
    assert np.abs(np.nansum(got.values, axis=1) - wanted).max() <= 1e-3 * np.abs(wanted).max()


class Scaled(keras.layers.Layer):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def call(self, x):
        return 0.5 * x + 0.7 * self.block(0.9 * x)


def conditional(backbone):
    """Return a model steered in its second block where the first one meets a condition.

    The corrupted text does not meet it, and the clean one does.
    """
    watched, added = np.random.default_rng(1).normal(size=(2, backbone.hidden_dim))
    lm = bs.CachedCausalLM(backbone)
    runs = [
        ByRewrites(lm).seen(ids, {}, ["blocks.0"])["blocks.0"][-1] for ids in (CLEAN, CORRUPTED)
    ]
    scores = [x @ watched / np.linalg.norm(x) / np.linalg.norm(watched) for x in runs]
    watched, scores = (
        (watched, scores) if scores[0] > scores[1] else (-watched, np.negative(scores))
    )
    edits = [
        bs.Condition("told", watched, float(np.mean(scores)), at="blocks.0", tokens=(4, 5)),
        bs.Steer("mood", {1: 3 * added}, at="blocks.*.mlp_output", when="told"),
    ]
    return bs.operate(backbone, edits)


SHARED = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "num_key_value_heads": 1}
ODD = {
    "wrapped": lambda: bs.operate(make_gpt2(num_layers=3), [bs.Wrap("blocks.1", Scaled)]),
    "first": lambda: bs.operate(make_gpt2(num_layers=2), [bs.Wrap("blocks.0", Scaled)]),
    "conditional": lambda: conditional(make_deep_gpt2()),
    "streams": lambda: ROWS["gemma3n"].make(num_layers=3),
    "shared": lambda: ROWS["gemma4"].make(num_layers=4, **SHARED),
    "handed_on": lambda: ROWS["rwkv7"].make(num_layers=3),
}
PARTS = [(model, by_head) for model in ODD for by_head in (False, True)]
PARTS.remove(("handed_on", True))  # by head, its gates and decays are not sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "by_head"),
    [
        pytest.param(model, by_head, marks=() if case == 0 else pytest.mark.slow)
        for case, (model, by_head) in enumerate(PARTS)
    ],
)
def test_what_goes_beside_the_stream_takes_part(model, by_head):
    """Around a `Wrap`, by a `Condition`, by other streams, by keys and values that blocks share."""
    lm = bs.CachedCausalLM(ODD[model]())
    check_against_rewrites(lm, by_head, 37 if by_head else 11)
    if by_head and model in ("shared", "streams"):  # a norm follows attention
        return
    got = bs.edge_attribution(lm, CLEAN, CORRUPTED, PAIR, by_head=by_head)
    wanted = nodes(lm, got.senders)
    assert np.abs(np.nansum(got.values, axis=1) - wanted).max() <= 1e-3 * np.abs(wanted).max()


@pytest.mark.slow
def test_a_block_without_the_sites_is_passed_as_it_computes(monkeypatch):
    """Its family has no site for what attention writes, so one edge is all that there is."""
    monkeypatch.setattr(family, "_families", dict(family._families))
    bs.register_family(OWN)
    lm = bs.CachedCausalLM(make_own())
    got = bs.edge_patching(lm, CLEAN, CORRUPTED, PAIR)
    assert (got.senders, got.receivers) == (["embeddings"], ["logits"])
    assert abs(got.values[0, 0] - (got.clean - got.corrupted)) <= 1e-4
    with pytest.raises(bs.SurgeryError, match="by_head=True: expected blocks with sites query"):
        bs.edge_attribution(lm, CLEAN, CORRUPTED, PAIR, by_head=True)


@pytest.mark.slow
def test_receivers_are_chosen():
    lm = bs.CachedCausalLM(make_gpt2(num_layers=2))
    whole = bs.edge_patching(lm, CLEAN, CORRUPTED, PAIR, by_head=True)
    for receivers in ("blocks.1.query", "blocks.*.mlp_output", "logits"):
        some = bs.edge_patching(lm, CLEAN, CORRUPTED, PAIR, receivers, by_head=True, batch_size=2)
        columns = [whole.receivers.index(receiver) for receiver in some.receivers]
        assert np.allclose(some.values, whole.values[:, columns], atol=1e-5, equal_nan=True)
    assert some.receivers == ["logits"]
    best = whole.top(3)
    assert [value for _, _, value in best] == sorted((v for *_, v in best), key=abs, reverse=True)
    assert len(whole.top(10**6)) == (~np.isnan(whole.values)).sum()


@pytest.mark.slow
def test_controls_and_a_metric_of_ones_own():
    backbone = make_gpt2(num_layers=2)
    steer = bs.Steer("mood", {0: np.arange(backbone.hidden_dim) % 3}, tokens="generated")
    lm = bs.CachedCausalLM(bs.operate(backbone, [steer]))

    def metric(logits):
        return logits[:, PAIR[0]] - logits[:, PAIR[1]]

    for ask in (bs.edge_attribution, bs.edge_patching):
        plain = ask(lm, CLEAN, CORRUPTED, PAIR, controls={"mood": 0.0})
        assert np.allclose(ask(lm, CLEAN, CORRUPTED, metric).values, plain.values, equal_nan=True)
        steered = ask(lm, CLEAN, CORRUPTED, metric, controls={"mood": 2.0}, prompt_length=2)
        assert not np.allclose(steered.values, plain.values, atol=1e-3, equal_nan=True)
        assert steered.corrupted != plain.corrupted


@pytest.fixture(scope="module")
def small():
    return bs.CachedCausalLM(make_gpt2(num_layers=1))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"by_head": "yes"}, "at 'by_head': expected True or False"),
        ({"clean": [1, 2]}, "expected two different texts of as many tokens"),
        ({"clean": CORRUPTED}, "expected two different texts of as many tokens"),
        ({"metric": 1000}, "at 'metric': expected one token"),
        ({"prompt_length": 9}, "at 'prompt_length': expected an int from 0 to 5"),
        ({"controls": {"mood": 1}}, "mood"),
        ({"steps": 0}, "at 'steps': expected a positive int"),
        ({"batch_size": 0}, "at 'batch_size': expected a positive int"),
        ({"receivers": 3}, "at 'receivers': expected a site selector"),
        ({"receivers": "blocks.9.mlp_output"}, "matches nothing among"),
        ({"receivers": "blocks.0.quer*"}, r"at 'receivers': .* With by_head=True queries, keys"),
    ],
)
def test_bad_input_is_refused(small, more, words):
    asked = {"clean": CLEAN, "corrupted": CORRUPTED, "metric": PAIR, **more}
    asks = [bs.edge_attribution] * ("batch_size" not in more)
    asks += [bs.edge_patching] * ("steps" not in more)
    for ask in asks:
        with pytest.raises(bs.SurgeryError, match=words):
            ask(small, **asked)


def test_a_metric_without_gradients_is_refused(small):
    with pytest.raises(bs.SurgeryError, match="at 'metric': expected a function that returns flo"):
        bs.edge_attribution(small, CLEAN, CORRUPTED, lambda logits: logits[:, 3].astype("int32"))


def test_top_counts_edges(small):
    edges = bs.edge_patching(small, CLEAN, CORRUPTED, PAIR, "logits")
    with pytest.raises(bs.SurgeryError, match="at 'count': expected a positive int"):
        edges.top(0)


def scaled(backbone):
    for variable in backbone.trainable_variables:
        variable.assign(1.3 * np.asarray(variable))


def with_lora(backbone):
    backbone.enable_lora(2)
    for variable in backbone.trainable_variables:
        variable.assign(np.random.default_rng(3).normal(0, 0.3, variable.shape))


@pytest.mark.slow
@pytest.mark.parametrize("change", [scaled, with_lora, lambda backbone: backbone.quantize("int8")])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_change_between_calls_count(tied, change):
    backbone = ROWS["llama"].make(num_layers=1, tie_word_embeddings=tied)
    lm = bs.CachedCausalLM(backbone)
    asks = bs.edge_attribution, bs.edge_patching
    before = [ask(lm, CLEAN, CORRUPTED, PAIR).values for ask in asks]
    change(backbone)
    fresh = bs.CachedCausalLM(backbone)
    for ask, old in zip(asks, before, strict=True):
        edges, wanted = (ask(model, CLEAN, CORRUPTED, PAIR) for model in (lm, fresh))
        assert np.allclose(edges.values, wanted.values, atol=1e-5, equal_nan=True)
        assert not np.allclose(edges.values, old, atol=1e-3, equal_nan=True)
        grid = bs.patch_grid(fresh, CLEAN, CORRUPTED, PAIR, at="blocks.0")
        assert abs(edges.clean - grid.clean) <= 1e-4
        assert abs(edges.corrupted - grid.corrupted) <= 1e-4


def test_no_weight_is_baked_into_a_program():
    """All that a stage computes with is an argument of its program."""
    lm = bs.CachedCausalLM(make_gpt2(num_layers=1))
    streams = Streams(lm, "test", True)
    known = {id(v) for stage in streams._stages.stages for v in stage.variables}
    assert {id(v) for v in lm.opened.owner.variables if "seed" not in v.path} == known
