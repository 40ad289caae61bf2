"""Measure how long a control vector takes to train, beside repeng, on the same weights and pairs.

    KERAS_BACKEND=jax python scripts/bench_train.py --runs 3 --json train.json

256 pairs of texts of 36 to 44 random tokens, GPT-2's shape, `pca_diff`. Each library is tried with
some batch sizes, and then runs at its best. The directions are compared.
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


def make_pairs(count: int, vocabulary: int) -> list[tuple[list[int], list[int]]]:
    """Draw pairs of texts of as many tokens, as token ids."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(36, 45, count)
    texts = [rng.integers(1, vocabulary, (2, length)).tolist() for length in lengths]
    return [(first, second) for first, second in texts]


def ours(backbone: keras.Model, pairs: list[tuple[list[int], list[int]]]) -> Train:
    """Train by `ControlVector.train`."""
    lm = bs.CachedCausalLM(backbone)

    def train(batch_size: int) -> dict[int, np.ndarray]:
        vector = bs.ControlVector.train(lm, pairs, batch_size=batch_size, verbose=0)
        return dict(vector.directions)

    return train


def repeng(backbone: keras.Model, pairs: list[tuple[list[int], list[int]]]) -> Train:
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


def main(
    pairs: Annotated[int, typer.Option(min=2)] = 256,
    blocks: Annotated[int, typer.Option(min=2)] = 12,
    runs: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure, and print a table. Exits with 1 if a direction differs."""
    console, machine = Console(), describe()
    backbone = backbone_of({**CONFIG, "num_layers": blocks}, "gpt2", "float32")
    texts = make_pairs(pairs, backbone.vocabulary_size)
    trains = {"ours": ours(backbone, texts), "repeng": repeng(backbone, texts)}
    found = {name: train(BATCHES[-1]) for name, train in trains.items()}
    cosines = [abs(float(found["ours"][b] @ found["repeng"][b])) for b in range(blocks)]
    sizes = {}
    for name, train in trains.items():
        for size in BATCHES:
            train(size)  # compiles
        sizes[name] = min(BATCHES, key=lambda size, train=train: timed(train, size))
    seconds: dict[str, list[float]] = {name: [] for name in trains}
    for _ in range(runs):
        for name, train in trains.items():
            seconds[name].append(timed(train, sizes[name]))
    ratio = statistics.median(
        t / o for t, o in zip(seconds["repeng"], seconds["ours"], strict=True)
    )
    table = Table("library", "batch size", "seconds (least, most)", "ours is faster by")
    for name, times in seconds.items():
        shown = f"{statistics.median(times):.2f} ({min(times):.2f}, {max(times):.2f})"
        table.add_row(name, str(sizes[name]), shown, f"{ratio:.2f}" if name != "ours" else "")
    console.print(machine, table, f"least cosine of two directions: {min(cosines):.6f}")
    if json_file is not None:
        result = {"machine": machine, "seconds": seconds, "batch": sizes, "ratio": ratio}
        json_file.write_text(json.dumps(result, indent=1))
    if min(cosines) < 0.99:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
