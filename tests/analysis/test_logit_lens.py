"""The logit lens of edited models: rewrites behind the last block act on every site it reads."""

import numpy as np
import pytest

import backbone_surgery as bs
from tests.caching.test_state import CumulativeMean
from tests.families import ROWS
from tests.helpers import make_deep_gpt2, make_gpt2, relative
from tests.rewriting.test_refused_edits import WithoutBlocks
from tests.rewriting.test_streams import run_blocks


@pytest.mark.slow
def test_a_control_behind_the_last_block():
    backbone, ids = make_deep_gpt2(), np.array([3, 1, 4, 1, 5])
    rewrites = [bs.Ablate("final_norm", to="mean", values={"final_norm": np.ones(32, "float32")})]
    lens = bs.logit_lens(bs.CachedCausalLM(bs.operate(backbone, rewrites)), ids)
    kernel = np.asarray(backbone.token_embedding.embeddings, "float64")
    logits = kernel.sum(axis=1)
    probabilities = np.exp(logits - logits.max())
    best = (probabilities / probabilities.sum()).max()
    assert relative(lens.probabilities, np.full((3, 5), best)) <= 1e-5
    off = bs.logit_lens(
        bs.CachedCausalLM(bs.operate(backbone, rewrites)), ids, controls={"ablate": 0.0}
    )
    plain = bs.logit_lens(bs.CachedCausalLM(backbone), ids)
    assert np.array_equal(off.token_ids, plain.token_ids)
    assert relative(off.probabilities, plain.probabilities) <= 1e-5


def test_a_graph_without_blocks_is_refused():
    rewrites = [bs.Insert("embeddings", CumulativeMean(name="mean")), WithoutBlocks()]
    lm = bs.CachedCausalLM(bs.operate(make_gpt2(num_layers=1), rewrites))
    with pytest.raises(bs.SurgeryError, match=r"logit_lens at .*: expected decoder blocks"):
        bs.logit_lens(lm, [1, 2], at="embeddings")


@pytest.mark.parametrize("at", ["final_norm", "blocks.*.mlp_output", "blocks.0.*"])
def test_only_the_residual_stream_is_read(at):
    """The final norm would be taken twice, or of a part of the stream: numbers of no meaning."""
    lm = bs.CachedCausalLM(make_gpt2(num_layers=1))
    with pytest.raises(bs.SurgeryError, match=r"expected a site of the residual stream"):
        bs.logit_lens(lm, [1, 2], at=at)


@pytest.mark.slow
def test_every_site_of_the_residual_stream_is_read():
    lm = bs.CachedCausalLM(make_deep_gpt2())
    for at, sites in {
        "embeddings": ["embeddings"],
        "blocks.-1": ["blocks.2"],
        "blocks.:2.residual_mid": ["blocks.0.residual_mid", "blocks.1.residual_mid"],
    }.items():
        assert bs.logit_lens(lm, [1, 2], at=at).sites == sites


@pytest.mark.slow
def test_streams_beside_are_read_too():
    """As KerasHub's loop would end after each block."""
    backbone, ids = ROWS["gemma3n"].make(num_layers=3), np.array([[3, 1, 4, 1, 5]])
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    lm = bs.CachedCausalLM(backbone)
    lens = bs.logit_lens(lm, ids[0])
    for i in range(3):
        states = run_blocks(backbone, inputs, range(i + 1))
        logits = np.asarray(backbone.language_model.token_embedding(states, reverse=True))[0]
        assert np.array_equal(lens.token_ids[i], logits.argmax(-1))
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        assert (
            relative(lens.probabilities[i], (shares / shares.sum(-1, keepdims=True)).max(-1)) < 1e-4
        )
    for at in ("embeddings", "blocks.0.residual_mid"):
        with pytest.raises(bs.SurgeryError, match="whole blocks, since several streams"):
            bs.logit_lens(lm, ids[0], at=at)


@pytest.mark.slow
def test_other_streams_are_read_with_their_block_alone():
    lm = bs.CachedCausalLM(ROWS["gemma3n"].make())
    with pytest.raises(bs.SurgeryError, match=r"other_streams': expected whole blocks.* Use `at="):
        bs.logit_lens(lm, [1, 2, 3], at="blocks.*.other_streams")
