"""Analyses, drawings, nested rewrites, transfers and merges: for one family of each group."""

import numpy as np
import pytest

import backbone_surgery as bs
from tests.analysis.cells import logits_of_cells
from tests.families import ROWS
from tests.helpers import relative
from tests.test_family_table import blocks_of, run

CLEAN, CORRUPTED = [3, 14, 15, 9, 2], [3, 14, 26, 9, 2]
TOKENS = {"token_ids": np.array([CLEAN]), "padding_mask": np.ones((1, 5), "int32")}
GROUPS = ("qwen3", "mixtral", "gpt_oss", "gemma3", "gemma3n", "gemma4", "qwen3_5", "rwkv7")
NORM_AFTER = ("gemma3", "gemma3n", "gemma4")
"""A norm stands between the projection of attention and what it gives."""
MIXTURES = {"mixtral": {"num_experts": 32}, "gpt_oss": {}, "gemma4": ROWS["gemma4"].shapes[2]}

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("name", GROUPS)]


def test_analyses(name):
    lm = bs.CachedCausalLM(ROWS[name].make())
    logits = np.asarray(lm(TOKENS))[0]
    grid = bs.patch_grid(lm, CLEAN, CORRUPTED, (7, 8))
    assert abs(grid.clean - (logits[-1, 7] - logits[-1, 8])) <= 1e-4
    assert np.allclose(grid.recovered[-1, -1], 1, atol=1e-3)
    assert np.allclose(grid.values[:, :2], grid.corrupted, atol=1e-5)
    assert np.array_equal(bs.logit_lens(lm, CLEAN).token_ids[-1], logits.argmax(-1))
    last = bs.attribution(lm, CLEAN, 7, at="final_norm")
    assert abs(last.metric - logits[-1, 7]) <= 1e-4
    assert abs(last.values[0, -1] - last.metric) <= 1e-4
    assert not bs.attribution(lm, CLEAN, 7).values[-1, :-1].any()


@pytest.mark.parametrize("at", ["blocks.*", "blocks.*.attention_output"])
def test_grids_of_texts_in_pieces_are_one_pass_for_each_cell(name, at, monkeypatch):
    lm = bs.CachedCausalLM(ROWS[name].make())
    clean, corrupted = [9, 2, 3, 4, 5, 6, 7, 8, 1, 2], [9, 2, 5, 4, 5, 6, 7, 8, 1, 2]
    monkeypatch.setattr("backbone_surgery.analysis.runs._LEAST_PIECE", 1)
    got = bs.patch_grid(lm, clean, corrupted, (7, 8), at=at, batch_size=2)
    cells = [(s, t) for s in range(len(got.sites)) for t in (2, 3, 6, 9)]
    logits = logits_of_cells(lm, clean, corrupted, at, cells)
    wanted = logits[:, 7] - logits[:, 8]
    assert np.abs([got.values[cell] for cell in cells] - wanted).max() <= 1e-4


@pytest.mark.parametrize("router", ["router", "expert_weights"])
def test_grids_of_what_chooses_experts(name, router, monkeypatch):
    """One token at a time: of 32 experts only the chosen ones are run then."""
    monkeypatch.setattr("backbone_surgery.analysis.runs._LEAST_PIECE", 1)
    if name not in MIXTURES:
        pytest.skip("has no experts")
    lm = bs.CachedCausalLM(ROWS[name].make(**MIXTURES[name]))
    at = f"blocks.*.{router}"
    got = bs.patch_grid(lm, CLEAN, CORRUPTED, (7, 8), at=at, batch_size=1)
    cells = [(s, t) for s in range(len(got.sites)) for t in range(2, 5)]
    logits = logits_of_cells(lm, CLEAN, CORRUPTED, at, cells)
    values = np.array([got.values[cell] for cell in cells])
    assert np.abs(values - (logits[:, 7] - logits[:, 8])).max() <= 1e-4
    assert np.abs(values - got.corrupted).max() >= 1e-3


def test_drawings_name_each_block_and_cache(name):
    backbone = ROWS[name].make()
    text = bs.to_mermaid(bs.rewire(backbone), expand_nested=True)
    for block in blocks_of(backbone):
        assert f'["{block.name}"]' in text


@pytest.mark.filterwarnings("ignore::jax.experimental.sparse.bcoo.SparseEfficiencyWarning")
def test_a_norm_in_a_block_is_rewritten(name):
    """Keras takes Gemma 4's inputs of each layer for sparse, of which JAX warns in shapes alone."""
    backbone = ROWS[name].make()
    norm = ROWS[name].layers["mlp_norm"]
    around = "text_model." if name == "gemma3n" else ""
    path = f"{around}{blocks_of(backbone)[1].name}.{norm}"
    same = bs.rewrite_nested(backbone, path, lambda layer, x: layer(x))
    half = bs.rewrite_nested(backbone, path, lambda layer, x: 0.5 * layer(x))
    wanted = run(name, backbone, TOKENS)
    assert relative(run(name, same, TOKENS), wanted) <= 1e-6
    assert relative(run(name, half, TOKENS), wanted) > 1e-3


def test_weights_are_transferred(name):
    backbone, other = ROWS[name].make(), ROWS[name].make(seed=5)
    assert bs.weights_digest(backbone) != bs.weights_digest(other)
    bs.transfer_weights(backbone, bs.open_backbone(other))
    assert bs.weights_digest(backbone) == bs.weights_digest(other)


def test_a_direction_is_merged_or_refused(name, rng):
    backbone = ROWS[name].make()
    vector = rng.normal(size=32)
    steer = bs.Steer("none", {0: vector, 1: vector}, "blocks.*.attention_output", mode="ablate")
    edited = bs.operate(backbone, [steer])
    if name in NORM_AFTER:
        with pytest.raises(bs.SurgeryError, match="that site, or a part of it, and is no linear"):
            bs.merge(edited)
        return
    got = run(name, bs.merge(edited), TOKENS)
    assert relative(got, edited.predict_on_batch(TOKENS)) <= 5e-6
    assert relative(got, run(name, backbone, TOKENS)) > 1e-3
