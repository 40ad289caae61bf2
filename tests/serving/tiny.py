"""The bundled GPT-2 with a control, and servers of it."""

import socket
import threading
import time

import httpx
import openai
import uvicorn
from fastapi.testclient import TestClient

import backbone_surgery as bs
from backbone_surgery.serving.serve import make_server_app
from backbone_surgery.serving.web import ending

NAMES = ("mood", "pet")
TEXT = "Once upon a time there was a girl named Lily."


def make_steered():
    """Load it with the control `mood`, at 0."""
    plain = bs.CachedCausalLM.from_preset("tiny_gpt2")
    steer = bs.Steer("mood", bs.ControlVector.from_preset("tiny_gpt2", "mood"), strength=0.0)
    lm = bs.CachedCausalLM(bs.operate(plain.backbone, [steer]), plain.preprocessor)
    lm.compile(sampler="greedy")
    return lm


def serve(lm, **settings):
    """Return a client of a server; enter it to start the engine."""
    return TestClient(make_server_app(lm, warm_up=False, rows=2, length=128, **settings))


class Server:
    """A server in a thread of its own."""

    def __init__(self, lm, **settings):
        vectors = {name: bs.ControlVector.from_preset("tiny_gpt2", name) for name in NAMES}
        settings = {"rows": 3, "length": 128, "warm_up": False, "name": "tiny", **settings}
        app = make_server_app(lm, vectors, **settings)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.engine = app.state.engine
        config = uvicorn.Config(app, log_level="warning", lifespan="on")
        self.server = ending.Server(config, self.engine)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *error):
        self.server.should_exit = True
        self.thread.join()
        self.socket.close()

    def client(self, key="none"):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def send(self, method, path, **more):
        return httpx.request(method, f"{self.url}{path}", timeout=60, **more)

    def upload(self, name, content, kind="application/octet-stream"):
        headers = {} if kind is None else {"Content-Type": kind}
        path = f"/v1/steering/vectors?name={name}"
        return self.send("POST", path, content=content, headers=headers)
