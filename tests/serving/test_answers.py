"""Answers: what they cost, and how they end, whatever the engine does."""

import asyncio
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from fastapi.testclient import TestClient

import backbone_surgery as bs
from backbone_surgery.generation.captures import GeneratedActivations
from backbone_surgery.serving.scheduler import Scheduler
from backbone_surgery.serving.serve import make_server_app
from backbone_surgery.serving.web.answers import Answer


class Stop(str):
    """A stop sequence that counts how often it is compared."""

    compared = 0

    def startswith(self, *args):
        type(self).compared += 1
        return super().startswith(*args)


def test_a_long_text_is_compared_with_stops_at_its_end_alone():
    text = "abc " * 500 + "z"
    request = SimpleNamespace(finish_reason=None, listen=print, added_text=lambda: text)

    async def visible():
        return await Answer([request], "tiny", False, stops=[Stop("zzz"), Stop("yy")])._visible(0)

    assert asyncio.run(visible()) == text[:-1]
    assert Stop.compared <= 6


@pytest.mark.parametrize(
    ("text", "ended", "shown"),
    [
        ("stop here", False, ""),
        ("go, stop", True, "go, "),
        ("go, stop it.", True, "go"),
        ("go, sto", False, "go"),
        ("go, sto", True, "go, sto"),
        ("gone", False, "gone"),
    ],
)
def test_a_text_is_shown_up_to_its_first_stop_sequence(text, ended, shown):
    reason = "length" if ended else None
    request = SimpleNamespace(finish_reason=reason, listen=print, added_text=lambda: text)
    stops = ["stop", ", stop i"]

    async def visible():
        return await Answer([request], "tiny", False, stops=stops)._visible(0)

    assert asyncio.run(visible()) == shown


class Captured(SimpleNamespace):
    """A request that has ended, and notes in which thread its captures are read."""

    def __init__(self):
        ids, reads = np.zeros((1, 2), np.int32), []
        super().__init__(finish_reason="length", listen=print, cancel=print, reads=reads)
        self.prompt_token_ids, self.token_ids, self.reused_tokens = ids[0, :1], ids[0], 0
        self.token_texts, self.added_text = ["a", "b"], lambda: "b"

    @property
    def captures(self):
        self.reads.append(threading.current_thread())
        ids = np.zeros((1, 2), np.int32)
        values = {"blocks.0": np.zeros((1, 2, 4), np.float32)}
        return GeneratedActivations(ids, np.array([2]), values)


@pytest.mark.parametrize("stream", [False, True])
def test_captures_are_written_beside_the_loop_that_serves_others(stream):
    request = Captured()

    async def read():
        answer = Answer([request], "tiny", False, capture=["blocks.0"])
        return [e async for e in answer.events(False)] if stream else await answer.whole()

    assert "safetensors" in str(asyncio.run(read()))
    assert request.reads
    assert threading.main_thread() not in request.reads


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_strength_that_is_too_large_is_a_fault_of_the_request(stream):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    vector = {1: np.full(lm.backbone.hidden_dim, 2.0)}
    lm = bs.CachedCausalLM(bs.operate(lm.backbone, [bs.Steer("mood", vector)]), lm.preprocessor)
    app = make_server_app(lm, warm_up=False, rows=2)
    body = {"prompt": "Hello", "max_tokens": 4, "steering": {"mood": 3e38}, "stream": stream}
    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == (200 if stream else 400)
    told = json.loads(answer.text.removeprefix("data: "))["error"]
    assert told["type"] == "invalid_request_error"
    assert "that are too large" in told["message"]


@pytest.mark.slow
def test_a_model_that_was_quantised_since_is_no_fault_of_the_request():
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    app = make_server_app(lm, warm_up=False, rows=2)
    with TestClient(app) as client:
        lm.quantize("int8")
        answer = client.post("/v1/completions", json={"prompt": "Once upon a time"})
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "this server: its model was quantised since it began. Start it anew.",
        "type": "server_error",
        "param": None,
        "code": None,
    }


@pytest.mark.by_default(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "shown"),
    [(bs.SurgeryError("`fit` holds the weights"), "RuntimeError"), (MemoryError(), "MemoryError")],
)
def test_a_failure_of_the_engine_is_told_in_openais_shape(monkeypatch, stream, error, shown):
    def fail(scheduler):
        raise error

    monkeypatch.setattr(Scheduler, "_admit", fail)
    app = make_server_app(bs.CachedCausalLM.from_preset("tiny_gpt2"), warm_up=False, rows=2)
    body = {"prompt": "Once upon a time", "temperature": 0, "stream": stream}
    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == (200 if stream else 500)
    told = json.loads(answer.text.removeprefix("data: "))["error"]
    assert told["type"] == "server_error"
    assert told["message"].startswith(f"the server failed: {shown}. Its log says more.")
