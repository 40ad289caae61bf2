"""Measure what a token costs against the slots of the cache, those asked for, and the blocks.

And what surgery costs against the blocks: `open_backbone`, `operate` with four rewrites, `rewire`.

    KERAS_BACKEND=jax python scripts/bench_growth.py --json growth.json --plot growth.png

Every model decodes a few tokens at a time, in turns, and the fastest turn counts: what else runs
on the machine can only slow a turn down.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from bench_machine import describe
from bench_peers import backbone_of
from rich.console import Console
from rich.table import Table

import backbone_surgery as bs
from backbone_surgery.generation.run_batch import Batch, make_arguments, run_batch
from backbone_surgery.generation.samplers import make_strategy
from backbone_surgery.generation.stopping import Stops

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
BLOCKS = (2, 4, 8, 16)
OPERATED = (12, 48, 96)
CONFIG = {
    "vocabulary_size": 1000,
    "num_heads": 8,
    "hidden_dim": 512,
    "intermediate_dim": 2048,
    "max_sequence_length": LENGTHS[-1],
}
SMALL = {**CONFIG, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
PROMPT = 16
CHUNK = 64


class Decoder:
    """A model with a cache of some length, ready to decode."""

    def __init__(self, lm: bs.CachedCausalLM, length: int) -> None:
        self.programs = lm.programs
        self.strategy = make_strategy(lm.sampler)
        budget = np.array([length - PROMPT], np.int32)
        prompt = np.arange(PROMPT, dtype=np.int32)
        batch = Batch([prompt], budget, np.zeros((1, 2), np.uint32), {}, Stops([]))
        self.arguments = jax.device_put(make_arguments(self.strategy, batch, 1, PROMPT))
        cache = self.programs.packing.new_cache(1, length)
        self.state = self.programs.prefill(self.strategy, cache, self.arguments, length)
        self.slot = PROMPT + 1
        self.seconds = float("inf")

    def turn(self, steps: int) -> None:
        """Decode some tokens, and keep the least time for one."""
        self.slot += steps
        start = time.perf_counter()
        self.state, _ = self.programs.decode(self.strategy, self.state, self.arguments, self.slot)
        jax.block_until_ready(self.state)
        self.seconds = min(self.seconds, (time.perf_counter() - start) / steps)


def measure_reserved(lm: bs.CachedCausalLM, turns: int) -> dict[int, float]:
    """Return what each of the first tokens costs, in ms, of texts that may become longer."""
    strategy, costs = make_strategy(lm.sampler), dict.fromkeys(LENGTHS[1:], float("inf"))
    for turn in range(turns + 1):
        for length in costs:
            budget = np.array([length - PROMPT], np.int32)
            prompt, seeds = np.arange(PROMPT, dtype=np.int32), np.zeros((1, 2), np.uint32)
            batch = Batch([prompt], budget, seeds, {}, Stops([]))
            start = time.perf_counter()
            pieces = run_batch(lm.programs, strategy, batch, chunk=CHUNK)
            next(pieces)
            seconds = time.perf_counter() - start
            pieces.close()
            time.sleep(0.5)  # the next piece was begun
            if turn:  # the first one compiles
                costs[length] = min(costs[length], 1000 * seconds / CHUNK)
    return costs


def measure_surgery(turns: int) -> dict[int, float]:
    """Return how long surgery takes for each block, in ms, whatever the size of the weights."""
    backbones = {n: backbone_of({**SMALL, "num_layers": n}, "gpt2", "float32") for n in OPERATED}
    costs = dict.fromkeys(OPERATED, float("inf"))
    for _ in range(turns):
        for blocks, backbone in backbones.items():
            vector = dict.fromkeys(range(blocks), np.ones(backbone.hidden_dim, "float32"))
            rewrites = [
                bs.Steer("mood", vector),
                bs.Capture("blocks.*"),
                bs.LowRank("blocks.*.query", rank=2),
                bs.Ablate("blocks.*.head_outputs", heads=[0]),
            ]
            start = time.perf_counter()
            bs.rewire(bs.operate(bs.open_backbone(backbone), rewrites))
            seconds = time.perf_counter() - start
            costs[blocks] = min(costs[blocks], 1000 * seconds / blocks)
    return costs


def make(blocks: int) -> bs.CachedCausalLM:
    """Make a model of some blocks."""
    lm = bs.CachedCausalLM(backbone_of({**CONFIG, "num_layers": blocks}, "gpt2", "float32"))
    lm.compile(sampler="greedy")
    return lm


def measure(decoders: dict[int, Decoder], turns: int, steps: int) -> dict[int, float]:
    """Return the milliseconds that a token costs for each decoder."""
    for decoder in decoders.values():
        decoder.turn(steps)  # compiles
        decoder.seconds = float("inf")
    for _ in range(turns):
        for decoder in decoders.values():
            decoder.turn(steps)
    return {key: 1000 * decoder.seconds for key, decoder in decoders.items()}


def plot(figures: dict[str, dict[int, float]], to_file: Path) -> None:
    """Draw the curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    for axes, (name, costs) in zip(figure.subplots(1, 3), figures.items(), strict=True):
        axes.plot(list(costs), list(costs.values()), marker="o")
        axes.set_xlabel(name)
        axes.set_xticks(list(costs)[-4:])
        axes.set_ylabel("ms per token")
        axes.set_ylim(0, 1.15 * max(costs.values()))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(to_file, dpi=150)


def main(
    turns: Annotated[int, typer.Option(min=1)] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Tokens in a turn.")] = 8,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot")] = None,
) -> None:
    """Measure all three, and print a table of each."""
    if PROMPT + 1 + (turns + 1) * steps > LENGTHS[0]:
        raise typer.BadParameter(f"turns x steps do not fit in {LENGTHS[0]} slots, and all must")
    console, machine = Console(), describe()
    four = make(4)
    surgery = measure_surgery(turns=3)
    figures: dict[str, dict[int, float]] = {
        "slots of the cache": measure({n: Decoder(four, n) for n in LENGTHS}, turns, steps),
        "slots asked for, first 64 tokens": measure_reserved(four, turns),
        "blocks": measure({n: Decoder(make(n), 256) for n in BLOCKS}, turns, steps),
    }
    console.print(machine)
    for name, costs in figures.items():
        table = Table(name, "ms per token")
        for key, cost in costs.items():
            table.add_row(str(key), f"{cost:.2f}")
        console.print(table)
    table = Table("surgery on so many blocks", "ms per block")
    for blocks, cost in surgery.items():
        table.add_row(str(blocks), f"{cost:.1f}")
    console.print(table)
    result: dict[str, Any] = {
        "machine": machine,
        "ms_per_token": figures,
        "ms_of_surgery_per_block": surgery,
    }
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1))
    if plot_file is not None:
        plot(figures, plot_file)


if __name__ == "__main__":
    typer.run(main)
