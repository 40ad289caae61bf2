"""The benchmark runs, and its contenders give the same tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_quick_runs_without_pytorch_and_tokens_agree(tmp_path):
    output = tmp_path / "figures.json"
    command = [sys.executable, "scripts/bench.py", "--quick", "--only-keras", "--runs", "1"]
    subprocess.run(
        [*command, "--json", str(output), "--plot", str(tmp_path / "figures.png")],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=600,
        capture_output=True,
    )
    rows = {row["name"]: row["contenders"] for row in json.loads(output.read_text())["rows"]}
    assert {name: [c["name"] for c in field] for name, field in rows.items()} == {
        "gpt2_128": ["ours", "keras_hub"],
        "first_token": ["ours", "keras_hub"],
        "strengths": ["ours"],
        "steering": ["ours_steered", "ours"],
        "capture": ["ours_capturing", "ours"],
        "stream": ["ours_streaming", "ours"],
        "llama": ["ours", "keras_hub"],
        "gemma": ["ours", "keras_hub"],
    }
    assert all(c["differs_from"] is None for field in rows.values() for c in field)
    assert rows["gpt2_128"][0]["distinct_tokens"] >= 3
    assert (tmp_path / "figures.png").stat().st_size > 0


@pytest.mark.slow
def test_a_contender_with_other_tokens_is_reported():
    code = """
import sys
sys.path.insert(0, "scripts")
import numpy as np, typer, bench, bench_peers

class Wrong(bench_peers.KerasHub):
    def generate(self, work, stop=()):
        tokens = np.array(super().generate(work, stop))
        tokens[:, 5:] += 1
        return tokens

bench_peers.KerasHub = Wrong
bench.main(row=["gpt2_128"], runs=1, quick=True, only_keras=True, json_file=None, plot_file=None)
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT)},
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "gpt2_128: keras_hub differs from token 5" in result.stdout


@pytest.mark.slow
def test_grids_agree(tmp_path):
    """`patch_grid` gives what a loop over its cells does; the script exits with 1 otherwise."""
    output = tmp_path / "grid.json"
    options = ["--blocks", "2", "--length", "4", "--runs", "1", "--json", str(output)]
    subprocess.run(
        [sys.executable, "scripts/bench_grid.py", *options],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=600,
        capture_output=True,
    )
    grids = json.loads(output.read_text())["grids"]
    assert {"patch_grid", "a loop"} <= set(grids)
    assert grids["a loop"]["difference"] <= 1e-4
