"""The benchmark of leaks runs, and finds none of nodes in a few rounds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_few_rounds_keep_no_nodes():
    command = [sys.executable, "scripts/bench_leaks.py", "--rounds", "3", "--warm-up", "1"]
    result = subprocess.run(
        [*command, "--every", "1", "--limit", "1000"],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT)},
        timeout=600,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    _, *rows, summary = result.stdout.strip().splitlines()
    assert [int(row.split()[0]) for row in rows] == [1, 2, 3]
    assert len({row.split()[-1] for row in rows}) == 1
    assert summary.startswith("grown by")
    assert summary.endswith("in 2 rounds")
