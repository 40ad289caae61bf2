"""What real shapes take on a chip does not grow; docs/accelerators.json says what it was."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.planning.test_compiled import needs

ROOT = Path(__file__).parents[2]
KNOWN = json.loads((ROOT / "docs" / "accelerators.json").read_text())
CASES = [line for line in KNOWN if line["rows"] == 8 and line["device"] == "h100"]


def load_script():
    path = ROOT / "scripts" / "measure_accelerators.py"
    spec = importlib.util.spec_from_file_location("measure_accelerators", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("known", CASES, ids=[line["model"] for line in CASES])
@pytest.mark.usefixtures("half_precision")
def test_counts_do_not_grow(known):
    needs(known["device"])
    least, now = load_script().ours(known["model"], known["device"], known["rows"])
    before = known["ours"]
    assert least == known["least_bytes"]
    new = Counter(now["instructions"]) - Counter(before["instructions"])
    for name in ("kernels", "copied_bytes", "step_bytes", "temporary_bytes"):
        assert now[name] <= before[name], f"{name}: {now[name]} after {before[name]}; new: {new}"


def test_what_is_on_record_keeps_what_was_promised():
    """Of an H100: what is moved, what is needed besides, and never more than KerasHub."""
    for line in KNOWN:
        own, other = line["ours"], line["keras_hub"]
        assert own["kernels"] <= other["kernels"]
        if line["device"] == "h100":
            few = line["rows"] <= 8
            # Of many rows XLA adds up sums of pieces: GPT-2 misses the aim of 1.25.
            assert own["step_bytes"] <= (1.10 if few else 1.37) * line["least_bytes"]
            assert own["temporary_bytes"] <= (0.01 if few else 0.02) * line["least_bytes"]
            assert own["step_bytes"] <= other["step_bytes"]
            assert own["copied_bytes"] == 0
