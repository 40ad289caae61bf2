"""Answers: what they cost, and how they end, whatever the engine does."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

import backbone_surgery as bs
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


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_engine_is_told_in_openais_shape(monkeypatch, stream):
    def fail(scheduler):
        raise MemoryError("of the chip")

    monkeypatch.setattr(Scheduler, "_admit", fail)
    app = make_server_app(bs.CachedCausalLM.from_preset("tiny_gpt2"), warm_up=False, rows=2)
    body = {"prompt": "Once upon a time", "temperature": 0, "stream": stream}
    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == (200 if stream else 500)
    error = json.loads(answer.text.removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert error["message"].startswith("the server failed: MemoryError.")
