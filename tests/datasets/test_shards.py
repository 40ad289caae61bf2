"""Shards hold each row of a file once, in order."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backbone_surgery.datasets.shards import find_shards


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
