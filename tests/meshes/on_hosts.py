"""Run one of several processes that hold a mesh together; process 0 of 1 is what they compare to.

python -m tests.meshes.on_hosts texts FOLDER --mesh 1,4 --process 0 --processes 2 --port 1234
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import jax
import keras
import numpy as np

import backbone_surgery as bs


def disagree(what, process):
    """Ask for another thing in process 1 than in process 0."""
    from tests.meshes.on_devices import OPTIONS, make_divisible, prompts

    edit = [bs.Steer("mood", {1: np.ones(64)})]
    if what == "edit" and process:
        edit.append(bs.Remove("blocks.2"))
    if what == "weights":
        edit.append(bs.LowRank("blocks.1.query", rank=2))
    lm = bs.CachedCausalLM(bs.operate(make_divisible(), edit))
    if what == "weights":
        for variable in lm.opened.trained_layers[0].trainable_variables:
            variable.assign(np.full(variable.shape, 0.1 + process))
    lm.compile(sampler="greedy")
    rows = prompts(2 if what == "prompts" and process else 1)
    seed = process if what == "seeds" else 0
    strength = 1.0 + process if what == "controls" else 1.0
    if what == "manifest":  # each process has a folder of its own
        folder = Path(tempfile.mkdtemp())
        (folder / "in.jsonl").write_text('{"prompt": [1, 2]}\n')
        bs.generate_dataset(lm, folder / "in.jsonl", folder / "out", verbose=0, **OPTIONS)
    if what == "seeds":
        lm.compile(sampler="top_p")
    lm.generate(rows, controls={"mood": strength}, seed=seed, **OPTIONS)


def die(who, process):
    """End one process without a word, while the others generate or wait."""
    from tests.meshes.on_devices import OPTIONS, make_divisible, prompts

    lm = bs.CachedCausalLM(make_divisible())
    lm.compile(sampler="greedy")
    lm.generate(prompts(4), **OPTIONS)
    print("begun", flush=True)
    if process == int(who[-1]):
        os._exit(9)
    while True:
        if who.startswith("idle"):
            time.sleep(1)
        else:
            lm.generate(prompts(4), **OPTIONS)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["texts", "disagree", "die"])
    parser.add_argument("what")
    parser.add_argument("--mesh", default="1,4")
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    asked = parser.parse_args()
    if asked.processes > 1:
        address = f"127.0.0.1:{asked.port}"
        jax.distributed.initialize(
            address, asked.processes, asked.process, heartbeat_timeout_seconds=20
        )
    # What is imported here makes arrays, which must not be before the processes know each other.
    from tests.meshes.on_devices import make_divisible, on, tools

    keras.utils.set_random_seed(0)
    with on(tuple(map(int, asked.mesh.split(","))), make_divisible()):
        if asked.kind == "texts":
            folder = Path(asked.what)
            arrays = tools(folder)
            np.savez(folder / f"{asked.processes}_{asked.process}.npz", **arrays)
            return
        try:
            {"disagree": disagree, "die": die}[asked.kind](asked.what, asked.process)
        except bs.SurgeryError as error:
            print(error, flush=True)
            sys.exit(3)


if __name__ == "__main__":
    main()
