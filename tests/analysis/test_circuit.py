"""Circuits equal runs in which captures are patched, one receiver after another."""

import dataclasses

import numpy as np
import pytest

import backbone_surgery as bs
from tests.analysis.test_edges import CLEAN, CORRUPTED, ODD, PAIR, WRITTEN, ByRewrites
from tests.analysis.test_edges import PARTS as ODD_PARTS
from tests.families import ROWS
from tests.helpers import make_gpt2


def by_rewrites(lm, edges, kept):
    """Run a circuit by `Capture` and `Patch` alone, one uncached pass for each receiver."""
    runs = ByRewrites(lm)
    values = {"embeddings": runs.clean["embeddings"]}

    def head_outputs(path):
        block = path.rpartition(".")[0]
        read = {f"{block}.{role}": values[f"{block}.{role}"] for role in ("query", "key", "value")}
        return runs.seen(CORRUPTED, read, [path])[path]

    def written(receiver):
        """Return what is written for a receiver, by path."""
        sent = {p: x for p, x in runs.base.items() if WRITTEN.search(p)}
        mixed = {}
        for sender, is_kept in zip(edges.senders, kept[:, receiver], strict=True):
            path, _, head = sender.rstrip("]").partition("[")
            if is_kept and head:
                whole = mixed.setdefault(path, runs.base[path].copy())
                whole[:, int(head)] = head_outputs(path)[:, int(head)]
            elif is_kept:
                sent[path] = values[path]
        for path, heads in mixed.items():
            to = path.replace("head_outputs", "attention_output")
            sent[to] = runs.seen(CORRUPTED, {path: heads}, [to])[to]
        return sent

    for r, receiver in enumerate(edges.receivers):
        path, _, head = receiver.rstrip("]").partition("[")
        held = {p: value for p, value in written(r).items() if p != path}
        if path == "logits":
            return runs.metric(held)
        made = runs.seen(CORRUPTED, held, [path])[path]
        if head:
            values.setdefault(path, runs.base[path].copy())[:, int(head)] = made[:, int(head)]
        else:
            values[path] = made
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "falcon", "gemma2"])
def test_a_circuit_is_that_of_rewrites(family, by_head):
    lm = bs.CachedCausalLM(ROWS[family].make())
    asked = lm, CLEAN, CORRUPTED, PAIR
    edges = bs.edge_attribution(*asked, by_head=by_head)
    counts = [25, 60] if by_head else [6, 12]
    got = bs.faithfulness(*asked, edges, counts)
    for count, value in zip(counts, got.values, strict=True):
        kept = np.zeros(edges.values.shape, bool)
        kept[tuple(np.transpose(edges.order()[:count]))] = True
        assert abs(value - by_rewrites(lm, edges, kept)) <= 1e-4
    assert abs(value - got.clean) > 1e-3
    assert abs(value - got.corrupted) > 1e-3


ENDS = {"gpt2": lambda: ROWS["gpt2"].make(), **ODD}
PARTS = [("gpt2", False), ("gpt2", True), *ODD_PARTS]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "by_head"), PARTS)
def test_all_edges_are_the_clean_text_and_none_the_corrupted_one(model, by_head):
    """But for Gemma 3n and 4, whose embeddings for each layer nobody sends."""
    lm = bs.CachedCausalLM(ENDS[model]())
    asked = lm, CLEAN, CORRUPTED, PAIR
    edges = bs.edge_attribution(*asked, by_head=by_head)
    most = int((~np.isnan(edges.values)).sum())
    got = bs.faithfulness(*asked, edges, (0, most))
    assert abs(got.values[0] - got.corrupted) <= 1e-5
    assert (abs(got.values[1] - got.clean) <= 1e-4) == (model not in ("shared", "streams"))
    assert got.counts == [0, most]
    assert repr(got).startswith(f"Faithfulness(shares by edges left {{0: {got.shares[0]:.4g}, ")


def test_bad_input_is_refused():
    lm = bs.CachedCausalLM(make_gpt2(num_layers=1))
    asked = lm, CLEAN, CORRUPTED, PAIR
    edges = bs.edge_patching(*asked)
    unknown = [[("embeddings", "nowhere")], ["embeddings"], [("logits", "embeddings")], [[{}, {}]]]
    for circuits in ([], [-1], [1.5], "12", 3, [7], *([edge] for edge in unknown)):
        with pytest.raises(bs.SurgeryError, match=r"at 'circuits': expected ints from 0 to 6"):
            bs.faithfulness(*asked, edges, circuits)
    with pytest.raises(bs.SurgeryError, match=r"Received 7\. Pass \[10, edges\.circuit\(100\)\]"):
        bs.faithfulness(*asked, edges, [1, 7])
    four = [(*edges.top(1)[0], 1.0)]
    with pytest.raises(bs.SurgeryError, match="at 'circuits'"):
        bs.faithfulness(*asked, edges, [four])
    pairs = np.array([edge[:2] for edge in edges.top(2)])
    assert len(set(bs.faithfulness(*asked, edges, [pairs, 2]).values.tolist())) == 1
    with pytest.raises(bs.SurgeryError, match="at 'edges': expected `Edges`"):
        bs.faithfulness(*asked, edges.values, [1])
    some = bs.edge_patching(*asked, receivers="logits")
    with pytest.raises(bs.SurgeryError, match="expected those of this model, 3 senders x 3 receiv"):
        bs.faithfulness(*asked, some, [1])
    others = [{"senders": edges.senders[::-1]}, {"values": edges.values[:2]}]
    for other in (dataclasses.replace(edges, **change) for change in others):
        with pytest.raises(bs.SurgeryError, match="expected those of this model"):
            bs.faithfulness(*asked, other, [1])
    with pytest.raises(bs.SurgeryError, match="expected two texts that the metric tells apart"):
        bs.faithfulness(*asked[:3], lambda logits: 0 * logits[:, 0], edges, [1])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "by_head"), PARTS)
def test_edges_that_do_not_join_carry_nothing(model, by_head):
    """And the others do, but where MLPs alone are on their way: those know one token each."""
    lm = bs.CachedCausalLM(ENDS[model]())
    asked = lm, CLEAN, CORRUPTED, PAIR
    edges = bs.edge_attribution(*asked, by_head=by_head)
    top = edges.top(25 if by_head else 7)
    circuit = edges.circuit(len(top))
    assert [edge for edge in top if edge in circuit] == circuit
    without = [[other for other in top if other != edge] for edge in top]
    got = bs.faithfulness(*asked, edges, [len(top), circuit, *without])
    assert got.counts[:3] == [len(top), len(circuit), len(top) - 1]
    assert got.values[0] == pytest.approx(got.values[1], abs=1e-5)
    carry = [abs(value - got.values[0]) > 1e-5 for value in got.values[2:]]
    assert not [edge for edge, does in zip(top, carry, strict=True) if does and edge not in circuit]
    if model == "gpt2":
        assert sum(carry) == len(circuit)


def test_a_circuit_of_some_receivers_is_refused():
    lm = bs.CachedCausalLM(make_gpt2(num_layers=1))
    for receivers in ("logits", "blocks.0.*"):
        some = bs.edge_patching(lm, CLEAN, CORRUPTED, PAIR, receivers=receivers)
        with pytest.raises(bs.SurgeryError, match=r"circuit: expected edges of all receivers"):
            some.circuit()


@pytest.mark.slow
def test_the_mean_over_several_pairs_of_texts():
    lm = bs.CachedCausalLM(make_gpt2(num_layers=1))
    pairs = (CLEAN, CORRUPTED), (CORRUPTED, CLEAN), (CLEAN[:3], CORRUPTED[:3])
    several = [bs.edge_patching(lm, *pair, PAIR) for pair in pairs]
    mean = bs.Edges.mean(several)
    total = several[0].values + several[1].values + several[2].values
    np.testing.assert_allclose(mean.values, total / 3, rtol=1e-6)
    assert mean.clean == pytest.approx(np.mean([one.clean for one in several]))
    assert mean.is_exact
    assert len(bs.faithfulness(lm, *pairs[0], PAIR, mean, [2]).shares) == 1
    for bad in ([], several[0], [several[0], 1]):
        with pytest.raises(bs.SurgeryError, match=r"Edges\.mean: expected a list of `Edges`"):
            bs.Edges.mean(bad)
    other = bs.edge_attribution(lm, *pairs[0], PAIR, by_head=True)
    with pytest.raises(bs.SurgeryError, match="expected edges between the same senders"):
        bs.Edges.mean([several[0], other])
