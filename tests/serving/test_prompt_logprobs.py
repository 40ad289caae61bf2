"""Log-probabilities of prompts, and the routes by which an evaluation harness asks for them."""

import json

import numpy as np
import pytest
from scipy.special import log_softmax

import backbone_surgery as bs
from backbone_surgery.serving.logprobs import MOST_LIKELIEST
from tests import compilations
from tests.helpers import ragged
from tests.serving.tiny import TEXT, make_steered, serve
from tests.serving.traffic import SIZE, VOCABULARY, random_gpt2

NAN = {
    "prompt": "Once upon a time",
    "echo": True,
    "logprobs": 1,
    "max_tokens": 0,
    "steering": {"mood": 1e38},
}


@pytest.fixture(scope="module")
def lm():
    rng = np.random.default_rng(3)
    steer = bs.Steer("mood", {1: rng.normal(size=SIZE)}, strength=0.0)
    lm = bs.CachedCausalLM(bs.operate(random_gpt2(rng), [steer, bs.Capture("blocks.*")]))
    lm.compile(sampler="greedy")
    return lm


def scored(lm, ids, strength):
    """Log-probabilities by the uncached graph, in NumPy from the logits on."""
    logits = np.asarray(lm.score(ids[None], controls={"mood": strength}), np.float64)[0]
    return log_softmax(logits, axis=-1)


@pytest.mark.by_default(1)
@pytest.mark.parametrize("strength", [1.5, 0.0])
def test_they_are_those_of_the_uncached_graph(lm, rng, strength):
    """In whole chunks and in parts of them, beside requests that do not ask for them."""
    engine = bs.Engine(lm, rows=2, length=64, chunk_size=4, prefill_chunk=8)
    inputs = ragged(rng, (19, 1, 8, 3), 19, VOCABULARY)
    settings = {"controls": {"mood": strength}, "stop_token_ids": None}
    requests = [
        engine.submit(
            {k: v[i : i + 1] for k, v in inputs.items()},
            max_new_tokens=(5, 1, 0, 7)[i],
            prompt_logprobs=i != 3,
            **settings,
        )
        for i in range(4)
    ]
    for request in requests[:3]:
        notes, ids = request.prompt_logprobs, request.prompt_token_ids
        assert np.array_equal(notes.token_ids, ids[1:])
        assert len(notes.logprobs) == len(notes.likeliest_ids) == len(ids) - 1
        if len(ids) == 1:  # Keras warns of attention to one token, which is no mistake here
            continue
        wanted = scored(lm, ids, strength)[:-1]
        best = -np.sort(-wanted, axis=-1)[:, :MOST_LIKELIEST]
        own = np.take_along_axis(wanted, ids[1:, None], axis=-1)[:, 0]
        np.testing.assert_allclose(notes.logprobs, own, atol=2e-5)
        np.testing.assert_allclose(notes.likeliest_logprobs, best, atol=2e-5)
    texts = [request.result() for request in requests]
    alone = {"token_ids": inputs["token_ids"][:1], "padding_mask": inputs["padding_mask"][:1]}
    free = lm.generate(alone, max_new_tokens=5, **settings)["token_ids"][0]
    assert texts[0].tolist() == free.tolist()
    with pytest.raises(bs.SurgeryError, match="Pass `prompt_logprobs=True` to `submit`"):
        _ = requests[3].prompt_logprobs


@pytest.mark.slow
def test_warm_up_compiles_what_they_need(lm, rng):
    engine = bs.Engine(lm, rows=2, length=64, prefill_chunk=8)
    engine.warm_up(captures=True, prompt_logprobs=True)
    compiled = dict(engine.stats.compilations)
    for length in (3, 8, 19):
        for captures in (False, True):
            inputs = ragged(rng, (length,), length, VOCABULARY)
            settings = {"stop_token_ids": None, "return_captures": captures}
            request = engine.submit(inputs, 3, prompt_logprobs=True, **settings)
            assert len(request.prompt_logprobs.logprobs) == length - 1
            if captures:
                assert request.captures["blocks.0"].shape[1] == length + 2
    assert engine.stats.compilations == compiled


def test_a_prompt_of_another_length_compiles_nothing(lm, rng):
    engine = bs.Engine(lm, rows=1, length=64, prefill_chunk=8)

    def ask(length):
        inputs = ragged(rng, (length,), length, VOCABULARY)
        return engine.submit(inputs, 1, stop_token_ids=None, prompt_logprobs=True).prompt_logprobs

    ask(16), ask(17)
    with compilations.counted() as compiled:
        for length in (19, 13, 22, 31):
            assert len(ask(length).logprobs) == length - 1
    assert not compiled


@pytest.mark.parametrize("count", [0, 1])
def test_logits_that_are_no_numbers_are_told_of(rng, count):
    lm = bs.CachedCausalLM(random_gpt2(rng))
    lm.backbone.get_layer("layer_norm").gamma.assign(np.full(SIZE, np.nan))
    engine = bs.Engine(lm, rows=1, length=64)
    inputs = ragged(rng, (4,), 4, VOCABULARY)
    request = engine.submit(inputs, count, stop_token_ids=None, prompt_logprobs=True)
    with pytest.raises(bs.SurgeryError, match=r"at token 1: expected logits that are numbers"):
        _ = request.prompt_logprobs


def test_a_prompt_that_was_kept_is_run_anew(lm, rng):
    engine = bs.Engine(lm, rows=1, length=64, prefill_chunk=8)
    inputs = ragged(rng, (20,), 20, VOCABULARY)
    for noted in (False, True, False):
        request = engine.submit(inputs, 1, stop_token_ids=None, prompt_logprobs=noted)
        request.result()
    assert request.reused_tokens == 16
    noted = engine.submit(inputs, 1, stop_token_ids=None, prompt_logprobs=True)
    assert len(noted.prompt_logprobs.logprobs) == 19
    assert noted.reused_tokens == 0


def test_a_request_that_was_cancelled_before_has_none(lm, rng):
    engine = bs.Engine(lm, rows=1, length=64)
    inputs = ragged(rng, (4,), 4, VOCABULARY)
    request = engine.submit(inputs, 8, stop_token_ids=None, prompt_logprobs=True)
    request.cancel()
    with pytest.raises(bs.SurgeryError, match=r"prompt was run.*that ended by 'cancelled' before"):
        _ = request.prompt_logprobs
    with pytest.raises(bs.SurgeryError, match="prompt_logprobs"):
        engine.submit(inputs, stop_token_ids=None, prompt_logprobs="yes")


@pytest.fixture(scope="module")
def model():
    return make_steered()


@pytest.fixture(scope="module")
def client(model):
    with serve(model) as client:
        yield client


def echoed(client, prompt, **body):
    """What a harness asks: one new token, which it leaves out again."""
    body = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, **body}
    answer = client.post("/v1/completions", json={"prompt": prompt, **body})
    return answer.json()["choices"]


def tokenize(client, text, **body):
    return client.post("/tokenize", json={"prompt": text, **body}).json()["tokens"]


def test_what_a_harness_adds_up_is_what_score_says(model, client):
    ids = np.array(tokenize(client, TEXT))
    (choice,), (same,) = echoed(client, TEXT), echoed(client, ids.tolist())
    assert choice == same
    shown = choice["logprobs"]
    assert all(len(column) == len(ids) + 1 for column in shown.values())
    assert "".join(shown["tokens"]) == choice["text"]
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
    wanted = log_softmax(np.asarray(model.score(ids[None]), np.float64)[0], axis=-1)[:-1]
    own = np.take_along_axis(wanted, ids[1:, None], axis=-1)[:, 0]
    np.testing.assert_allclose(shown["token_logprobs"][1:-1], own, atol=1e-4)
    tops = [max(top.values()) for top in shown["top_logprobs"][1:-1]]
    is_greedy = [x == top for x, top in zip(shown["token_logprobs"][1:-1], tops, strict=True)]
    assert is_greedy == (wanted.argmax(-1) == ids[1:]).tolist()
    assert not all(is_greedy)


@pytest.mark.parametrize("end", [False, True])
def test_each_new_token_counts_though_it_has_no_text(client, end):
    ids = tokenize(client, TEXT)
    stop = tokenize(client, client.get("/tokenizer_info").json()["eos_token"])[-1]
    bias = {"logit_bias": {str(stop): 100}} if end else {}
    choices = echoed(client, [ids, ids[:4]], n=2, logprobs=2, **bias)
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for choice, count in zip(choices, (12, 12, 4, 4), strict=True):
        shown = choice["logprobs"]
        assert all(len(column) == count + 1 for column in shown.values())
        assert choice["finish_reason"] == ("stop" if end else "length")
        assert (shown["text_offset"][-1] == len(choice["text"])) == end


@pytest.mark.slow
def test_a_stop_sequence_cuts_the_new_tokens_alone(client):
    whole = echoed(client, TEXT, max_tokens=12)[0]
    added = whole["text"][len(TEXT) :]
    cut = echoed(client, TEXT, max_tokens=12, stop=added[5:9])[0]
    assert cut["text"] == TEXT + added[:5]
    count = sum(offset < len(cut["text"]) for offset in whole["logprobs"]["text_offset"])
    assert cut["logprobs"]["tokens"] == whole["logprobs"]["tokens"][:count]
    assert count > 12


@pytest.mark.parametrize(
    "text",
    [f"<|endoftext|>{TEXT}", "a<|endoftext|>b c", "a\ufffd b c", "  two  spaces\n\nand lines"],
)
def test_tokens_stand_in_the_echoed_text_where_it_says(client, text):
    shown = echoed(client, text)[0]["logprobs"]
    for token, start in zip(shown["tokens"][:-1], shown["text_offset"], strict=False):
        if "\ufffd" not in token:
            assert text[start:].startswith(token), (token, start)
    count = len(tokenize(client, text))
    assert count == len(shown["tokens"]) - 1
    assert shown["text_offset"][count - 1] == len(text) - len(shown["tokens"][-2])


def test_bytes_of_a_character_begin_where_it_does(client):
    shown = echoed(client, "a 😀 b")[0]["logprobs"]
    ids = tokenize(client, "a 😀 b")
    starts = shown["text_offset"][: len(ids)]
    assert len(set(starts[3:7])) == 1
    assert starts[-1] == 3


def test_messages_become_the_tokens_of_their_template(model):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    messages = [{"role": "user", "content": [{"type": "text", "text": "a red box"}]}]
    client = serve(model, chat_template=template)
    for is_asked in (True, False):
        text = "user: a red box<|endoftext|>" + "assistant:" * is_asked
        wanted = np.asarray(model.preprocessor.tokenizer(text)).tolist()
        body = {
            "messages": messages,
            "add_generation_prompt": is_asked,
            "add_special_tokens": False,
        }
        got = client.post("/tokenize", json=body).json()
        assert (got["tokens"], got["count"]) == (wanted, len(wanted))
    default = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert default[: len(wanted)] == wanted
    assert len(default) > len(wanted)
    for body, words in (
        ({}, "expected `prompt` or `messages`"),
        ({"prompt": "a", "messages": messages}, "expected `prompt` or `messages`, and not both"),
        ({"messages": messages, "add_special_tokens": True}, "a template writes its own"),
        ({"prompt": "a", "add_generation_prompt": True}, "with `messages` alone"),
        ({"messages": []}, "at least 1"),
        ({"messages": [{"role": "user", "content": "a" * 100_000}]}, "Received 100000. Shorten"),
    ):
        answer = client.post("/tokenize", json=body)
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), (
            answer.json()
        )
    answer = serve(model).post("/tokenize", json={"messages": messages})
    assert "expected a server with a chat template" in answer.json()["error"]["message"]


def test_text_becomes_the_tokens_of_the_model_and_text_again(model, client):
    ids = tokenize(client, TEXT)
    bare = tokenize(client, TEXT, add_special_tokens=False)
    tokenizer = model.preprocessor.tokenizer
    assert ids == [tokenizer.start_token_id, *bare]
    assert bare == np.asarray(tokenizer(TEXT)).tolist()
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": TEXT}
    body = {"prompt": " Lily", "add_special_tokens": False, "return_token_strs": True}
    answer = client.post("/tokenize", json=body).json()
    assert answer["count"] == len(answer["token_strs"]) == 1
    assert answer["max_model_len"] == 128


@pytest.mark.slow
def test_special_tokens_of_a_sentencepiece_model_are_read_as_such():
    lm = bs.CachedCausalLM.from_preset("tiny_gemma")
    with serve(lm) as client:
        info = client.get("/tokenizer_info").json()
        for name, wanted in (("bos_token", 2), ("eos_token", 1), ("pad_token", 0)):
            assert tokenize(client, info[name], add_special_tokens=False) == [wanted]
        assert tokenize(client, f"<bos>{TEXT}", add_special_tokens=False) == tokenize(client, TEXT)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/tokenize", {"prompt": 3}, 400, "'prompt': expected a text. Received 3."),
        ("/tokenize", {"prompts": "a", "prompt": "a"}, 400, "Did you mean 'prompt'?"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model 'x': expected 'edited_backbone'"),
        ("/tokenize", {"prompt": "a" * 9999}, 400, "prompt: expected at most 1664 characters"),
        ("/tokenize", {"prompt": "\ud800", "add_special_tokens": False}, 400, "UTF-8"),
        ("/detokenize", {"tokens": [1], "model": "\ud800"}, 400, "UTF-8"),
        ("/v1/completions", NAN, 400, "at token 1: expected logits that are numbers"),
        ("/detokenize", {"tokens": [1] * 129}, 400, "'tokens': expected at most 128"),
        ("/detokenize", {"tokens": []}, 400, "'tokens': expected a list of at least 1."),
        ("/detokenize", {"tokens": [2**31]}, 400, "'tokens'.0: expected less than 2147483648."),
        ("/detokenize", {"tokens": [999]}, 400, "expected token ids from 0 to 806. Received ids"),
        ("/detokenize", {"tokens": [1], "model": "x"}, 404, "model 'x'"),
    ],
)
def test_refusals(client, path, body, status, words):
    headers = {"Content-Type": "application/json"}
    answer = client.post(path, content=json.dumps(body), headers=headers)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
