"""Measure this project beside llama.cpp on a CPU: the same random weights, prompts and cores.

Each generates greedily, all rows at once, in turn, round by round. See `llama_cpp_peer.py` for what
it takes:

    python scripts/bench_llama_cpp.py llama_cpp_python-*/vendor/llama.cpp --rows 1 --rows 8
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras_hub
import numpy as np
import typer
from bench_checkpoints import CONFIGS, save
from llama_cpp_peer import LlamaCpp, convert_model

import backbone_surgery as bs

KINDS = {
    "float32": ("ALL_F32", "float32", None),
    "bfloat16": ("MOSTLY_BF16", "bfloat16", None),
    "int8": ("MOSTLY_Q8_0", "bfloat16", "int8"),
}
"""By what is compared: the type of the GGUF file; our dtype, and how we quantise."""

_PROMPT = 16


class Ours:
    """This project, on the same folder.

    Args:
        folder: of Hugging Face.
        dtype: of the backbone.
        mode: of quantisation, if any.
    """

    def __init__(self, folder: Path, dtype: str, mode: str | None) -> None:
        backbone = keras_hub.models.Backbone.from_preset(str(folder), dtype=dtype)
        self._lm = bs.CachedCausalLM(backbone)
        self._lm.compile(sampler="greedy")
        if mode is not None:
            self._lm.quantize(mode)

    def generate(self, prompts: np.ndarray, length: int) -> np.ndarray:
        """Return the new tokens of all rows."""
        inputs = {"token_ids": prompts, "padding_mask": np.ones_like(prompts)}
        result = self._lm.generate(
            inputs, max_length=length, stop_token_ids=None, strip_prompt=True
        )
        return result["token_ids"][:, : length - prompts.shape[1]]


def measure(peer: LlamaCpp, ours: Ours, rows: int, length: int, rounds: int, threads: int) -> str:
    """Let both take turns, and say how fast they are."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(1, 32000, (rows, _PROMPT), dtype=np.int32)
    runs = {
        "llama.cpp": lambda: peer.generate(prompts, length, threads),
        "ours": lambda: ours.generate(prompts, length),
    }
    tokens = [run() for run in runs.values()]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    new = rows * (length - _PROMPT)
    speeds = [f"{name} {new / statistics.median(s):.1f} tokens/s" for name, s in seconds.items()]
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    same = (tokens[0] == tokens[1]).all(axis=0)
    common = len(same) if same.all() else int(same.argmin())
    ratio = f"ours is {statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f}) times"
    return f"{', '.join(speeds)}; {ratio} as fast; the first {common} tokens are the same"


def main(
    sources: Annotated[Path, typer.Argument(help="Folder of llama.cpp's sources.")],
    model: Annotated[str, typer.Option(help="Of bench_checkpoints.py.")] = "llama_124m",
    rows: Annotated[list[int] | None, typer.Option(help="Rows at once; may be repeated.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of a row, its prompt included.")] = 256,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Measure all kinds of weights."""
    threads = len(os.sched_getaffinity(0))
    pairs: dict[str, tuple[Any, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        save(CONFIGS[model], str(folder))
        for name, (kind, dtype, mode) in KINDS.items():
            path = Path(temporary, f"{name}.gguf")
            convert_model(sources, folder, path, kind)
            pairs[name] = LlamaCpp(path), Ours(folder, dtype, mode)
        for count in rows or [1]:
            for name, (peer, ours) in pairs.items():
                text = measure(peer, ours, count, length, rounds, threads)
                typer.echo(f"{model}, {name}, {count} rows: {text}")


if __name__ == "__main__":
    typer.run(main)
