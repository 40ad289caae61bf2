"""Count what generation does on chips that are not there, beside KerasHub's own `generate`.

Real shapes, without weights; nothing runs. With --write, docs/accelerators.json is what it printed.

    pip install -e ".[plan-tpu,plan-gpu]"
    KERAS_BACKEND=jax JAX_PLATFORMS=cpu python scripts/measure_accelerators.py
"""

import argparse
import itertools
import json
from pathlib import Path

import jax
import keras
import keras_hub
import numpy as np
from jax import export
from rich.console import Console
from rich.table import Table

import backbone_surgery as bs
from backbone_surgery import graph
from backbone_surgery.planning.abstract import Traced
from backbone_surgery.planning.compilers import compile_programs
from backbone_surgery.planning.devices import find_devices

FILE = Path(__file__).parents[1] / "docs" / "accelerators.json"
PROMPT = 16


def gpt2():
    """Of the shape of GPT-2 124M."""
    return keras_hub.models.GPT2Backbone(50257, 12, 12, 768, 3072, max_sequence_length=1024)


def gemma2(blocks=4):
    """Of the shape of Gemma 2 2B, with fewer blocks."""
    return keras_hub.models.GemmaBackbone(
        vocabulary_size=256000,
        num_layers=blocks,
        num_query_heads=8,
        num_key_value_heads=4,
        hidden_dim=2304,
        intermediate_dim=18432,
        head_dim=256,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        final_logit_soft_cap=30,
        attention_logit_soft_cap=50,
        use_sliding_window_attention=True,
        sliding_window_size=4096,
    )


def llama3(blocks=4):
    """Of the shape of Llama 3 8B, with fewer blocks."""
    return keras_hub.models.Llama3Backbone(
        vocabulary_size=128256,
        num_layers=blocks,
        num_query_heads=32,
        num_key_value_heads=8,
        hidden_dim=4096,
        intermediate_dim=14336,
    )


MODELS = {
    "gpt2": (gpt2, keras_hub.models.GPT2CausalLM),
    "gemma2": (gemma2, keras_hub.models.GemmaCausalLM),
    "llama3": (llama3, keras_hub.models.Llama3CausalLM),
}
LENGTHS = {"gpt2": 256, "gemma2": 1024, "llama3": 1024}


def ours(name, device, rows):
    """Return the counts of our programs."""
    with graph.without_values():
        backbone = MODELS[name][0]()
    length = LENGTHS[name]
    plan = bs.plan(
        backbone, device=device, batch=rows, length=length, prompt=PROMPT, compile=True, verbose=0
    )
    own = counts(plan["decode"])
    return plan.least_bytes, {**own, "instructions": dict(plan["decode"].instructions)}


def upstream(name, device, rows):
    """Return the counts of KerasHub's `generate`, compiled in the same way."""
    devices = find_devices(device)
    with graph.without_values():
        backbone = MODELS[name][0]()
    task = MODELS[name][1](backbone=backbone, preprocessor=None)  # its optimizer has values
    task.compile(sampler="greedy")
    with graph.without_values():
        variables = [*task.sampler.variables, *task.variables]

        def generate(values, inputs):
            with keras.StatelessScope(state_mapping=zip(variables, values, strict=True)):
                return task.generate_step(inputs, None)

        values = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
        shape = (rows, LENGTHS[name])
        inputs = {
            "token_ids": jax.ShapeDtypeStruct(shape, np.int32),
            "padding_mask": jax.ShapeDtypeStruct(shape, bool),
        }
        platform = {"gpu": "cuda", "tpu": "tpu"}[devices.device.platform]
        program = export.export(jax.jit(generate), platforms=[platform])(values, inputs)
    count = len(program.in_avals)
    traced = Traced(bytes(program.serialize()), [[]] * count, ())
    try:
        compiled = compile_programs({"decode": traced}, devices, {"batch": 1, "model": 1}, 0)
    except bs.SurgeryError as error:  # its compiler broke
        return {"error": str(error)[:200]}
    return counts(compiled["decode"])


def counts(program):
    """Return what is kept of a compiled program."""
    if program.error:
        return {"error": program.error[:200]}
    names = ("kernels", "step_bytes", "copied_bytes", "temporary_bytes", "estimated_seconds")
    return {name: getattr(program, name) for name in names}


def measure(models, devices, rows):
    """Yield a line for each case."""
    for name, device, count in itertools.product(models, devices, rows):
        least, own = ours(name, device, count)
        other = upstream(name, device, count)
        yield {
            "model": name,
            "device": device,
            "rows": count,
            "least_bytes": least,
            "ours": own,
            "keras_hub": other,
        }


def show(lines):
    """Print the lines as a table, ours / KerasHub."""
    table = Table("model", "device", "rows", "kernels", "moved / least", "temporaries MB", "us")
    for line in lines:

        def pair(name, unit, digits, line=line):
            values = [line[who].get(name) for who in ("ours", "keras_hub")]
            return " / ".join("-" if v is None else f"{v / unit:.{digits}f}" for v in values)

        table.add_row(
            *(str(line[name]) for name in ("model", "device", "rows")),
            pair("kernels", 1, 0),
            pair("step_bytes", line["least_bytes"], 2),
            pair("temporary_bytes", 1e6, 1),
            pair("estimated_seconds", 1e-6, 0),
        )
    Console(width=100).print(table)


def write(line):
    """Put a line in the place of what was known of its case."""
    known = json.loads(FILE.read_text()) if FILE.exists() else []
    keys = ("model", "device", "rows")
    kept = [x for x in known if any(x[k] != line[k] for k in keys)]
    FILE.write_text(json.dumps([*kept, line], indent=1) + "\n")


def main():
    """Measure, show and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gpt2,gemma2,llama3")
    parser.add_argument("--devices", default="h100,v5e")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--write", action="store_true", help="write docs/accelerators.json")
    args = parser.parse_args()
    keras.config.set_dtype_policy("bfloat16")
    rows = [int(n) for n in args.rows.split(",")]
    lines = []
    for line in measure(args.models.split(","), args.devices.split(","), rows):
        lines.append(line)
        show([line])
        if args.write:
            write(line)
    show(lines)


if __name__ == "__main__":
    main()
