"""Shards hold each row of a file once, in order."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import backbone_surgery as bs
from backbone_surgery.datasets.shards import JsonRows, find_shards, forget


@pytest.mark.parametrize("most", [1, 2, 3, 7, 100])
def test_shards_hold_each_row_once(tmp_path, most):
    rows = [{"n": i, "text": f"größe {i}\u2028"} for i in range(7)]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    blank = "\n  \n".join(lines).rstrip("\n")  # the last line ends without one
    (tmp_path / "a.jsonl").write_text("\n" + blank, encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet", row_group_size=3)
    shards = find_shards("test", tmp_path, most)
    for name in ("a.jsonl", "b.parquet"):
        own = [shard for shard in shards if shard.file.name == name]
        assert [shard.stop - shard.start for shard in own[:-1]] == [most] * (len(own) - 1)
        assert [n for shard in own for n in shard.read().column("n")] == list(range(7))
        texts = [text for shard in own for text in shard.read(["text"]).column("text")]
        assert texts == [row["text"] for row in rows]


@pytest.mark.parametrize("rows", [3, 10, 20])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_file_that_was_changed_since_is_refused(tmp_path, ending, rows):
    """It may be shorter by then, or have as many rows, of another text."""

    def write(text, count):
        made = [{"text": f"{text} {i}"} for i in range(count)]
        if ending == "parquet":
            pq.write_table(pa.Table.from_pylist(made), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in made))

    path = tmp_path / f"in.{ending}"
    write("a", 10)
    first, second = find_shards("test", path, 5)
    assert first.read().column("text")[0] == "a 0"
    write("b", rows)
    for shard in (first, second):
        with pytest.raises(bs.SurgeryError, match="expected the file as it was when the job began"):
            shard.read()
    forget()


@pytest.mark.parametrize("most", [2, 5])
def test_row_groups_are_decoded_once(tmp_path, monkeypatch, most):
    rows = [{"n": i, "other": -i} for i in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet", row_group_size=8)
    decoded = []

    def counting(file, *args, read=pq.ParquetFile.read_row_group, **kwargs):
        decoded.append(args)
        return read(file, *args, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counting)
    shards = find_shards("test", tmp_path, most)
    assert [n for shard in shards for n in shard.read(["n"]).column("n")] == list(range(20))
    assert len(decoded) == 3
    forget()


def test_lines_of_output_are_lines_to_python(tmp_path):
    rows = [{"text": f"größe{chr(code)}"} for code in (*range(32), 0x85, 0x2028, 0x2029)]
    path = tmp_path / "out.jsonl"
    JsonRows(rows).write(path, {"new": ["\x85é" for _ in rows]})
    text = path.read_text(encoding="utf-8")
    assert [json.loads(line) for line in text.splitlines()] == [
        {**row, "new": "\x85é"} for row in rows
    ]
    assert r"größe\u2028" in text


def test_half_a_pair_of_surrogates_is_written(tmp_path):
    rows = [{"cut": "\ud83d"}, {"cut": "größe"}]
    JsonRows(rows).write(tmp_path / "out.jsonl", {"new": ["é\ude00", "é"]})
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines[1] == '{"cut": "größe", "new": "é"}'
    assert json.loads(lines[0]) == {"cut": "\ud83d", "new": "é\ude00"}
