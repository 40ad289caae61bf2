"""Measure how long a command takes from the shell to its first printed token, and imports.

    python scripts/bench_startup.py --runs 5

Each run is a process of its own, and the contenders take turns: `import keras_hub` and
`import backbone_surgery`, the latter also with `BACKBONE_SURGERY_LEAN=1`; `generate` with an empty
folder of compiled programs, and with the one that it left.
`--also PATH` runs them once more with the package in another checkout, to compare two commits.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from bench_machine import describe
from rich.console import Console
from rich.table import Table

SCRIPT = str(Path(sys.executable).with_name("backbone-surgery"))
GENERATE = [SCRIPT, "generate", "Once upon a time", "--stream", "--max-new-tokens", "32", "--model"]
OWN = "backbone_surgery"
MODELS = ("tiny_gpt2", "tiny_gemma")
HERE = Path(__file__).resolve().parents[1]


def seconds_of(command: list[str], checkout: Path, caches: str, lean: bool = False) -> float:
    """Return when a process wrote its first bytes, or, if it writes none, when it ended."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": "jax",
        "PYTHONPATH": str(checkout),
        "XDG_CACHE_HOME": caches,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "BACKBONE_SURGERY_LEAN": str(int(lean)),
    }
    start = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd=checkout,
    ) as process:
        output: Any = process.stdout
        output.read(1)
        seconds = time.perf_counter() - start
        output.read()
    if process.returncode:
        raise SystemExit(f"{command} in {checkout} ended with {process.returncode}")
    return seconds


def measure(checkout: Path, full: str) -> dict[str, float]:
    """Return the seconds of one run of each contender."""
    found = {}
    for package, lean in (("keras_hub", False), (OWN, False), (OWN, True)):
        name = f"import {package}" + ", lean" * lean
        found[name] = seconds_of([sys.executable, "-c", f"import {package}"], checkout, full, lean)
    for model in MODELS:
        with tempfile.TemporaryDirectory() as empty:
            cold = seconds_of([*GENERATE, model], checkout, empty)
        found[f"first token of {model}, nothing compiled before"] = cold
        warm = seconds_of([*GENERATE, model], checkout, full)
        found[f"first token of {model}, again"] = warm
    return found


def main(
    runs: Annotated[int, typer.Option(min=1, help="Processes of each contender.")] = 5,
    also: Annotated[Path | None, typer.Option(help="Another checkout of this project.")] = None,
) -> None:
    """Measure how long a command takes from the shell to its first printed token."""
    checkouts = [HERE] if also is None else [HERE, also.resolve()]
    rounds: dict[Path, list[dict[str, float]]] = {checkout: [] for checkout in checkouts}
    with tempfile.TemporaryDirectory() as full:
        for checkout in checkouts:  # fills the folder of programs, and Python's own caches
            measure(checkout, full)
        for _ in range(runs):
            for checkout in checkouts:
                rounds[checkout].append(measure(checkout, full))
    table = Table("seconds", *(checkout.name for checkout in checkouts))
    for name in rounds[HERE][0]:
        cells = []
        for checkout in checkouts:
            times = [found[name] for found in rounds[checkout]]
            least, most = min(times), max(times)
            cells.append(f"{statistics.median(times):.2f} ({least:.2f}, {most:.2f})")
        table.add_row(name, *cells)
    console = Console()
    console.print(table)
    console.print(describe())


if __name__ == "__main__":
    typer.run(main)
