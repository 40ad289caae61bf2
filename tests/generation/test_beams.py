"""Beam search with stop tokens equals KerasHub's own, and a row does not depend on its batch."""

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation import causal_lm
from tests.helpers import FAMILIES, TASKS, ragged, relative

VOCABULARY, WIDTH = 9, 14
LENGTHS = (3, 7, 1, 13, 14, 5)
STOPS = {1: (4, 7), 2: (5, 2, 8), 3: (3, 6), 4: (1, 4, 6, 8), 5: (7, 2, 3)}
"""For each number of beams, token ids that end a row."""


def make_backbone(family):
    """Make a model of so few tokens that rows stop often, with no position to spare."""
    limit = {"max_sequence_length": WIDTH} if family == "gpt2" else {}
    return FAMILIES[family](vocabulary_size=VOCABULARY, num_layers=2, **limit)


def draw_weights(backbone, rng):
    """Draw weights that are small enough for the choices to be close."""
    for variable in backbone.trainable_variables:
        variable.assign(rng.normal(0, 0.35, variable.shape))


def rows_of(arrays):
    masks = np.asarray(arrays["padding_mask"], bool)
    return [np.asarray(ids)[m].tolist() for ids, m in zip(arrays["token_ids"], masks, strict=True)]


def alone(inputs, i):
    return {name: value[i : i + 1] for name, value in inputs.items()}


def generate(task, inputs, stops):
    return rows_of(task.generate({k: v.copy() for k, v in inputs.items()}, stop_token_ids=stops))


class Pair:
    """A model of ours and KerasHub's own task, over one backbone."""

    def __init__(self, family):
        self.backbone = make_backbone(family)
        self.upstream = TASKS[family](backbone=self.backbone, preprocessor=None)
        self.lm = bs.CachedCausalLM(self.backbone)


@pytest.fixture(scope="module", params=["gpt2", "gemma2"])
def pair(request):
    return Pair(request.param)


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_beams", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in STOPS if n != 3)]
)
def test_each_row_of_a_ragged_batch_is_kerashubs_alone(pair, rng, num_beams):
    for task in (pair.upstream, pair.lm):
        task.compile(sampler=keras_hub.samplers.BeamSampler(num_beams=num_beams))
    stops, early = STOPS[num_beams], 0
    for _ in range(5):
        draw_weights(pair.backbone, rng)
        inputs = ragged(rng, LENGTHS, WIDTH, VOCABULARY)
        wanted = [generate(pair.upstream, alone(inputs, i), stops)[0] for i in range(len(LENGTHS))]
        assert generate(pair.lm, inputs, stops) == wanted
        early += sum(len(row) < WIDTH for row in wanted)
    assert generate(pair.lm, alone(inputs, 0), stops) == wanted[:1]
    assert early >= 3  # or nothing was stopped, and nothing is tested


def kerashub_beams(model, head, num_beams, stops):
    """Return KerasHub's sampler over a graph without a cache, for one row and a strength."""
    sampler = keras_hub.samplers.BeamSampler(num_beams=num_beams)

    @jax.jit
    def search(weights, token_ids, padding_mask, strength):
        def logits(prompt, cache, index):
            inputs = {"token_ids": prompt, "padding_mask": np.ones(prompt.shape, "int32")}
            inputs["mood_strength"] = jnp.broadcast_to(strength, (len(prompt), 2))
            hidden_states = model(inputs)["hidden_states"]
            return head(hidden_states, reverse=True)[:, index - 1], None, cache

        with keras.StatelessScope(zip(model.variables, weights, strict=True)):
            return sampler(
                logits,
                token_ids,
                index=padding_mask.sum(),
                mask=padding_mask,
                stop_token_ids=stops,
                model=model,
            )

    def run(row, strength):
        ids = np.pad(row, (0, WIDTH - len(row)))[None].astype("int32")
        weights = [v.value for v in model.variables]
        mask = (np.arange(WIDTH) < len(row))[None]
        found = np.asarray(search(weights, ids, mask, np.float32(strength)))[0].tolist()
        ends = (i + 1 for i in range(len(row), WIDTH) if found[i] in stops)
        return found[: next(ends, WIDTH)]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_of_an_edited_graph_with_controls_and_captures(family, rng, monkeypatch):
    monkeypatch.setattr(causal_lm, "_SEQUENCE_CHECK", 3)
    backbone = make_backbone(family)
    directions = {i: rng.normal(size=backbone.hidden_dim) for i in range(2)}
    edited = bs.operate(backbone, [bs.Steer("mood", directions), bs.Capture("blocks.1")])
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler=keras_hub.samplers.BeamSampler(num_beams=3))
    search = kerashub_beams(edited, lm.opened.token_embedding, 3, STOPS[4])
    strengths, early, changed = np.linspace(-2, 2, len(LENGTHS)), 0, 0
    options = {"controls": {"mood": strengths}, "stop_token_ids": STOPS[4]}
    for _ in range(5):
        draw_weights(backbone, rng)
        inputs = ragged(rng, LENGTHS, WIDTH, VOCABULARY)
        rows = rows_of(inputs)
        wanted = [search(row, s) for row, s in zip(rows, strengths, strict=True)]
        early += sum(len(row) < WIDTH for row in wanted)
        changed += sum(search(row, 0.0) != w for row, w in zip(rows, wanted, strict=True))
        # The second one looks at the rows every few steps, as for a stream.
        assert rows_of(lm.generate(inputs, **options)) == wanted
        assert rows_of(lm.generate(inputs, stop_sequences=[[0] * 40], **options)) == wanted
        got, captures = lm.generate(inputs, return_captures=True, **options)
        assert rows_of(got) == wanted
        finished = {"token_ids": got["token_ids"], "padding_mask": np.ones_like(got["token_ids"])}
        finished["mood_strength"] = np.stack([strengths, strengths], 1).astype("float32")
        uncached = edited.predict_on_batch(finished)["captures"]["blocks.1"]
        for i, row in enumerate(wanted):
            length = max(len(row) - 1, LENGTHS[i])
            assert captures.lengths[i] == length
            assert relative(captures.row(i)["blocks.1"], uncached[i, :length]) <= 1e-5
    assert early >= 3
    assert changed >= 3
