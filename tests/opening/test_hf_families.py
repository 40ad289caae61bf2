"""Every family: logits and greedy text equal those of Hugging Face `transformers`.

The models and the expected values were made by `scripts/make_hf_family_fixtures.py`, whose recipes
say what each of them has. KerasHub's own converters load them, or ours. This is left out:

| model | left out, since KerasHub has it otherwise |
|---|---|
| Falcon, GPT-NeoX, OPT | variants that KerasHub has not: Falcon 7B, OPT-350m |
| Falcon | 6 heads: `transformers` rounds the slopes of ALiBi to bfloat16 |
| GPT-NeoX | attention and MLP one after the other: KerasHub has them side by side |
| Llama | a head size of its own, biases: the backbone has none |
| Mixtral | a head size of its own: the converter passes none |
| Phi-3 | texts longer than what the short frequencies are for: refused |
| Qwen 2, Qwen 3 | windows: KerasHub has none on JAX |
| Qwen MoE, Qwen 3 MoE | dense blocks among the mixtures: the converter leaves them out |
| Qwen 3 | another epsilon of the norms of queries and keys than 1e-5 |
| Gemma 3 | `query_pre_attn_scalar` unlike the head size: does not reach KerasHub's attention |
| SmolLM3 | biases, untied heads, windows: the converter passes none |
"""

from pathlib import Path

import numpy as np
import pytest

import backbone_surgery as bs
from tests.helpers import relative
from tests.opening.hf_cases import Case, generate, run_whole

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf_families"
FOLDERS = sorted(path.name for path in FIXTURES.iterdir())
EXACT = 5e-6
"""Of the largest logit. Seen: 7e-7 (GPT-NeoX) to 4.2e-6 (Qwen MoE)."""
ROUNDED_MORE = {"gemma4_text": 1e-5, "qwen3_5_moe": 1e-5}
"""Seen from run to run: 5.0e-6 to 5.6e-6 (Gemma 4; KerasHub's own backbone 4.8e-6), and 4.5e-6 to
7.7e-6 (Qwen 3.5 MoE)."""


@pytest.fixture(scope="module", params=FOLDERS)
def case(request):
    folder = FIXTURES / request.param
    lm = bs.CachedCausalLM.from_preset(str(folder))
    lm.compile(sampler="greedy")
    return Case(lm, dict(np.load(folder / "expected.npz")))


def test_logits_of_a_ragged_batch(case, request):
    logits, expected = run_whole(case), case.arrays["logits"]
    folder = request.node.callspec.params["case"]
    assert relative(logits, expected, case.mask) <= ROUNDED_MORE.get(folder, EXACT)
    np.testing.assert_array_equal(logits.argmax(-1)[case.mask], expected.argmax(-1)[case.mask])


def test_greedy_of_a_ragged_batch(case):
    assert generate(case.lm, case.prompts, case.new_tokens) == case.greedy


def test_stop_token_ends_each_row_where_it_does_there(case):
    stop = int(case.arrays["stop_token_id"])
    new = generate(case.lm, case.prompts, case.new_tokens, (stop,))
    assert new == case.stopped
    assert {row[-1] == stop for row in new} == {True, False}
