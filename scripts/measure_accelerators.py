"""Count what generation does on chips that are not there, beside KerasHub's own `generate`.

Real shapes, without weights; nothing runs. With --write, docs/accelerators.json is what it printed;
with --int4 --write, docs/int4.json is what ours take in four bits; with --meshes, docs/meshes.json
is what they exchange on several chips.

    pip install -e ".[plan-tpu,plan-gpu]"
    KERAS_BACKEND=jax JAX_PLATFORMS=cpu python scripts/measure_accelerators.py
"""

import argparse
import itertools
import json
from pathlib import Path

import jax
import keras
import numpy as np
from accelerator_models import LENGTH, LENGTHS, MODELS, PROMPT, in_int4, without_values
from jax import export
from rich.console import Console
from rich.table import Table

import backbone_surgery as bs
from backbone_surgery import graph
from backbone_surgery.planning.abstract import Traced
from backbone_surgery.planning.compilers import compile_programs
from backbone_surgery.planning.devices import find_devices

FILE = Path(__file__).parents[1] / "docs" / "accelerators.json"
INT4_FILE = FILE.with_name("int4.json")
MESHES_FILE = FILE.with_name("meshes.json")
CASE = ("model", "device", "rows")
INT4 = ("gpt2", "gemma2", "llama3", "qwen3")
MESHES = {"v5e:2x2": (1, 4), "v5e:4x4": (1, 16), "h100:8": (1, 8), "h100:2x4": (2, 4)}


def ours(name, device, rows, int4=False):
    """Return the least that is moved, and the counts of our programs.

    Of several chips, with what is exchanged for each token, and on paper.
    """
    backbone = without_values(name)
    if int4:
        backbone = in_int4(backbone)
    mesh = dict(zip(("batch", "model"), MESHES.get(device, (1, 1)), strict=True))
    length = LENGTHS.get(name, LENGTH)
    options = {"batch": rows, "length": length, "prompt": PROMPT, "verbose": 0}
    plan = bs.plan(backbone, mesh, device=device, compile=True, **options)
    own = counts(plan["decode"])
    if device in MESHES:
        own["collectives"] = dict(plan["decode"].collectives)
        own["on_paper"] = dict(plan.collectives)
    else:
        own["instructions"] = dict(plan["decode"].instructions)
    return plan.least_bytes, own


def write_meshes(models, devices):
    """Measure meshes; keep what is known of others."""
    for name, device in itertools.product(models, devices):
        least, own = ours(name, device, 8)
        line = {"model": name, "device": device, "rows": 8, "ours": {"least_bytes": least, **own}}
        print(line)
        write(line, MESHES_FILE)


def upstream(name, device, rows):
    """Return the counts of KerasHub's `generate`, compiled in the same way."""
    devices = find_devices(device)
    backbone = without_values(name)
    task = MODELS[name][1](backbone=backbone, preprocessor=None)  # its optimizer has values
    task.compile(sampler="greedy")
    with graph.without_values():
        variables = [*task.sampler.variables, *task.variables]

        def generate(values, inputs):
            with keras.StatelessScope(state_mapping=zip(variables, values, strict=True)):
                return task.generate_step(inputs, None)

        values = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
        shape = (rows, LENGTHS.get(name, LENGTH))
        inputs = {
            "token_ids": jax.ShapeDtypeStruct(shape, np.int32),
            "padding_mask": jax.ShapeDtypeStruct(shape, bool),
        }
        platform = {"gpu": "cuda", "tpu": "tpu"}[devices.device.platform]
        program = export.export(jax.jit(generate), platforms=[platform])(values, inputs)
    count = len(program.in_avals)
    traced = Traced(bytes(program.serialize()), [[]] * count, [None] * count, ())
    try:
        compiled = compile_programs({"decode": traced}, devices, {"batch": 1, "model": 1}, 0)
    except bs.SurgeryError as error:  # its compiler broke
        return {"error": str(error)[:200]}
    return counts(compiled["decode"])


def counts(program):
    """Return what is kept of a compiled program."""
    if program.error:
        return {"error": program.error[:200]}
    names = ("kernels", "transfers", "step_bytes", "copied_bytes", "temporary_bytes")
    return {name: getattr(program, name) for name in (*names, "estimated_seconds")}


def measure(models, devices, rows, own_alone):
    """Yield a line for each case; with `own_alone` KerasHub's counts are those on record."""
    for name, device, count in itertools.product(models, devices, rows):
        case = {"model": name, "device": device, "rows": count}
        least, own = ours(name, device, count)
        if own_alone:
            (other,) = (x["keras_hub"] for x in on_record() if case.items() <= x.items())
        else:
            other = upstream(name, device, count)
        yield {**case, "least_bytes": least, "ours": own, "keras_hub": other}


def measure_int4(models, devices, rows):
    """Yield a line for each case in four bits; bfloat16's are on record."""
    for name, device, count in itertools.product(models, devices, rows):
        least, own = ours(name, device, count, int4=True)
        case = {"model": name, "device": device, "rows": count}
        yield {**case, "least_bytes": least, "ours": own}


def show(lines):
    """Print the lines as a table, ours / KerasHub."""
    columns = ("kernels", "transfers", "moved / least", "temporaries MB", "us")
    table = Table(*CASE, *columns)
    for line in lines:

        def pair(name, unit, digits, line=line):
            return " / ".join(text(line[who], name, unit, digits) for who in ("ours", "keras_hub"))

        table.add_row(
            *(str(line[name]) for name in CASE),
            pair("kernels", 1, 0),
            pair("transfers", 1, 0),
            pair("step_bytes", line["least_bytes"], 2),
            pair("temporary_bytes", 1e6, 1),
            pair("estimated_seconds", 1e-6, 0),
        )
    Console(width=100).print(table)


def show_int4(lines):
    """Print the lines in four bits as a table, beside what is on record of bfloat16."""
    columns = ("kernels", "moved MB", "of bfloat16", "temporaries MB", "us", "bfloat16 us")
    table = Table(*CASE, *columns)
    for line in lines:
        case = {name: line[name] for name in CASE}
        known = [*on_record(), *on_record(MESHES_FILE)]
        wide = next((x["ours"] for x in known if case.items() <= x.items()), {})
        table.add_row(
            *map(str, case.values()),
            text(line["ours"], "kernels"),
            text(line["ours"], "step_bytes", 1e6),
            text(line["ours"], "step_bytes", wide.get("step_bytes"), 2),
            text(line["ours"], "temporary_bytes", 1e6, 1),
            text(line["ours"], "estimated_seconds", 1e-6),
            text(wide, "estimated_seconds", 1e-6),
        )
    Console(width=100).print(table)


def text(counted, name, unit=1, digits=0):
    """Return a count as text, in a unit; a dash where one of them is not known."""
    value = counted.get(name)
    return "-" if None in (value, unit) else f"{value / unit:.{digits}f}"


def on_record(file=FILE):
    """Return the lines of docs/accelerators.json, or of another file."""
    return json.loads(file.read_text()) if file.exists() else []


def write(line, file):
    """Put a line in the place of what was known of its case."""
    kept = [x for x in on_record(file) if any(x[k] != line[k] for k in CASE)]
    order = list(MODELS)
    lines = sorted([*kept, line], key=lambda x: (order.index(x["model"]), x["device"], x["rows"]))
    file.write_text(json.dumps(lines, indent=1) + "\n")


def keep(measured, show_lines, file):
    """Show each line as it comes, and all in the end; write them to a file, if there is one."""
    lines = []
    for line in measured:
        lines.append(line)
        show_lines([line])
        if file:
            write(line, file)
    show_lines(lines)


def main():
    """Measure what the options say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}; with --int4, {', '.join(INT4)}")
    parser.add_argument("--devices", help="h100,v5e by default; with --int4 meshes, too")
    parser.add_argument("--rows", help="1,8,64 by default; with --int4, 1,8")
    parser.add_argument("--own", action="store_true", help="leave KerasHub's as on record")
    parser.add_argument("--int4", action="store_true", help="measure four bits, without KerasHub's")
    parser.add_argument(
        "--write", action="store_true", help="write docs/accelerators.json or int4.json"
    )
    parser.add_argument(
        "--meshes", action="store_true", help="write docs/meshes.json, of all meshes or --devices"
    )
    args = parser.parse_args()
    known, models, rows = MODELS, "gpt2,gemma2,llama3", "1,8,64"
    if args.int4:
        known, models, rows = INT4, ",".join(INT4), "1,8"
    models = (args.models or models).split(",")
    if not set(models) <= set(known):
        parser.error(f"--models: expected some of {', '.join(known)}. Received {args.models}.")
    keras.config.set_dtype_policy("bfloat16")
    devices = args.devices or (",".join(MESHES) if args.meshes else "h100,v5e")
    devices = devices.split(",")
    if args.meshes:
        write_meshes(models, devices)
        return
    rows = [int(n) for n in (args.rows or rows).split(",")]
    if args.int4:
        keep(measure_int4(models, devices, rows), show_int4, INT4_FILE if args.write else None)
    else:
        keep(measure(models, devices, rows, args.own), show, FILE if args.write else None)


if __name__ == "__main__":
    main()
