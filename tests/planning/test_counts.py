"""What real shapes take on a chip does not grow; docs/accelerators.json says what it was."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.planning.test_compiled import needs

ROOT = Path(__file__).parents[2]
KNOWN = json.loads((ROOT / "docs" / "accelerators.json").read_text())
# The whole models take minutes.
CHEAP = {("h100", name) for name in ("gpt2", "gemma2", "llama3", "qwen3", "mixtral")}
CHEAP |= {("v5e", "gpt2"), ("v5e", "llama3")}
CASES = [x for x in KNOWN if x["rows"] == 8 and (x["device"], x["model"]) in CHEAP]
CASES += [x for x in KNOWN if x["rows"] == 1 and x["model"] == "mixtral"]


def load_script():
    path = ROOT / "scripts" / "measure_accelerators.py"
    spec = importlib.util.spec_from_file_location("measure_accelerators", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    "known", CASES, ids=[f"{x['model']} {x['device']} {x['rows']}" for x in CASES]
)
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
    """What is moved, what is needed besides, and never more than KerasHub."""
    for line in KNOWN:
        own, other = line["ours"], line["keras_hub"]
        few = line["rows"] <= 8
        if "error" not in other:  # its compiler broke
            assert own["estimated_seconds"] <= other["estimated_seconds"]
            assert own["temporary_bytes"] <= other["temporary_bytes"]
            assert own["kernels"] <= other["kernels"]
            # Of a small model and 1 row, KerasHub's keep a table on the chip of a v5e.
            if (line["device"], line["rows"]) != ("v5e", 1):
                assert own["step_bytes"] <= other["step_bytes"]
        if few:
            # GPT-2 on a v5p misses the aim of 0.01.
            most = 0.042 if (line["model"], line["device"]) == ("gpt2", "v5p") else 0.01
            assert own["temporary_bytes"] <= most * line["least_bytes"]
        if line["device"] == "h100":
            # Of many rows XLA adds up sums of pieces: GPT-2 misses the aim of 1.25.
            assert own["step_bytes"] <= (1.10 if few else 1.37) * line["least_bytes"]
            assert own["temporary_bytes"] <= 0.02 * line["least_bytes"]
            assert own["copied_bytes"] == 0
