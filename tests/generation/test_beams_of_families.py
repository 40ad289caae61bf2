"""Beams of families with other attention or state: those of the graph without a cache."""

import jax
import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from tests.families import ROWS
from tests.generation.test_beams import (
    LENGTHS,
    STOPS,
    VOCABULARY,
    WIDTH,
    draw_weights,
    generate,
    rows_of,
)
from tests.helpers import ragged

PATTERNS = "blocks.*.attention_pattern"
SPLIT = (bs.Ablate(PATTERNS, heads=[1]), bs.Capture(PATTERNS))
"""Attention in two halves, each of which keeps its part of the cache."""


def uncached_beams(model, head, num_beams, stops):
    """Return KerasHub's sampler over a graph without a cache, for one row."""
    sampler = keras_hub.samplers.BeamSampler(num_beams=num_beams)

    @jax.jit
    def search(weights, token_ids, padding_mask):
        def logits(prompt, cache, index):
            inputs = {"token_ids": prompt, "padding_mask": np.ones(prompt.shape, "int32")}
            outputs = model(inputs)
            states = outputs["hidden_states"] if isinstance(outputs, dict) else outputs
            return head(states, reverse=True)[:, index - 1], None, cache

        with keras.StatelessScope(zip(model.variables, weights, strict=True)):
            return sampler(
                logits,
                token_ids,
                index=padding_mask.sum(),
                mask=padding_mask,
                stop_token_ids=stops,
                model=model,
            )

    def run(row):
        ids = np.pad(row, (0, WIDTH - len(row)))[None].astype("int32")
        mask = (np.arange(WIDTH) < len(row))[None]
        found = np.asarray(search([v.value for v in model.variables], ids, mask))[0].tolist()
        ends = (i + 1 for i in range(len(row), WIDTH) if found[i] in stops)
        return found[: next(ends, WIDTH)]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "edit"), [("gpt_oss", SPLIT), ("bloom", SPLIT), ("qwen3_5", ()), ("qwen3_5_moe", ())]
)
def test_each_row_is_that_of_the_uncached_graph(name, edit, rng):
    backbone = ROWS[name].make(vocabulary_size=VOCABULARY)
    model = bs.operate(backbone, edit) if edit else bs.open_backbone(backbone)
    bs.check(model)
    lm = bs.CachedCausalLM(model)
    lm.compile(sampler=keras_hub.samplers.BeamSampler(num_beams=2))
    search = uncached_beams(model, lm.opened.token_embedding, 2, STOPS[4])
    early = 0
    for _ in range(3):
        draw_weights(backbone, rng)
        inputs = ragged(rng, LENGTHS, WIDTH, VOCABULARY)
        wanted = [search(row) for row in rows_of(inputs)]
        assert generate(lm, inputs, STOPS[4]) == wanted
        early += sum(len(row) < WIDTH for row in wanted)
    assert early >= 3
