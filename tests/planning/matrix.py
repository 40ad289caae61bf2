"""Families, chips that are not there, and what is done: each is compiled, with a tiny model.

python -m tests.planning.matrix gpt2 gemma2
"""

import argparse
import itertools
import time

import numpy as np

import backbone_surgery as bs
from tests.families import ROWS

CHIPS = ("h100", "v5e")
SAMPLERS = ("greedy", "top_p", "beam")
EDITS = ("steer", "capture", "condition", "low_rank")
MODES = ("int8", "int4")
DTYPES = ("bfloat16",)
KINDS = (*SAMPLERS, *EDITS, *MODES, *DTYPES)


def can_be(name, kind):
    """Tell whether Keras can do that to a family."""
    return kind not in MODES or not ROWS[name].int8_error


def compile_kind(chip, name, kind):
    """Return the plan of a family for a chip; strengths are one for each row."""
    backbone = ROWS[name].make(**({"dtype": kind} if kind in DTYPES else {}))
    if kind in MODES:
        tokens = np.ones((8, 2), "int32")
        backbone({x.name: tokens for x in backbone.inputs})  # Keras wants all layers built
        backbone.quantize(kind)
    size = bs.open_backbone(backbone).token_embedding.output_dim
    direction, vector = np.random.default_rng(0).normal(size=(2, size))
    edits = {
        "steer": [bs.Steer("mood", {1: vector})],
        "capture": [bs.Capture("blocks.*")],
        "condition": [
            bs.Condition("asked", direction, threshold=0.2, at="blocks.0"),
            bs.Steer("mood", {1: vector}, when="asked"),
        ],
        "low_rank": [bs.LowRank("blocks.1.query", rank=2)],
    }
    return bs.plan(
        backbone,
        device=chip,
        batch=3,
        length=64,
        prompt=16,
        edits=edits.get(kind, []),
        sampler=kind if kind in SAMPLERS else "greedy",
        compile=True,
        verbose=0,
    )


def check(chip, name, kind):
    """Compile it; what is kept of it is what the weights and the cache take, and no exchange."""
    plan = compile_kind(chip, name, kind)
    for program in plan.programs.values():
        assert program.error is None
        assert program.argument_bytes >= plan.weight_bytes
    assert plan["decode"].kernels > 20
    assert plan["decode"].collectives == {}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(ROWS))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    asked = parser.parse_args()
    found = 0
    for name, chip, kind in itertools.product(asked.names, CHIPS, asked.kinds):
        if not can_be(name, kind):
            continue
        begin = time.monotonic()
        try:
            check(chip, name, kind)
            said = "compiles"
        except Exception as error:  # say it of all
            said, found = f"fails: {type(error).__name__}: {error}"[:300], found + 1
        print(name, chip, kind, f"{time.monotonic() - begin:.0f} s", said, flush=True)
    assert not found, f"{found} fail"


if __name__ == "__main__":
    main()
