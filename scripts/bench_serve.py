"""Measure the engine: many requests of different lengths, steered or not, against static batches.

    python scripts/bench_serve.py                # GPT-2 of 124M; half an hour on two cores
    ... --part mixed --runs 3 --json out.json
    ... --quick                                  # a tiny model: shows that the benchmark works

Parts: `mixed` (64 requests of 16 to 256 new tokens, against batches of 8 by this library, by
KerasHub and by `transformers`' continuous batching where it is installed), `vectors` (EasySteer's
protocol: K distinct control vectors dealt over a full batch, all blocks, scale 0), `first` (the
time to the first token beside 7 running rows, and after a prefix that was kept). The contenders
take turns; all choose greedily and never stop early. See docs/performance.md for what it measured.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import keras_hub
import numpy as np
import typer
from bench import MODELS
from bench_convert import convert
from bench_machine import describe
from bench_peers import backbone_of
from rich.console import Console
from rich.table import Table

import backbone_surgery as bs

console = Console()
PARTS = ("mixed", "vectors", "first")


def make(name: str) -> keras.Model:
    """Make a random GPT-2."""
    return backbone_of(MODELS[name], "gpt2", "float32")


def greedy(backbone: keras.Model) -> bs.CachedCausalLM:
    """Make a model that takes the likeliest token each time."""
    lm = bs.CachedCausalLM(backbone)
    lm.compile(sampler="greedy")
    return lm


def prompt_of(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return one prompt as the models take it."""
    return {"token_ids": ids[None], "padding_mask": np.ones((1, len(ids)), bool)}


def rounds(contenders: dict[str, Callable[[], float]], runs: int) -> dict[str, list[float]]:
    """Let the contenders take turns, after one turn to compile."""
    for name, run in contenders.items():
        console.print(f"[dim]compiling {name}")
        run()
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(runs):
        for name, run in contenders.items():
            figures[name].append(run())
    return figures


class Mixed:
    """64 requests of different lengths, with prompts of one length, for all to run alike."""

    def __init__(self, name: str, count: int, rows: int, most: int, prompt: int = 16) -> None:
        rng = np.random.default_rng(0)
        self.backbone, self.rows, self.prompt = make(name), rows, prompt
        vocabulary = self.backbone.vocabulary_size
        self.prompts = rng.integers(0, vocabulary, (count, prompt)).astype("int32")
        self.new = rng.integers(max(most // 16, 1), most + 1, count)
        self.lm = greedy(self.backbone)
        length = prompt + most
        self.engine = bs.Engine(self.lm, rows=rows, length=length, prefill_chunk=64)
        self.tokens: dict[str, list[np.ndarray]] = {}

    def batches(self) -> list[slice]:
        """Return the static batches, in the order of the requests."""
        return [slice(i, i + self.rows) for i in range(0, len(self.prompts), self.rows)]

    def timed(self, name: str, run: Callable[[], list[np.ndarray]]) -> float:
        """Return the wanted tokens per second, and check that they are those of the others."""
        start = time.perf_counter()
        rows = run()
        seconds = time.perf_counter() - start
        self.tokens[name] = [row[: n + self.prompt] for row, n in zip(rows, self.new, strict=True)]
        return float(self.new.sum() / seconds)

    def run_engine(self) -> float:
        """Run all requests at once."""

        def run() -> list[np.ndarray]:
            requests = [
                self.engine.submit(prompt_of(ids), max_new_tokens=int(n), stop_token_ids=None)
                for ids, n in zip(self.prompts, self.new, strict=True)
            ]
            return [request.result() for request in requests]

        return self.timed("engine", run)

    def run_generate(self) -> float:
        """Run batch after batch, each until its longest request has ended."""

        def run() -> list[np.ndarray]:
            rows: list[np.ndarray] = []
            for part in self.batches():
                ids = self.prompts[part]
                inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
                most = int(self.new[part].max())
                out = self.lm.generate(inputs, max_new_tokens=most, stop_token_ids=None)
                rows.extend(out["token_ids"])
            return rows

        return self.timed("generate", run)

    def kerashub(self) -> Callable[[], float]:
        """Return KerasHub's task, batch after batch, padded to the longest request of each."""
        task = keras_hub.models.GPT2CausalLM(backbone=self.backbone, preprocessor=None)
        task.compile(sampler="greedy")

        def run() -> list[np.ndarray]:
            rows: list[np.ndarray] = []
            for part in self.batches():
                length = self.prompt + int(self.new[part].max())
                ids = np.zeros((len(self.prompts[part]), length), "int32")
                ids[:, : self.prompt] = self.prompts[part]
                mask = np.arange(length)[None] < np.full((len(ids), 1), self.prompt)
                inputs = {"token_ids": ids, "padding_mask": mask}
                rows.extend(np.asarray(task.generate(inputs, stop_token_ids=None)["token_ids"]))
            return rows

        return lambda: self.timed("KerasHub", run)

    def transformers(self) -> Callable[[], float]:
        """Return the continuous batching of `transformers`."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        model = convert(self.backbone)
        model.set_attn_implementation("sdpa")
        # By default it takes most of the memory there is.
        batching = ContinuousBatchingConfig(
            num_blocks=4 * self.rows, max_batch_tokens=512, max_requests_per_batch=self.rows
        )
        prompts = self.prompts.tolist()

        def run() -> list[np.ndarray]:
            rows: dict[int, np.ndarray] = {}
            config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
            with model.continuous_batching_context_manager(
                generation_config=config, continuous_batching_config=batching
            ) as manager:
                ids = [
                    manager.add_request(p, max_new_tokens=int(n))
                    for p, n in zip(prompts, self.new, strict=True)
                ]
                for result in manager:
                    if result.is_finished():
                        i = ids.index(result.request_id)
                        rows[i] = np.array([*prompts[i], *result.generated_tokens], "int32")
                    if len(rows) == len(ids):
                        break
            return [rows[i] for i in range(len(ids))]

        return lambda: self.timed("transformers", run)

    def measure(self, runs: int) -> dict[str, Any]:
        """Return tokens per second of each contender; peers that cannot run are left out."""
        contenders = {"engine": self.run_engine, "generate": self.run_generate}
        contenders["KerasHub"] = self.kerashub()
        try:
            contenders["transformers"] = self.transformers()
            contenders["transformers"]()
        except Exception as error:  # whatever its continuous batching wants of a machine
            contenders.pop("transformers", None)
            console.print(f"transformers left out: {type(error).__name__}: {error}", markup=False)
        figures = rounds(contenders, runs)
        for name, rows in self.tokens.items():
            same = [np.array_equal(a, b) for a, b in zip(rows, self.tokens["engine"], strict=True)]
            if not all(same):
                console.print(
                    f"{name}: {same.count(False)} of {len(same)} texts differ", style="red"
                )
        return {name: {"tokens/s": speeds} for name, speeds in figures.items()}


def measure_vectors(name: str, rows: int, new: int, counts: list[int], runs: int) -> dict[str, Any]:
    """Return tokens per second at K distinct vectors over a full batch, and without steering."""
    rng = np.random.default_rng(0)
    backbone = make(name)
    size, blocks = backbone.hidden_dim, range(backbone.num_layers)
    zero = {i: np.zeros(size, "float32") for i in blocks}
    plain = greedy(backbone)
    steered = greedy(bs.operate(backbone, [bs.Steer("v", zero, strength=0.0)]))
    prompts = rng.integers(0, backbone.vocabulary_size, (rows, 16)).astype("int32")
    engines = {0: bs.Engine(plain, rows=rows, length=16 + new)}
    engines |= {k: bs.Engine(steered, rows=rows, length=16 + new) for k in counts if k}
    vectors = [
        bs.ControlVector({i: rng.normal(size=size).astype("float32") for i in blocks})
        for _ in range(max(counts))
    ]

    def run(k: int) -> float:
        controls = [
            {"v": bs.Control(0.0, directions=vectors[i % k])} if k else None for i in range(rows)
        ]
        start = time.perf_counter()
        requests = [
            engines[k].submit(
                prompt_of(ids), max_new_tokens=new, stop_token_ids=None, controls=control
            )
            for ids, control in zip(prompts, controls, strict=True)
        ]
        for request in requests:
            request.result()
        return rows * new / (time.perf_counter() - start)

    figures = rounds({f"K={k}": lambda k=k: run(k) for k in [0, *counts]}, runs)
    return {name: {"tokens/s": speeds} for name, speeds in figures.items()}


def measure_first(name: str, runs: int, prefix: int) -> dict[str, Any]:
    """Return seconds to the first token: alone, beside 7 rows, after a prefix cold and warm."""
    rng = np.random.default_rng(0)
    backbone = make(name)
    lm = greedy(backbone)
    vocabulary = backbone.vocabulary_size
    length = min(lm.max_positions, prefix + 256)

    def first(engine: bs.Engine, ids: np.ndarray) -> float:
        request = engine.submit(prompt_of(ids), max_new_tokens=8, stop_token_ids=None)
        request.result()
        return request.seconds_to_first_token

    def ids(count: int) -> np.ndarray:
        return rng.integers(0, vocabulary, count).astype("int32")

    engine = bs.Engine(lm, rows=8, length=length, prefix_cache=0)
    shared = bs.Engine(lm, rows=16, length=length, prefix_cache=2**30)

    def alone() -> float:
        return first(engine, ids(16))

    def beside() -> float:
        running = [
            engine.submit(prompt_of(ids(16)), max_new_tokens=length - 16, stop_token_ids=None)
            for _ in range(7)
        ]
        for _ in range(12):
            engine.step()
        seconds = first(engine, ids(16))
        for request in running:
            request.cancel()
        engine.step()
        return seconds

    common = ids(prefix)

    def after(cold: bool) -> float:
        if cold:
            shared.clear()
        else:
            first(shared, np.concatenate([common, ids(3)]))
        prompts = [np.concatenate([common, ids(5)]) for _ in range(1 if cold else 16)]
        return statistics.median(first(shared, prompt) for prompt in prompts)

    figures = rounds(
        {
            "alone": alone,
            "beside 7 rows": beside,
            f"{prefix} tokens, cold": lambda: after(True),
            f"{prefix} tokens, shared by 16": lambda: after(False),
        },
        runs,
    )
    return {name: {"seconds": seconds} for name, seconds in figures.items()}


def show(part: str, figures: dict[str, Any]) -> None:
    """Print the medians, and ratios to the first."""
    table = Table(title=part)
    for column in ("", "median", "from", "to", "of the first"):
        table.add_column(column, justify="left" if not column else "right")
    reference: float | None = None
    for name, values in figures.items():
        ((unit, runs),) = values.items()
        median = statistics.median(runs)
        reference = reference or median
        numbers = (f"{x:.3g}" for x in (min(runs), max(runs), median / reference))
        table.add_row(name, f"{median:.4g} {unit}", *numbers)
    console.print(table)


def main(
    part: Annotated[list[str], typer.Option(help=f"Which of {', '.join(PARTS)}.")] = list(PARTS),  # noqa: B006
    runs: Annotated[int, typer.Option(min=1)] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, few tokens.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure, show, and keep."""
    unknown = set(part) - set(PARTS)
    if unknown:
        raise typer.BadParameter(f"expected some of {', '.join(PARTS)}. Received {unknown}.")
    model = "gpt2_tiny" if quick else "gpt2_124m"
    results: dict[str, Any] = {"machine": describe(), "model": model}
    for name in part:
        if name == "mixed":
            sizes = (12, 4, 24) if quick else (64, 8, 256)
            figures = Mixed(model, *sizes).measure(runs)
        elif name == "vectors":
            sizes = (4, 8, [1, 4]) if quick else (32, 128, [1, 8, 32])
            figures = measure_vectors(model, *sizes, runs)
        else:
            figures = measure_first(model, runs, 16 if quick else 512)
        results[name] = figures
        show(name, figures)
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    typer.run(main)
