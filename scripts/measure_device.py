"""Run on this machine's accelerator what `measure_accelerators.py` compiled for it.

    KERAS_BACKEND=jax python scripts/measure_device.py gpt2/8 gemma2/1 llama3/8

A case is model/rows, or model/rows/prompt/length, of `accelerator_models.MODELS`; `/int8` or
`/int4` after it quantises first. Weights are random, in bfloat16, and all rows are chosen greedily
to their full length. Seconds for each token are those of a whole call over the new tokens of a
row: the prompt, of 16 tokens unless the case says so, and the host are in them.
"""

import argparse
import gc
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
import keras
import numpy as np
from accelerator_models import LENGTH, LENGTHS, MODELS, PROMPT
from bench_machine import describe, read_bandwidth
from bench_peers import KerasHub, Ours, Work
from measure_accelerators import on_record

from backbone_surgery.planning.hlo import read_step

MODES = ("int8", "int4")


class Case(NamedTuple):
    """What is measured: its text, the model, rows, prompt, length, and how it is quantised."""

    text: str
    name: str
    rows: int
    prompt: int
    length: int
    mode: str | None


def parse(text):
    """Read the text of a case."""
    name, *parts = text.split("/")
    mode = parts.pop() if parts and parts[-1] in MODES else None
    sizes = [int(part) for part in parts if part.isdecimal()]
    if name not in MODELS or len(sizes) != len(parts) or len(sizes) not in (1, 3):
        raise argparse.ArgumentTypeError(
            f"expected model/rows or model/rows/prompt/length, and /int8 or /int4 after it. "
            f"Received {text!r}. The models are {', '.join(MODELS)}."
        )
    rows, prompt, length = sizes if len(sizes) == 3 else (*sizes, PROMPT, LENGTHS.get(name, LENGTH))
    if not rows or not 0 < prompt < length:
        raise argparse.ArgumentTypeError(
            f"expected a row or more, and prompts shorter than the length. Received {text!r}."
        )
    return Case(text, name, rows, prompt, length, mode)


def count(text):
    """Read a number of calls."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected 1 or more. Received {text!r}.")
    return int(text)


def file(text):
    """Read where figures are written to."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.absolute().parent}.")
    return path


def make_work(backbone, case):
    """Draw prompts."""
    shape = (case.rows, case.prompt)
    rng = np.random.default_rng(1)
    return Work(rng.integers(1, backbone.vocabulary_size, shape, dtype=np.int32), case.length)


def measure(contender, work, runs):
    """Return what calls took: the first, which compiles, and for each token the others."""
    start = time.perf_counter()
    tokens = contender.generate(work)
    first = time.perf_counter() - start
    calls = []
    for _ in range(runs):
        start = time.perf_counter()
        contender.generate(work)
        calls.append((time.perf_counter() - start) / work.new_tokens)
    until_first = []
    if isinstance(contender, Ours):  # KerasHub would compile a program for these stop tokens
        stop = tuple(np.unique(tokens[:, 0]).tolist())
        contender.generate(work, stop)  # many are another program
        for _ in range(runs):
            start = time.perf_counter()
            contender.generate(work, stop)
            until_first.append(time.perf_counter() - start)
    stats = jax.devices()[0].memory_stats() or {}
    return tokens, {
        "first_call_s": round(first, 2),
        "us": statistics.median(calls) * 1e6,
        "first_token_ms": [round(x * 1e3, 2) for x in until_first],
        "us_of_all": [round(x * 1e6, 1) for x in calls],
        "peak_bytes": stats.get("peak_bytes_in_use"),
    }


def profile(contender, work, folder):
    """Return the kernels that a call ran on the device, for each token: [name, number, us]."""
    with jax.profiler.trace(folder):
        contender.generate(work)
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    planes = jax.profiler.ProfileData.from_file(str(files[-1])).planes
    lines = [line for plane in planes if "/device:" in plane.name for line in plane.lines]
    numbers, times = Counter(), Counter()
    for line in lines:
        for event in line.events if line.name.startswith("Stream") else ():
            numbers[event.name] += 1
            times[event.name] += event.duration_ns
    new = work.new_tokens
    listed = [
        [name, round(numbers[name] / new, 2), round(ns / new / 1e3, 2)]
        for name, ns in times.most_common()
    ]
    return {
        "kernels": sum(numbers.values()) / new,
        "us_in_kernels": sum(times.values()) / new / 1e3,
        "listed": [x for x in listed if x[1] >= 0.5 or x[2] >= 1],
    }


def counted(lm):
    """Return what the device's own compiler made of a token, to hold beside what is on paper."""

    def tables(program):  # the longest cache is that of the whole text; lists of stops do not count
        return sum(a.size for a in jax.tree.leaves(program.in_avals) if a.ndim > 1)

    program = max(lm.programs.compiled("decode"), key=tables)
    step = read_step(program.as_text(), in_loop=True)
    counts = {
        "kernels": step.kernels.total(),
        "step_bytes": step.bytes,
        "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
    }
    return counts, dict(step.instructions)


def run(case, options):
    """Measure one case."""
    keras.config.set_dtype_policy("bfloat16")
    backbone = MODELS[case.name][0]()
    work = make_work(backbone, case)
    ours = Ours(backbone)
    line = {"case": case.text, "new_tokens": work.new_tokens}
    if options.keras_hub:
        peer = KerasHub(backbone)
    if case.mode:
        ours.lm.quantize(case.mode)
    tokens, line["ours"] = measure(ours, work, options.runs)
    line["compiled"], line["instructions"] = counted(ours.lm)
    if options.profile:
        line["profile"] = profile(ours, work, options.profile)
    if options.keras_hub:
        others, line["keras_hub"] = measure(peer, work, options.runs)
        line["same_tokens"] = float((np.asarray(others) == tokens).mean())
    kept = {"model": case.name, "device": "h100", "rows": case.rows}
    if case == parse(f"{case.name}/{case.rows}")._replace(text=case.text):
        for on_paper in (x for x in on_record() if kept.items() <= x.items()):
            line["estimated_us"] = on_paper["ours"]["estimated_seconds"] * 1e6
            line["least_bytes"] = on_paper["least_bytes"]
            line["on_paper"] = {k: on_paper["ours"][k] for k in ("kernels", "step_bytes")}
    return line


def main():
    """Measure all cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", type=parse, metavar="case", help="model/rows")
    parser.add_argument("--runs", type=count, default=3, help="calls that are timed")
    parser.add_argument("--keras-hub", action="store_true", help="measure KerasHub's task as well")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FOLDER",
        help="list the kernels that a GPU ran for each token; traces go here",
    )
    parser.add_argument("--write", type=file, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    result = {"machine": describe(), "bandwidth": read_bandwidth(), "lines": []}
    print(json.dumps(result), flush=True)
    for case in options.cases:
        try:
            line = run(case, options)
        except Exception as error:  # the others go on
            line = {"case": case.text, "error": repr(error)[:2000]}
        result["lines"].append(line)
        shown = {k: v for k, v in line.items() if k not in ("profile", "instructions")}
        print(json.dumps(shown), flush=True)
        if options.write:
            options.write.write_text(json.dumps(result, indent=1) + "\n")
        gc.collect()
    if any("error" in line for line in result["lines"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
