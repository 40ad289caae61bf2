"""Response formats of an engine and of a server."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import openai
import pydantic
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.formats import table
from tests.serving.tiny import Server, make_steered

PROMPT = "Once upon a time there was a"
AGE = bs.ResponseFormat.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
        "required": ["age"],
    }
)
YES = bs.ResponseFormat.choice([" yes", " no", " maybe so"])
NAME = bs.ResponseFormat(r" [a-z]{1,6}( [a-z]{1,6}){2,4}\.")


class Pet(pydantic.BaseModel):
    """What a client asks for."""

    kind: Literal["dog", "cat", "bird"]
    age: int


@pytest.fixture(scope="module")
def lm():
    return make_steered()


@pytest.fixture(scope="module")
def running(lm):
    sizes = {"prefill_chunk": 16, "chunk_size": 4}
    with Server(lm, chat_template="{{ messages[-1].content }}", **sizes) as server:
        yield server


@pytest.fixture(scope="module")
def engine(running):
    return running.engine


FORMATS = [AGE, None, YES, NAME, AGE]


@pytest.mark.parametrize("seed", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_each_request_gives_what_generate_gives_for_it_alone(lm, engine, seed):
    """Beside others with and without a format, which come and go, and with controls of its own."""
    prompts = [PROMPT, "Tom had a red ball. " * 3, "The", PROMPT, "A dog"]
    asked = {"max_new_tokens": 40, "strip_prompt": True}
    if seed is not None:
        lm.compile(sampler="random")
    try:
        requests = [
            engine.submit(
                prompt,
                response_format=wanted,
                controls={"mood": strength},
                seed=seed,
                temperature=None if seed is None else 1.0,
                **asked,
            )
            for prompt, wanted, strength in zip(prompts, FORMATS, range(-2, 3), strict=True)
        ]
        for prompt, wanted, strength, request in zip(
            prompts, FORMATS, range(-2, 3), requests, strict=True
        ):
            alone = lm.generate(
                prompt, response_format=wanted, controls={"mood": strength}, seed=seed, **asked
            )
            assert request.result() == alone
            if wanted is not None and request.finish_reason == "stop":
                assert re.fullmatch(wanted.regex, alone)
    finally:
        lm.compile(sampler="greedy")
    assert [request.finish_reason for request in requests].count("stop") >= 3


@pytest.mark.slow
def test_a_format_comes_and_goes_beside_a_row_without(lm):
    """The row goes on as it does alone, whether tables are there, and of whatever size."""
    engine = bs.Engine(lm, rows=3, length=128, chunk_size=2)
    before = engine.stats.compilations.get("insert", 0)
    without = engine.submit(PROMPT, max_new_tokens=60, stop_token_ids=None)
    engine.step()
    large = bs.ResponseFormat(r"([a-z]{1,9}[0-9]{1,9}[.,]){1,9}(a|b){1,900}")
    small = engine.submit("Tom", response_format=YES, max_new_tokens=20)
    engine.step()
    larger = engine.submit("Tom", response_format=large, max_new_tokens=20)
    assert small.result() == lm.generate("Tom", response_format=YES, max_new_tokens=20)
    assert larger.result() == lm.generate("Tom", response_format=large, max_new_tokens=20)
    assert without.result() == lm.generate(PROMPT, max_new_tokens=60, stop_token_ids=None)
    # Without a format, and with tables of two sizes.
    assert engine.stats.compilations["insert"] <= before + 3
    assert not engine._scheduler._batch.formats.arrays


@pytest.mark.slow
def test_more_masks_come_beside_rows_that_have_few(lm, rng):
    letters = rng.integers(97, 123, (700, 7)).astype("uint8")
    many = bs.ResponseFormat.choice([f" {bytes(row).decode()}" for row in letters])
    tokenizer, size = lm.preprocessor.tokenizer, lm.programs.head.input_dim
    assert len(table.table_of(many, tokenizer, size).masks) > 256
    engine = bs.Engine(lm, rows=3, length=128, chunk_size=2)
    formats = [NAME, many, YES, None]
    asked = {"max_new_tokens": 30, "stop_token_ids": None}
    requests = []
    for wanted in formats:
        requests.append(engine.submit(PROMPT, response_format=wanted, **asked))
        engine.step()
    for wanted, request in zip(formats, requests, strict=True):
        assert request.result() == lm.generate(PROMPT, response_format=wanted, **asked)


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up(lm):
    """Whatever the order in which smaller formats come."""
    engine = bs.Engine(lm, rows=2, length=128, prefill_chunk=32)
    large = bs.ResponseFormat("[a-z ]{9000}")
    engine.warm_up(response_format=large)
    before = engine.stats.compilations
    engine.warm_up(response_format=YES)
    formats = [YES, None, NAME, None, bs.ResponseFormat("[0-9]{9}"), large, AGE, None]
    for wanted in formats[:1], formats:
        engine.generate([PROMPT] * len(wanted), response_format=wanted, max_new_tokens=30)
    assert engine.stats.compilations == before


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_a_longer_cache_is_made_while_a_format_is_read(rows):
    lm = bs.CachedCausalLM.from_preset("tiny_gemma")
    lm.compile(sampler="greedy")
    engine = bs.Engine(lm, rows=rows, length=512)
    letters = bs.ResponseFormat("[a-z ]{40,60}")
    for wanted in (None, letters):
        asked = [("Tom", letters), ("The cat sat on the mat. " * 40, wanted)]
        requests = [engine.submit(p, response_format=f, max_new_tokens=9) for p, f in asked]
        for request, (prompt, format_) in zip(requests, asked, strict=True):
            alone = lm.generate(prompt, response_format=format_, max_new_tokens=9)
            assert request.result() == alone


def test_a_format_that_takes_long_holds_up_nobody_else(monkeypatch, running):
    """Two are made at once; requests without one, and with one that is made, go on."""
    known = {"structured_outputs": {"choice": [" yes", " no"]}}
    body = {"prompt": PROMPT, "max_tokens": 3}
    running.send("POST", "/v1/completions", json={**body, **known})
    go_on, begun = threading.Event(), []

    def slow(wanted, tokens):
        begun.append(wanted)
        go_on.wait(60)
        raise ValueError("it took long")

    monkeypatch.setattr(table, "make_table", slow)
    slow_ones = [{**body, "structured_outputs": {"regex": f"a{{{i + 1}}}"}} for i in range(17)]
    with ThreadPoolExecutor(17) as threads:
        sent = [threads.submit(running.send, "POST", "/v1/completions", json=b) for b in slow_ones]
        try:
            deadline = time.monotonic() + 30
            while sum(s.done() for s in sent) < 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            for more in ({}, known):
                answer = running.send("POST", "/v1/completions", json={**body, **more})
                assert answer.status_code == 200
            assert len(begun) == 2
            assert [s.result().status_code for s in sent if s.done()] == [429]
        finally:
            go_on.set()


def test_log_probabilities_are_those_of_the_model(lm, engine):
    """Not those of what a format leaves."""
    request = engine.submit(PROMPT, response_format=YES, logprobs=True, max_new_tokens=8)
    request.result()
    ids = np.concatenate([request.prompt_token_ids, request.token_ids])[None]
    logits = np.asarray(lm.score(ids))[0, len(request.prompt_token_ids) - 1 : -1]
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    notes = request.logprobs
    own = np.take_along_axis(logprobs, request.token_ids[:, None], axis=-1)[:, 0]
    np.testing.assert_allclose(notes.logprobs, own, atol=1e-4)
    np.testing.assert_array_equal(notes.likeliest_ids[:, 0], logprobs.argmax(axis=-1))


def test_many_prompts_have_one_format_or_one_each(engine):
    texts = engine.generate([PROMPT] * 2, response_format=YES, max_new_tokens=8, strip_prompt=True)
    assert texts[0] in (" yes", " no", " maybe so")
    assert texts[0] == texts[1]
    with pytest.raises(
        bs.SurgeryError, match=r"Engine.generate at 'response_format': .* of 2, one"
    ):
        engine.generate([PROMPT] * 2, response_format=[YES])
    with pytest.raises(bs.SurgeryError, match="warm_up at 'response_format': expected a"):
        engine.warm_up(response_format="yes")


def test_openais_client_parses_a_class(running):
    client = running.client()
    said = [{"role": "user", "content": PROMPT}]
    answer = client.chat.completions.parse(model="tiny", messages=said, response_format=Pet)
    assert isinstance(answer.choices[0].message.parsed, Pet)
    assert answer.choices[0].finish_reason == "stop"
    again = client.chat.completions.create(
        model="tiny",
        messages=said,
        extra_body={"structured_outputs": {"json": Pet.model_json_schema()}},
    )
    assert again.choices[0].message.content == answer.choices[0].message.content


def test_the_formats_of_vllm(running, lm):
    def ask(**fields):
        answer = running.client().completions.create(
            model="tiny", prompt=PROMPT, max_tokens=30, extra_body={"structured_outputs": fields}
        )
        return answer.choices[0].text

    assert ask(choice=[" yes", " no", " maybe so"]) == lm.generate(
        PROMPT, response_format=YES, max_new_tokens=30, strip_prompt=True
    )
    assert re.fullmatch("[0-9]{5}", ask(regex="[0-9]{5}"))
    assert 3 <= len(json.loads(ask(json={"type": "string", "minLength": 3, "maxLength": 5}))) <= 5
    assert json.loads(ask(json='{"enum": [17]}')) == 17


def test_a_stream_and_several_choices(running):
    pieces = running.client().completions.create(
        model="tiny",
        prompt=PROMPT,
        n=3,
        seed=1,
        temperature=1,
        stream=True,
        extra_body={"structured_outputs": {"regex": " [a-z]{2}[0-9]{2}"}},
    )
    texts = {0: "", 1: "", 2: ""}
    for piece in pieces:
        texts[piece.choices[0].index] += piece.choices[0].text
    assert all(re.fullmatch(" [a-z]{2}[0-9]{2}", text) for text in texts.values())
    assert len(set(texts.values())) > 1


@pytest.mark.slow
def test_any_object_of_json(running):
    """Small models go on for long: what there is begins one."""
    answer = running.client().completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=60,
        extra_body={"response_format": {"type": "json_object"}},
    )
    choice = answer.choices[0]
    assert choice.text.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.text), dict)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"response_format": {"type": "xml"}},
            "'response_format'.type: expected 'text', 'json_object' or 'json_schema'. R",
        ),
        ({"response_format": {"type": "json_schema"}}, "expected `json_schema` where `type` is"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "expected `json_schema` where `type` is 'json_schema', and only there",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"multipleOf": 1}},
                }
            },
            "json_schema, schema: expected keywords that can be kept. Received 'multipleOf'",
        ),
        ({"structured_outputs": {}}, "expected one of `choice`, `regex`, `json` and `json_object`"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "expected one of `choice`, `reg"),
        (
            {"structured_outputs": {"regex": "(a"}},
            "it is no regular expression of the Rust crate `regex`",
        ),
        ({"structured_outputs": {"grammar": "a"}}, "expected no such field"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs: expected it or `response_format`. Received both",
        ),
    ],
)
def test_bad_formats_are_refused(running, fields, words):
    with pytest.raises(openai.BadRequestError) as caught:
        running.client().completions.create(model="tiny", prompt=PROMPT, extra_body=fields)
    assert words in caught.value.body["message"]


def test_a_text_is_the_format_of_a_text(running):
    bodies = [
        {"prompt": PROMPT, "max_tokens": 5, **more}
        for more in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": None})
    ]
    answers = [running.send("POST", "/v1/completions", json=b).json() for b in bodies]
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts == texts[:1] * 3
