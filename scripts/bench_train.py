"""Measure how long a control vector takes to train, beside repeng, on the same weights and pairs.

    KERAS_BACKEND=jax python scripts/bench_train.py --runs 3 --json train.json

256 pairs of texts of about 40 random tokens, GPT-2's shape, `pca_diff`. Either each text is one of
its own, of 36 to 44 tokens. Or, as in repeng's notebooks, a pair is two openings of 8 tokens, each
followed by the beginning of the same text, cut after each of its tokens: 8 texts, 16 to 47 tokens
of each. Each library is tried with some batch sizes, and then runs at its best. The directions are
compared.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import keras
import numpy as np
import torch
import typer
from bench_convert import convert
from bench_grid import CONFIG
from bench_machine import describe
from bench_peers import backbone_of
from rich.console import Console
from rich.table import Table
from transformers import BatchEncoding

import backbone_surgery as bs

BATCHES = (8, 16, 32, 64)

Train = Callable[[int], dict[int, np.ndarray]]


Pairs = list[tuple[list[int], list[int]]]


def own_texts(count: int, vocabulary: int) -> Pairs:
    """Draw pairs of texts of as many tokens, as token ids."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(36, 45, count)
    texts = [rng.integers(1, vocabulary, (2, length)).tolist() for length in lengths]
    return [(first, second) for first, second in texts]


def cut_texts(count: int, vocabulary: int) -> Pairs:
    """Draw two openings and some texts, and cut the texts after each of their tokens."""
    rng = np.random.default_rng(0)
    openings = rng.integers(1, vocabulary, (2, 8)).tolist()
    texts = rng.integers(1, vocabulary, (-(-count // 32), 47)).tolist()
    cut = [text[:length] for text in texts for length in range(16, 48)][:count]
    return [(openings[0] + text, openings[1] + text) for text in cut]


TEXTS = {"texts of their own": own_texts, "texts cut after each token": cut_texts}


def ours(backbone: keras.Model, pairs: Pairs) -> Train:
    """Train by `ControlVector.train`."""
    lm = bs.CachedCausalLM(backbone)

    def train(batch_size: int) -> dict[int, np.ndarray]:
        vector = bs.ControlVector.train(lm, pairs, batch_size=batch_size, verbose=0)
        return dict(vector.directions)

    return train


def repeng(backbone: keras.Model, pairs: Pairs) -> Train:
    """Train by repeng, whose texts are numbers that a tokenizer reads, without progress bars."""
    np.float_ = np.float64  # a name that NumPy 2 dropped, in a type annotation of repeng
    import repeng.extract

    model, blocks = convert(backbone), list(range(backbone.num_layers))
    repeng.extract.tqdm.tqdm = lambda rows, **options: rows
    data = [repeng.DatasetEntry(*(" ".join(map(str, t)) for t in pair)) for pair in pairs]

    def tokenizer(texts: list[str], **options: Any) -> BatchEncoding:
        rows = [torch.tensor([int(word) for word in text.split()]) for text in texts]
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(rows, batch_first=True)
        mask = pad([torch.ones_like(row) for row in rows], batch_first=True)
        return BatchEncoding({"input_ids": ids, "attention_mask": mask})

    def train(batch_size: int) -> dict[int, np.ndarray]:
        options = {"hidden_layers": blocks, "batch_size": batch_size}
        wrapped = repeng.ControlModel(model, blocks)
        try:
            return repeng.ControlVector.train(wrapped, tokenizer, data, **options).directions
        finally:
            wrapped.unwrap()

    return train


def timed(train: Train, batch_size: int) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    train(batch_size)
    return time.perf_counter() - start


def measure(backbone: keras.Model, pairs: Pairs, runs: int) -> dict[str, Any]:
    """Find the batch size of each library, then let them take turns."""
    trains = {"ours": ours(backbone, pairs), "repeng": repeng(backbone, pairs)}
    found = {name: train(BATCHES[-1]) for name, train in trains.items()}
    cosines = [abs(float(found["ours"][b] @ found["repeng"][b])) for b in found["ours"]]
    sizes = {}
    for name, train in trains.items():
        for size in BATCHES:
            train(size)  # compiles
        sizes[name] = min(BATCHES, key=lambda size, train=train: timed(train, size))
    seconds: dict[str, list[float]] = {name: [] for name in trains}
    for _ in range(runs):
        for name, train in trains.items():
            seconds[name].append(timed(train, sizes[name]))
    ratios = [t / o for t, o in zip(seconds["repeng"], seconds["ours"], strict=True)]
    least = {"ratio": statistics.median(ratios), "least_cosine": min(cosines)}
    return {"seconds": seconds, "batch": sizes, **least}


def main(
    pairs: Annotated[int, typer.Option(min=2)] = 256,
    blocks: Annotated[int, typer.Option(min=2)] = 12,
    runs: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure, and print a table. Exits with 1 if a direction differs."""
    console, machine = Console(), describe()
    backbone = backbone_of({**CONFIG, "num_layers": blocks}, "gpt2", "float32")
    table = Table("pairs", "library", "batch size", "seconds (least, most)", "ours is faster by")
    results = {}
    for kind, make in TEXTS.items():
        result = measure(backbone, make(pairs, backbone.vocabulary_size), runs)
        results[kind] = result
        for name, times in result["seconds"].items():
            shown = f"{statistics.median(times):.2f} ({min(times):.2f}, {max(times):.2f})"
            ratio = "" if name == "ours" else f"{result['ratio']:.2f}"
            table.add_row(kind, name, str(result["batch"][name]), shown, ratio)
    least = min(result["least_cosine"] for result in results.values())
    console.print(machine, table, f"least cosine of two directions: {least:.6f}")
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    if least < 0.95:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
