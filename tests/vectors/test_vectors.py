"""Training control vectors, against activations recorded from KerasHub's blocks and NumPy."""

import copy
import pickle

import keras
import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression

import backbone_surgery as bs
from backbone_surgery import graph
from backbone_surgery.opening import predict
from backbone_surgery.vectors import activations
from backbone_surgery.vectors.pairs import check_pairs
from backbone_surgery.vectors.prefixes import plan_runs
from tests.helpers import FAMILIES, VOCABULARY, make_deep_gpt2, relative

METHODS = ["pca_diff", "pca_center", "mean_diff", "logistic"]


def random_pairs(rng, count=12):
    """Pairs of token id sequences of all lengths from 3 to 9."""
    rows = [rng.integers(1, VOCABULARY, rng.integers(3, 10)).tolist() for _ in range(2 * count)]
    return list(zip(rows[::2], rows[1::2], strict=True))


def recorded(backbone, pairs, token=-1):
    """Block outputs at one token of each text, text by text: float[blocks, pairs, 2, hidden]."""
    outputs = [block.output for block in backbone.transformer_layers]
    model = keras.Model(backbone.input, outputs)
    texts = [text for pair in pairs for text in pair]
    states = []
    for text in texts:
        # Left-padded, where extraction pads on the right. GPT-2 numbers positions by slot, so
        # here padding must come after; the mask makes both the same.
        ids = np.zeros((1, 9), "int32")
        ids[0, : len(text)] = text
        mask = (np.arange(9) < len(text))[None]
        found = model.predict_on_batch({"token_ids": ids, "padding_mask": mask})
        index = len(text) + token if token < 0 else token
        states.append([np.asarray(x)[0, index] for x in found])
    return np.array(states).transpose(1, 0, 2).reshape(len(outputs), len(pairs), 2, -1)


@pytest.fixture(scope="module", params=["gpt2", "gemma2"])
def trained(request):
    """A model, pairs, what the blocks really put out, and a vector for each method."""
    rng = np.random.default_rng(5)
    backbone = FAMILIES[request.param](num_layers=3)
    lm = bs.CachedCausalLM(backbone)
    pairs = random_pairs(rng)
    vectors = {m: bs.ControlVector.train(lm, pairs, m, verbose=0) for m in METHODS}
    return lm, pairs, recorded(backbone, pairs), vectors


def test_methods_follow_their_definitions(trained):
    _, _, states, vectors = trained
    for block, (positive, negative) in enumerate(states.transpose(0, 2, 1, 3).astype("float64")):
        differences = positive - negative
        centred = np.concatenate([differences, -differences]) / 2
        labels = [1] * len(differences) + [0] * len(differences)
        logistic = LogisticRegression(fit_intercept=False, max_iter=10_000, tol=1e-8)
        normal = logistic.fit(centred, labels).coef_[0]
        wanted = {
            "pca_diff": PCA(1, svd_solver="full").fit(differences).components_[0],
            "pca_center": PCA(1, svd_solver="full").fit(centred).components_[0],
            "mean_diff": differences.mean(axis=0),
            "logistic": normal / np.linalg.norm(normal),
        }
        # Uncentred PCA of the differences, as steering-vectors has it, is `pca_center`.
        uncentred = np.linalg.eigh(differences.T @ differences)[1][:, -1]
        got = {m: v.directions[block] for m, v in vectors.items()}
        for method in ("pca_diff", "pca_center"):
            sign = np.sign(wanted[method] @ got[method])
            assert np.abs(got[method] - sign * wanted[method]).max() <= 1e-3, method
            further = (differences @ got[method] > 0).sum()
            assert further >= len(differences) / 2
        assert abs(uncentred @ got["pca_center"]) >= 1 - 1e-5
        assert relative(got["mean_diff"], wanted["mean_diff"]) <= 1e-5
        assert relative(got["logistic"], wanted["logistic"]) <= 1e-3
        for method in ("pca_diff", "pca_center", "logistic"):
            assert np.linalg.norm(got[method]) == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_same_result_for_any_batch_size_and_again(trained):
    lm, pairs, _, vectors = trained
    again = bs.ControlVector.train(lm, pairs, "pca_diff", verbose=0)
    assert again == vectors["pca_diff"]
    for batch_size in (1, 5):
        other = bs.ControlVector.train(lm, pairs, "mean_diff", batch_size, verbose=0)
        for block, direction in vectors["mean_diff"].directions.items():
            assert relative(other.directions[block], direction) <= 1e-5


def test_texts_that_begin_another_are_read_from_its_run(trained):
    lm, pairs, _, _ = trained
    texts = [text for pair in pairs for text in pair]
    cut = [
        [text[: 1 + i % len(text)] for i, text in enumerate(texts[k:] + texts[:k])] for k in (0, 1)
    ]
    listed = [*pairs, *zip(*cut, strict=True)]
    states = recorded(lm.backbone, listed)
    found = bs.ControlVector.train(lm, listed, "mean_diff", batch_size=5, verbose=0)
    for block, direction in found.directions.items():
        assert relative(direction, (states[block, :, 0] - states[block, :, 1]).mean(axis=0)) <= 1e-5


def test_only_texts_that_begin_no_other_are_run():
    words = ["ab", "abcd", "abc", "ax", "abcd", "b", "a"]
    rows = [np.frombuffer(w.encode(), "uint8").astype("int32") for w in words]
    last = np.array([len(w) - 1 for w in words])
    runs = plan_runs(rows, last, {"push": np.zeros((7, 1))})
    assert {words[i] for i in runs.texts} == {"abcd", "ax", "b"}
    for i, word in enumerate(words):
        host = words[runs.texts[runs.run[i]]]
        assert host[: 1 + runs.tokens[runs.run[i], runs.place[i]]] == word
    push = np.array([0, 1, 0, 0, 1, 0, 0])[:, None]
    runs = plan_runs(rows, last, {"push": push})
    assert [words[i] for i in runs.texts] == ["abcd", "b", "ax", "abc"]
    assert all(push[runs.texts[run]] == own for run, own in zip(runs.run, push, strict=True))
    each = plan_runs(rows, None, {})
    assert [*each.texts] == [*each.run] == [*range(7)]


def test_padding_on_either_side_measures_the_same(trained):
    from backbone_surgery.vectors.activations import TokenStates, _measuring

    lm, pairs, states, _ = trained
    model = _measuring(lm.opened, "blocks.*", TokenStates, (("int32", 2),))
    texts = [text for pair in pairs for text in pair]
    for left in (True, False):
        ids, mask = np.zeros((len(texts), 12), "int32"), np.zeros((len(texts), 12), bool)
        for i, text in enumerate(texts):
            slots = slice(12 - len(text), 12) if left else slice(0, len(text))
            ids[i, slots], mask[i, slots] = text, True
        token = np.array([len(text) - 1 for text in texts], "int32")
        inputs = {"token_ids": ids, "padding_mask": mask, "measured_asked_0": token[:, None]}
        found = model.predict_on_batch(inputs)
        for block in range(len(states)):
            wanted = states[block].reshape(len(texts), -1)
            assert relative(found[f"blocks.{block}"][:, 0], wanted) <= 1e-5


@pytest.mark.slow
def test_a_given_token(trained):
    lm, pairs, _, _ = trained
    for token in (0, 2, -2):
        states = recorded(lm.backbone, pairs, token)
        vector = bs.ControlVector.train(lm, pairs, "mean_diff", token=token, verbose=0)
        for block in vector.directions:
            wanted = (states[block, :, 0] - states[block, :, 1]).mean(axis=0)
            if token == 0 and np.abs(wanted).max() < 1e-6:
                continue
            assert relative(vector.directions[block], wanted) <= 1e-5


def test_the_last_block_runs_for_measured_tokens_alone_after_attention(trained):
    lm, _, states, _ = trained
    model = activations._measuring(lm.opened, "blocks.*", activations.TokenStates, (("int32", 2),))
    takes = [
        node.input_tensors[0]._keras_history.operation
        for node in graph.all_nodes(model)
        if isinstance(node.operation, activations.TokenStates)
    ]
    # The streams of the other blocks; of the last one what went in, and what attention gave.
    assert len(takes) == len(states) + 1
    kinds = [type(layer).__name__ for layer in takes[-2:]]
    assert sorted(kinds) == ["InputLayer", "SelfAttention"]


@pytest.mark.slow
def test_a_second_vector_is_trained_by_the_programs_of_the_first(monkeypatch):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    pairs = [("a good day", "a bad day"), ("a happy cat", "a sad cat")]
    first = bs.ControlVector.train(lm, pairs, verbose=0)
    compiled = []
    monkeypatch.setattr(predict, "_compiled", lambda model: compiled.append(model))
    second = bs.ControlVector.train(lm, pairs, verbose=0)
    assert not compiled
    for block, direction in first.directions.items():
        np.testing.assert_array_equal(second.directions[block], direction)
    with pytest.raises(TypeError):  # another site is another model
        bs.ControlVector.train(lm, pairs, at="blocks.*.mlp_output", verbose=0)
    assert len(compiled) == 1


@pytest.mark.slow
def test_other_rewrites_are_measured_too(rng):
    backbone = make_deep_gpt2()
    push = rng.normal(size=32).astype("float32")
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Steer("push", {1: push}, tokens=(2, 3))]))
    pairs = [([3, 4, 5, 6], [3, 4, 5]), ([7, 8, 9], [7, 8, 9, 10])]
    plain = bs.ControlVector.train(bs.CachedCausalLM(backbone), pairs, "mean_diff", verbose=0)
    pushed = bs.ControlVector.train(lm, pairs, "mean_diff", verbose=0)
    off = bs.ControlVector.train(lm, pairs, "mean_diff", verbose=0, controls={"push": 0})
    assert relative(pushed.directions[0], plain.directions[0]) <= 1e-5
    # One text of each pair ends on the steered token, on opposite sides: block 1 itself cancels.
    assert relative(pushed.directions[1], plain.directions[1]) <= 1e-5
    assert relative(pushed.directions[2], plain.directions[2]) > 1e-3
    for block, direction in plain.directions.items():
        assert relative(off.directions[block], direction) <= 1e-5


@pytest.mark.slow
def test_other_sites(rng, tmp_path):
    backbone = make_deep_gpt2()
    lm = bs.CachedCausalLM(backbone)
    vector = bs.ControlVector.train(
        lm, random_pairs(rng), "mean_diff", verbose=0, at="blocks.1:.mlp_output"
    )
    assert list(vector.directions) == [1, 2]
    bs.operate(backbone, [bs.Steer("s", vector, at="blocks.*.mlp_output")])
    inner = bs.ControlVector.train(
        lm, random_pairs(rng), "mean_diff", verbose=0, at="blocks.1:.mlp_hidden"
    )
    assert inner.hidden_dim == 64
    assert (inner.info["at"], inner.info["hidden_dim"]) == ("blocks.1:.mlp_hidden", "64")
    inner.save(tmp_path / "inner.safetensors")
    assert bs.ControlVector.load(tmp_path / "inner.safetensors", lm=lm) == inner
    bs.ControlVector({1: np.ones(9)}, {"at": "nowhere"}).save(tmp_path / "other.safetensors")
    with pytest.raises(bs.SurgeryError, match="expected directions of size 32 for blocks 0 to 2"):
        bs.ControlVector.load(tmp_path / "other.safetensors", lm=lm)
    with pytest.raises(bs.SurgeryError, match="one site in each block"):
        bs.ControlVector.train(lm, random_pairs(rng), verbose=0, at="blocks.0.*_output")
    with pytest.raises(bs.SurgeryError, match="expected a site of hidden states"):
        bs.ControlVector.train(lm, random_pairs(rng), verbose=0, at="blocks.0.query")


def test_arithmetic(rng):
    a = bs.ControlVector({1: rng.normal(size=4), 2: rng.normal(size=4)}, {"family": "gpt2"})
    b = bs.ControlVector({2: rng.normal(size=4), 3: rng.normal(size=4)}, {"family": "gpt2"})
    both = a + b
    assert list(both.directions) == [1, 2, 3]
    assert np.array_equal(both.directions[1], a.directions[1])
    assert np.array_equal(both.directions[2], a.directions[2] + b.directions[2])
    assert np.array_equal((a - b).directions[3], -b.directions[3])
    assert 2 * a == a * 2 == a + a
    assert -a == a * -1
    assert a / 2 == a * 0.5
    assert a != b
    assert both.info["family"] == "gpt2"
    for direction in a.normalized().directions.values():
        assert np.linalg.norm(direction) == pytest.approx(1, abs=1e-6)
    with pytest.raises(ValueError, match="read-only"):
        a.directions[1][0] = 0
    with pytest.raises(bs.SurgeryError, match="two vectors of one size"):
        a + bs.ControlVector({1: np.ones(5)})
    with pytest.raises(bs.SurgeryError, match="Received zeros for blocks"):
        bs.ControlVector({1: np.zeros(4)}).normalized()
    with pytest.raises(TypeError):
        a * "2"
    assert sum([a, b, a]) == a + b + a
    for other in (1, None, False):
        with pytest.raises(TypeError, match="unsupported operand"):
            other + a


def test_a_vector_can_be_copied_and_sent_to_another_process(rng):
    vector = bs.ControlVector({1: rng.normal(size=4)}, {"family": "gpt2"})
    for copied in (copy.deepcopy(vector), pickle.loads(pickle.dumps(vector))):
        assert copied == vector
        assert copied.info == vector.info
    steer = bs.Steer("mood", vector)
    assert [bs.Steer("mood", {1: np.ones(4)}), steer].index(steer) == 1


def test_what_is_at_right_angles_to_long_and_short_vectors(rng):
    rows = rng.normal(size=(3, 8))
    vector, *others = (bs.ControlVector({1: x}) for x in rows * [[1], [1e4], [1e-4]])
    left = vector.orthogonal_to(*others).directions[1]
    assert np.abs(rows[1:] @ left).max() <= 1e-5
    assert vector.orthogonal_to() == vector


@pytest.mark.slow
def test_relative_to_measures_the_residual_norm(trained):
    lm, _, _, vectors = trained
    rows = [[5, 6, 7, 8], [9, 10, 11]]
    scaled = vectors["pca_diff"].relative_to(lm, rows)
    states = [recorded(lm.backbone, [(row, row)], t)[:, 0, 0] for row in rows for t in (1, 2)]
    states = states[:2], [*states[2:]]
    third = recorded(lm.backbone, [(rows[0], rows[0])], 3)[:, 0, 0]
    for block, direction in scaled.directions.items():
        first = np.mean([np.linalg.norm(s[block]) for s in (*states[0], third)])
        second = np.mean([np.linalg.norm(s[block]) for s in states[1]])
        assert np.linalg.norm(direction) == pytest.approx((first + second) / 2, rel=1e-4)
    assert vectors["pca_diff"].relative_to(lm).hidden_dim == 32
    with pytest.raises(bs.SurgeryError, match="at least two tokens"):
        vectors["pca_diff"].relative_to(lm, [[5]])
    with pytest.raises(bs.SurgeryError, match="relative_to: expected a vector of size 32 for"):
        bs.ControlVector({1: np.ones(48)}).relative_to(lm, rows)


@pytest.mark.parametrize("dtype", [str, object])
def test_texts_may_be_arrays(dtype):
    glad, sad, rest = (np.array(t, dtype) for t in (["a", "b"], ["c", "d"], ["one", "two"]))
    pairs = bs.contrast_pairs("{persona} {suffix}", glad, sad, rest)
    assert pairs == bs.contrast_pairs("{persona} {suffix}", ["a", "b"], ["c", "d"], ["one", "two"])
    whole = np.array(pairs, dtype)
    for given in (whole, [*whole]):
        assert [*map(tuple, check_pairs(given))] == pairs
    for wrong in (whole[:, 0], whole[:, :1], np.array([], dtype)):
        with pytest.raises(bs.SurgeryError, match=r"pairs.*: expected"):
            check_pairs(wrong)


def test_contrast_pairs():
    pairs = bs.contrast_pairs("[{x} {persona}] {suffix}", ["a", "b"], ["c", "d"], ["one", "two"])
    assert pairs[:2] == [("[{x} a] one", "[{x} c] one"), ("[{x} b] one", "[{x} d] one")]
    assert len(pairs) == 4
    (pair,) = bs.contrast_pairs("{suffix}: {persona}, {persona}", ["{suffix}"], ["b"], ["c"])
    assert pair == ("c: {suffix}, {suffix}", "c: b, b")
    bad = [
        (("{persona}", ["a"], ["b"], ["c"]), "without {suffix}"),
        (("{persona}{suffix}", ["a", "b"], ["b"], ["c"]), "as many negatives"),
        (("{persona}{suffix}", "a", ["b"], ["c"]), "'positives': expected a list"),
        (("{persona}{suffix}", ["a"], ["b"], []), "'suffixes': expected a list"),
        (("{persona}{suffix}", ["a"], ["a"], ["c"]), "two texts that differ"),
    ]
    for arguments, words in bad:
        with pytest.raises(bs.SurgeryError, match=words):
            bs.contrast_pairs(*arguments)


def test_bad_training(trained):
    lm, pairs, _, _ = trained
    for given, options, words in [
        ([], {}, "at least one pair"),
        ([([1, 2], [1, 2])], {}, "two texts that differ"),
        ([([1, 2], [])], {}, "an empty one"),
        ([[1, 2, 3]], {}, r"expected \(positive, negative\)"),
        (pairs, {"method": "pca_dif"}, "Did you mean 'pca_diff'"),
        (pairs, {"token": 7}, "token=7: expected texts with such a token"),
        ([([1, 99], [1, 2])], {}, "expected token ids from 0 to 59"),
        ([("happy", "sad")], {}, "has no preprocessor"),
        (pairs, {"controls": {"mood": 1}}, "^train at control 'mood'"),
        (pairs[:1], {}, "Add pairs that differ"),
        ([([1, 2], [1, 3])], {"token": 0, "method": "mean_diff"}, "two sides that are the same"),
    ]:
        with pytest.raises(bs.SurgeryError, match=words):
            bs.ControlVector.train(lm, given, verbose=0, **options)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_activations_beyond_float16_are_refused(method):
    backbone = make_deep_gpt2(dtype="float16")
    backbone.token_embedding.embeddings.assign(backbone.token_embedding.embeddings * 1e6)
    lm = bs.CachedCausalLM(backbone)
    with pytest.raises(bs.SurgeryError, match="Received NaN or Inf for text 0, of a model that"):
        bs.ControlVector.train(lm, [([1, 2], [3, 4])], method, verbose=0)


def test_bad_vectors():
    for directions, words in [
        ({}, "maps blocks to directions"),
        ({1: np.ones(4), 2: np.ones(5)}, "all of one size"),
        ({1: np.array([1, np.nan])}, "NaN or Inf"),
        ({-1: np.ones(4)}, "blocks counted from 0"),
    ]:
        with pytest.raises(bs.SurgeryError, match=words):
            bs.ControlVector(directions)
