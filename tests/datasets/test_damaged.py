"""Files that cannot be read are refused by name, and lines by their row."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import backbone_surgery as bs
from tests.datasets.conftest import OPTIONS


def test_damaged_files_are_refused(lm, tmp_path):
    (tmp_path / "in.parquet").write_text("{")
    with pytest.raises(bs.SurgeryError, match=r"expected a \.parquet file"):
        bs.generate_dataset(lm, tmp_path / "in.parquet", tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize("row", [0, 9])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            b'{"prompt": [1]',
            r"""Received b'{"prompt": \[1]' \(Expecting ',' delimiter: column 15""",
        ),
        (b"[1]", "a value of type list"),
        (b"\x00", "Expecting value"),
        (b'{"prompt": "\xff"}', "'utf-8' codec can't decode byte 0xff in position 12"),
        (b"[" * 100_000, "recursion"),
        (b'{"prompt": [1], "x": [1e400]}', "1e400, which is no finite number"),
        (b'{"prompt": [1], "x": -1e999}', "-1e999, which is no finite number"),
        (b'{"prompt": [1], "x": {"y": 1, "y": 2}}', "the name 'y' 2 times"),
        (b'{"prompt": [1], "x": NaN}', "NaN, which is no finite number"),
        (b'{"prompt": [1], "x": -Infinity}', "-Infinity, which is no finite number"),
    ],
)
def test_a_line_that_holds_no_object_is_named_by_its_row(lm, rows, tmp_path, row, line, words):
    path, out = tmp_path / "in.jsonl", tmp_path / "out"
    lines = [json.dumps(each).encode() for each in rows]
    lines[row] = line
    path.write_bytes(b"\n\n".join(lines))  # empty lines are no rows
    words = rf"at row {row} of '{path}': expected a JSON object in one line\..*{words}"
    with pytest.raises(bs.SurgeryError, match=words):
        bs.generate_dataset(lm, path, out, shard_rows=4, **OPTIONS)
    with pytest.raises(bs.SurgeryError, match=words):
        bs.harvest(lm, path, out, "blocks.1", "prompt", shard_rows=4, verbose=0)
    assert not out.exists()


def test_two_columns_of_one_name_are_refused(lm, rows, tmp_path):
    prompts = pa.array([row["prompt"] for row in rows])
    table = pa.Table.from_arrays([prompts, prompts], names=["prompt", "prompt"])
    path, out = tmp_path / "in.parquet", tmp_path / "out"
    pq.write_table(table, path)
    words = f"at '{path}': expected one column 'prompt'. Received 2 of that name"
    with pytest.raises(bs.SurgeryError, match=words):
        bs.generate_dataset(lm, path, out, **OPTIONS)
    with pytest.raises(bs.SurgeryError, match=words):
        bs.harvest(lm, path, out, "blocks.1", "prompt", verbose=0)
    assert not out.exists()


def test_files_of_one_name_or_without_rows_are_refused(lm, lines, tmp_path):
    with pytest.raises(bs.SurgeryError, match="files of different names"):
        bs.generate_dataset(lm, [lines, lines / "a.jsonl"], tmp_path / "out", **OPTIONS)
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(bs.SurgeryError, match="at least one row"):
        bs.generate_dataset(lm, tmp_path / "none.jsonl", tmp_path / "out", **OPTIONS)
