"""Measure `patch_grid` beside a Python loop over the same model, and beside TransformerLens.

    KERAS_BACKEND=jax python scripts/bench_grid.py --runs 3 --json grid.json

All patch every block at every token of one text, on the same random weights of GPT-2's shape, and
their grids are compared. The two texts differ in their first token, so no cell can be left out.
TransformerLens is left out where it is not installed.
"""

from __future__ import annotations

import json
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
from bench_machine import describe
from bench_peers import backbone_of
from rich.console import Console
from rich.table import Table

import backbone_surgery as bs

CONFIG = {
    "vocabulary_size": 50257,
    "num_heads": 12,
    "hidden_dim": 768,
    "intermediate_dim": 3072,
    "max_sequence_length": 1024,
}
TOKENS = (11, 12)
"""The metric: the logit of the first minus that of the second."""

Grid = Callable[[], np.ndarray]


def ours(backbone: keras.Model, clean: np.ndarray, corrupted: np.ndarray) -> Grid:
    """Make the grid by `patch_grid`."""
    lm = bs.CachedCausalLM(backbone)
    return lambda: bs.patch_grid(lm, clean, corrupted, TOKENS).values


def loop(backbone: keras.Model, clean: np.ndarray, corrupted: np.ndarray) -> Grid:
    """Make the grid by a loop: one compiled pass of the patched model for each cell."""
    patching = bs.operate(backbone, [bs.Patch("blocks.*")])
    capturing = bs.operate(backbone, [bs.Capture("blocks.*")])
    mask = np.ones((1, len(clean)), "int32")
    inputs = {"token_ids": corrupted[None], "padding_mask": mask}

    def cell(values: list[np.ndarray], block: int, token: int) -> float:
        positions = np.full((1, len(values), 1), -1)
        positions[0, block] = token
        patch = {f"patch_value_{i}": v[:, token : token + 1] for i, v in enumerate(values)}
        hidden = patching.predict_on_batch({**inputs, **patch, "patch_positions": positions})
        logits = np.asarray(backbone.token_embedding(hidden[:, -1], reverse=True))
        return float(logits[0, TOKENS[0]] - logits[0, TOKENS[1]])

    def run() -> np.ndarray:
        outputs = capturing.predict_on_batch({"token_ids": clean[None], "padding_mask": mask})
        captures = outputs["captures"]
        values = [np.asarray(captures[f"blocks.{b}"]) for b in range(len(captures))]
        cells = [[cell(values, b, t) for t in range(len(clean))] for b in range(len(values))]
        return np.array(cells, "float32")

    return run


def transformer_lens(backbone: keras.Model, clean: np.ndarray, corrupted: np.ndarray) -> Grid:
    """Make the grid by TransformerLens's own patching, without its progress bar."""
    import torch
    from transformer_lens import patching
    from transformer_lens.model_bridge import TransformerBridge

    converted = convert(backbone)
    with tempfile.TemporaryDirectory() as folder:
        converted.config.save_pretrained(folder)
        model = TransformerBridge.boot_transformers(folder, hf_model=converted, device="cpu")
    patching.tqdm = lambda rows, **options: rows
    texts = [torch.tensor(ids[None], dtype=torch.long) for ids in (clean, corrupted)]

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, -1, TOKENS[0]] - logits[0, -1, TOKENS[1]]

    def run() -> np.ndarray:
        with torch.inference_mode():
            cache = model.run_with_cache(texts[0])[1]
            grid = patching.generic_activation_patch(
                model,
                texts[1],
                cache,
                metric,
                patch_setter=patching.layer_pos_patch_setter,
                activation_name="resid_post",
                index_axis_names=("layer", "pos"),
            )
        return grid.numpy()

    return run


def contenders(backbone: keras.Model, length: int) -> tuple[dict[str, Grid], list[str]]:
    """Make all that can run here, and notes on what cannot."""
    rng = np.random.default_rng(1)
    clean = rng.integers(100, backbone.vocabulary_size, length, dtype=np.int32)
    corrupted = clean.copy()
    corrupted[0] = 99
    texts = backbone, clean, corrupted
    grids = {"patch_grid": ours(*texts), "a loop": loop(*texts)}
    try:
        return {**grids, "TransformerLens": transformer_lens(*texts)}, []
    except ImportError as error:
        return grids, [f"TransformerLens: left out, {error}"]


def measure(grids: dict[str, Grid], runs: int) -> dict[str, Any]:
    """Let all take turns; the first turn compiles, and is where the grids are compared."""
    values = {name: grid() for name, grid in grids.items()}
    wanted = values["patch_grid"]
    seconds: dict[str, list[float]] = {name: [] for name in grids}
    for _ in range(runs):
        for name, grid in grids.items():
            start = time.perf_counter()
            grid()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            "seconds": statistics.median(times),
            "spread": [min(times), max(times)],
            "ours_over_it": statistics.median(
                t / o for t, o in zip(times, seconds["patch_grid"], strict=True)
            ),
            "difference": float(np.abs(values[name] - wanted).max() / np.abs(wanted).max()),
        }
        for name, times in seconds.items()
    }


def main(
    blocks: Annotated[int, typer.Option(min=1)] = 12,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a text.")] = 32,
    runs: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure, and print a table. Exits with 1 if a grid differs."""
    console = Console()
    machine = describe()
    console.print(machine)
    backbone = backbone_of({**CONFIG, "num_layers": blocks}, "gpt2", "float32")
    grids, notes = contenders(backbone, length)
    results = measure(grids, runs)
    table = Table("grid", "seconds (least, most)", "ours is faster by", "difference")
    for name, result in results.items():
        low, high = result["spread"]
        shown = f"{result['seconds']:.2f} ({low:.2f}, {high:.2f})"
        table.add_row(name, shown, f"{result['ours_over_it']:.2f}", f"{result['difference']:.1e}")
    console.print(table, *notes)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine, "grids": results}, indent=1))
    if any(result["difference"] > 1e-4 for result in results.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
