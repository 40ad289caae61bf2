"""Run one of several processes that hold a mesh together; process 0 of 1 is what they compare to.

python -m tests.meshes.on_hosts texts FOLDER --mesh 1,4 --process 0 --processes 2 --port 1234
"""

import argparse
import dataclasses
import os
import time
from pathlib import Path

import jax
import keras
import keras_hub
import numpy as np

import backbone_surgery as bs

KINDS = ["texts", "narrow", "disagree", "fail", "differ", "apart", "laid", "die"]


def disagree(folder, process):
    """Ask for another thing in process 1 than in process 0, time after time."""
    from tests.meshes.on_devices import OPTIONS, make_divisible, prompts

    backbone, steer = make_divisible(), bs.Steer("mood", {1: np.ones(64)})

    def make(*edits):
        lm = bs.CachedCausalLM(bs.operate(backbone, [steer, *edits]))
        lm.compile(sampler=keras_hub.samplers.TopKSampler(k=5))
        return lm

    def generate(lm, rows=1, **options):
        return lm.generate(prompts(rows), **{**OPTIONS, "seed": 0, **options})

    lm, other = make(), make(bs.Insert("blocks.1", keras.layers.Rescaling(1.0 + process)))
    generate(lm)
    bs.logit_lens(lm, [1, 2, 3])
    lms = [lm, make(bs.Remove("blocks.2"))]
    lines = [folder / f"{i}.jsonl" for i in (0, 1)]
    lines[process].write_text('{"prompt": [1, 2]}')
    low = bs.operate(backbone, [bs.LowRank("blocks.1.query", rank=2)])
    zeros, one = bs.weight_tree(lm), f"blocks.{1 + process}"
    own = folder / str(process)  # a folder that the other does not see as its own
    own.mkdir()
    short = {"max_new_tokens": 4, "stop_token_ids": None, "verbose": 0}
    (own / "in.jsonl").write_text('{"prompt": [1, 2]}')
    k = keras_hub.samplers.TopKSampler(k=5 + process)
    cases = {
        "prompts": lambda: generate(lm, 1 + process),
        "seeds": lambda: generate(lm, seed=process),
        "controls": lambda: generate(lm, controls={"mood": 1.0 + process}),
        "edit": lambda: generate(lms[process]),
        "edit and sampler": lambda: generate(other),
        "sampler": lambda: (lm.compile(sampler=k), generate(lm)),
        "inputs": lambda: bs.logit_lens(lm, [1, 2, 3 + process]),
        "model": lambda: bs.logit_lens((lm, other)[process], [1, 2, 3]),
        "text": lambda: bs.attribution(lm, [1, 2, 3 + process], target=7),
        "metric": lambda: bs.attribution(lm, [1, 2, 3], target=7 + process),
        "model or target": lambda: bs.attribution(lm, [1, 2, 3], lambda x: x[:, 7 + process]),
        "path": lambda: bs.save_recipe(lm, folder / f"{process}.recipe"),
        "files of output": lambda: bs.generate_dataset(lm, lines[process], folder / "out"),
        "manifest": lambda: (
            lm.compile(sampler="greedy"),
            bs.generate_dataset(lm, own / "in.jsonl", own / "out", **short),
        ),
        "weights": lambda: bs.weights_digest((lm, low)[process]),
        "weights to copy": lambda: bs.transfer_weights(lm, zeros, strict=False, only=one),
        "call": lambda: generate(lm) if process else bs.save_recipe(lm, folder / "a.recipe"),
    }
    for what, ask in cases.items():
        try:
            ask()
        except bs.SurgeryError as error:
            print(f"{what}: {error}", flush=True)
        else:
            print(f"{what}: no error", flush=True)


def fail(folder, process):
    """Run into an error in process 1 alone, time after time, and then in none."""
    from tests.meshes.on_devices import OPTIONS, make_divisible, prompts

    lm = bs.CachedCausalLM(make_divisible())
    lm.compile(sampler="greedy")
    lines, out = folder / "in.jsonl", folder / "out"
    quiet = {"verbose": 0}
    short = {"max_new_tokens": 4, "stop_token_ids": None, **quiet}
    lines.write_text('{"prompt": [1, 2]}')
    bad = prompts(2)
    bad["token_ids"] = bad["token_ids"] + 10**6 * process

    def judge(text):
        return float("nan") if jax.process_index() else 1.0

    cases = {
        "prompts": lambda: lm.generate(bad, **OPTIONS),
        "inputs": lambda: bs.generate_dataset(lm, (lines, out)[process], out, **short),
        "corpus": lambda: bs.harvest(lm, (lines, out)[process], out, "blocks.1", "prompt", **quiet),
        "score": lambda: bs.generate_dataset(lm, lines, out, score=judge, **short),
    }
    for what, ask in cases.items():
        try:
            ask()
        except bs.SurgeryError as error:
            print(f"{what}: {error}", flush=True)
        else:
            print(f"{what}: no error", flush=True)
    paths = bs.generate_dataset(lm, lines, folder / "whole", **short)
    print(f"whole: {len(paths)}", flush=True)


def differ(process):
    """Give a layer that is on every device other weights in process 1."""
    from tests.meshes.on_devices import make_divisible

    lm = bs.CachedCausalLM(bs.operate(make_divisible(), [bs.LowRank("blocks.1.query", rank=2)]))
    for variable in lm.opened.trained_layers[0].trainable_variables:
        variable.assign(np.full(variable.shape, 0.1 + process))


def apart(folder, process):
    """Hold a whole model in each process, and use it in one way or another."""
    from tests.meshes.on_devices import OPTIONS, make_divisible, prompts

    lm = bs.CachedCausalLM(make_divisible())
    lm.compile(sampler="greedy")
    if process == 0:
        ids = lm.generate(prompts(3), **OPTIONS)["token_ids"]
        np.testing.assert_array_equal(ids, lm.generate(prompts(3), **OPTIONS)["token_ids"])
        bs.check(lm.opened)
        bs.save_recipe(lm, folder / "edit.recipe")
        bs.ControlVector({1: np.ones(64)}).save(folder / "vector.safetensors")
        bs.Engine(lm, rows=2, length=48).generate(prompts(2), **OPTIONS)
    print("done", flush=True)


def make_wide():
    """Make a Llama whose heads are so wide that a TPU has their kernels laid heads-first."""
    sizes = {"vocabulary_size": 64, "num_layers": 2, "hidden_dim": 512, "intermediate_dim": 128}
    return keras_hub.models.LlamaBackbone(**sizes, num_query_heads=4, num_key_value_heads=4)


def laid():
    """Generate by the programs of a TPU too, one batch and another, and read the weights."""
    from tests.meshes.on_devices import OPTIONS, prompts

    lm = bs.CachedCausalLM(make_wide())
    lm.compile(sampler="greedy")
    before = bs.weights_digest(lm)
    wanted = [lm.generate(prompts(rows), **OPTIONS)["token_ids"] for rows in (4, 3)]
    object.__setattr__(lm, "programs", dataclasses.replace(lm.programs, platform="tpu"))
    got = [lm.generate(prompts(rows), **OPTIONS)["token_ids"] for rows in (4, 3)]
    for text, own in zip(wanted, got, strict=True):
        np.testing.assert_array_equal(own, text)
    orders = [v.value.format.layout.major_to_minor for v in lm.backbone.variables]
    assert bs.weights_digest(lm) == before
    print(f"laid: {orders.count((1, 0, 2))}", flush=True)


def narrow(folder):
    """Quantise to int4, learn and generate; what processes can't do together is told in words."""
    import tensorflow as tf

    from tests.meshes.on_devices import OPTIONS, make_divisible, prompts

    backbone = make_divisible(num_layers=2)
    rewrites = [bs.LowRank("blocks.*.query", rank=2), bs.Capture("blocks.1")]
    lm = bs.CachedCausalLM(bs.operate(backbone, rewrites))
    lm.compile(optimizer=keras.optimizers.SGD(0.1), sampler="greedy")
    ids = np.random.default_rng(0).integers(1, 60, (16, 8))
    data = ({"token_ids": ids, "padding_mask": np.ones_like(ids)}, np.roll(ids, -1, 1))

    def batched(size):
        return tf.data.Dataset.from_tensor_slices(data).batch(size, drop_remainder=True)

    if jax.process_count() > 1:
        gptq = keras.quantizers.GPTQConfig([ids], lambda x: x)
        for ask in (
            lambda: lm.fit(*data, batch_size=8, verbose=0),
            lambda: lm.evaluate(batched(7), verbose=0),
            lambda: lm.predict(data[0], batch_size=8, verbose=0),
            lambda: lm.quantize("gptq", config=gptq),
            lambda: lm.save_weights(folder / "saved.weights.h5"),
        ):
            try:
                ask()
            except bs.SurgeryError as error:
                print(f"refused: {error}", flush=True)
    rng = np.random.default_rng(2)
    examples = [(rng.integers(1, 60, 5), rng.integers(1, 60, 5), 7) for _ in range(12)]
    found = bs.find_subspace(lm, examples, "blocks.1", rank=2, steps=5)
    lm.quantize("int4", config=keras.quantizers.Int4QuantizationConfig(block_size=8))
    loss = lm.fit(batched(8), epochs=2, verbose=0).history["loss"]
    texts, captures = lm.generate(prompts(4), return_captures=True, **OPTIONS)
    learned = {"span": found.directions.T @ found.directions, "accuracy": 1 + found.accuracy}
    return {"loss": loss, "ids": texts["token_ids"], **captures.values, **learned}


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
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("what", help="a folder; or who dies, and when")
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
    mesh = None if asked.kind == "apart" else tuple(map(int, asked.mesh.split(",")))
    folder = Path(asked.what)
    with on(mesh, make_wide() if asked.kind == "laid" else make_divisible()):
        if asked.kind in ("texts", "narrow"):
            arrays = tools(folder) if asked.kind == "texts" else narrow(folder)
            np.savez(folder / f"{asked.processes}_{asked.process}.npz", **arrays)
        elif asked.kind == "die":
            die(asked.what, asked.process)
        elif asked.kind == "differ":
            differ(asked.process)
        elif asked.kind == "laid":
            laid()
        else:
            {"disagree": disagree, "fail": fail, "apart": apart}[asked.kind](folder, asked.process)


if __name__ == "__main__":
    main()
