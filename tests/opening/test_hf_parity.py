"""Logits and greedy text equal those of Hugging Face `transformers`.

The models and the expected values were made by `scripts/make_hf_fixtures.py`; nothing here needs
`transformers` or PyTorch.
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import backbone_surgery as bs
from tests.helpers import relative
from tests.opening.hf_cases import Case, generate, run_whole

FIXTURES = Path(__file__).parents[1] / "fixtures"
FOLDERS = ("hf_gpt2", "hf_gemma", "hf_gemma2", "hf_qwen3")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
EXACT = 5e-6
"""Of the largest logit. Seen: 1.7e-6 (GPT-2), 2.2e-6 (Gemma), 2.6e-6 (Gemma 2), 1.8e-6 (Qwen 3)."""

# KerasHub leaves the file of a SentencePiece model to the garbage collector to close.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:Exception ignored in.*tokenizer\.model:pytest.PytestUnraisableExceptionWarning"
)


def load(folder):
    lm = bs.CachedCausalLM.from_preset(str(folder))
    lm.compile(sampler="greedy")
    arrays = dict(np.load(folder / "expected.npz"))
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    return Case(lm, arrays, expected["texts"])


@pytest.fixture(scope="module", params=FOLDERS)
def case(request):
    return load(FIXTURES / request.param)


@pytest.fixture
def lm(case, monkeypatch):
    """The model without its preprocessor, for arrays."""
    monkeypatch.setattr(case.lm, "preprocessor", None)
    return case.lm


def copy(name, tmp_path, without=()):
    folder = tmp_path / name
    shutil.copytree(FIXTURES / name, folder, ignore=lambda *_: without)
    return folder


def run_token_by_token(case):
    """Run the prompts padded on the left, one token of each row at a time."""
    longest, lengths = case.mask.shape[1], case.arrays["lengths"]
    rolled = [np.roll(ids, longest - n) for ids, n in zip(*case.batch, strict=True)]
    mask = case.mask[:, ::-1]
    positions = np.maximum(np.arange(longest)[None] - (longest - lengths)[:, None], 0)
    cache = bs.new_cache(case.lm.backbone_with_cache, len(lengths), longest)
    step = jax.jit(lambda *args: case.lm.call_with_cache(*args))
    columns = []
    for slot in range(longest):
        now = slice(slot, slot + 1)
        ids = np.stack(rolled)[:, now]
        logits, _, cache = step(ids, cache, np.int32(slot), positions[:, now], mask)
        columns.append(np.asarray(logits))
    logits = np.concatenate(columns, axis=1)
    return np.stack([np.roll(row, n, axis=0) for row, n in zip(logits, lengths, strict=True)])


@pytest.mark.by_default(1)
@pytest.mark.parametrize("run", [run_whole, run_token_by_token])
def test_logits_of_a_ragged_batch(case, run):
    logits, expected = run(case), case.arrays["logits"]
    assert relative(logits, expected, case.mask) <= EXACT
    np.testing.assert_array_equal(logits.argmax(-1)[case.mask], expected.argmax(-1)[case.mask])


def test_greedy_of_a_ragged_batch(case, lm):
    new = generate(lm, case.prompts, case.new_tokens)
    assert new == case.greedy


@pytest.mark.slow
def test_greedy_of_each_prompt_alone(case, lm):
    for prompt, expected in zip(case.prompts, case.greedy, strict=True):
        assert generate(lm, [prompt], case.new_tokens) == [expected]


def test_stop_token_ends_each_row_where_it_does_there(case, lm):
    stop = int(case.arrays["stop_token_id"])
    new = generate(lm, case.prompts, case.new_tokens, (stop,))
    assert new == case.stopped
    assert {row[-1] == stop for row in new} == {True, False}


def test_text_becomes_the_same_tokens(case):
    for text in case.texts:
        expected = text["token_ids"][: -text["new_tokens"]]
        packed = case.lm.preprocessor.generate_preprocess([text["prompt"]], len(expected))
        assert np.asarray(packed["token_ids"]).tolist() == [expected]


def test_text_in_gives_the_text_out(case):
    prompts = [t["prompt"] for t in case.texts]
    expected = [t["text"] for t in case.texts]
    assert case.lm.generate(prompts, max_new_tokens=case.new_tokens) == expected
    assert case.lm.generate(prompts[0], max_new_tokens=case.new_tokens) == expected[0]


def test_streamed_text_joins_to_the_same(case):
    text = case.texts[1]
    pieces = list(case.lm.stream(text["prompt"], max_new_tokens=case.new_tokens, chunk_size=3))
    assert len(pieces) > 1
    assert "".join(pieces) == text["text"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sliding_window", 9),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
    ],
)
def test_another_config_gives_other_logits(key, value, tmp_path):
    folder = copy("hf_gemma2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    case = load(folder)
    assert relative(run_whole(case), case.arrays["logits"], case.mask) > 1000 * EXACT


@pytest.mark.slow
def test_folder_without_tokenizer_takes_and_gives_arrays(tmp_path):
    case = load(copy("hf_gpt2", tmp_path, without=TOKENIZER_FILES))
    assert case.lm.preprocessor is None
    assert generate(case.lm, case.prompts, 5) == case.arrays["greedy"][:, :5].tolist()
    with pytest.raises(bs.SurgeryError, match="expected a dict of arrays `token_ids`"):
        case.lm.generate("text", max_new_tokens=5)


def test_folder_without_config_is_refused(tmp_path):
    folder = copy("hf_gpt2", tmp_path, without=["config.json"])
    with pytest.raises(bs.SurgeryError, match=r"Received one without `config\.json`"):
        bs.CachedCausalLM.from_preset(str(folder))


def test_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(bs.SurgeryError, match="expected a folder that exists"):
        bs.CachedCausalLM.from_preset(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("name", "file", "other"),
    [("hf_gpt2", "merges.txt", "tokenizer.json"), ("hf_gemma", "tokenizer.model", "merges.txt")],
)
def test_folder_with_half_a_tokenizer_is_refused(name, file, other, tmp_path):
    folder = copy(name, tmp_path, without=[file, other])
    with pytest.raises(bs.SurgeryError, match=rf"Received a folder where `{file}` doesn't exist"):
        bs.CachedCausalLM.from_preset(str(folder))
