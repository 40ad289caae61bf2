"""Measure this project side by side with KerasHub, Hugging Face and repeng, in one run.

    python scripts/bench.py                      # every row that this machine can run
    ... --row gpt2_128 --runs 3 --json out.json --plot out.png
    ... --quick                                  # tiny models: shows that the benchmark works

The contenders take turns, round by round, on the same random weights and the same prompts, choose
greedily and never stop early, and must give the same tokens. `pip install -e ".[bench]"` brings
the peers; repeng asks for an older NumPy, and runs with this one: `pip install --no-deps repeng`.
Peers that are not installed are left out. See docs/performance.md for what it measured.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("KERAS_BACKEND", "jax")
# So that JAX leaves room on the device for peers that use PyTorch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
import typer
from bench_checkpoints import CONFIGS, load
from bench_machine import arithmetic, describe, peak_extra_bytes, read_bandwidth
from bench_peers import Contender, Work, backbone_of, contenders
from bench_report import plot, table
from rich.console import Console

from backbone_surgery.caching.cache import bytes_per_token

MODELS: dict[str, dict[str, Any]] = {
    "gpt2_124m": {
        "vocabulary_size": 50257,
        "num_layers": 12,
        "num_heads": 12,
        "hidden_dim": 768,
        "intermediate_dim": 3072,
        "max_sequence_length": 1024,
    },
    "gemma_2b": {
        "vocabulary_size": 256000,
        "num_layers": 18,
        "num_query_heads": 8,
        "num_key_value_heads": 1,
        "hidden_dim": 2048,
        "intermediate_dim": 32768,
        "head_dim": 256,
    },
    "gemma_tiny": {
        "vocabulary_size": 60,
        "num_layers": 2,
        "num_query_heads": 4,
        "num_key_value_heads": 1,
        "hidden_dim": 32,
        "intermediate_dim": 96,
        "head_dim": 8,
    },
    "gpt2_tiny": {
        "vocabulary_size": 60,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 32,
        "intermediate_dim": 64,
        "max_sequence_length": 64,
    },
}

progress = Console(stderr=True)
console = Console() if sys.stdout.isatty() else Console(width=150)


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: for `--row`.
        model: of `MODELS`.
        batch: number of prompts.
        prompt: tokens of each.
        length: tokens of each row in the end, the prompt included.
        kind: `plain`; `first_token` (nothing more is timed); `steered` at every block, a vector
            and strength for each row; `overhead` of that steering, against none; `capture` of
            every block's output, against none; `stream`, in chunks of 8 tokens, against none.
        dtype: of the weights.
        backend: of JAX, where the row is run by default.
    """

    name: str
    model: str
    batch: int
    prompt: int
    length: int
    kind: str = "plain"
    dtype: str = "float32"
    backend: str = "cpu"


ROWS = [
    Row("gpt2_128", "gpt2_124m", 1, 16, 128),
    Row("gpt2_1024", "gpt2_124m", 1, 16, 1024),
    Row("gpt2_batch8", "gpt2_124m", 8, 16, 256),
    Row("first_token", "gpt2_124m", 1, 512, 1024, kind="first_token"),
    Row("strengths", "gpt2_124m", 8, 16, 128, kind="steered"),
    Row("vectors", "gpt2_124m", 32, 16, 128, kind="steered"),
    Row("steering", "gpt2_124m", 1, 16, 128, kind="overhead"),
    Row("capture", "gpt2_124m", 1, 16, 128, kind="capture"),
    Row("stream", "gpt2_124m", 1, 16, 256, kind="stream"),
    Row("gpt2_bf16", "gpt2_124m", 1, 16, 256, dtype="bfloat16"),
    Row("gpt2_bf16_batch8", "gpt2_124m", 8, 16, 256, dtype="bfloat16"),
    Row("llama", "llama_124m", 1, 16, 256),
    Row("llama_batch8", "llama_124m", 8, 16, 256),
    Row("qwen3", "qwen3_119m", 1, 16, 256),
    Row("qwen3_batch8", "qwen3_119m", 8, 16, 256),
    Row("gemma3", "gemma3_141m", 1, 16, 256),
    Row("gemma3_batch8", "gemma3_141m", 8, 16, 256),
    Row("mixtral", "mixtral_99m", 1, 16, 256),
    Row("mixtral_batch8", "mixtral_99m", 8, 16, 256),
    *(
        Row(f"gpu_{name}{of}", model, batch, 64, 1024, dtype="bfloat16", backend="gpu")
        for name, model in (("gpt2", "gpt2_124m"), ("gemma", "gemma_2b"))
        for of, batch in (("", 1), ("_batch8", 8), ("_batch64", 64))
    ),
    *(
        Row(f"gpu_{kind}", "gemma_2b", batch, prompt, length, kind, "bfloat16", "gpu")
        for kind, batch, prompt, length in (
            ("first_token", 1, 2048, 2304),
            ("steered", 32, 64, 512),
            ("overhead", 1, 64, 512),
            ("capture", 1, 64, 512),
            ("stream", 1, 64, 512),
        )
    ),
]

QUICK = (
    "gpt2_128",
    "first_token",
    "strengths",
    "steering",
    "capture",
    "stream",
    "llama",
    "gpu_gemma",
)


def quick(row: Row) -> Row:
    """Make a row tiny."""
    return dataclasses.replace(
        row,
        name=row.name.removeprefix("gpu_"),
        model=f"{row.model.split('_')[0]}_tiny",
        batch=min(row.batch, 4),
        prompt=16,
        length=48,
        dtype="float32",
        backend="cpu",
    )


def is_tiny(row: Row) -> bool:
    """Tell whether a row shows only that the benchmark works."""
    return row.model.endswith("_tiny")


def chosen_rows(names: list[str], is_quick: bool) -> list[Row]:
    """Return the rows that were asked for, or those for this machine."""
    unknown = set(names) - {row.name for row in ROWS}
    if unknown:
        raise typer.BadParameter(f"no rows {sorted(unknown)}; there are {[r.name for r in ROWS]}")
    backend = "cpu" if jax.default_backend() == "cpu" else "gpu"  # for any accelerator
    wanted = names or (QUICK if is_quick else [r.name for r in ROWS if r.backend == backend])
    rows = [row for row in ROWS if row.name in wanted]
    return [quick(row) for row in rows] if is_quick else rows


@cache
def models(name: str, dtype: str) -> tuple[Any, Any]:
    """Build the model of a row, once, and that of `transformers` if they are built together."""
    if name in CONFIGS:
        return load(CONFIGS[name], dtype)
    return backbone_of(MODELS[name], name.split("_")[0], dtype), None


@cache
def field(name: str, dtype: str, kind: str, only_keras: bool) -> tuple[list[Contender], list[str]]:
    """Make the contenders of a row, once for each model."""
    return contenders(*models(name, dtype), kind, only_keras)


def make_work(row: Row) -> Work:
    """Draw the prompts of a row, and its vectors and strengths."""
    rng = np.random.default_rng(1)
    backbone, _ = models(row.model, row.dtype)
    shape = (row.batch, row.prompt)
    prompts = rng.integers(1, backbone.vocabulary_size, shape, dtype=np.int32)
    if row.kind not in ("steered", "overhead"):
        return Work(prompts, row.length)
    size = (row.batch, backbone.num_layers, backbone.hidden_dim)
    directions = 0.1 * rng.standard_normal(size, "float32")
    strengths = np.linspace(-2, 2, row.batch, dtype="float32") if row.batch > 1 else np.ones(1)
    if row.name == "strengths":
        prompts, directions = (np.repeat(x[:1], row.batch, 0) for x in (prompts, directions))
    return Work(prompts, row.length, directions, strengths.astype("float32"))


def bytes_per_step(row: Row, ours: Any) -> float:
    """Return how many bytes one step reads: weights, and the filled cache.

    Of the weights that is all but positions, and of the experts those that are chosen.
    """
    backbone = ours.lm.backbone
    experts = getattr(backbone, "num_experts", None)
    share = min(row.batch * backbone.top_k / experts, 1) if experts else 1
    weights = sum(np.asarray(v.value).nbytes * s for v, s in _read(backbone, share))
    filled = (row.prompt + row.length) / 2
    return weights + row.batch * filled * bytes_per_token(ours.lm.backbone_with_cache)


def operations_per_step(row: Row, backbone: Any) -> float:
    """Return how many operations the products with the weights take in one step of all rows."""
    experts = getattr(backbone, "num_experts", None)
    share = backbone.top_k / experts if experts else 1
    return 2.0 * row.batch * sum(v.value.size * s for v, s in _read(backbone, share))


def _read(backbone: Any, share: float) -> list[tuple[Any, float]]:
    """Return the variables that a step reads, and of each what share; that is one of experts."""
    variables = [v for v in backbone.variables if "position_embedding" not in v.path]
    return [(v, share if "/experts/" in v.path else 1) for v in variables]


def timed(contender: Contender, work: Work, stop: tuple[int, ...] = ()) -> tuple[float, np.ndarray]:
    """Time one call."""
    start = time.perf_counter()
    tokens = contender.generate(work, stop)
    seconds = time.perf_counter() - start
    progress.print(f"{contender.name}: {tokens.shape[1]} tokens in {seconds:.2f} s")
    return seconds, tokens


def _call(calls: list, contender: Contender, work: Work, stop: tuple[int, ...]) -> None:
    calls.append(timed(contender, work, stop))


def first_tokens(backbone: Any, work: Work) -> tuple[int, ...]:
    """Return the first new tokens, by the plain backbone: no contender compiles anything for it."""
    inputs = {"token_ids": work.prompts, "padding_mask": np.ones_like(work.prompts)}
    last = backbone.predict_on_batch(inputs)[:, -1]
    logits = np.asarray(backbone.token_embedding(last, reverse=True))
    return tuple(int(i) for i in np.unique(logits.argmax(axis=-1)))


def warm_up(
    field: list[Contender], work: Work, first_only: bool, stop: tuple[int, ...]
) -> tuple[tuple[int, ...], dict[str, dict[str, Any]]]:
    """Let every contender compile what it will run, and note the time and the tokens."""
    first_runs: dict[str, dict[str, Any]] = {}
    for contender in field:
        calls: list[tuple[float, np.ndarray]] = []
        peak = peak_extra_bytes(partial(_call, calls, contender, work, stop), contender.on_jax)
        seconds, tokens = calls[0]
        first_runs[contender.name] = {"first_call_s": seconds, "tokens": tokens, "peak": peak}
    if not first_only:
        stop = tuple(int(i) for i in np.unique([f["tokens"][:, 0] for f in first_runs.values()]))
        for contender in field:
            timed(contender, work, stop)
    return stop, first_runs


def measure(row: Row, runs: int, only_keras: bool) -> dict[str, Any]:
    """Run one row: the contenders take turns, round by round."""
    ours_and_peers, notes = field(row.model, row.dtype, row.kind, only_keras)
    work, first_only = make_work(row), row.kind == "first_token"
    stop = first_tokens(models(row.model, row.dtype)[0], work) if first_only else ()
    stop, first_runs = warm_up(ours_and_peers, work, first_only, stop)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in first_runs}
    bandwidths, speeds = [], []
    for _ in range(runs):
        bandwidths.append(read_bandwidth())
        speeds.append(arithmetic())
        for contender in ours_and_peers:
            rounds[contender.name].append(_one_round(contender, work, stop, first_only))
    result = {
        **dataclasses.asdict(row),
        "notes": notes,
        "bandwidth": max(bandwidths),
        "bytes_per_step": bytes_per_step(row, ours_and_peers[0]),
        "arithmetic": max(speeds),
        "operations_per_step": operations_per_step(row, ours_and_peers[0].lm.backbone),
    }
    result["contenders"] = [
        _summary(name, row, result, first_runs, rounds) for name in (c.name for c in ours_and_peers)
    ]
    return result


def _one_round(
    contender: Contender, work: Work, stop: tuple[int, ...], first_only: bool
) -> dict[str, float]:
    first, _ = timed(contender, work, stop)
    return {"first": first, "total": first if first_only else timed(contender, work)[0]}


def _summary(
    name: str,
    row: Row,
    shared: dict[str, Any],
    first_runs: dict[str, dict[str, Any]],
    rounds: dict[str, list[dict[str, float]]],
) -> dict[str, Any]:
    mine, ours = rounds[name], next(iter(rounds.values()))
    totals, firsts = ([r[key] for r in mine] for key in ("total", "first"))
    total, first = statistics.median(totals), statistics.median(firsts)
    reference, tokens = next(iter(first_runs.values()))["tokens"], first_runs[name]["tokens"]
    summary = {
        "name": name,
        "total_s": total,
        "spread_s": [min(totals), max(totals)],
        "first_token_s": first,
        "compile_s": first_runs[name]["first_call_s"] - total,
        "ours_over_it": statistics.median(
            r["total"] / o["total"] for r, o in zip(mine, ours, strict=True)
        ),
        "peak_extra_bytes": first_runs[name]["peak"],
        "distinct_tokens": len(np.unique(tokens)),
        "differs_from": None if row.kind == "overhead" else differs_from(reference, tokens),
    }
    if row.kind != "first_token":
        new = row.length - row.prompt
        summary["tokens_per_s"] = row.batch * new / total
        if total > first and not is_tiny(row):
            decode = row.batch * (new - 1) / (total - first)
            reading = shared["bytes_per_step"] / shared["bandwidth"]
            multiplying = shared["operations_per_step"] / shared["arithmetic"]
            limit = row.batch / max(reading, multiplying)
            summary |= {"decode_tokens_per_s": decode, "share_of_limit": decode / limit}
    return summary


def differs_from(wanted: np.ndarray, got: np.ndarray) -> int | None:
    """Return the number of the first new token that is not the same in all rows, if any."""
    if wanted.shape != got.shape:
        return min(wanted.shape[1], got.shape[1])
    different = np.flatnonzero((wanted != got).any(axis=0))
    return int(different[0]) if len(different) else None


def _check_files(json_file: Path | None, plot_file: Path | None) -> None:
    """Refuse at once what would fail after everything was measured."""
    for path in (json_file, plot_file):
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.absolute().parent}")
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("--plot needs matplotlib: pip install matplotlib")


def main(
    row: Annotated[list[str] | None, typer.Option(help="A row; may be repeated.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Rounds of each row.")] = 3,
    quick: Annotated[bool, typer.Option(help="Tiny models and shapes.")] = False,
    only_keras: Annotated[bool, typer.Option(help="Leave out peers that need PyTorch.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw them.")] = None,
) -> None:
    """Measure the rows, and print a table. Exits with 1 if tokens differ in float32."""
    _check_files(json_file, plot_file)
    machine = describe()
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()))
    if quick:
        console.print("Tiny models: the figures say nothing but that the benchmark works.")
    rows, results = chosen_rows(row or [], quick), []
    if plot_file is not None and all(one.kind == "first_token" for one in rows):
        raise typer.BadParameter("--plot draws tokens per second, and these rows have none")
    for one in rows:
        results.append(measure(one, runs, only_keras))
        console.print(table(results[-1]))
        for note in results[-1]["notes"]:
            console.print(note)
        if json_file is not None:
            json_file.write_text(json.dumps({"machine": machine, "rows": results}, indent=1))
    if plot_file is not None:
        plot(results, plot_file)
    wrong = [
        f"{r['name']}: {c['name']} differs from token {c['differs_from']}"
        for r in results
        for c in r["contenders"]
        if c["differs_from"] is not None and r["dtype"] == "float32"
    ]
    if wrong:
        console.print("\n".join(wrong))
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
