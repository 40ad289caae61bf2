"""How well a vector tells texts apart: by hand, with plain activations and scikit-learn."""

import numpy as np
import pytest

import backbone_surgery as bs
from tests import compilations
from tests.helpers import make_gpt2
from tests.numpy_models import Model


def states(backbone, ids, block):
    """Return the output of a block for one text, in plain NumPy."""
    seen, model = [], Model(backbone)
    model.blocks[block].at("block", lambda x, _: seen.append(x) or x)
    model(ids[None])
    return seen[0][0]


def test_it_is_the_area_under_the_curve(rng):
    metrics = pytest.importorskip("sklearn.metrics")
    backbone = make_gpt2(num_layers=3)
    lm = bs.CachedCausalLM(backbone)
    texts = [rng.integers(1, 60, n).astype("int32") for n in (2, 5, 9, 4, 7, 3, 8)]
    vector = bs.ControlVector({0: rng.normal(size=32), 2: rng.normal(size=32)})
    scores = bs.score_detection(lm, vector, texts[:4], texts[4:], batch_size=3)
    assert list(scores) == [0, 2]
    for block, direction in vector.directions.items():
        largest = [(states(backbone, ids, block)[1:] @ direction).max() for ids in texts]
        wanted = metrics.roc_auc_score([1, 1, 1, 1, 0, 0, 0], largest)
        assert scores[block] == pytest.approx(wanted)


def test_another_vector_compiles_nothing(rng):
    lm = bs.CachedCausalLM(make_gpt2())
    texts = [[1, 2, 3]], [[4, 5]]
    for is_known in (False, True):
        vector = bs.ControlVector({i: rng.normal(size=32) for i in range(2)})
        with compilations.counted() as compiled:
            bs.score_detection(lm, vector, *texts)
        assert bool(compiled) != is_known


def test_a_tie_counts_half():
    lm = bs.CachedCausalLM(make_gpt2())
    vector = bs.ControlVector({1: np.ones(32)})
    assert bs.score_detection(lm, vector, [[1, 2, 3]], [[1, 2, 3]]) == {1: 0.5}


@pytest.mark.slow
def test_a_trained_direction_tells_texts_that_it_did_not_see():
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    names = [f"This is a story about {name}. {name}" for name in ("Lily", "Tom", "Mia", "Ben")]
    pairs = bs.contrast_pairs("{suffix} {persona}", ["was very happy."], ["was very sad."], names)
    vector = bs.ControlVector.train(lm, pairs, "mean_diff", verbose=0)
    happy = ["Lily was happy. She smiled and laughed.", "The dog was so glad. He was full of joy."]
    sad = ["Lily was sad. She cried and cried.", "The dog was so unhappy. He was full of tears."]
    assert max(bs.score_detection(lm, vector, happy, sad).values()) > 0.8


def test_what_cannot_be_scored_is_refused(rng):
    lm = bs.CachedCausalLM(make_gpt2())
    vector = bs.ControlVector({1: np.ones(32)})
    with pytest.raises(bs.SurgeryError, match="expected a ControlVector"):
        bs.score_detection(lm, {1: np.ones(32)}, [[1, 2]], [[1, 2]])
    with pytest.raises(bs.SurgeryError, match="expected a list of texts"):
        bs.score_detection(lm, vector, [], [[1, 2]])
    with pytest.raises(bs.SurgeryError, match=r"^score_detection at control 'mood'"):
        bs.score_detection(lm, vector, [[1, 2]], [[1, 2]], controls={"mood": 1})
    with pytest.raises(bs.SurgeryError, match=r"at text \d: expected at least two tokens"):
        bs.score_detection(lm, vector, [[1, 2]], [[1]])
    for other in ({1: np.ones(16)}, {5: np.ones(32)}):
        with pytest.raises(bs.SurgeryError, match="expected a vector of size 32 for blocks 0 to"):
            bs.score_detection(lm, bs.ControlVector(other), [[1, 2]], [[1, 2]])
