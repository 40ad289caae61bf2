"""`generate_dataset`: each row gets the text that `generate` gives it alone."""

import functools
import hashlib
import json
import re
from decimal import Decimal

import jax.numpy as jnp
import keras
import keras_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import backbone_surgery as bs
from backbone_surgery.datasets.shards import Shard
from backbone_surgery.errors import shown
from backbone_surgery.files import hidden_beside
from tests.datasets.conftest import OPTIONS, ROWS, make_lm, read_lines
from tests.helpers import make_gpt2

CONTROLS = {"mood": "strength"}
CALLS = []
"""What counts as another function is what one closes over, not the globals that it reads."""


def seed_of(name, seed=0):
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "big")


def alone(lm, row, name, strength, control="mood"):
    ids = np.array([row["prompt"]])
    options = {k: v for k, v in OPTIONS.items() if k != "batch_size"}
    result = lm.generate(
        {"token_ids": ids, "padding_mask": np.ones_like(ids)},
        seed=seed_of(name),
        controls={control: strength},
        strip_prompt=True,
        **options,
    )
    return result["token_ids"][0][result["padding_mask"][0]].tolist()


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_an_id_that_is_missing_in_parquet_is_refused(lm, rows, tmp_path):
    """pandas writes NaN for it; all such rows would have one seed."""
    table = pa.table({"prompt": [row["prompt"] for row in rows], "id": [1.0, *[np.nan] * 10]})
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(bs.SurgeryError, match=r"row 1 of .*expected an id in column 'id'.* nan"):
        bs.generate_dataset(
            lm, tmp_path / "in.parquet", tmp_path / "out", id_column="id", **OPTIONS
        )


@pytest.mark.slow
def test_strengths_may_be_decimal_numbers(lm, rows, tmp_path):
    rows = [{**row, "strength": round(row["strength"], 2)} for row in rows]
    path, options = tmp_path / "in.parquet", {**OPTIONS, "controls": CONTROLS}
    wanted = [alone(lm, row, f"in.parquet/{i}", row["strength"]) for i, row in enumerate(rows)]
    decimals = [{**row, "strength": Decimal(f"{row['strength']:.2f}")} for row in rows]
    pq.write_table(pa.Table.from_pylist(decimals), path)
    [written] = bs.generate_dataset(lm, path, tmp_path / "out", **options)
    assert pq.read_table(written)["generated"].to_pylist() == wanted
    assert pq.read_table(written)["strength"].to_pylist() == [row["strength"] for row in decimals]
    pq.write_table(pa.Table.from_pylist([{**decimals[0], "strength": Decimal("1e60")}]), path)
    with pytest.raises(bs.SurgeryError, match=r"expected a number .* Received Decimal"):
        bs.generate_dataset(lm, path, tmp_path / "other", **options)


def test_a_job_that_is_ended_goes_on_where_it_was(lm, lines, tmp_path):
    options = {**OPTIONS, "controls": CONTROLS, "shard_rows": 2}
    whole = bs.generate_dataset(lm, lines, tmp_path / "whole", score=len, **options)
    CALLS.clear()

    def interrupted(text):
        CALLS.append(text)
        if len(CALLS) in (3, 8):
            raise KeyboardInterrupt
        return len(text)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            bs.generate_dataset(lm, lines, tmp_path / "out", score=interrupted, **options)
        hidden_beside(tmp_path / "out" / "a-00003.jsonl").write_text("half of it")
    (tmp_path / "out" / whole[-1].name).symlink_to(tmp_path / "elsewhere")
    paths = bs.generate_dataset(lm, lines, tmp_path / "out", score=interrupted, **options)
    assert len(CALLS) == ROWS + 2  # the row at which it was interrupted, twice
    assert {p.name: p.read_bytes() for p in paths} == {p.name: p.read_bytes() for p in whole}
    assert (tmp_path / "elsewhere").read_bytes() == whole[-1].read_bytes()  # through the link
    folders = (sorted(p.name for p in paths[0].parent.iterdir()) for paths in (paths, whole))
    assert len(set(map(tuple, folders))) == 1
    before = {p: p.stat().st_mtime_ns for p in paths}
    bs.generate_dataset(make_lm, lines, tmp_path / "out", score=interrupted, **options)
    assert {p: p.stat().st_mtime_ns for p in paths} == before


@pytest.mark.slow
def test_another_job_in_the_same_folder_is_refused(lm, lines, tmp_path):
    out = tmp_path / "out"
    bs.generate_dataset(lm, lines, out, **OPTIONS)
    others = {
        r"options\.max_new_tokens \(5 there, 6 here\)\. Choose": {"max_new_tokens": 6},
        r"options\.stop_token_ids \(None there, .*stop_sequences": {
            "stop_token_ids": [3],
            "stop_sequences": [[4, 5]],
        },
        "controls.values .'sha256:": {"controls": {"mood": bs.Control(0.5, tokens="prompt")}},
        r"outputs\.a-00000\.jsonl\.1 \(7 there, 2 here.* \[2, 4\] here.*, and 2 more\. Ch": {
            "shard_rows": 2
        },
        r"columns\.output_column \('generated' there, 'new' here": {"output_column": "new"},
        r"scores\.score \(None there, {'function': 'builtins\.len'": {"score": len},
    }
    for words, other in others.items():
        with pytest.raises(bs.SurgeryError, match=f"differs in: {words}"):
            bs.generate_dataset(lm, lines, out, **{**OPTIONS, **other})
    with pytest.raises(bs.SurgeryError, match=r"differs in: edit\.rewrites"):
        bs.generate_dataset(bs.CachedCausalLM(lm.opened.owner), lines, out, **OPTIONS)
    (lines / "a.jsonl").write_text(json.dumps({"prompt": [1]}) + "\n")
    with pytest.raises(
        bs.SurgeryError, match=r"differs in: inputs\.a\.jsonl\.rows \(7 there, 1 here"
    ):
        bs.generate_dataset(lm, lines, out, **OPTIONS)


@pytest.mark.slow
def test_a_job_of_another_release_is_refused(lm, lines, tmp_path):
    out = tmp_path / "out"
    bs.generate_dataset(lm, lines, out, **OPTIONS)
    manifest = json.loads((out / "_manifest.json").read_text())
    (out / "_manifest.json").write_text(json.dumps({**manifest, "version": 1}))
    with pytest.raises(bs.SurgeryError, match=r"manifest of version 6\. Received version 1"):
        bs.generate_dataset(lm, lines, out, **OPTIONS)
    (out / "_manifest.json").write_text("[]")
    with pytest.raises(bs.SurgeryError, match="expected the manifest of a job"):
        bs.generate_dataset(lm, lines, out, **OPTIONS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": "nowhere.parquet"}, "expected a .parquet or .jsonl file that exists"),
        ({"column": "promt"}, "expected a column 'promt'. .*'prompt'"),
        ({"controls": {"mood": "strenght"}}, "expected a column 'strenght'"),
        ({"controls": {"mod": 1.0}}, "^generate_dataset at control 'mod'.*Did you mean 'mood'"),
        ({"controls": {"mood": "name"}}, "row 0 of .*expected a number in column 'name'"),
        ({"column": "strength"}, "row 0 of .*expected a prompt in column 'strength'"),
        ({"column": ["prompt"]}, r"at 'column': expected the name of a column. Received \['prompt"),
        ({"output_column": ""}, "at 'output_column': expected the name of a column"),
        ({"id_column": 3}, "at 'id_column': expected the name of a column"),
        ({"vectors": {"up": bs.ControlVector({1: [1.0]})}}, "a column that names them"),
        ({"vectors": [3]}, r"at 'vectors': expected control vectors by name. Received \[3\]"),
        ({"output_column": "name"}, r"expected no column \['name'\]"),
        ({"id_column": "ids"}, "expected a column 'ids'"),
        ({"batch_size": 0}, "at 'batch_size'"),
        ({"seed": "x"}, "at 'seed'"),
        ({"seed": 10**5000}, "at 'seed': expected an int of at most 64 bits"),
        ({"shard_rows": 0}, "at 'shard_rows'"),
        ({"max_new_tokens": None}, "at 'max_new_tokens'"),
        ({"max_new_tokens": 40}, "^generate_dataset: .*at most 32 tokens"),
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


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.by_default(4)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": None}, "expected a prompt in column 'prompt'"),
        ({"prompt": "words"}, "expected token ids"),
        ({"prompt": [1, 99]}, "expected token ids from 0 to 49"),
        ({"prompt": list(range(1, 30))}, "at most 32 tokens.* a prompt of 29"),
        ({"prompt": [1] * 40}, "at most 32 tokens"),
        ({"strength": None}, "expected a number in column 'strength'"),
        ({"strength": float("nan")}, "expected a JSON object .*NaN, which is no finite number"),
        ({"name": None}, "expected an id in column 'name'"),
        ({"vector": "sideways"}, "one of the vectors up, wide"),
    ],
)
def test_a_bad_row_found_late_is_named_before_anything_is_written(
    lm, rows, tmp_path, change, words
):
    rows = [{**row, "vector": "up"} for row in rows]
    vectors = {"up": bs.ControlVector({1: np.ones(8)}), "wide": bs.ControlVector({1: np.ones(9)})}
    options = {**OPTIONS, "controls": {"mood": ("strength", "vector")}, "vectors": vectors}
    options |= {"id_column": "name", "shard_rows": 4}
    path, out = tmp_path / "in.jsonl", tmp_path / "out"
    write_lines(path, [*rows[:9], {**rows[9], **change}, rows[10]])
    with pytest.raises(bs.SurgeryError, match=f"row 9 of '{path}': .*{words}"):
        bs.generate_dataset(lm, path, out, **options)
    assert not out.exists()
    write_lines(path, rows)
    assert len(bs.generate_dataset(lm, path, out, **options)) == 3


def test_a_vector_that_does_not_fit_is_named_before_anything_is_written(lm, rows, tmp_path):
    vectors = {"up": bs.ControlVector({1: np.ones(8)}), "wide": bs.ControlVector({1: np.ones(9)})}
    rows = [{**row, "vector": "wide" if i == 9 else "up"} for i, row in enumerate(rows)]
    options = {**OPTIONS, "controls": {"mood": ("strength", "vector")}, "vectors": vectors}
    path = write_lines(tmp_path / "in.jsonl", rows)
    with pytest.raises(bs.SurgeryError, match=r"at vector 'wide': .*directions of size 8"):
        bs.generate_dataset(lm, path, tmp_path / "out", shard_rows=4, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.by_default(1)
@pytest.mark.parametrize("text", ["the dog " * 200, "cut \ud83d"])
def test_a_text_found_late_is_named_before_anything_is_written(tmp_path, text):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "Tom ran."}, {"prompt": text}])
    with pytest.raises(bs.SurgeryError, match=f"row 1 of '{path}'"):
        bs.generate_dataset(lm, path, tmp_path / "out", shard_rows=1, verbose=0)
    with pytest.raises(bs.SurgeryError, match=f"row 1 of '{path}'"):
        bs.harvest(lm, path, tmp_path / "out", "blocks.1", "prompt", shard_rows=1, verbose=0)
    assert not (tmp_path / "out").exists()


class Scaled(keras.layers.Layer):
    """Add a multiple of the states, backwards."""

    def call(self, x, strength):
        return x + keras.ops.reshape(strength, (-1, 1, 1)) * x[..., ::-1]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (1,)])
def test_an_input_that_a_user_adds_is_fed_from_a_column(lm, lines, rows, tmp_path, shape):
    backbone = lm.opened.owner
    strength = keras.Input(shape, name="strength")

    def clone_fn(layer, *args, **kwargs):
        x = layer(*args, **kwargs)
        return Scaled()(x, strength) if layer.name == "transformer_layer_1" else x

    outputs = bs.clone_layer_graph(backbone.input, backbone.output, clone_fn)
    inputs = {**backbone.input, "strength": strength}
    own = bs.CachedCausalLM(keras_hub.models.Backbone(inputs, outputs))
    own.compile(sampler="greedy")
    options = {**OPTIONS, "controls": {"strength": "strength"}}
    paths = bs.generate_dataset(own, lines, tmp_path / "out", **options)
    assert [row["generated"] for row in read_lines(paths)] == [
        alone(own, row, "", row["strength"], "strength") for row in rows
    ]


def test_rows_of_shards_that_are_done_are_not_read_again(lm, lines, tmp_path, monkeypatch):
    options = {**OPTIONS, "shard_rows": 2}
    paths = bs.generate_dataset(lm, lines, tmp_path / "out", **options)
    paths[2].unlink()
    read, found = Shard.read, []

    def recording(shard, columns=None):
        found.append(shard.name)
        return read(shard, columns)

    monkeypatch.setattr(Shard, "read", recording)
    bs.generate_dataset(lm, lines, tmp_path / "out", **options)
    assert {name for name in found if name} == {"a-00002"}


def test_a_batch_that_fails_names_its_rows(lm, rows, tmp_path):
    rows[8]["strength"] = 3e38
    path = write_lines(tmp_path / "in.jsonl", rows)
    order = sorted(range(ROWS), key=lambda i: len(rows[i]["prompt"]))
    at = order.index(8)
    batch = ", ".join(str(i) for i in order[at // 4 * 4 : at // 4 * 4 + 4])
    with pytest.raises(
        bs.SurgeryError, match=f"a batch of rows {batch}, in this order: .*at row {at % 4}, step"
    ):
        bs.generate_dataset(lm, path, tmp_path / "out", controls=CONTROLS, **OPTIONS)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", b"1", np.str_("1"), None])
def test_a_score_that_is_no_finite_number_is_refused_by_row(lm, lines, tmp_path, value):
    def score(text):
        CALLS.append(text)
        return value if len(CALLS) == 3 else 1.0

    CALLS.clear()
    place = f"at row 2 of '{lines / 'a.jsonl'}' at score 'own'"
    wanted = "a finite number" if isinstance(value, float) else "a function that returns a number"
    words = re.escape(f"{place}: expected {wanted}. Received {shown(value)} for the text")
    with pytest.raises(bs.SurgeryError, match=words):
        bs.generate_dataset(lm, lines, tmp_path / "out", score={"own": score}, **OPTIONS)
    assert not list((tmp_path / "out").glob("*.jsonl"))


def test_a_score_that_raises_is_named_with_its_row(lm, lines, tmp_path):
    words = (
        r"^generate_dataset in rows 0 to \d+ of .*: at row 0 of .* at score 'own': .* "
        "Received ZeroDivisionError, division by zero, for"
    )
    with pytest.raises(bs.SurgeryError, match=words):
        bs.generate_dataset(lm, lines, tmp_path / "out", score={"own": lambda x: 1 / 0}, **OPTIONS)


@pytest.mark.parametrize("value", [2, np.float32(2), np.array(2), jnp.float32(2), True])
def test_a_score_may_be_any_number(lm, lines, tmp_path, value):
    paths = bs.generate_dataset(lm, lines, tmp_path / "out", score=lambda text: value, **OPTIONS)
    scores = {row["score"] for row in read_lines(paths)}
    assert scores == {float(value)}


def scaled(text, factor):
    return factor * len(text)


@pytest.mark.parametrize(
    "make",
    [
        lambda factor: lambda text: factor * len(text),
        lambda factor: [lambda text: len(text), lambda text: 2 * len(text)][factor - 1],
        lambda factor: functools.partial(scaled, factor=factor),
    ],
    ids=["closure", "code", "partial"],
)
def test_functions_of_one_name_are_told_apart(lm, lines, tmp_path, make):
    for factor in (1, 1):
        bs.generate_dataset(lm, lines, tmp_path / "out", score=make(factor), **OPTIONS)
    with pytest.raises(bs.SurgeryError, match="differs in: scores"):
        bs.generate_dataset(lm, lines, tmp_path / "out", score=make(2), **OPTIONS)


def test_a_function_that_closes_over_a_model_is_refused(lm, lines, tmp_path):
    judge = keras.layers.Dense(1)
    with pytest.raises(bs.SurgeryError, match=r"score 'score'.* a Keras object, Dense.*a global"):
        bs.generate_dataset(
            lm, lines, tmp_path / "out", score=lambda text: judge is None, **OPTIONS
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_samplers_of_one_name_are_told_apart(lines, tmp_path):
    class Nth(keras_hub.samplers.Sampler):
        def __init__(self, nth):
            super().__init__()
            self.nth = nth

        def get_next_token(self, probabilities):
            return keras.ops.argsort(probabilities, axis=-1)[:, -self.nth]

    lm = make_lm()
    for nth in (1, 1):
        lm.compile(sampler=Nth(nth))
        bs.generate_dataset(lm, lines, tmp_path / "out", **OPTIONS)
    lm.compile(sampler=Nth(2))
    with pytest.raises(bs.SurgeryError, match="differs in: sampler"):
        bs.generate_dataset(lm, lines, tmp_path / "out", **OPTIONS)


def test_equal_prompts_with_one_id_get_one_text(lm, rows, tmp_path):
    same = [{**rows[0], "name": name} for name in ("x", "y", "x")]
    path = write_lines(tmp_path / "in.jsonl", same)
    paths = bs.generate_dataset(lm, path, tmp_path / "out", id_column="name", **OPTIONS)
    texts = [row["generated"] for row in read_lines(paths)]
    assert texts[0] == texts[2] != texts[1]


def test_other_files_are_left_alone(lm, lines, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(bs.SurgeryError, match="Received one that holds"):
        bs.generate_dataset(lm, lines, tmp_path / "out", **OPTIONS)


@pytest.mark.slow
def test_a_patch_at_a_position_that_only_some_rows_have(tmp_path):
    """Those are patched; a job does not stop at the others."""
    lm = bs.CachedCausalLM(bs.operate(make_gpt2(), [bs.Patch("blocks.0")]))
    lm.compile(sampler="greedy")
    value = np.random.default_rng(0).normal(size=(1, 32)) * 5
    controls = {"patch": {"positions": [4], "values": value}}
    prompts = [[3, 4, 5, 6, 7], [9, 8], [3, 4, 5, 6, 7, 8]]
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    options = {"max_new_tokens": 2, "stop_token_ids": None}
    (path,) = bs.generate_dataset(
        lm, tmp_path / "in.jsonl", tmp_path / "out", controls=controls, verbose=0, **options
    )
    rows = [json.loads(line)["generated"] for line in path.read_text().splitlines()]
    for prompt, got, patched in zip(prompts, rows, (True, False, True), strict=True):
        one = {"token_ids": [prompt], "padding_mask": np.ones((1, len(prompt)))}
        extra = {"controls": controls} if patched else {}
        wanted = lm.generate(one, strip_prompt=True, **extra, **options)["token_ids"]
        assert got == np.asarray(wanted)[0, :2].tolist()
