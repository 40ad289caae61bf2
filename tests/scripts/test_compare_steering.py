"""The peers of the comparison: their directions are ours, and they write steered."""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import backbone_surgery as bs

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
PAIRS = [
    ("Lily was happy. Lily smiled. So Lily", "Lily was sad. Lily cried. So Lily"),
    ("Tom was glad. Tom laughed. Then Tom", "Tom was unhappy. Tom wept. Then Tom"),
    ("Ben felt cheerful. Ben sang. Ben", "Ben felt gloomy. Ben sighed. Ben"),
    ("Mia was merry and she", "Mia was upset and she"),
]
SAME = {
    ("steering-vectors", "mean"): "mean_diff",
    ("repeng", "pca_diff"): "pca_diff",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Creating a tensor from a list:UserWarning"),
]


@pytest.fixture(scope="module")
def compared():
    for name in ("torch", "repeng", "steering_vectors"):
        if find_spec(name) is None:
            pytest.skip(f"needs the package {name}")
    sys.path.insert(0, SCRIPTS)
    try:
        import compare_steering

        yield compare_steering
    finally:
        sys.path.remove(SCRIPTS)


@pytest.fixture(scope="module", params=["tiny_gpt2", "tiny_gemma"])
def lm(request):
    return bs.CachedCausalLM.from_preset(request.param)


@pytest.mark.parametrize(("name", "method"), SAME)
def test_directions_are_those_of_the_same_method_here(name, method, compared, lm):
    found = compared.PEERS[name](lm).directions(PAIRS)[method]
    own = bs.ControlVector.train(lm, PAIRS, method=SAME[name, method], verbose=0)
    assert list(found) == list(own.directions)
    if name == "repeng":  # of the last block it sees what `transformers` normalises after it
        del found[5]
    for block, theirs in found.items():
        ours = own.directions[block]
        cosine = ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs)
        if method == "pca_diff":  # which way it points, repeng lets the pairs vote
            cosine = abs(cosine)
        assert cosine == pytest.approx(1, abs=1e-3), block


@pytest.mark.parametrize("name", ["repeng", "steering-vectors"])
def test_they_write_steered_and_are_left_as_they_were(name, compared, lm):
    peer = compared.PEERS[name](lm)
    prompts = ["Once upon a time", "Tom had a red ball. He"]
    vector = bs.ControlVector.train(lm, PAIRS, "mean_diff", verbose=0).directions
    steering = {block: 2 * direction for block, direction in vector.items()}
    nothing = {block: 0 * direction for block, direction in vector.items()}
    alone = peer.write(prompts, nothing, 12)
    assert len(alone) == 2
    assert peer.write(prompts, steering, 12) != alone
    assert peer.write(prompts, nothing, 12) == alone
