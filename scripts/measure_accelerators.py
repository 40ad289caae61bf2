"""Count what generation does on chips that are not there, beside KerasHub's own `generate`.

Real shapes, without weights; nothing runs. With --write, docs/accelerators.json is what it printed;
with --meshes, docs/meshes.json is what ours exchange on several chips.

    pip install -e ".[plan-tpu,plan-gpu]"
    KERAS_BACKEND=jax JAX_PLATFORMS=cpu python scripts/measure_accelerators.py
"""

import argparse
import itertools
import json
from functools import partial
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
MESHES_FILE = FILE.with_name("meshes.json")
PROMPT = 16


def gpt2():
    """Of the shape of GPT-2 124M."""
    return keras_hub.models.GPT2Backbone(50257, 12, 12, 768, 3072, max_sequence_length=1024)


def gemma2(**sizes):
    """Of the shape of Gemma 2 2B, with 4 of its 26 blocks."""
    shape = {
        "vocabulary_size": 256000,
        "num_layers": 4,
        "num_query_heads": 8,
        "num_key_value_heads": 4,
        "hidden_dim": 2304,
        "intermediate_dim": 18432,
        "head_dim": 256,
    }
    return keras_hub.models.GemmaBackbone(
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        final_logit_soft_cap=30,
        attention_logit_soft_cap=50,
        use_sliding_window_attention=True,
        sliding_window_size=4096,
        **{**shape, **sizes},
    )


def gemma2_32k():
    """Of the same shape, with 32,000 tokens: the blocks are most of what is read."""
    return gemma2(vocabulary_size=32000)


def gemma2_27b(blocks=4):
    """Of the shape of Gemma 2 27B, with 4 of its 46 blocks."""
    return gemma2(
        num_layers=blocks,
        num_query_heads=32,
        num_key_value_heads=16,
        hidden_dim=4608,
        intermediate_dim=73728,
        head_dim=128,
        query_head_dim_normalize=False,
    )


def llama3(**sizes):
    """Of the shape of Llama 3 8B, with 4 of its 32 blocks."""
    shape = {
        "num_layers": 4,
        "num_query_heads": 32,
        "hidden_dim": 4096,
        "intermediate_dim": 14336,
    }
    return keras_hub.models.Llama3Backbone(
        vocabulary_size=128256, num_key_value_heads=8, **{**shape, **sizes}
    )


def llama3_70b(blocks=4):
    """Of the shape of Llama 3 70B, with 4 of its 80 blocks."""
    return llama3(num_layers=blocks, num_query_heads=64, hidden_dim=8192, intermediate_dim=28672)


def qwen3():
    """Of the shape of Qwen 3 8B, with 4 of its 36 blocks."""
    return keras_hub.models.Qwen3Backbone(
        vocabulary_size=151936,
        num_layers=4,
        num_query_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        hidden_dim=4096,
        intermediate_dim=12288,
        rope_max_wavelength=1000000,
        tie_word_embeddings=False,
        sliding_window_size=None,
    )


def mixtral():
    """Of the shape of Mixtral 8x7B, with 4 of its 32 blocks."""
    return keras_hub.models.MixtralBackbone(
        vocabulary_size=32000,
        num_layers=4,
        num_query_heads=32,
        num_key_value_heads=8,
        hidden_dim=4096,
        intermediate_dim=14336,
        num_experts=8,
        top_k=2,
        rope_max_wavelength=1000000,
        sliding_window=None,
    )


def qwen3_moe(vocabulary_size=151936, num_layers=4):
    """Of the shape of Qwen 3 MoE 30B, with 4 of its 48 blocks."""
    return keras_hub.models.Qwen3MoeBackbone(
        vocabulary_size=vocabulary_size,
        num_layers=num_layers,
        num_query_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        hidden_dim=2048,
        intermediate_dim=6144,
        moe_intermediate_dim=768,
        num_experts=128,
        top_k=8,
        rope_max_wavelength=1000000,
        tie_word_embeddings=False,
        sliding_window_size=None,
    )


def gpt_oss(experts=32, **sizes):
    """Of the shape of GPT-OSS 20B, with 4 of its 24 blocks; with 128 experts that of 120B."""
    shape = {"vocabulary_size": 201088, "num_layers": 4}
    return keras_hub.models.GptOssBackbone(
        **{**shape, **sizes},
        num_query_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        hidden_dim=2880,
        intermediate_dim=2880,
        num_experts=experts,
        top_k=4,
        sliding_window=128,
        rope_max_wavelength=150000,
        rope_scaling_factor=32.0,
    )


def gemma4(**sizes):
    """Of the shape of the mixture of Gemma 4 (26B), with 4 of its 30 blocks, one of them global."""
    shape = {"vocabulary_size": 262144, "num_layers": 4, "sliding_window_pattern": 4}
    return keras_hub.models.Gemma4Backbone(
        **{**shape, **sizes},
        image_size=16,
        num_query_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        head_dim=256,
        global_head_dim=512,
        hidden_dim=2816,
        intermediate_dim=2112,
        sliding_window_size=1024,
        final_logit_soft_cap=30.0,
        enable_moe_block=True,
        num_experts=128,
        num_experts_per_token=8,
        expert_intermediate_dim=704,
    )


MODELS = {
    "gpt2": (gpt2, keras_hub.models.GPT2CausalLM),
    "gemma2": (gemma2, keras_hub.models.GemmaCausalLM),
    "gemma2_32k": (gemma2_32k, keras_hub.models.GemmaCausalLM),
    "gemma2_27b": (gemma2_27b, keras_hub.models.GemmaCausalLM),
    "gemma2_27b_whole": (partial(gemma2_27b, 46), keras_hub.models.GemmaCausalLM),
    "llama3": (llama3, keras_hub.models.Llama3CausalLM),
    "llama3_70b": (llama3_70b, keras_hub.models.Llama3CausalLM),
    "llama3_70b_whole": (partial(llama3_70b, 80), keras_hub.models.Llama3CausalLM),
    "qwen3": (qwen3, keras_hub.models.Qwen3CausalLM),
    "mixtral": (mixtral, keras_hub.models.MixtralCausalLM),
    "qwen3_moe": (qwen3_moe, keras_hub.models.Qwen3MoeCausalLM),
    "gpt_oss": (gpt_oss, keras_hub.models.GptOssCausalLM),
    "gemma4": (gemma4, keras_hub.models.Gemma4CausalLM),
}
MESHES = {"v5e:2x2": (1, 4), "v5e:4x4": (1, 16), "h100:8": (1, 8), "h100:2x4": (2, 4)}
LENGTHS = {"gpt2": 256}
LENGTH = 1024


def ours(name, device, rows):
    """Return the counts of our programs."""
    with graph.without_values():
        backbone = MODELS[name][0]()
    length = LENGTHS.get(name, LENGTH)
    plan = bs.plan(
        backbone, device=device, batch=rows, length=length, prompt=PROMPT, compile=True, verbose=0
    )
    own = counts(plan["decode"])
    return plan.least_bytes, {**own, "instructions": dict(plan["decode"].instructions)}


def on_mesh(name, device, rows):
    """Return our counts on several chips, with what is exchanged for each token, and on paper."""
    with graph.without_values():
        backbone = MODELS[name][0]()
    mesh = dict(zip(("batch", "model"), MESHES[device], strict=True))
    length = LENGTHS.get(name, LENGTH)
    options = {"batch": rows, "length": length, "prompt": PROMPT, "verbose": 0}
    plan = bs.plan(backbone, mesh, device=device, compile=True, **options)
    decode = plan["decode"]
    exchanged = {"collectives": dict(decode.collectives), "on_paper": dict(plan.collectives)}
    return {"least_bytes": plan.least_bytes, **counts(decode), **exchanged}


def write_meshes(models):
    """Measure all meshes; keep what is known of other models."""
    lines = json.loads(MESHES_FILE.read_text()) if MESHES_FILE.exists() else []
    lines = [x for x in lines if x["model"] not in models]
    for name, device in itertools.product(models, MESHES):
        lines.append({"model": name, "device": device, "rows": 8, "ours": on_mesh(name, device, 8)})
        print(lines[-1])
    order = list(MODELS)
    lines.sort(key=lambda x: (order.index(x["model"]), x["device"]))
    MESHES_FILE.write_text(json.dumps(lines, indent=1) + "\n")


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


def show(lines):
    """Print the lines as a table, ours / KerasHub."""
    columns = ("kernels", "transfers", "moved / least", "temporaries MB", "us")
    table = Table("model", "device", "rows", *columns)
    for line in lines:

        def pair(name, unit, digits, line=line):
            values = [line[who].get(name) for who in ("ours", "keras_hub")]
            return " / ".join("-" if v is None else f"{v / unit:.{digits}f}" for v in values)

        table.add_row(
            *(str(line[name]) for name in ("model", "device", "rows")),
            pair("kernels", 1, 0),
            pair("transfers", 1, 0),
            pair("step_bytes", line["least_bytes"], 2),
            pair("temporary_bytes", 1e6, 1),
            pair("estimated_seconds", 1e-6, 0),
        )
    Console(width=100).print(table)


def on_record():
    """Return the lines of docs/accelerators.json."""
    return json.loads(FILE.read_text()) if FILE.exists() else []


def write(line):
    """Put a line in the place of what was known of its case."""
    keys = ("model", "device", "rows")
    kept = [x for x in on_record() if any(x[k] != line[k] for k in keys)]
    order = list(MODELS)
    lines = sorted([*kept, line], key=lambda x: (order.index(x["model"]), x["device"], x["rows"]))
    FILE.write_text(json.dumps(lines, indent=1) + "\n")


def main():
    """Measure, show and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gpt2,gemma2,llama3", help=", ".join(MODELS))
    parser.add_argument("--devices", default="h100,v5e")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--own", action="store_true", help="leave KerasHub's as on record")
    parser.add_argument("--write", action="store_true", help="write docs/accelerators.json")
    parser.add_argument("--meshes", action="store_true", help="write docs/meshes.json alone")
    args = parser.parse_args()
    models = args.models.split(",")
    if not set(models) <= set(MODELS):
        parser.error(f"--models: expected some of {', '.join(MODELS)}. Received {args.models}.")
    keras.config.set_dtype_policy("bfloat16")
    if args.meshes:
        write_meshes(models)
        return
    rows = [int(n) for n in args.rows.split(",")]
    lines = []
    for line in measure(models, args.devices.split(","), rows, args.own):
        lines.append(line)
        show([line])
        if args.write:
            write(line)
    show(lines)


if __name__ == "__main__":
    main()
