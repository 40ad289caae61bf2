"""The server, over a real port on loopback, by OpenAI's own client."""

import base64
import contextlib
import gc
import json
import re
import socket
import time
from functools import partial

import keras
import numpy as np
import openai
import pytest
import uvicorn
from fastapi.testclient import TestClient
from safetensors.numpy import load, save
from scipy.special import log_softmax
from typer.testing import CliRunner

import backbone_surgery as bs
from backbone_surgery.cli import app
from backbone_surgery.generation.controls import bind_controls
from backbone_surgery.serving.request import EngineRequest
from backbone_surgery.serving.serve import check_server, make_server_app
from backbone_surgery.serving.web import ending, limits
from backbone_surgery.serving.web.steering import Vectors, describe_controls, read_steering
from tests.serving.tiny import NAMES, Server

JSON = {"Content-Type": "application/json"}
PROMPT = "Once upon a time"
TWICE = '{"prompt": "a", "steering": {"mood": 1, "mood": 2}}'
CHAT = '{"messages": [{"role": "user", "content": %s}]}'


@pytest.fixture(scope="module")
def lm():
    plain = bs.CachedCausalLM.from_preset("tiny_gpt2")
    vectors = {name: bs.ControlVector.from_preset("tiny_gpt2", name) for name in NAMES}
    steers = [bs.Steer(name, vectors[name], strength=0.0) for name in NAMES]
    edited = bs.operate(plain.backbone, [*steers, bs.Capture("blocks.*")])
    lm = bs.CachedCausalLM(edited, plain.preprocessor)
    lm.compile(sampler="greedy")
    return lm


@pytest.fixture(scope="module")
def server(lm):
    with Server(lm) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def complete(client, prompt=PROMPT, steering=None, capture=None, **settings):
    extra = {} if steering is None else {"steering": steering}
    extra |= {} if capture is None else {"capture": capture}
    settings = {"max_tokens": 20, "temperature": 0, **settings}
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **settings)


@pytest.mark.slow
def test_texts_are_those_of_generate(lm, client):
    strengths = {"happy": 1.5, "sad": -1.5, "none": 0.0}
    for strength in strengths.values():
        answer = complete(client, steering={"mood": strength})
        wanted = lm.generate(
            PROMPT, max_new_tokens=20, controls={"mood": strength}, strip_prompt=True
        )
        assert answer.choices[0].text == wanted
        assert answer.choices[0].finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 20)


@pytest.mark.slow
def test_penalties_are_those_of_generate(lm, client):
    period = lm.preprocessor.tokenizer.token_to_id(".")
    fields = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {str(period): -100}}
    answer = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=20,
        temperature=0,
        extra_body={"repetition_penalty": 1.2},
        **fields,
    )
    penalties = bs.Penalties(1.2, presence=0.5, frequency=0.3, bias={period: -100})
    wanted = lm.generate(PROMPT, max_new_tokens=20, penalties=penalties, strip_prompt=True)
    assert answer.choices[0].text == wanted
    assert "." not in wanted
    assert wanted != lm.generate(PROMPT, max_new_tokens=20, strip_prompt=True)


@pytest.mark.slow
def test_objects_say_vector_tokens_and_schedule(lm, client):
    vector = bs.ControlVector.from_preset("tiny_gpt2", "pet")
    steering = {"mood": {"strength": -2, "vector": "pet", "tokens": [2, None]}}
    control = bs.Control(-2.0, directions=vector, tokens=(2, None))
    wanted = lm.generate(PROMPT, max_new_tokens=20, controls={"mood": control}, strip_prompt=True)
    assert complete(client, steering=steering).choices[0].text == wanted
    steering = {"mood": {"strength": 2, "schedule": [0, 0, 1]}}
    control = bs.Schedule([0.0, 0.0, 2.0])
    wanted = lm.generate(PROMPT, max_new_tokens=20, controls={"mood": control}, strip_prompt=True)
    assert complete(client, steering=steering).choices[0].text == wanted


@pytest.mark.slow
def test_easysteers_fields_mean_the_same(client):
    for apply, tokens in ((None, "all"), ({"prompt": None, "generation": "all"}, "generated")):
        entry = {"name": "mood", "scale": 2.0, "layers": [4, 5]}
        entry |= {} if apply is None else {"apply": apply}
        theirs = complete(client, steering={"vectors": [entry]}).choices[0].text
        vector = bs.ControlVector.from_preset("tiny_gpt2", "mood")
        vector = bs.ControlVector({b: vector.directions[b] for b in (4, 5)}, vector.info)
        control = bs.Control(2.0, directions=vector, tokens=tokens)
        assert theirs == texts_alone(control)


@pytest.mark.parametrize("entry", [{}, {"scale": None}])
def test_an_easysteer_vector_without_a_scale_acts_at_1(lm, entry):
    vectors = Vectors(lm, {"mood": bs.ControlVector.from_preset("tiny_gpt2", "mood")})
    control = read_steering(lm, vectors, {"vectors": [{"name": "mood", **entry}]}, 128, {})["mood"]
    assert control.strength == 1.0


def test_objects_of_other_controls_say_what_those_take():
    tiny = bs.CachedCausalLM.from_preset("tiny_gpt2")
    direction = bs.ControlVector.from_preset("tiny_gpt2", "mood").directions[4]
    rewrites = [
        bs.Condition("sad", direction, 0.2, at="blocks.1"),
        bs.Steer("mood", {4: direction}, when="sad", strength=0.0),
        bs.ProjectOut("none", direction),
    ]
    lm = bs.CachedCausalLM(bs.operate(tiny.backbone, rewrites))
    read = partial(read_steering, lm, Vectors(lm, {}), length=128, strengths={})
    steering = {"sad": {"threshold": 0.5, "tokens": "last"}, "none": {"strength": 1}}
    controls = read(steering)
    assert controls["sad"].threshold == 0.5
    assert (controls["sad"].tokens, controls["none"].strength) == ("last", 1)
    bind_controls(lm.opened, controls, np.array([3]))
    vectors = Vectors(lm, {"mood": bs.ControlVector.from_preset("tiny_gpt2", "mood")})
    control = read_steering(lm, vectors, {"none": {"vector": "mood", "blocks": 5}}, 128, {})["none"]
    np.testing.assert_array_equal(control.directions, [vectors["mood"].directions[5]])
    vectors = Vectors(lm, {"none": bs.ControlVector.from_preset("tiny_gpt2", "mood")})
    with pytest.raises(bs.SurgeryError, match="at vector 'none': expected a `Steer` for each vec"):
        read_steering(lm, vectors, {"vectors": [{"name": "none", "scale": 1}]}, 128, {})
    vectors = Vectors(lm, {"mood": bs.ControlVector.from_preset("tiny_gpt2", "mood")})
    with pytest.raises(bs.SurgeryError, match=r"at 'none', 'blocks': expected blocks that the vec"):
        read_steering(lm, vectors, {"none": {"vector": "mood", "blocks": [77]}}, 128, {})
    with pytest.raises(bs.SurgeryError, match=r"at 'none': expected `blocks` beside a `vector`"):
        read({"none": {"blocks": 5}})
    control = read_steering(lm, vectors, {"none": {"vector": "mood"}}, 128, {})
    with pytest.raises(bs.SurgeryError, match=r"at 'none': .* span at most 1 dimensions"):
        bind_controls(lm.opened, control, np.array([3]))
    with pytest.raises(bs.SurgeryError, match=r"'sad': expected threshold, tokens. Received 'str"):
        read({"sad": {"strength": 1}})
    control = read({"none": {"tokens": [-2, None]}})["none"]
    assert (control.strength, control.tokens) == (None, (-2, None))
    with pytest.raises(bs.SurgeryError, match=r"'mood': expected a `strength` or .* 0 by default"):
        read({"mood": {"tokens": "last"}})
    with pytest.raises(bs.SurgeryError, match=r"at 'none': expected tokens 'all'.*Received \['la"):
        read({"mood": 1, "none": {"strength": 1, "tokens": ["last"]}})
    with pytest.raises(bs.SurgeryError, match=r"at 'none': expected a finite strength.*True"):
        read({"mood": 1, "none": {"strength": True}})
    with pytest.raises(bs.SurgeryError, match="at 'sad': expected thresholds from -1 to 1"):
        read({"sad": {"threshold": "high"}})
    with pytest.raises(bs.SurgeryError, match=r"from -1 to 1, one or one for each row. Received 2"):
        bind_controls(lm.opened, read({"sad": 2}), np.array([3]))


def test_strengths_of_blocks_are_a_list():
    """A request is one row."""
    tiny = bs.CachedCausalLM.from_preset("tiny_gpt2")
    directions = {b: np.eye(tiny.backbone.hidden_dim)[b] for b in (2, 4)}
    lm = bs.CachedCausalLM(bs.operate(tiny.backbone, [bs.Steer("mood", directions)]))
    read = partial(read_steering, lm, Vectors(lm, {}), length=128, strengths={})
    for steering in ([0, 1.5], [[0, 1.5]], {"strength": [0, 1.5]}):
        bound = bind_controls(lm.opened, read({"mood": steering}), np.array([3]))
        assert bound["mood_strength"].tolist() == [[0, 1.5]]
    with pytest.raises(bs.SurgeryError, match=r"\[1, 2\] \(rows first, then sites\)"):
        bind_controls(lm.opened, read({"mood": [0, 1, 2]}), np.array([3]))


def test_a_vector_may_come_from_a_model_in_another_dtype(tmp_path):
    vector = bs.ControlVector.from_preset("tiny_gpt2", "mood")
    assert {"family", "source_digest"} <= set(vector.info)  # of a model in float32
    vector.save(tmp_path / "mood.safetensors")
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2", dtype="bfloat16")
    vectors = Vectors(lm, {})
    vectors.read("mine", (tmp_path / "mood.safetensors").read_bytes())
    assert vectors["mine"].directions.keys() == vector.directions.keys() != set()


def test_inputs_belong_to_one_control():
    plain = bs.CachedCausalLM.from_preset("tiny_gpt2")
    vector = bs.ControlVector.from_preset("tiny_gpt2", "mood")
    edited = bs.operate(plain.backbone, [bs.Steer(name, vector) for name in ("mood", "mood_b")])
    for control in describe_controls(bs.CachedCausalLM(edited), {}):
        parts = ("strength", "directions", "tokens", "schedule")
        assert set(control["inputs"]) == {f"{control['name']}_{part}" for part in parts}


def test_the_default_of_a_clamp_is_listed():
    plain = bs.CachedCausalLM.from_preset("tiny_gpt2")
    edited = bs.operate(plain.backbone, [bs.Clamp("blocks.1", features=(3, 7), values=2.0)])
    (control,) = describe_controls(bs.CachedCausalLM(edited), {})
    assert control["default"] == {"features": [3, 7], "values": 2.0}


@pytest.mark.slow
def test_an_input_put_in_by_hand_is_a_control():
    plain = bs.CachedCausalLM.from_preset("tiny_gpt2")
    nudge = keras.Input((plain.backbone.hidden_dim,), name="nudge")
    inputs = {**plain.backbone.input, "nudge": nudge}
    model = keras.Model(inputs, plain.backbone.output + nudge[:, None])
    lm = bs.CachedCausalLM(model, plain.preprocessor)
    lm.compile(sampler="greedy")
    values = [float(i % 7) for i in range(nudge.shape[1])]
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    with TestClient(make_server_app(lm, warm_up=False, rows=2, length=64)) as client:
        (listed,) = client.get("/v1/steering").json()["controls"]
        assert (listed["name"], listed["kind"]) == ("nudge", "Input")
        assert listed["inputs"]["nudge"]["shape"] == [len(values)]
        answer = client.post("/v1/completions", json={**body, "steering": {"nudge": values}})
        refused = client.post("/v1/completions", json=body)
    controls = {"nudge": [values]}
    wanted = lm.generate(PROMPT, max_new_tokens=4, controls=controls, strip_prompt=True)
    assert answer.json()["choices"][0]["text"] == wanted
    assert refused.status_code == 400
    assert "control 'nudge': expected a value" in refused.json()["error"]["message"]


def texts_alone(control):
    plain = bs.CachedCausalLM.from_preset("tiny_gpt2")
    steer = bs.Steer("mood", bs.ControlVector.from_preset("tiny_gpt2", "mood"), strength=0.0)
    lm = bs.CachedCausalLM(bs.operate(plain.backbone, [steer]), plain.preprocessor)
    lm.compile(sampler="greedy")
    return lm.generate(PROMPT, max_new_tokens=20, controls={"mood": control}, strip_prompt=True)


@pytest.mark.slow
def test_pieces_of_a_stream_join_to_the_answer(client):
    settings = {"temperature": 0.9, "seed": 3, "n": 2, "stop": ["."], "prompt": [PROMPT, "One day"]}
    whole = complete(client, **settings)
    pieces = [""] * 4
    reasons = [None] * 4
    usage = None
    for event in complete(client, **settings, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        for choice in event.choices:
            pieces[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert pieces == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(set(pieces)) > 1
    assert not any("." in piece for piece in pieces)
    assert usage.total_tokens == whole.usage.total_tokens


@pytest.mark.slow
def test_captures_come_with_the_last_event(lm, client):
    answer = complete(client, steering={"mood": 1.0}, capture=["blocks.2", "blocks.5"])
    _, wanted = lm.generate(PROMPT, max_new_tokens=20, controls={"mood": 1.0}, return_captures=True)
    captures = answer.choices[0].captures
    arrays = load(base64.b64decode(captures["data"]))
    np.testing.assert_array_equal(arrays["token_ids"], wanted.token_ids[0])
    for site in ("blocks.2", "blocks.5"):
        np.testing.assert_allclose(arrays[site], wanted[site][0], rtol=1e-5, atol=1e-5)
    *_, last = complete(client, capture=["blocks.2"], stream=True)
    assert last.choices[0].captures["format"] == "safetensors"
    assert "".join(captures["tokens"]).endswith(answer.choices[0].text)


def in_numpy(lm, text_ids, count):
    """Log-probabilities of the last tokens of a text, by the graph without a cache."""
    ids = np.array([text_ids])
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids, bool)}
    states = lm.backbone.predict_on_batch(inputs)["hidden_states"]
    logits = np.asarray(lm.opened.token_embedding(states, reverse=True))[0]
    return log_softmax(logits, axis=-1)[-count - 1 : -1]


@pytest.mark.slow
def test_logprobs_of_completions(lm, client):
    _, run = lm.generate(PROMPT, max_new_tokens=21, return_captures=True)
    wanted = in_numpy(lm, run.token_ids[0], 20)
    choice = complete(client, logprobs=3).choices[0]
    shown = choice.logprobs
    assert "".join(shown.tokens) == choice.text
    for token, offset in zip(shown.tokens, shown.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    np.testing.assert_allclose(shown.token_logprobs, wanted.max(axis=-1), atol=1e-4)
    for entry, row in zip(shown.top_logprobs, wanted, strict=True):
        np.testing.assert_allclose(sorted(entry.values()), np.sort(row)[-3:], atol=1e-4)


@pytest.mark.slow
def test_logprobs_of_a_stream_join_to_those_of_the_whole(lm, client):
    settings = {"temperature": 0.9, "seed": 3, "n": 2, "stop": [".", " the"], "logprobs": 2}
    whole = complete(client, **settings)
    for index, choice in enumerate(whole.choices):
        events = [
            e.choices[0]
            for e in complete(client, **settings, stream=True)
            if e.choices and e.choices[0].index == index and e.choices[0].logprobs
        ]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            pieces = [x for e in events for x in getattr(e.logprobs, name)]
            assert pieces == getattr(choice.logprobs, name), name


@pytest.mark.slow
def test_logprobs_of_a_chat(lm):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with Server(lm, chat_template=template) as server, server.client() as client:
        create = client.chat.completions.create
        messages = [{"role": "user", "content": PROMPT}]
        settings = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 6}
        choice = create(**settings, logprobs=True, top_logprobs=2).choices[0]
        content = choice.logprobs.content
        assert "".join(token.token for token in content) == choice.message.content
        assert bytes(b for token in content for b in token.bytes).decode() == choice.message.content
        for token in content:
            assert [token.token, token.logprob] == [
                token.top_logprobs[0].token,
                token.top_logprobs[0].logprob,
            ]
            assert len(token.top_logprobs) == 2
        assert create(**settings, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
        assert create(**settings).choices[0].logprobs is None
        with pytest.raises(openai.BadRequestError, match="expected `logprobs` to be true"):
            create(**settings, top_logprobs=2)


@pytest.mark.slow
def test_prompts_as_token_ids(lm, client):
    tokens = lm.preprocessor.generate_preprocess([PROMPT], sequence_length=32)
    ids = np.asarray(tokens["token_ids"])[np.asarray(tokens["padding_mask"], bool)].tolist()
    wanted = complete(client).choices[0].text
    assert complete(client, prompt=ids).choices[0].text == wanted
    both = complete(client, prompt=[ids, ids[:3]], echo=True)
    assert both.choices[0].text == PROMPT + wanted
    assert both.choices[1].text.startswith(PROMPT[:9])
    for bad in ([2**40], [-1], [10**6]):
        with pytest.raises(openai.BadRequestError, match=r"token_ids|token ids"):
            complete(client, prompt=bad)


@pytest.mark.slow
def test_vectors_are_uploaded_checked_and_deleted(server, client, tmp_path):
    vector = bs.ControlVector.from_preset("tiny_gpt2", "mood")
    vector.save(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    assert server.upload("mine", data).status_code == 201
    mine = complete(client, steering={"pet": {"strength": 2, "vector": "mine"}})
    assert mine.choices[0].text == complete(client, steering={"mood": 2.0}).choices[0].text
    listed = server.send("GET", "/v1/steering/vectors").json()["vectors"]
    assert [v["name"] for v in listed] == ["mine", "mood", "pet"]
    assert server.send("DELETE", "/v1/steering/vectors/mine").status_code == 200
    for method in ("GET", "DELETE"):
        answer = server.send(method, "/v1/steering/vectors/mine")
        assert answer.status_code == 404
        assert "Known: mood, pet" in answer.json()["error"]["message"]
    bs.ControlVector(vector.directions, {"family": "gemma"}).save(tmp_path / "g.safetensors")
    other = (tmp_path / "g.safetensors").read_bytes()
    answer = server.upload("mine", other)
    assert answer.status_code == 400
    assert "a model of family 'gpt2'. Received one of 'gemma'" in answer.json()["error"]["message"]
    for content, words in (
        (data[:-40], "mine"),
        (b"garbage", "mine"),
        (save({"direction.1": np.ones(7, "float32")}), "mine"),
    ):
        answer = server.upload("mine", content)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
    answer = server.upload("../mine", data)
    assert "letters, digits and underscores" in answer.json()["error"]["message"]


@pytest.mark.by_default(12)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"steerin": {}}, "'steerin' is not a known field. Did you mean 'steering'?"),
        ({"steering": {"moood": 1}}, "expected a control of this model. Did you mean 'mood'"),
        ({"steering": {"mood": {"strength": 1, "vector": "moo"}}}, "Did you mean 'mood'"),
        ({"steering": {"mood": {"vector": "mood"}}}, "expected a `strength` or a `schedule`"),
        ({"steering": {"mood": {"strenght": 1}}}, "Did you mean 'strength'"),
        ({"steering": {"mood": "1"}}, "expected a number, or an object"),
        ({"steering": {"mood": {"strength": 1, "tokens": "some"}}}, "expected tokens 'all'"),
        ({"steering": {"mood": {"strength": 1, "schedule": ["a"]}}}, "a list of numbers"),
        ({"steering": {"vectors": [{"name": "mood", "algorithm": "direct"}]}}, "'algorithm'"),
        ({"steering": {"vectors": [{"name": "mood", "layers": [99]}]}}, "blocks that the vector"),
        ({"steering": {"vectors": [{"name": "mood", "layers": [[4]]}]}}, "blocks that the vector"),
        ({"steering": {"vectors": [{"name": "mood", "layers": {}}]}}, "blocks that the vector"),
        ({"steering": {"vectors": [{"name": []}]}}, "vector []: expected the name of a vector"),
        ({"steering": {"vectors": [{"name": {}}]}}, "vector {}: expected the name of a vector"),
        ({"steering": {"vectors": [{"name": "mood", "apply": {"prompt": []}}]}}, '"all" or null'),
        ({"steering": {"vectors": [{"name": "mood", "apply": []}]}}, '"all" or null'),
        ({"steering": {"mood": {"strength": 1, "schedule": [10**400]}}}, "a list of numbers"),
        ({"steering": {"mood": {"strength": 1, "schedule": "12"}}}, "a list of numbers"),
        ({"steering": {"mood": {"strength": 1, "schedule": {"5": 1}}}}, "a list of numbers"),
        ({"steering": {"mood": {"strength": "2", "schedule": [1]}}}, "a list of numbers"),
        ({"steering": {"mood": {"schedule": [1] * 129}}}, "at most 128 factors, as many as a text"),
        ({"steering": {"vectors": []}}, "expected a list of objects"),
        ({"capture": ["blocks.77"]}, "matches nothing"),
        ({"prompt": 3}, "'prompt': expected a text or a list. Received 3."),
        ({"temperature": "hot"}, "'temperature': expected a number. Received 'hot'."),
        ({"presence_penalty": 2.5}, "'presence_penalty': expected at most 2. Received 2.5."),
        ({"logit_bias": {"a": 1}}, "'logit_bias'.a: expected the id of a token. Received 'a'."),
        ({"logit_bias": {"5": -101}}, "'logit_bias'.5: expected at least -100. Received -101."),
        ({"logit_bias": {"99999": 1}}, "'logit_bias': expected biases of token ids from 0 to"),
        ({"logit_bias": {"05": 1}}, "'logit_bias'.05: expected the id of a token. Received '05'."),
        (
            {"logit_bias": {str(i): 1 for i in range(301)}},
            "'logit_bias': expected at most 300",
        ),
        ({"repetition_penalty": 0}, "'repetition_penalty': expected at least 0.01. Received 0."),
        ({"n": 99}, "'n': expected at most 16. Received 99."),
        ({"n": 0}, "'n': expected at least 1. Received 0."),
        ({"n": "2"}, "'n': expected an integer. Received '2'."),
        ({"seed": 2**63}, "'seed': expected less than 9223372036854775808."),
        ({"stream": "yes"}, "'stream': expected true or false. Received 'yes'."),
        ({"steering": []}, "'steering': expected an object. Received []."),
        ({"stream_options": {"a": 1}}, "'stream_options'.a: expected no such field. Received 1."),
        (
            {"stream_options": {}},
            "'stream_options': expected it only with `stream`, as true. Received",
        ),
        ({"best_of": 2}, "'best_of': expected 1 or null"),
        ({"logprobs": 21}, "'logprobs': expected at most 20. Received 21."),
        ({"logprobs": 1, "echo": True, "stream": True}, "expected it without `stream` where"),
        ({"prompt": []}, "'prompt': expected a list of at least 1. Received []."),
        ({"prompt": [[1], []]}, "'prompt'.1: expected a list of at least 1. Received []."),
        ({"prompt": [[1], ["a"]]}, "'prompt'.1.0: expected an integer. Received 'a'."),
        ({"prompt": [True]}, "'prompt'.0: expected a text or an integer or a list. Received True."),
        ({"stop": ""}, "'stop': expected a text that is not empty. Received ''."),
        ({"stop": ["a", ""]}, "'stop'.1: expected a text that is not empty. Received ''."),
        ({"stop": 3}, "'stop': expected a text or a list. Received 3."),
        ({"stop": ["a"] * 17}, "'stop': expected at most 16 entries. Received ['a', 'a',"),
        ({"max_tokens": 2**30 + 1}, "'max_tokens': expected at most 1073741824. Received 107374"),
        ({"max_tokens": 500}, "(its `--length`, as far as the model has positions). Received 505."),
        ({"max_tokens": 126}, "prompt: expected at most 128 tokens with the new ones, as many as"),
        ({"prompt": [[9] * 300]}, "Received 316. Shorten it, or ask for fewer."),
    ],
)
def test_nothing_is_silently_ignored(server, body, words):
    answer = server.send("POST", "/v1/completions", json={"prompt": PROMPT, **body})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.slow
def test_what_is_surely_too_long_is_not_tokenized(lm, server, monkeypatch):
    tokenizer = lm.preprocessor.tokenizer
    longest = max(tokenizer.get_vocabulary(), key=len).replace("\u0120", " ")
    fitting = {"prompt": 127 * longest, "max_tokens": 0}
    usage = server.send("POST", "/v1/completions", json=fitting).json()["usage"]
    assert usage["prompt_tokens"] == 128  # with the start token
    monkeypatch.setattr(type(tokenizer), "tokenize", lambda *_: pytest.fail("tokenized"))
    text = 128 * longest + "."
    message = {"role": "user", "content": [{"type": "text", "text": text}]}
    words = f"expected at most {128 * len(longest)} characters"
    for path, body in (("", {"prompt": ["a", text]}), ("chat/", {"messages": [message]})):
        answer = server.send("POST", f"/v1/{path}completions", json=body)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/v1/completions", json.dumps({"prompt": "a", "model": "\ud800"}), 400, "UTF-8"),
        ("POST", "/v1/completions", json.dumps({"prompt": "a", "\ud800": 1}), 400, "UTF-8"),
        ("POST", "/v1/completions", "{", 400, "'body': expected JSON (Expecting"),
        ("POST", "/v1/completions", "", 400, "'body': expected a value. Received none. Send one."),
        ("POST", "/v1/completions", "[]", 400, "'body': expected an object. Received []."),
        ("POST", "/v1/completions", "{}", 400, "'prompt': expected a value. Received none."),
        ("POST", "/v1/completions", b'{"prompt": "\xff"}', 400, "a body of JSON in UTF-8"),
        ("POST", "/v1/completions", '{"prompt": "a", "prompt": "b"}', 400, "'prompt' 2 times"),
        ("POST", "/v1/completions", TWICE, 400, "the name 'mood' 2 times"),
        ("POST", "/v1/chat/completions", '{"messages": 3}', 400, "'messages': expected a list."),
        ("POST", "/v1/chat/completions", CHAT % 3, 400, "'messages'.0.content: expected a text or"),
        ("POST", "/v1/chat/completions", CHAT % "[{}]", 400, "content.0.type: expected a value."),
        ("POST", "/v1/completions", "[" * 100_000, 400, "expected a body of JSON"),
        ("POST", "/v1/completions", '{"max_tokens": ' + "9" * 5000 + "}", 400, "a body of JSON"),
        ("POST", "/v1/steering/vectors", "", 400, "'name': expected a value."),
        (
            "POST",
            "/v1/completions",
            '{"prompt": "a", "model": "b"}',
            404,
            "model 'b': expected 'tin",
        ),
        ("GET", "/nope", None, 404, "GET /nope: Not Found"),
        ("GET", "/v1/completions", None, 405, "Method Not Allowed"),
        ("GET", "/v1/models/other/one", None, 404, "model 'other/one': expected 'tiny'"),
    ],
)
def test_every_error_has_openais_shape(server, method, path, body, status, words):
    headers = {"Content-Type": "application/json"}
    answer = server.send(method, path, content=body, headers=headers)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
def test_json_by_another_header_is_told_which_one(server, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    answer = server.send("POST", "/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 400
    words = (
        f"the header Content-Type: expected application/json. Received {kind or 'none'}. Send it."
    )
    assert answer.json()["error"]["message"] == words
    answer = server.upload("mine", b"a", kind)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == words.replace("json", "octet-stream")


@pytest.mark.by_default(1)
@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "One day"]])
def test_usage_counts_a_prompt_once(client, prompt):
    settings = {"prompt": prompt, "max_tokens": 0}
    wanted = complete(client, **settings).usage.prompt_tokens
    assert complete(client, **settings, n=3).usage.prompt_tokens == wanted
    *_, last = complete(
        client, **settings, n=3, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage.prompt_tokens == last.usage.total_tokens == wanted


@pytest.mark.slow
def test_usage_counts_a_cached_prompt_once(lm):
    with Server(lm, prefill_chunk=4) as server, server.client() as client:
        complete(client, max_tokens=2)
        for n in (1, 2):
            usage = complete(client, max_tokens=2, n=n).usage
            assert usage.completion_tokens == 2 * n
            assert usage.prompt_tokens_details.cached_tokens == 4


@pytest.mark.slow
def test_seeds_of_64_bits_are_taken_modulo_2_to_the_32(client):
    def draw(seed):
        return complete(client, temperature=1, seed=seed, n=2).choices[0].text

    assert draw(-1) == draw(2**32 - 1) == draw(2**63 - 1)
    assert draw(-(2**63)) == draw(0) != draw(-1)


def test_models_are_listed_and_retrieved(lm):
    before = int(time.time())
    with Server(lm, name="org/tiny") as server, server.client() as client:
        (listed,) = client.models.list().data
        assert client.models.retrieve("org/tiny") == listed
        assert before <= listed.created <= time.time()
        assert listed.max_model_len == 128
        with pytest.raises(openai.NotFoundError, match="model 'tiny': expected 'org/tiny'"):
            client.models.retrieve("tiny")


@pytest.mark.slow
def test_malformed_bodies(server):
    for content in (b"", b"{", b"[]", b'{"prompt": "\xff"}'):
        answer = server.send("POST", "/v1/completions", content=content)
        assert answer.status_code == 400, content
    large = b'{"prompt": "' + b"x" * 2**22 + b'"}'
    assert server.send("POST", "/v1/completions", content=large).status_code == 413
    answer = server.upload("large", large)
    assert answer.status_code == 400
    assert "control vector" in answer.text

    def pieces():
        for _ in range(20):
            yield b"x" * 2**20

    answer = server.upload("large", pieces())
    assert answer.status_code == 413


@pytest.mark.slow
def test_a_body_that_does_not_come_is_408_and_holds_up_no_ending(lm, monkeypatch):
    monkeypatch.setattr(limits, "MOST_SECONDS", 3.0)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = json.dumps({"prompt": PROMPT, "max_tokens": 100, "n": 3}).encode()
    half = head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:-5]
    with Server(lm) as server, contextlib.ExitStack() as stack:
        address = server.socket.getsockname()
        slow, late = (
            stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(2)
        )
        slow.sendall(half)
        late.sendall(half)
        time.sleep(0.3)
        server.server.should_exit = True
        time.sleep(0.3)
        late.sendall(body[-5:])
        server.thread.join(30)
        assert not server.thread.is_alive()
        answer = slow.makefile("rb").read().decode()
        assert answer.startswith("HTTP/1.1 408 ")
        error = json.loads(answer.partition("\r\n\r\n")[2])["error"]
        words = "the body: expected one within 3 seconds. Received a part. Send all of it."
        assert (error["message"], error["type"]) == (words, "invalid_request_error")
        answer = late.makefile("rb").read().decode()
        assert answer.startswith("HTTP/1.1 200 ")
        assert len(json.loads(answer.partition("\r\n\r\n")[2])["choices"]) == 3


@pytest.mark.slow
def test_what_the_server_says_of_itself(server, client):
    assert [model.id for model in client.models.list().data] == ["tiny"]
    assert server.send("GET", "/health").json() == {"status": "ok"}
    controls = server.send("GET", "/v1/steering").json()["controls"]
    assert [control["name"] for control in controls] == ["mood", "pet"]
    blocks = len(bs.ControlVector.from_preset("tiny_gpt2", "mood").directions)
    assert controls[0]["inputs"]["mood_strength"] == {"shape": [blocks], "dtype": "float32"}
    complete(client)
    metrics = server.send("GET", "/metrics").text
    assert "backbone_surgery_running_requests 0.0" in metrics
    assert 'backbone_surgery_requests_total{reason="length"}' in metrics
    assert "backbone_surgery_time_to_first_token_seconds_count" in metrics
    assert "<title>" in server.send("GET", "/").text


@pytest.mark.slow
def test_a_chat_without_a_template_says_so(server, client):
    with pytest.raises(openai.BadRequestError, match="have the server started with `--chat-temp"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}]
        )


@pytest.mark.slow
def test_a_chat_by_a_template_given_at_the_start(lm):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [
        {"role": "system", "content": "Once upon"},
        {"role": "user", "content": " a time"},
    ]
    prompt = lm.chat_prompt(messages, template=template)
    wanted = lm.generate(prompt, max_new_tokens=20, strip_prompt=True)
    settings = {"model": "tiny", "messages": messages, "temperature": 0}
    with Server(lm, chat_template=template) as server, server.client() as client:
        create = client.chat.completions.create
        answer = create(**settings, max_completion_tokens=20)
        assert answer.choices[0].message.content == wanted
        pieces = create(**settings, max_tokens=20, stream=True)
        assert "".join(e.choices[0].delta.content or "" for e in pieces) == wanted


def test_a_chat_goes_on_with_what_was_answered(lm):
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    with Server(lm, chat_template=template) as server, server.client() as client:
        create = client.chat.completions.create
        settings = {"model": "tiny", "max_tokens": 0, "n": None, "stream": None, "logprobs": None}
        parts = [{"type": "text", "text": "Once upon"}, {"type": "text", "text": " a time"}]
        first = create(messages=[{"role": "user", "content": parts}], **settings)
        text = {"role": "user", "content": PROMPT}
        assert create(messages=[text], **settings).usage == first.usage
        again = [first.choices[0].message.model_dump(), text]
        assert create(messages=again, **settings).usage == first.usage
        image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        with pytest.raises(openai.BadRequestError, match="Received 'image_url'"):
            create(messages=[{"role": "user", "content": image}], **settings)


def test_a_chat_that_is_too_long_names_the_length_of_the_server(lm):
    messages = [{"role": "user", "content": "a " * 150}]
    with Server(lm, chat_template="{{ messages[0].content }}") as server, server.client() as client:
        words = r"prompt: expected at most 128 tokens.* Received \d+\. Shorten it"
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(model="tiny", messages=messages)


@pytest.mark.slow
def test_a_chat_of_parts_by_a_template_that_prints_the_content(lm):
    parts = [{"type": "text", "text": "Once upon"}, {"type": "text", "text": "a time"}]
    with Server(lm, chat_template="{{ messages[0].content }}") as server, server.client() as client:
        settings = {"model": "tiny", "max_tokens": 4, "temperature": 0}
        told = [
            client.chat.completions.create(
                messages=[{"role": "user", "content": content}], **settings
            )
            for content in (parts, "Once upon\na time")
        ]
    assert told[0].choices[0].message == told[1].choices[0].message
    assert told[0].usage == told[1].usage


def test_a_key_that_is_no_base64_is_401(lm):
    with Server(lm, api_key="sesame") as server:
        for value in (b"Basic \xe9", b"Basic a", b"Basic /w==", b"Bearer \xe9"):
            answer = server.send("GET", "/v1/models", headers={"Authorization": value})
            assert answer.status_code == 401, value


@pytest.mark.slow
def test_with_a_key_every_route_but_health_wants_it(lm):
    with Server(lm, api_key="sesame") as server:
        for path in ("/", "/metrics", "/v1/models", "/v1/steering", "/v1/steering/vectors"):
            assert server.send("GET", path).status_code == 401, path
            wrong = {"Authorization": "Bearer sesam"}
            assert server.send("GET", path, headers=wrong).status_code == 401, path
            right = {"Authorization": "Bearer sesame"}
            assert server.send("GET", path, headers=right).status_code == 200, path
        assert server.send("GET", "/", auth=("any", "sesame")).status_code == 200
        assert server.send("GET", "/", auth=("any", "wrong")).status_code == 401
        assert server.send("GET", "/health").status_code == 200
        answer = server.send("POST", "/v1/completions", content=b"{", headers=JSON)  # not read
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"]
        with server.client("wrong") as client, pytest.raises(openai.AuthenticationError):
            complete(client)
        with server.client("sesame") as client:
            assert complete(client).choices[0].text


@pytest.mark.slow
def test_a_full_queue_is_429(lm):
    with Server(lm, rows=1, max_waiting=3) as server:
        body = {"prompt": PROMPT, "n": 5, "max_tokens": 100}
        answer = server.send("POST", "/v1/completions", json=body)
        assert answer.status_code == 400  # it could never be taken
        assert "at most 3 texts" in answer.json()["error"]["message"]
        body["n"] = 3
        with server.client() as client:
            stream = complete(client, n=3, max_tokens=100, stream=True)
            next(iter(stream))
            answer = server.send("POST", "/v1/completions", json=body)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert "Received one more than may wait" in answer.json()["error"]["message"]
            stream.close()
        body = {"prompt": PROMPT, "max_tokens": 2}
        assert server.send("POST", "/v1/completions", json=body).status_code == 200


@pytest.mark.slow
def test_a_client_that_leaves_frees_its_row(server, client):
    for _ in range(4):
        stream = complete(client, max_tokens=120, stream=True)
        next(iter(stream))
        stream.close()
    deadline = time.monotonic() + 30
    while "backbone_surgery_running_requests 0.0" not in server.send("GET", "/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_what_was_answered_is_let_go(client):
    def living():
        gc.collect()
        return sum(isinstance(x, EngineRequest) for x in gc.get_objects())

    before = living()
    for _ in range(3):
        complete(client, max_tokens=2)
        list(complete(client, max_tokens=2, stream=True))
    for _ in range(50):  # the last one is let go a moment after its answer
        if living() <= before:
            return
        time.sleep(0.1)
    raise AssertionError(f"{living() - before} requests are held")


@pytest.mark.parametrize("template", ["{{ unfinished", 3])
def test_a_template_with_an_error_is_told_before_anything_is_compiled(lm, monkeypatch, template):
    monkeypatch.setattr(bs.Engine, "warm_up", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(bs.SurgeryError, match="template"):
        make_server_app(lm, chat_template=template)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("", "an empty one"),
        (b"k", "one of type bytes"),
        ("schlüssel", "one with other characters"),
        ("key ", "one with other characters"),
    ],
)
def test_a_key_that_no_client_can_send_is_told_without_a_model(key, words):
    with pytest.raises(bs.SurgeryError, match=f"'api_key': expected a text of .* {words}"):
        check_server("127.0.0.1", 0, key)


def test_an_address_that_is_none():
    with pytest.raises(bs.SurgeryError, match="'host': expected the address to listen on"):
        check_server(3, 0, None)


def test_a_port_that_is_taken_is_told_before_anything_is_compiled(lm, monkeypatch):
    monkeypatch.setattr(bs.Engine, "warm_up", lambda *_, **__: pytest.fail("compiled"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = f"listen on port {port} of 127.0.0.1.*in use.*End what listens there, or choose"
        with pytest.raises(bs.SurgeryError, match=words):
            bs.serve(lm, port=port)
        # The command does not even look for a model.
        answer = CliRunner().invoke(app, ["serve", "--port", str(port), "--model", "missing"])
        assert answer.exit_code == 2
        assert re.search(words, answer.stderr, re.DOTALL)


@pytest.mark.parametrize("given", ["free", 0])
def test_a_port_that_is_free_is_listened_on(lm, monkeypatch, given):
    """Also one that was used a moment ago, or any."""
    if given == "free":
        with socket.create_server(("127.0.0.1", 0)) as free:
            given = free.getsockname()[1]
            with socket.create_connection(free.getsockname()), free.accept()[0]:
                pass
    seen = []

    async def main_loop(self):
        seen.append(self.servers[0].sockets[0].getsockname()[1])

    monkeypatch.setattr(uvicorn.Server, "main_loop", main_loop)
    bs.serve(lm, port=given, warm_up=False, rows=1, length=16)
    assert seen == [given] if given else seen[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_ending_waits_for_no_client_that_does_not_read(lm, monkeypatch, stream):
    monkeypatch.setattr(ending, "MOST_SECONDS", 1.0)
    body = {"prompt": PROMPT, "max_tokens": 110, "n": 16, "capture": ["blocks.*"], "stream": stream}
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    server = Server(lm)
    with server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.socket.getsockname())
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        engine = server.server.engine
        while engine.stats.new_tokens == 0:
            time.sleep(0.05)
        server.server.should_exit = True
        server.thread.join(60)
        ended = not server.thread.is_alive()
    assert ended
    assert engine.stats.new_tokens >= 16 * 109


@pytest.mark.slow
def test_ending_finishes_what_runs(lm):
    texts = []
    with Server(lm) as server, server.client() as client:
        stream = complete(client, max_tokens=100, stream=True)
        texts.append(next(iter(stream)).choices[0].text)
        server.server.should_exit = True
        texts += [event.choices[0].text for event in stream if event.choices]
        with pytest.raises(openai.APIConnectionError):
            complete(client)
    assert "".join(texts) == lm.generate(PROMPT, max_new_tokens=100, strip_prompt=True)
