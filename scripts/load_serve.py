"""Put a server under load, and check every answer.

    python scripts/load_serve.py                 # 64 clients, 2,000 requests, three times

A server of tiny_gpt2 runs in this process, on loopback. Many clients send requests of mixed lengths
and vectors at once; one in ten leaves midway, one in twenty sends what is malformed. Each answer is
compared with the text that `generate` gives for the request alone. It is done without an API key,
with the right one, and with a wrong one, twice each: what a server grows by at first must not go
on.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import ssl
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import httpx
import typer
import uvicorn
from rich.console import Console

import backbone_surgery as bs
from backbone_surgery.serving.serve import make_server_app

console = Console()
CONTEXT = ssl.create_default_context()
"""One for all clients: they run in the process whose size is measured."""
VECTORS = ("mood", "pet", "place")
PROMPTS = (
    "Once upon a time",
    "Tom had a",
    "It was a fine evening",
    "Lily",
    "One day there was a boy",
)
MALFORMED: tuple[dict[str, Any], ...] = (
    {"prompt": "x", "steering": {"nothing": 1}},
    {"prompt": 3},
    {"prompt": "x", "unknown": 1},
    {"prompt": "x", "max_tokens": 100_000},
    {"prompt": "x", "steering": {"mood": {"strength": "much"}}},
)


def make_model() -> bs.CachedCausalLM:
    """Make the model that is served: steered by three vectors."""
    plain = bs.CachedCausalLM.from_preset("tiny_gpt2")
    steers = [
        bs.Steer(name, bs.ControlVector.from_preset("tiny_gpt2", name), strength=0.0)
        for name in VECTORS
    ]
    lm = bs.CachedCausalLM(bs.operate(plain.backbone, steers), plain.preprocessor)
    lm.compile(sampler="greedy")
    return lm


def make_bodies(count: int) -> list[dict[str, Any]]:
    """Make requests: greedy ones, and some that are sampled by a seed."""
    rng = random.Random(0)
    bodies = []
    for _ in range(count):
        body: dict[str, Any] = {
            "prompt": rng.choice(PROMPTS),
            "max_tokens": rng.choice((4, 16, 40, 64)),
            "steering": {name: rng.choice((-2.0, 0.0, 1.5)) for name in VECTORS},
        }
        if rng.random() < 0.3:
            body |= {"temperature": 0.8, "seed": rng.randrange(4)}
        else:
            body["temperature"] = 0
        bodies.append(body)
    return bodies


def wanted_texts(lm: bs.CachedCausalLM, bodies: list[dict[str, Any]]) -> list[str]:
    """Return the text of each request alone, by `generate`, in batches of one kind."""
    import keras_hub

    texts = [""] * len(bodies)
    kinds: dict[Any, list[int]] = {}
    for i, body in enumerate(bodies):
        kinds.setdefault((body["temperature"], body["max_tokens"]), []).append(i)
    for (temperature, most), indices in kinds.items():
        sampled = keras_hub.samplers.RandomSampler(temperature=temperature or 1.0)
        lm.compile(sampler=sampled if temperature else "greedy")
        made = lm.generate(
            [bodies[i]["prompt"] for i in indices],
            max_new_tokens=most,
            controls={v: [bodies[i]["steering"][v] for i in indices] for v in VECTORS},
            seed=[bodies[i].get("seed", 0) for i in indices],
            strip_prompt=True,
            batch_size=32,
        )
        for i, text in zip(indices, made, strict=True):
            texts[i] = text
    lm.compile(sampler="greedy")
    return texts


class Client:
    """Sends requests one after another, and counts what became of them."""

    def __init__(self, url: str, key: str | None, counts: Counter) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=120, verify=CONTEXT)
        self.counts = counts

    async def send(self, body: dict[str, Any], wanted: str, number: int, allowed: bool) -> None:
        """Send one request: whole, as a stream, malformed, or left midway."""
        if number % 20 == 3:
            answer = await self.http.post("/v1/completions", json=MALFORMED[number % 5])
            self.count("malformed", answer.status_code == (400 if allowed else 401))
        elif not allowed:
            answer = await self.http.post("/v1/completions", json=body)
            self.count("refused", answer.status_code == 401)
        elif number % 10 == 7:
            async with self.http.stream(
                "POST", "/v1/completions", json={**body, "stream": True}
            ) as s:
                async for _ in s.aiter_text():
                    break
            self.count("left", True)
        else:
            answer = await self.http.post("/v1/completions", json=body)
            text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else None
            self.count("answered", text == wanted)

    def count(self, kind: str, right: bool) -> None:
        """Count one outcome."""
        self.counts[f"{kind}, {'right' if right else 'WRONG'}"] += 1


async def load(
    url: str, key: str | None, bodies: list[dict], wanted: list[str], clients: int, allowed: bool
) -> Counter:
    """Let clients take requests from one list until it is empty."""
    counts: Counter = Counter()
    numbers = iter(range(len(bodies)))

    async def run() -> None:
        client = Client(url, key, counts)
        for i in numbers:
            await client.send(bodies[i], wanted[i], i, allowed)
        await client.http.aclose()

    await asyncio.gather(*(run() for _ in range(clients)))
    return counts


def resident() -> float:
    """Return the size of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(
    requests: Annotated[int, typer.Option(min=1)] = 2000,
    clients: Annotated[int, typer.Option(min=1)] = 64,
    rows: Annotated[int, typer.Option(min=1)] = 16,
) -> None:
    """Run the load three times."""
    lm = make_model()
    bodies = make_bodies(requests)
    wanted = wanted_texts(lm, bodies)
    failed = False
    for title, key, sent in (("no key", None, None), ("key", "k", "k"), ("wrong key", "k", "w")):
        app = make_server_app(lm, api_key=key, rows=rows, length=128)
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started:
            time.sleep(0.05)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        allowed = key == sent
        asyncio.run(load(url, sent, bodies[:100], wanted, clients, allowed))
        for turn in ("first", "second"):
            before, start = resident(), time.perf_counter()
            counts = asyncio.run(load(url, sent, bodies, wanted, clients, allowed))
            seconds, grown = time.perf_counter() - start, resident() - before
            words = f"{title}, {turn} time: {seconds:.1f} s, grown by {grown:.1f} MiB"
            console.print(words, dict(counts))
            failed |= any("WRONG" in kind for kind in counts) or sum(counts.values()) != requests
        server.should_exit = True
        thread.join()
        listening.close()
    if failed:
        raise SystemExit("some answers were wrong")


if __name__ == "__main__":
    typer.run(main)
