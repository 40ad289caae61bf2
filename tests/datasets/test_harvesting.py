"""`harvest`: activations in files are those of the edited model."""

import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

import backbone_surgery as bs
from tests.datasets.conftest import make_lm

SITES = ["blocks.*", "blocks.0.head_outputs"]
OPTIONS = {"column": "prompt", "batch_size": 4, "verbose": 0}


def read(path, site):
    """Return row numbers, positions, token ids and the values at a site."""
    table = pq.read_table(path)
    values = table[site].combine_chunks()
    columns = [table[name].to_numpy() for name in ("row", "position", "token_id")]
    return *columns, values.flatten().to_numpy().reshape(len(table), -1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "float32"])
def test_activations_are_those_of_the_edited_model(lm, lines, rows, tmp_path, dtype):
    options = {**OPTIONS, "dtype": dtype, "controls": {"mood": 2.0}, "shard_rows": 5}
    paths = bs.harvest(lm, lines, tmp_path / "out", SITES, **options)
    assert [path.name for path in paths] == [
        "a-00000.parquet",
        "a-00001.parquet",
        "b-00000.parquet",
    ]
    steer = replace(lm.opened.rewrites[0], strength=2.0)
    model = bs.operate(lm.opened.owner, [steer, bs.Capture(*SITES)])
    counts = {"a": 7, "b": 4}
    first = {"a": 0, "b": 7}
    prompts = [row["prompt"] for row in rows]
    ids, mask = np.zeros((2, len(rows), max(map(len, prompts))), "int32")
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)], mask[i, : len(prompt)] = prompt, 1
    inputs = model.with_defaults({"token_ids": ids, "padding_mask": mask})
    captures = model(inputs)["captures"]
    for site in ("blocks.0", "blocks.1", "blocks.0.head_outputs"):
        read_rows = dict.fromkeys(counts, 0)
        for path in paths:
            row, position, ids, values = read(path, site)
            assert values.dtype == dtype
            name = path.stem[0]
            for number in sorted(set(row.tolist())):
                read_rows[name] += 1
                prompt = rows[first[name] + number]["prompt"]
                chosen = row == number
                np.testing.assert_array_equal(position[chosen], np.arange(len(prompt)))
                np.testing.assert_array_equal(ids[chosen], prompt)
                wanted = captures[site][first[name] + number, : len(prompt)]
                wanted = np.asarray(wanted, "float32")
                tolerance = 1e-5 if dtype == "float32" else 2e-3
                wanted = wanted.reshape(len(prompt), -1)
                np.testing.assert_allclose(values[chosen], wanted, atol=tolerance, rtol=tolerance)
        assert read_rows == counts


def test_an_array_may_name_the_sites(lm, lines, tmp_path):
    paths = bs.harvest(lm, lines, tmp_path / "out", np.array(SITES), **OPTIONS)
    names = ["blocks.0", "blocks.1", "blocks.0.head_outputs"]
    assert sorted(pq.read_table(paths[0]).column_names[3:]) == sorted(names)


def test_a_harvest_that_is_ended_goes_on(lm, lines, tmp_path):
    whole = bs.harvest(lm, lines, tmp_path / "whole", "blocks.1", shard_rows=2, **OPTIONS)
    out = tmp_path / "out"
    bs.harvest(lm, lines, out, "blocks.1", shard_rows=2, **OPTIONS)
    (out / "a-00002.parquet").unlink()
    paths = bs.harvest(lm, lines, out, "blocks.1", shard_rows=2, **OPTIONS)
    assert [p.read_bytes() for p in paths] == [p.read_bytes() for p in whole]
    assert len(pq.read_table(out)) == sum(len(pq.read_table(path)) for path in paths)


@pytest.mark.slow
def test_empty_texts_have_no_rows(tmp_path):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    for name, texts in {"some": ["", "Tom ran.", ""], "none": ["", ""]}.items():
        text = "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(text)
        options = {**OPTIONS, "shard_rows": 10}
        [path] = bs.harvest(lm, tmp_path / f"{name}.jsonl", tmp_path / name, "blocks.1", **options)
        assert set(pq.read_table(path)["row"].to_pylist()) == ({1} if name == "some" else set())


def test_long_texts_are_refused_or_cut(lm, tmp_path):
    prompt = list(range(1, 41))
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": prompt}))
    words = "jsonl': expected texts of at most 32 tokens.* Pass `length=32` to cut such texts"
    with pytest.raises(bs.SurgeryError, match=words):
        bs.harvest(lm, tmp_path / "in.jsonl", tmp_path / "out", "blocks.1", **OPTIONS)
    options = {**OPTIONS, "length": 9}
    [path] = bs.harvest(lm, tmp_path / "in.jsonl", tmp_path / "cut", "blocks.1", **options)
    assert pq.read_table(path)["token_id"].to_pylist() == prompt[:9]


@pytest.mark.slow
@pytest.mark.parametrize("text", [None, [1, 99], [1] * 40])
def test_a_bad_row_found_late_is_named_before_anything_is_written(lm, tmp_path, text):
    path = tmp_path / "in.jsonl"
    texts = [[1, 2], [], [3], [], text]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    with pytest.raises(bs.SurgeryError, match=f"row 4 of '{path}'"):
        bs.harvest(lm, path, tmp_path / "out", "blocks.1", shard_rows=3, **OPTIONS)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_float16_cannot_hold_is_refused(lines, tmp_path):
    lm = make_lm()
    options = {**OPTIONS, "controls": {"mood": 1e6}}
    with pytest.raises(
        bs.SurgeryError, match=r"at row \d+ of .*site 'blocks.1': expected .*float16 can"
    ):
        bs.harvest(lm, lines, tmp_path / "out", "blocks.*", **options)
    assert not list((tmp_path / "out").glob("*.parquet"))
    bs.harvest(lm, lines, tmp_path / "wide", "blocks.*", **{**options, "dtype": "float32"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sites": "blocks.7"}, "blocks.7"),
        ({"sites": []}, r"^harvest at 'sites': expected site selectors, at least.*Received \[\]"),
        ({"sites": np.array([])}, "^harvest at 'sites': .*Received array"),
        ({"sites": ["blocks.1", 3]}, r"^harvest at 'sites': .*Received \['blocks.1', 3\]"),
        ({"sites": None}, "^harvest at 'sites': .*Received None"),
        ({"sites": "blocks.0.attention_pattern"}, "Received an attention pattern"),
        ({"dtype": "int8"}, "expected 'float16' or 'float32'"),
        ({"length": 0}, "at 'length'"),
        ({"controls": {"mood": "strength"}}, "mood"),
        ({"controls": {"mod": 1.0}}, "^harvest at control 'mod'"),
        ({"column": "txt"}, "expected a column 'txt'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(lm, lines, tmp_path, change, words):
    arguments = {"sites": "blocks.1", **OPTIONS, **change}
    with pytest.raises(bs.SurgeryError, match=words):
        bs.harvest(lm, lines, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
