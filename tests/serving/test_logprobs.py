"""Log-probabilities: of the model's own logits over the finished text, uncached."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import log_softmax

import backbone_surgery as bs
from backbone_surgery.generation.stopping import Stops
from backbone_surgery.serving.logprobs import MOST_LIKELIEST
from backbone_surgery.serving.request import EngineRequest
from backbone_surgery.serving.web.logprobs import ShownLogprobs
from tests.helpers import ragged
from tests.serving.traffic import VOCABULARY, random_gpt2

SETTINGS = [
    {"max_new_tokens": 11, "logprobs": True, "controls": {"mood": 1.5}},
    {"max_new_tokens": 9, "temperature": 0.9, "top_k": 5, "seed": 3},
    {"max_new_tokens": 1, "logprobs": True},
    {"max_new_tokens": 20, "logprobs": True, "temperature": 1.3, "top_p": 0.9, "seed": 4},
    {"max_new_tokens": 0, "logprobs": True},
]


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(3)
    vector = rng.normal(size=16).astype("float32")
    return bs.operate(random_gpt2(rng), [bs.Steer("mood", {1: vector}, strength=0.0)])


def logits_of(model, ids, strength):
    """Of the edited graph without a cache, in plain NumPy from the hidden states on."""
    inputs = {"token_ids": ids[None], "padding_mask": np.ones((1, len(ids)), bool)}
    strengths = {"mood_strength": np.float32([[strength]])}
    hidden_states = np.asarray(model.predict_on_batch({**inputs, **strengths}))[0]
    return hidden_states @ np.asarray(model.get_layer("token_embedding").embeddings).T


@pytest.mark.slow
def test_they_are_those_of_the_text_whatever_runs_beside_it(model, rng):
    lm = bs.CachedCausalLM(model)
    lm.compile(sampler="greedy")
    engine = bs.Engine(lm, rows=2, length=64, chunk_size=4, prefill_chunk=16)
    prompts = ragged(rng, (4, 7, 3, 18, 5), 18, VOCABULARY)
    requests = [
        engine.submit({k: v[i : i + 1] for k, v in prompts.items()}, stop_token_ids=None, **asked)
        for i, asked in enumerate(SETTINGS)
    ]
    for asked, request in zip(SETTINGS, requests, strict=True):
        text = request.result()
        if "logprobs" not in asked:
            with pytest.raises(bs.SurgeryError, match="Pass `logprobs=True`"):
                _ = request.logprobs
            continue
        notes, count = request.logprobs, asked["max_new_tokens"]
        assert np.array_equal(notes.token_ids, text[len(text) - count :])
        assert len(notes.logprobs) == len(notes.likeliest_ids) == count
        strength = asked.get("controls", {"mood": 0.0})["mood"]
        wanted = log_softmax(logits_of(model, text, strength), axis=-1)[-count - 1 : -1]
        for own, ids, top, token, row in zip(
            notes.logprobs,
            notes.likeliest_ids,
            notes.likeliest_logprobs,
            notes.token_ids,
            wanted,
            strict=count > 0,
        ):
            assert abs(own - row[token]) <= 2e-5
            best = np.sort(row)[::-1][:MOST_LIKELIEST]
            np.testing.assert_allclose(top, best, atol=2e-5)
            np.testing.assert_allclose(row[ids], best, atol=2e-5)


@pytest.mark.by_default(3)
@pytest.mark.parametrize(("character", "count"), [("😀", 4), ("😀", 3), ("é", 2), ("é", 1)])
@pytest.mark.parametrize("then", ["", "dog"])
def test_bytes_of_a_character_begin_where_it_does(character, count, then):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    tokenizer = lm.preprocessor.tokenizer
    sent = tokenizer(character)[:count]  # a token for each byte
    new = np.array([*tokenizer("cat"), *sent, *tokenizer(then)])
    likeliest = {"likeliest_ids": new[:, None], "likeliest_logprobs": np.zeros((len(new), 1))}
    job = SimpleNamespace(prompt=np.array(tokenizer("a")), new=new, ended=True, cancel=print)
    job.stops = Stops([], preprocessor=lm.preprocessor)
    job.sampling = SimpleNamespace(logprobs=True)
    job.notes = [{"logprobs": np.zeros(len(new)), **likeliest}]
    request = EngineRequest(job, print, True)
    text = request.added_text()
    offsets = ShownLogprobs(request, 1, False).next(len(text))["text_offset"]
    before, after = len(tokenizer("cat")), len(tokenizer(then))
    assert len(offsets) == len(new)
    assert len(sent) == count
    assert offsets[before : len(new) - after] == [3] * len(sent)
    assert offsets[len(new) - after :][:1] == [4][:after]


@pytest.mark.slow
def test_a_small_vocabulary_is_shown_whole():
    import keras_hub

    lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(7, 1, 2, 8, 16))
    prompt = {"token_ids": [[1, 2]], "padding_mask": [[1, 1]]}
    request = bs.Engine(lm, rows=1, length=32).submit(
        prompt, max_new_tokens=3, stop_token_ids=None, logprobs=True
    )
    request.result()
    np.testing.assert_allclose(np.exp(request.logprobs.likeliest_logprobs).sum(-1), 1, rtol=1e-5)
    assert set(request.logprobs.likeliest_ids[0]) == set(range(7))
