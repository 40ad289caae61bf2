"""Measure prompt lookup on real texts: `generate(lookup=k)` beside `generate`, the same tokens.

    KERAS_BACKEND=jax python scripts/bench_lookup.py --runs 3 --json lookup.json

A GPT-2 of 124M whose text is known: its blocks add nothing, and the embedding of each position says
which token comes next. So a pass costs what one costs, and the text is one of this repository, its
words and marks as tokens: code, a guide, or random tokens, which do not repeat themselves.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import keras
import numpy as np
import typer
from bench_grid import CONFIG
from bench_machine import describe
from bench_peers import backbone_of
from rich.console import Console
from rich.table import Table

import backbone_surgery as bs

ROOT = Path(__file__).parents[1]
TEXTS = {
    "code": ROOT / "backbone_surgery" / "opening" / "attention.py",
    "a guide": ROOT / "docs" / "rewrites.md",
}
PROMPT, LENGTH = 64, 512


def words(file: Path) -> np.ndarray:
    """Number the words and marks of a text in the order in which they come."""
    parts = re.findall(r"\w+|[^\w\s]|\n| +", file.read_text())
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(part, len(numbers) + 1) for part in parts], "int32")


def teach(backbone: keras.Model, text: np.ndarray) -> None:
    """Have a GPT-2 write a text, whatever it reads."""
    for variable in backbone.variables:
        if "output_dense/kernel" in variable.path or "attention_output/kernel" in variable.path:
            variable.assign(np.zeros(variable.shape, "float32"))
    table = np.asarray(backbone.token_embedding.embeddings)
    positions = backbone.get_layer("position_embedding").position_embeddings
    following = np.zeros(positions.shape, "float32")
    following[: len(text) - 1] = 20 * table[text[1:]]
    positions.assign(following)


def seconds(lm: bs.CachedCausalLM, text: np.ndarray, lookup: int | None) -> float:
    """Write a text on, check it, and return how long it took."""
    prompt = {"token_ids": text[None, :PROMPT], "padding_mask": np.ones((1, PROMPT))}
    start = time.perf_counter()
    got = lm.generate(prompt, max_length=LENGTH, stop_token_ids=None, lookup=lookup)
    took = time.perf_counter() - start
    if not np.array_equal(np.asarray(got["token_ids"])[0, :LENGTH], text[:LENGTH]):
        raise RuntimeError(f"the text with lookup={lookup} is another")
    return took


def main(
    guesses: Annotated[list[int], typer.Option(help="How many to guess.")] = [2, 4, 8],  # noqa: B006
    runs: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 3,
    blocks: Annotated[int, typer.Option(min=1)] = 12,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure, and print a table."""
    console, machine = Console(), describe()
    backbone = backbone_of({**CONFIG, "num_layers": blocks}, "gpt2", "float32")
    lm = bs.CachedCausalLM(backbone)
    lm.compile(sampler="greedy")
    texts = {name: words(file)[:LENGTH] for name, file in TEXTS.items()}
    texts["random"] = np.random.default_rng(0).integers(1, 50_000, LENGTH).astype("int32")
    ways: list[int | None] = [None, *guesses]
    results: dict[str, Any] = {}
    for name, text in texts.items():
        teach(backbone, text)
        for way in ways:
            seconds(lm, text, way)  # compiles
        times = {str(way): [] for way in ways}
        for _ in range(runs):
            for way in ways:
                times[str(way)].append(seconds(lm, text, way))
        results[name] = times
    table = Table("text", "tokens/s without", *(f"lookup={k}" for k in guesses))
    for name, times in results.items():
        alone = times["None"]
        ratios = [
            statistics.median(a / b for a, b in zip(alone, times[str(k)], strict=True))
            for k in guesses
        ]
        speed = (LENGTH - PROMPT) / statistics.median(alone)
        table.add_row(name, f"{speed:.1f}", *(f"{ratio:.2f}" for ratio in ratios))
    console.print(machine, table)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine, "seconds": results}, indent=1))


if __name__ == "__main__":
    typer.run(main)
