"""Families, what is done, rows and meshes of eight fake devices, each against one device.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.meshes.matrix gpt2 gemma2
"""

import argparse
import time

import jax
import keras
import numpy as np

import backbone_surgery as bs
from backbone_surgery.generation.request import read_request
from backbone_surgery.generation.run_batch import run_batch
from backbone_surgery.generation.samplers import make_strategy
from tests.families import ROWS
from tests.helpers import relative
from tests.meshes.on_devices import MESHES, OPTIONS, SAMPLERS, on, prompts

ROW_COUNTS = (1, 3, 4)
EDITS = {
    "plain": ("plain", "top_p", "beam", "stream"),
    "steer": ("steer",),
    "capture": ("capture",),
    "low_rank": ("low_rank",),
    "condition": ("condition",),
    "cut": ("cut",),
    "bfloat16": ("bfloat16",),
    "int8": ("int8",),
}
"""What is done with each edit."""
ROUNDED = {"bfloat16": 3e-2, "int8": 1e-2}
"""What rounds otherwise in shards is compared by size, on the prompt."""


def make_lm(name, edit):
    """Make a model of a family, edited."""
    keras.utils.set_random_seed(0)
    backbone = ROWS[name].make(**({"dtype": "bfloat16"} if edit == "bfloat16" else {}))
    if edit == "int8":
        tokens = np.ones((8, 2), "int32")
        backbone({"token_ids": tokens, "padding_mask": tokens})  # Keras wants all layers built
        backbone.quantize("int8")
    size = bs.open_backbone(backbone).token_embedding.output_dim
    direction, vector = np.random.default_rng(5).normal(size=(2, size))
    capture = bs.Capture("blocks.*")
    edits = {
        "plain": [],
        "steer": [bs.Steer("mood", {1: vector}, strength=1.0)],
        "low_rank": [bs.LowRank("blocks.1.query", rank=2)],
        "condition": [
            bs.Condition("asked", direction, threshold=0.2, at="blocks.0"),
            bs.Steer("mood", {1: vector}, when="asked", strength=1.0),
            capture,
        ],
        "cut": [bs.Knockout("cut"), bs.ProjectOut("none", [direction, vector]), capture],
    }
    edited = bs.operate(backbone, edits.get(edit, [capture]))
    rng = np.random.default_rng(7)
    factors = [v for v in edited.trainable_variables if "low_rank" in v.path]
    assert len(factors) == (2 if edit == "low_rank" else 0)
    for variable in factors:
        variable.assign(rng.normal(0, 0.3, variable.shape))
    return bs.CachedCausalLM(edited)


def generate(lm, kind, rows):
    """Return the tokens of some rows, and what was captured."""
    lm.compile(sampler=SAMPLERS.get(kind, "greedy"))
    options = {**OPTIONS, "seed": list(range(rows))}
    if kind in ("steer", "condition"):
        options["controls"] = {"mood": np.linspace(-1, 2, rows)}
    if kind == "cut":
        edges = {"queries": (-1, None), "keys": (1, 3), "heads": np.arange(rows) % 2}
        options["controls"] = {"cut": edges, "none": np.linspace(0, 1, rows)}
    if kind == "stream":
        batch = read_request(lm, prompts(rows), **options).batch
        *_, last = run_batch(lm.programs, make_strategy(lm.sampler), batch, 4)
        return np.stack([row.new for row in last]), {}
    if kind not in ("capture", "condition", "cut", *ROUNDED):
        return lm.generate(prompts(rows), **options)["token_ids"], {}
    text, captures = lm.generate(prompts(rows), return_captures=True, **options)
    return text["token_ids"], captures.values


def run(name, edit, mesh):
    """Return `{(kind, rows): what is generated}` on a mesh."""
    keras.utils.clear_session(free_memory=False)
    with on(mesh, ROWS[name].make()):
        lm = make_lm(name, edit)
    assert (lm.programs.placement is None) == (mesh is None)
    shares = [v.value.addressable_shards[0].data.size < v.value.size for v in lm.backbone.variables]
    assert any(shares) == (mesh is not None and mesh[1] > 1)
    counts = (3,) if edit in ROUNDED else ROW_COUNTS
    return {(kind, rows): generate(lm, kind, rows) for kind in EDITS[edit] for rows in counts}


def compare(where, got, wanted):
    """Compare tokens as they are, and captures by size; return how far these are apart."""
    kind = where[1]
    if kind not in ROUNDED:
        np.testing.assert_array_equal(got[0], wanted[0], err_msg=str(where))
    errors = []
    for path, x in got[1].items():
        pair = x, wanted[1][path]
        if kind in ROUNDED:  # what is generated may be another token
            prompt = prompts(where[3])["padding_mask"]
            pair = (y[:, : prompt.shape[1]][prompt] for y in pair)
        errors.append(relative(*pair))
    assert max(errors, default=0) <= ROUNDED.get(kind, 1e-4), (where, errors)


def check(name, edit):
    """Compare what a family gives on every mesh with what it gives on one device."""
    begin = time.monotonic()
    wanted = run(name, edit, None)
    for mesh in MESHES:
        for (kind, rows), got in run(name, edit, mesh).items():
            try:
                compare((name, kind, mesh, rows), got, wanted[kind, rows])
            except AssertionError as error:
                yield f"{name} {kind} {mesh} {rows} rows: {error}"
    print(name, *EDITS[edit], f"{time.monotonic() - begin:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(ROWS))
    parser.add_argument("--edits", nargs="*", default=list(EDITS))
    asked = parser.parse_args()
    assert len(jax.devices()) == 8
    found = []
    for name in asked.names:
        for edit in asked.edits:
            if edit == "int8" and (ROWS[name].int8_error or not ROWS[name].int8_is_right):
                continue
            for difference in check(name, edit):
                print(difference, flush=True)
                found.append(difference)
    assert not found, f"{len(found)} differences"


if __name__ == "__main__":
    main()
