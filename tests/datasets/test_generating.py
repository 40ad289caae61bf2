"""`generate_dataset`: each row gets the text that `generate` gives it alone."""

import hashlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import backbone_surgery as bs
from tests.datasets.conftest import OPTIONS, ROWS, make_lm, read_lines

CONTROLS = {"mood": "strength"}


def seed_of(name, seed=0):
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "big")


def alone(lm, row, name, strength):
    ids = np.array([row["prompt"]])
    options = {k: v for k, v in OPTIONS.items() if k != "batch_size"}
    result = lm.generate(
        {"token_ids": ids, "padding_mask": np.ones_like(ids)},
        seed=seed_of(name),
        controls={"mood": strength},
        strip_prompt=True,
        **options,
    )
    return result["token_ids"][0][result["padding_mask"][0]].tolist()


def test_rows_of_json_lines_give_what_they_give_alone(lm, lines, rows, tmp_path):
    paths = bs.generate_dataset(
        lm, lines, tmp_path / "out", controls=CONTROLS, shard_rows=3, **OPTIONS
    )
    assert [p.name for p in paths] == [
        *(f"a-0000{i}.jsonl" for i in range(3)),
        *(f"b-0000{i}.jsonl" for i in range(2)),
    ]
    written = read_lines(paths)
    names = [f"a.jsonl/{i}" for i in range(7)] + [f"b.jsonl/{i}" for i in range(4)]
    for row, whole, name in zip(rows, written, names, strict=True):
        assert whole == {**row, "generated": alone(lm, row, name, row["strength"])}


def test_rows_name_their_vectors(lm, lines, rows, tmp_path):
    rng = np.random.default_rng(5)
    vectors = {name: bs.ControlVector({1: rng.normal(size=8) * 9}) for name in ("up", "down")}
    for i, row in enumerate(rows):
        row["vector"] = ("up", "down")[i % 2]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {**OPTIONS, "controls": {"mood": ("strength", "vector")}, "vectors": vectors}
    [path] = bs.generate_dataset(lm, tmp_path / "in.jsonl", tmp_path / "out", **options)
    for i, (row, whole) in enumerate(zip(rows, read_lines([path]), strict=True)):
        control = bs.Control(row["strength"], vectors[row["vector"]])
        assert whole["generated"] == alone(lm, row, f"in.jsonl/{i}", control)
    options["vectors"] = {"up": vectors["up"]}
    with pytest.raises(bs.SurgeryError, match="one of the vectors up"):
        bs.generate_dataset(lm, tmp_path / "in.jsonl", tmp_path / "other", **options)
    options["vectors"] = {"up": 3}
    with pytest.raises(bs.SurgeryError, match="expected control vectors by name"):
        bs.generate_dataset(lm, tmp_path / "in.jsonl", tmp_path / "third", **options)


def test_rows_of_parquet_keep_their_types(lm, rows, tmp_path):
    schema = pa.schema(
        {"name": pa.string(), "prompt": pa.list_(pa.int32()), "strength": pa.float32()}
    )
    table = pa.Table.from_pylist(rows, schema=schema)
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    options = {**OPTIONS, "id_column": "name", "output_column": "new", "shard_rows": 5}
    paths = bs.generate_dataset(lm, tmp_path / "in.parquet", tmp_path / "out", **options)
    written = pa.concat_tables([pq.read_table(path) for path in paths])
    assert written.drop_columns("new").equals(table)
    for row, new in zip(rows, written["new"].to_pylist(), strict=True):
        assert new == alone(lm, row, repr(row["name"]), 0.5)


def test_a_job_that_is_ended_goes_on_where_it_was(lm, lines, tmp_path):
    options = {**OPTIONS, "controls": CONTROLS, "shard_rows": 2}
    whole = bs.generate_dataset(lm, lines, tmp_path / "whole", score=len, **options)
    calls = 0

    def interrupted(text):
        nonlocal calls
        calls += 1
        if calls in (3, 8):
            raise KeyboardInterrupt
        return len(text)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            bs.generate_dataset(lm, lines, tmp_path / "out", score=interrupted, **options)
        (tmp_path / "out" / ".a-00003.jsonl.0123.new").write_text("half of it")
    paths = bs.generate_dataset(lm, lines, tmp_path / "out", score=interrupted, **options)
    assert calls == ROWS + 2  # the row at which it was interrupted, twice
    assert {p.name: p.read_bytes() for p in paths} == {p.name: p.read_bytes() for p in whole}
    folders = (sorted(p.name for p in paths[0].parent.iterdir()) for paths in (paths, whole))
    assert len(set(map(tuple, folders))) == 1
    before = {p: p.stat().st_mtime_ns for p in paths}
    bs.generate_dataset(make_lm, lines, tmp_path / "out", score=interrupted, **options)
    assert {p: p.stat().st_mtime_ns for p in paths} == before


def test_another_job_in_the_same_folder_is_refused(lm, lines, tmp_path):
    out = tmp_path / "out"
    bs.generate_dataset(lm, lines, out, **OPTIONS)
    others = {
        "options": {"max_new_tokens": 6},
        "controls": {"controls": {"mood": bs.Control(0.5, tokens="prompt")}},
        "outputs": {"shard_rows": 2},
        "columns": {"output_column": "new"},
        "scores": {"score": len},
    }
    for words, other in others.items():
        with pytest.raises(bs.SurgeryError, match=f"Received another {words}"):
            bs.generate_dataset(lm, lines, out, **{**OPTIONS, **other})
    with pytest.raises(bs.SurgeryError, match="Received another edit"):
        bs.generate_dataset(bs.CachedCausalLM(lm.opened.owner), lines, out, **OPTIONS)
    (lines / "a.jsonl").write_text(json.dumps({"prompt": [1]}) + "\n")
    with pytest.raises(bs.SurgeryError, match="Received another inputs"):
        bs.generate_dataset(lm, lines, out, **OPTIONS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": "nowhere.parquet"}, "expected a .parquet or .jsonl file that exists"),
        ({"column": "promt"}, "expected a column 'promt'. .*'prompt'"),
        ({"controls": {"mood": "strenght"}}, "expected a column 'strenght'"),
        ({"controls": {"mod": 1.0}}, "Did you mean 'mood'"),
        ({"controls": {"mood": "name"}}, "row 0 of .*expected a number in column 'name'"),
        ({"column": "strength"}, "row 0 of .*expected a prompt in column 'strength'"),
        ({"output_column": "name"}, r"expected no column \['name'\]"),
        ({"id_column": "ids"}, "expected a column 'ids'"),
        ({"batch_size": 0}, "at 'batch_size'"),
        ({"seed": "x"}, "at 'seed'"),
        ({"shard_rows": 0}, "at 'shard_rows'"),
        ({"max_new_tokens": None}, "at 'max_new_tokens'"),
        ({"max_new_tokens": 40}, "at most 32 tokens"),
        ({"score": 3}, "at 'score'"),
        ({"score": {"generated": len}}, "where the texts go"),
        ({"inputs": 3}, "expected a path"),
        ({"controls": {"mood": ("strength", "nam")}}, "expected a column 'nam'"),
        ({"controls": {"mood": ("strength", "name")}}, r"one of the vectors \(none\)"),
        ({"lm": 3}, "expected a `CachedCausalLM`"),
        ({"ray": "auto"}, "expected a function that makes a `CachedCausalLM`"),
        ({"output": "no/such/folder"}, "in one that exists"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(lm, lines, tmp_path, change, words):
    arguments = {"lm": lm, "inputs": lines, "output": tmp_path / "out", **OPTIONS, **change}
    with pytest.raises(bs.SurgeryError, match=words):
        bs.generate_dataset(**arguments)
    assert not (tmp_path / "out").exists()


def test_columns_of_later_rows_are_not_written_over(lm, rows, tmp_path):
    rows[9]["generated"] = "years of work"
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(bs.SurgeryError, match=r"expected no column \['generated'\]"):
        bs.generate_dataset(lm, tmp_path / "in.jsonl", tmp_path / "out", **OPTIONS)
    del rows[9]["generated"], rows[5]["name"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {**OPTIONS, "id_column": "name"}
    with pytest.raises(bs.SurgeryError, match=r"row 5 of .*expected an id in column 'name'"):
        bs.generate_dataset(lm, tmp_path / "in.jsonl", tmp_path / "ids", **options)


def test_a_row_that_cannot_be_run_is_named(lm, rows, tmp_path):
    rows[8]["prompt"] = list(range(1, 30))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(bs.SurgeryError, match=r"rows 8 to 10 of .*at most 32"):
        bs.generate_dataset(lm, tmp_path / "in.jsonl", tmp_path / "out", shard_rows=4, **OPTIONS)
    assert len(list((tmp_path / "out").glob("in-*.jsonl"))) == 2


def test_other_files_are_left_alone(lm, lines, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(bs.SurgeryError, match="Received one that holds"):
        bs.generate_dataset(lm, lines, tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize("text", ["{", "[1]\n", "\x00"])
def test_damaged_files_are_refused(lm, tmp_path, text):
    for ending in (".jsonl", ".parquet"):
        (tmp_path / f"in{ending}").write_text(text)
        with pytest.raises(bs.SurgeryError, match=f"expected a {ending} file"):
            bs.generate_dataset(lm, tmp_path / f"in{ending}", tmp_path / "out", **OPTIONS)


def test_files_of_one_name_or_without_rows_are_refused(lm, lines, tmp_path):
    with pytest.raises(bs.SurgeryError, match="files of different names"):
        bs.generate_dataset(lm, [lines, lines / "a.jsonl"], tmp_path / "out", **OPTIONS)
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(bs.SurgeryError, match="at least one row"):
        bs.generate_dataset(lm, tmp_path / "none.jsonl", tmp_path / "out", **OPTIONS)
