"""Each row draws, by settings of its own, what KerasHub's sampler draws with its seed."""

from dataclasses import replace

import jax
import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.penalties import past_of
from backbone_surgery.generation.samplers import NO_TOKEN, make_strategy
from backbone_surgery.serving.sampling import RequestSampling, Sampling, read_sampling

samplers = keras_hub.samplers
KINDS = [
    samplers.GreedySampler(),
    samplers.RandomSampler(temperature=0.7),
    samplers.RandomSampler(temperature=5.0),
    samplers.TopKSampler(k=1),
    samplers.TopKSampler(k=5, temperature=3.0),
    samplers.TopKSampler(k=97, temperature=3.0),
    samplers.TopPSampler(p=0.0),
    samplers.TopPSampler(p=0.4, temperature=2.0),
    samplers.TopPSampler(p=0.95, k=11, temperature=4.0),
    samplers.TopPSampler(p=1.0, temperature=4.0),
]


def of_rows(samplings):
    """Return the settings of rows that have the tokens 1 and 2 already."""
    settings = jax.tree.map(lambda *x: np.stack(x), *(s.arrays() for s in samplings))
    rows = len(samplings)
    lengths = jax.numpy.full(rows, 1)
    past = past_of(jax.numpy.tile(jax.numpy.array([[1, 2]]), (rows, 1)), lengths, 1, 2)
    return {**settings, "past": past}


def test_a_row_draws_as_its_sampler_would_alone(rng):
    rows, steps, vocabulary = len(KINDS), 40, 97
    logits = rng.normal(size=(steps, rows, vocabulary)).astype("float32") * 2
    seeds = np.stack([np.arange(rows), np.zeros(rows)], axis=1).astype("uint32")
    settings = of_rows([read_sampling(kind, None, None, None) for kind in KINDS])
    strategy = RequestSampling()
    choose = jax.jit(strategy.choose)
    state, drawn = strategy.start(seeds), []
    for step in range(steps):
        tokens, _, state = choose(logits[step], np.zeros(rows, bool), state, settings)
        drawn.append(np.asarray(tokens))
    for row, kind in enumerate(KINDS):
        alone = make_strategy(kind)
        state, choose = alone.start(seeds[row : row + 1]), jax.jit(alone.choose)
        for step in range(steps):
            tokens, _, state = choose(
                logits[step, row : row + 1], np.zeros(1, bool), state, alone.settings()
            )
            assert drawn[step][row] == tokens[0], f"row {row}, step {step}: {kind.get_config()}"


@pytest.mark.parametrize("penalized", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_without_probabilities_gets_no_token(bad, penalized):
    logits = np.zeros((3, 8), "float32")
    logits[1:, 3] = bad
    penalties = bs.Penalties(1.3, frequency=0.5) if penalized else bs.Penalties()
    kinds = [Sampling(1.0), Sampling(1.0, 3), Sampling()]
    settings = of_rows([replace(kind, penalties=penalties) for kind in kinds])
    strategy = RequestSampling()
    state = strategy.start(np.zeros((3, 2), "uint32"))
    tokens, _, _ = strategy.choose(logits, np.zeros(3, bool), state, settings)
    assert tokens[0] != NO_TOKEN
    assert tokens[1] == NO_TOKEN
    assert tokens[2] == NO_TOKEN


def test_settings_that_are_passed_leave_out_those_of_the_sampler():
    sampling = read_sampling(samplers.TopKSampler(k=5), 0.5, None, None)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 0, np.inf)
    assert read_sampling("any", None, 3, 1.0).arrays()["top_k"] == 3


def test_a_sampler_of_a_users_own_is_refused():
    class Own(samplers.Sampler):
        def get_next_token(self, probabilities):
            return keras.ops.argmax(probabilities, axis=-1)

    with pytest.raises(bs.SurgeryError, match="sampler Own: expected a model that is compiled"):
        read_sampling(Own(), None, None, None)
