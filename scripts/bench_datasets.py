"""Measure `generate_dataset` and `harvest` beside what they are built on, and beside peers.

    KERAS_BACKEND=jax python scripts/bench_datasets.py generate --prompts 100000
    KERAS_BACKEND=jax python scripts/bench_datasets.py harvest --texts 2000 --runs 3

`generate`: prompts of a few words to the bundled tiny_gpt2, beside one `generate` of all of them,
sorted by length, in batches of the same size. `harvest`: four sites of a random model of GPT-2's
shape, beside a plain forward pass of the backbone in the same batches, and beside `transformers`
and TransformerLens in batches of the same texts, padded to the longest. Only ours writes files.
Peers that are not installed are left out.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import keras
import numpy as np
import typer
from bench_convert import convert
from bench_grid import CONFIG
from bench_machine import describe
from bench_peers import backbone_of
from rich.console import Console
from rich.table import Table

import backbone_surgery as bs
from backbone_surgery.generation.buckets import bucket
from backbone_surgery.generation.prompts import pack_right
from backbone_surgery.opening.predict import predict
from backbone_surgery.vectors.activations import read_texts

SITES = ("blocks.2", "blocks.5", "blocks.8", "blocks.11")
WORDS = "the little dog ran to a big red house and saw his old friend by the river".split()

app = typer.Typer()
Runs = Annotated[int, typer.Option(min=1, help="Turns of each.")]
Json = Annotated[Path | None, typer.Option("--json")]


def turns(contenders: dict[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Let all take turns, and return the seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(runs):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def report(seconds: dict[str, list[float]], unit: str, count: int, file: Path | None) -> None:
    """Print medians, and how much faster ours, the first, is than each."""
    table = Table("", f"{unit} a second (least, most)", "ours is faster by")
    first, *_ = seconds.values()
    for name, times in seconds.items():
        rates = sorted(count / t for t in times)
        ratio = statistics.median(t / own for t, own in zip(times, first, strict=True))
        shown = f"{statistics.median(rates):,.0f} ({rates[0]:,.0f}, {rates[-1]:,.0f})"
        table.add_row(name, shown, f"{ratio:.2f}")
    machine = describe()
    Console().print(machine, table)
    if file is not None:
        file.write_text(json.dumps({"machine": machine, "seconds": seconds, unit: count}, indent=1))


@app.command()
def generate(
    prompts: Annotated[int, typer.Option(min=1)] = 100_000,
    max_new_tokens: int = 16,
    batch_size: int = 64,
    runs: Runs = 1,
    json_file: Json = None,
) -> None:
    """Generate from many prompts, from files and in one call."""
    rng = np.random.default_rng(0)
    counts = rng.integers(2, 12, prompts)
    texts = [" ".join(rng.choice(WORDS, count)) for count in counts]
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    lm.compile(sampler="greedy")
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "in.jsonl", Path(folder) / "out"
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))

        def ours() -> list[str]:
            shutil.rmtree(output, ignore_errors=True)
            paths = bs.generate_dataset(lm, file, output, verbose=0, **options)
            lines = (line for path in paths for line in path.read_text().splitlines())
            return [json.loads(line)["generated"] for line in lines]

        order = np.argsort([len(row) for row in read_texts(lm, texts, "bench")], kind="stable")
        by_length = [texts[i] for i in order]

        def one_call() -> list[str]:
            return lm.generate(by_length, strip_prompt=True, **options)

        written = ours()
        if [written[i] for i in order] != one_call():
            raise SystemExit("the texts differ")
        seconds = turns({"generate_dataset": ours, "one generate": one_call}, runs)
        report(seconds, "prompts", prompts, json_file)


@app.command()
def harvest(
    texts: Annotated[int, typer.Option(min=1)] = 2000,
    longest: int = 64,
    batch_size: int = 32,
    blocks: int = 12,
    runs: Runs = 3,
    json_file: Json = None,
) -> None:
    """Harvest four sites over a corpus of token ids."""
    backbone = backbone_of({**CONFIG, "num_layers": blocks}, "gpt2", "float32")
    sites = [site for site in SITES if int(site.partition(".")[2]) < blocks]
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 50257, rng.integers(8, longest + 1)).tolist() for _ in range(texts)]
    order = np.argsort([len(row) for row in rows], kind="stable")
    parts = [order[i : i + batch_size] for i in range(0, texts, batch_size)]
    batches = [[np.array(rows[i], np.int32) for i in part] for part in parts]
    lm = bs.CachedCausalLM(backbone)
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "in.jsonl", Path(folder) / "out"
        file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))

        def ours() -> None:
            shutil.rmtree(output, ignore_errors=True)
            bs.harvest(lm, file, output, sites, batch_size=batch_size, shard_rows=texts, verbose=0)

        def plain() -> None:
            for batch in batches:
                predict(backbone, pack_right(batch, bucket(max(map(len, batch)), 16, 4), 0))

        contenders: dict[str, Callable[[], object]] = {"harvest": ours, "plain forward": plain}
        try:
            contenders |= peers(backbone, batches, sites)
        except ImportError as error:
            Console().print(f"transformers or TransformerLens: left out, {error}")
        for contender in contenders.values():
            contender()  # compiles
        seconds = turns(contenders, runs)
        report(seconds, "tokens", sum(map(len, rows)), json_file)


def peers(
    backbone: keras.Model, batches: list[list[np.ndarray]], sites: list[str]
) -> dict[str, Callable[[], object]]:
    """Make what collects the same activations with PyTorch, without the head."""
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    model = convert(backbone)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        lens = TransformerBridge.boot_transformers(folder, hf_model=model, device="cpu")
    blocks = [int(site.partition(".")[2]) for site in sites]
    names = [f"blocks.{block}.hook_resid_post" for block in blocks]
    padded = [pack_right(batch, max(map(len, batch)), 0) for batch in batches]
    tensors = [
        (torch.tensor(x["token_ids"], dtype=torch.long), torch.tensor(x["padding_mask"]).long())
        for x in padded
    ]

    def transformers() -> None:
        with torch.inference_mode():
            for ids, mask in tensors:
                states = model.base_model(ids, attention_mask=mask, output_hidden_states=True)
                for block in blocks:
                    states.hidden_states[block + 1].half().numpy()

    def transformer_lens() -> None:
        with torch.inference_mode():
            for ids, mask in tensors:
                _, cache = lens.run_with_cache(ids, attention_mask=mask, names_filter=names)
                for name in names:
                    cache[name].half().numpy()

    return {"transformers": transformers, "TransformerLens": transformer_lens}


if __name__ == "__main__":
    app()
