"""Run one of several processes that hold a mesh together; process 0 of 1 is what they compare to.

python -m tests.meshes.on_hosts texts FOLDER --mesh 1,4 --process 0 --processes 2 --port 1234
"""

import argparse
import os
import sys
import time
from pathlib import Path

import jax
import keras
import numpy as np

import backbone_surgery as bs

CASES = [(4, "greedy"), (3, "greedy"), (4, "top_p"), (3, "beam")]
PAIRS = [([1, 2, 3], [4, 5]), ([6, 7, 8, 9], [10, 11, 12])]


def results(folder):
    """Return what each tool gives: generation, analysis, vectors, recipes, transfer."""
    from tests.meshes.on_devices import make_divisible, make_edited, texts

    backbone = make_divisible()
    lm = bs.CachedCausalLM(make_edited(backbone))
    arrays = {}
    for rows, sampler in CASES:
        ids, captures = texts(lm, rows, sampler)
        arrays[f"ids {rows} {sampler}"] = ids
        arrays |= {f"{path} {rows} {sampler}": value for path, value in captures.items()}
    bs.check(lm.opened)
    vector = bs.ControlVector.train(lm, PAIRS, "mean_diff", verbose=0)
    vector.save(folder / "vector.safetensors")
    saved = bs.ControlVector.load(folder / "vector.safetensors", lm=lm)
    arrays |= {f"vector {block}": x for block, x in saved.directions.items()}
    grid = bs.patch_grid(lm, [1, 2, 3], [1, 4, 3], metric=(5, 6))
    arrays |= {"patch_grid": grid.values, "logit_lens": bs.logit_lens(lm, [1, 2, 3]).entropies}
    arrays["attribution"] = bs.attribution(lm, [1, 2, 3], target=7).values
    arrays["weights"] = bs.weight_tree(lm)["blocks"]["1"]["self_attention"]["query"]["kernel"]
    bs.save_recipe(lm, folder / "edit.recipe")
    again = bs.CachedCausalLM(bs.load_recipe(folder / "edit.recipe", backbone))
    arrays["ids of the recipe"], _ = texts(again, 4, "greedy")
    other = make_divisible()
    for variable in other.trainable_variables:
        variable.assign(np.zeros(variable.shape, "float32"))
    assert not bs.transfer_weights(other, backbone).differences
    arrays["digest"] = np.array(bs.weights_digest(other) == bs.weights_digest(backbone))
    return arrays


def disagree(what, process):
    """Ask for another thing in process 1 than in process 0."""
    from tests.meshes.on_devices import OPTIONS, make_divisible, prompts

    edit = [bs.Steer("mood", {1: np.ones(64)})]
    if what == "edit" and process:
        edit.append(bs.Remove("blocks.2"))
    lm = bs.CachedCausalLM(bs.operate(make_divisible(), edit))
    lm.compile(sampler="greedy")
    rows = prompts(2 if what == "prompts" and process else 1)
    seed = process if what == "seeds" else 0
    strength = 1.0 + process if what == "controls" else 1.0
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
    from tests.meshes.on_devices import make_divisible, on

    keras.utils.set_random_seed(0)
    with on(tuple(map(int, asked.mesh.split(","))), make_divisible()):
        if asked.kind == "texts":
            folder = Path(asked.what)
            arrays = results(folder)
            np.savez(folder / f"{asked.processes}_{asked.process}.npz", **arrays)
            return
        try:
            {"disagree": disagree, "die": die}[asked.kind](asked.what, asked.process)
        except bs.SurgeryError as error:
            print(error, flush=True)
            sys.exit(3)


if __name__ == "__main__":
    main()
