"""What real shapes take on a chip does not grow; docs/accelerators.json says what it was."""

import itertools
import json
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from backbone_surgery import graph
from backbone_surgery.opening.int4 import policy_of
from tests.families import ROWS
from tests.planning.test_compiled import needs

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import measure_accelerators  # noqa: E402
from accelerator_models import in_int4  # noqa: E402

KNOWN = json.loads((ROOT / "docs" / "accelerators.json").read_text())
# The whole models take minutes.
CHEAP = {("h100", name) for name in ("gpt2", "gemma2", "llama3", "qwen3", "mixtral")}
CHEAP |= {("v5e", "gpt2"), ("v5e", "llama3")}
CASES = [x for x in KNOWN if x["rows"] == 8 and (x["device"], x["model"]) in CHEAP]
CASES += [x for x in KNOWN if x["rows"] == 1 and x["model"] == "mixtral"]
CASES += [x for x in KNOWN if x["rows"] == 8 and x["device"] == "v5p" and x["model"] == "gpt2"]
CASES += [x for x in KNOWN if x["rows"] == 64 and x["device"] == "h100" and x["model"] == "gpt2"]
INT4 = json.loads((ROOT / "docs" / "int4.json").read_text())
MESHES = json.loads((ROOT / "docs" / "meshes.json").read_text())
TITLES = {
    "qwen3": "Qwen 3 8B",
    "llama3": "Llama 3 8B",
    "gemma2": "Gemma 2 2B",
    "gpt2": "GPT-2 124M",
}


def check_counts(known, int4=False):
    needs(known["device"])
    case = (known[name] for name in ("model", "device", "rows"))
    least, now = measure_accelerators.ours(*case, int4)
    before = known["ours"]
    assert least == known["least_bytes"]
    new = Counter(now.get("instructions")) - Counter(before.get("instructions"))
    names = ("kernels", "transfers", "copied_bytes", "step_bytes", "temporary_bytes")
    for name in (*names, "estimated_seconds"):
        known_before = before.get(name, 0)  # a GPU has no transfers
        assert now[name] <= known_before, f"{name}: {now[name]} after {known_before}; new: {new}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "known", CASES, ids=[f"{x['model']} {x['device']} {x['rows']}" for x in CASES]
)
@pytest.mark.usefixtures("half_precision")
def test_counts_do_not_grow(known):
    check_counts(known)


@pytest.mark.slow
@pytest.mark.parametrize(
    "known", INT4[::3], ids=lambda x: f"{x['model']} {x['device']} {x['rows']}"
)
@pytest.mark.usefixtures("half_precision")
def test_counts_of_four_bits_do_not_grow(known):
    check_counts(known, int4=True)


@pytest.mark.slow
@pytest.mark.parametrize("known", MESHES[::5], ids=lambda x: f"{x['model']} {x['device']}")
@pytest.mark.usefixtures("half_precision")
def test_exchanges_do_not_grow(known):
    needs(known["device"])
    _, now = measure_accelerators.ours(known["model"], known["device"], known["rows"])
    for name in ("kernels", "copied_bytes", "step_bytes", "temporary_bytes"):
        assert now[name] <= known["ours"][name], name
    assert now["collectives"] == known["ours"]["collectives"]


def test_meshes_exchange_what_is_on_paper_and_nothing_else():
    """Two sums a block and three more; what all rows have ended by may go along with another."""
    for line in MESHES:
        found, paper = (line["ours"][name] for name in ("collectives", "on_paper"))
        assert set(found) == {"all-reduce"}, line
        with_rows = line["device"] == "h100:2x4"
        # A block of Gemma 4 has an MLP beside its mixture; the sums of both go together.
        beside = 4 if line["model"] == "gemma4" else 0
        least = paper["all-reduce"] - with_rows - beside
        assert least <= found["all-reduce"] <= paper["all-reduce"] - beside, line
        # 12 heads and 50,257 tokens of GPT-2, and 8 heads on 16 chips, do not divide.
        if line["model"] != "gpt2" and (line["model"], line["device"]) != ("gemma2", "v5e:4x4"):
            assert paper["all-reduce"] == 2 * 4 + 3 + with_rows + beside
        # No second copy of caches; where heads come several times, of a part of some kernels.
        most = 0.01 if line["device"] == "v5e:2x2" else 0.05
        if (line["model"], line["device"]) == ("gemma4", "v5e:4x4"):
            most = 0.061  # it turns its caches once, before the loop
        assert line["ours"]["temporary_bytes"] <= most * line["ours"]["least_bytes"]


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
            assert own["step_bytes"] <= (1.10 if few else 1.38) * line["least_bytes"]
            assert own["temporary_bytes"] <= 0.02 * line["least_bytes"]
            assert own["copied_bytes"] == 0


def test_the_guide_says_of_four_bits_what_is_on_record():
    def found(lines, name, device, rows):
        case = {"model": name, "device": device, "rows": rows}
        return next(x["ours"] for x in lines if case.items() <= x.items())

    wanted = []
    for (name, title), rows in itertools.product(TITLES.items(), (1, 8)):
        cells = [title if rows == 1 else "", str(rows)]
        for device in ("h100", "v5e"):
            own, wide = (found(lines, name, device, rows) for lines in (INT4, KNOWN))
            moved, before = own["step_bytes"], wide["step_bytes"]
            cells += [f"{moved / 1e6:,.0f}", f"{moved / before:.2f}"]
        cells += [f"{x['estimated_seconds'] * 1e6:,.0f}" for x in (own, wide)]
        wanted.append(cells)
    text = (ROOT / "docs" / "accelerators.md").read_text()
    (table,) = re.findall(r"^\| in int4 .*\n\|[-|]*\n((?:\|.*\n)*)", text, re.M)
    assert [[x.strip() for x in line[1:-1].split("|")] for line in table.splitlines()] == wanted


def test_four_bits_are_exchanged_no_more_than_others():
    for line in INT4:
        if ":" in line["device"]:
            case = {name: line[name] for name in ("model", "device", "rows")}
            wide = next(x["ours"] for x in MESHES if case.items() <= x.items())
            own = line["ours"]
            assert own["collectives"] == own["on_paper"] == wide["collectives"]
            assert own["step_bytes"] <= 0.5 * wide["step_bytes"]


def in_four_bits(backbone):
    """Return how layers are quantised, and which weights they have of which shapes and dtypes."""
    layers = [x for x in graph.layers_within(backbone) if x.quantization_mode]
    return {
        x.path: (
            policy_of(x).name,
            x.inputs_quantizer,
            {v.name: (v.shape, v.dtype) for v in graph.own_weights(x)},
        )
        for x in layers
    }


@pytest.mark.slow
@pytest.mark.usefixtures("no_collecting")
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "llama", "qwen3"])
def test_four_bits_without_values_are_what_quantize_makes(name):
    wanted = ROWS[name].make()
    wanted({x.name: np.ones((1, 2), "int32") for x in wanted.inputs})
    wanted.quantize("int4")
    with graph.without_values():
        backbone = ROWS[name].make()
    assert in_four_bits(in_int4(backbone)) == in_four_bits(wanted)
