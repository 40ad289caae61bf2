"""Measure what the process keeps of models that are built, run once and dropped.

    KERAS_BACKEND=jax python scripts/bench_leaks.py

Every round edits one and the same backbone, makes a task of it and generates once. Memory may grow
in the first rounds, in which caches of Python and JAX fill up; after that it must not.

Caches of JAX are emptied before each measurement, and freed memory goes back to the system. JAX
keeps the comparison of each `argmax` that it lowers, up to 4,096, and finds none of them again; so
without this, memory grows by some 5 MiB in 100 rounds, until that cache is full.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import keras_hub
import numpy as np
import typer

import backbone_surgery as bs

PROMPT = {"token_ids": np.array([[1, 2, 3]], "int32"), "padding_mask": np.ones((1, 3), "int32")}


@dataclass(frozen=True)
class Growth:
    """What was there after a number of rounds.

    Attributes:
        rounds: how many were run.
        memory: resident memory of the process, in MiB.
        nodes: nodes on the layers of the backbone that are still alive.
    """

    rounds: int
    memory: float
    nodes: int


def run_round(backbone: keras_hub.models.Backbone) -> np.ndarray:
    """Edit the backbone, make a task of it, and generate two tokens."""
    edited = bs.operate(backbone, [bs.Steer("mood", {1: np.ones(8)}, strength=0.5)])
    task = bs.CachedCausalLM(edited)
    return task.generate(PROMPT, max_new_tokens=2, stop_token_ids=None)["token_ids"]


def measure(backbone: keras_hub.models.Backbone, rounds: int) -> Growth:
    """Tell what is there now, when all that nobody uses has gone."""
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed goes back to the system
    layers = backbone._flatten_layers()
    nodes = {id(n) for layer in layers for n in layer._inbound_nodes if n.operation is layer}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Growth(rounds, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(nodes))


def main(
    rounds: Annotated[int, typer.Option(help="Rounds to run.")] = 2000,
    warm_up: Annotated[int, typer.Option(min=1, help="Rounds before the first measurement.")] = 100,
    every: Annotated[int, typer.Option(min=1, help="Rounds between two measurements.")] = 100,
    limit: Annotated[float, typer.Option(help="MiB by which memory may grow.")] = 30,
) -> None:
    """Run the rounds, print a row for each measurement, and fail where something is kept."""
    if rounds <= warm_up:
        raise typer.BadParameter(
            f"expected more rounds than those before the first measurement, {warm_up}. Received "
            f"{rounds}. With fewer nothing is compared.",
            param_hint="--rounds",
        )
    backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16, dropout=0)
    measured: list[Growth] = []
    print("rounds   memory, MiB   nodes on the backbone")
    for done in range(1, rounds + 1):
        run_round(backbone)
        if (done >= warm_up and (done - warm_up) % every == 0) or done == rounds:
            last = measure(backbone, done)
            measured.append(last)
            print(f"{last.rounds:6} {last.memory:13.1f} {last.nodes:23}", flush=True)
    first, last = measured[0], measured[-1]
    grown = last.memory - first.memory
    print(f"grown by {grown:.1f} MiB in {last.rounds - first.rounds} rounds")
    if grown > limit or last.nodes > first.nodes:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
