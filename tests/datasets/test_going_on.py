"""What a folder must hold for a job to go on in it."""

import errno
import fcntl
import json
import os

import pyarrow.parquet as pq
import pytest
from pyarrow.json import read_json

import backbone_surgery as bs
from backbone_surgery.datasets import job
from backbone_surgery.datasets.folder_lock import lock_on
from backbone_surgery.datasets.shards import JsonRows
from backbone_surgery.files import hidden_beside
from backbone_surgery.generation import described
from tests.datasets.conftest import OPTIONS, make_lm, read_lines

HARVEST = {"sites": "blocks.1", "column": "prompt", "batch_size": 4, "verbose": 0}


@pytest.fixture
def as_parquet(lines, tmp_path):
    """The rows of the files of JSON lines, in Parquet."""
    (tmp_path / "tables").mkdir()
    for path in lines.iterdir():
        pq.write_table(read_json(path), tmp_path / "tables" / f"{path.stem}.parquet")
    return tmp_path / "tables"


def generate(lm, inputs, out):
    return bs.generate_dataset(lm, inputs, out, shard_rows=4, **OPTIONS)


def harvest(lm, inputs, out):
    return bs.harvest(lm, inputs, out, shard_rows=4, **HARVEST)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "inputs"),
    [(generate, "lines"), (generate, "as_parquet"), (harvest, "lines")],
    ids=["lines", "parquet", "harvest"],
)
def test_files_of_output_that_were_cut_short_are_made_anew(lm, tmp_path, run, inputs, request):
    inputs = request.getfixturevalue(inputs)
    paths = run(lm, inputs, tmp_path / "out")
    whole = [path.read_bytes() for path in paths]
    last = paths[-1].stat().st_mtime_ns
    for cut in (whole[0][:-1], b"", whole[0][: len(whole[0]) // 2], b"\0" * len(whole[0])):
        paths[0].write_bytes(cut)
        assert run(lm, inputs, tmp_path / "out") == paths
        assert [path.read_bytes() for path in paths] == whole
    assert paths[-1].stat().st_mtime_ns == last


def test_lines_that_are_missing_are_made_anew(lm, lines, tmp_path):
    paths = generate(lm, lines, tmp_path / "out")
    whole = paths[0].read_bytes()
    paths[0].write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    generate(lm, lines, tmp_path / "out")
    assert paths[0].read_bytes() == whole


def test_a_file_of_input_that_changes_meanwhile_ends_the_job(lm, lines, tmp_path):
    changed = max(lines.iterdir())
    before = changed.read_bytes()

    def score(text):
        changed.write_bytes(before.splitlines(keepends=True)[0])
        return 1.0

    def run():
        return bs.generate_dataset(lm, lines, tmp_path / "out", score=score, **OPTIONS)

    with pytest.raises(bs.SurgeryError, match=f"data set at '{changed}': expected the file as it"):
        run()
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == ["_manifest.json", "a-00000.jsonl"]
    with pytest.raises(bs.SurgeryError, match="differs in: inputs"):
        run()


@pytest.mark.parametrize("more", [b'{"prompt": [1]}\n', b'{"pro'])
def test_a_file_of_more_rows_than_its_shard_is_refused(lm, lines, tmp_path, more):
    paths = generate(lm, lines, tmp_path / "out")
    longer = paths[1].read_bytes() + more
    paths[1].write_bytes(longer)
    words = f"at '{paths[1]}': expected the 3 rows of a shard, or fewer.* Received more. Move"
    with pytest.raises(bs.SurgeryError, match=words):
        generate(lm, lines, tmp_path / "out")
    assert paths[1].read_bytes() == longer


def test_a_folder_in_place_of_a_file_is_refused(lm, lines, tmp_path):
    [path, *_] = generate(lm, lines, tmp_path / "out")
    path.unlink()
    path.mkdir()
    words = f"at '{path}': expected a file of output. Received another one .Is a directory"
    with pytest.raises(bs.SurgeryError, match=words):
        generate(lm, lines, tmp_path / "out")


def test_shards_of_other_rows_under_the_same_names_are_refused(lm, lines, tmp_path):
    paths = harvest(lm, lines, tmp_path / "out")
    paths[0].unlink()
    with pytest.raises(bs.SurgeryError, match="differs in: outputs"):
        bs.harvest(lm, lines, tmp_path / "out", shard_rows=5, **HARVEST)


def fails(text):
    raise ValueError("no judgement")


def test_a_job_that_wrote_nothing_makes_room_for_another(lm, lines, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(bs.SurgeryError, match="no judgement"):
        bs.generate_dataset(lm, lines, out, score=fails, seed=1, **OPTIONS)
    assert [path.name for path in out.iterdir()] == ["_manifest.json"]
    hidden_beside(out / "a-00000.jsonl").write_text("half of it")  # as one that is killed does
    paths = bs.generate_dataset(lm, lines, out, score=len, **OPTIONS)
    assert sorted(out.iterdir()) == sorted([out / "_manifest.json", *paths])
    with pytest.raises(bs.SurgeryError, match="differs in: options"):
        bs.generate_dataset(lm, lines, out, score=len, seed=1, **OPTIONS)


@pytest.mark.parametrize("text", ['{"mine": 1}', "[]"])
def test_manifests_of_others_are_left_alone(lm, lines, tmp_path, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "_manifest.json").write_text(text)
    with pytest.raises(bs.SurgeryError, match=r"expected (a manifest of version|the manifest of)"):
        generate(lm, lines, tmp_path / "out")
    assert (tmp_path / "out" / "_manifest.json").read_text() == text


def test_another_job_is_refused_while_one_runs(lm, lines, tmp_path, monkeypatch):
    """Also while no output is there yet, and whatever is done meanwhile."""
    monkeypatch.setattr(job, "_PATIENCE", 0.1)
    tried = []

    def another(text):
        if not tried:
            tried.append(text)
            with pytest.raises(
                bs.SurgeryError,
                match=r"by a job that differs in: options\.seed \(0 there, 1 here\)",
            ):
                bs.generate_dataset(make_lm, lines, tmp_path / "out", seed=1, **OPTIONS)
        return 1.0

    paths = bs.generate_dataset(lm, lines, tmp_path / "out", score=another, **OPTIONS)
    assert tried
    assert all(row["score"] == 1.0 for row in read_lines(paths))


def test_the_same_job_may_run_twice_at_once(lm, lines, tmp_path, monkeypatch):
    """The one that ends first leaves the other the file that it is writing."""
    whole = [path.read_bytes() for path in generate(lm, lines, tmp_path / "whole")]
    tried, write = [], JsonRows.write

    def once_more(self, path, columns):
        write(self, path, columns)
        if not tried:
            tried.append(path)
            generate(lm, lines, tmp_path / "out")
            assert path.exists()

    monkeypatch.setattr(JsonRows, "write", once_more)
    paths = generate(lm, lines, tmp_path / "out")
    assert tried
    assert [path.read_bytes() for path in paths] == whole
    assert not tried[0].exists()


def test_without_locks_nobody_removes_what_another_is_writing(lm, lines, tmp_path, monkeypatch):
    def fails(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fails)
    test_the_same_job_may_run_twice_at_once(lm, lines, tmp_path, monkeypatch)


def test_a_disk_that_became_read_only_is_told_of(lm, lines, tmp_path, monkeypatch):
    generate(lm, lines, tmp_path / "out")[0].unlink()

    def fails(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(JsonRows, "write", fails)
    monkeypatch.setattr(type(tmp_path), "unlink", fails)
    with pytest.raises(
        bs.SurgeryError, match=r"a place that can be written. .* Read-only file sys"
    ):
        generate(lm, lines, tmp_path / "out")


@pytest.mark.parametrize("name", ["n" * 245, "\udcff"])
def test_names_of_input_that_are_long_or_no_text(lm, tmp_path, name):
    path = tmp_path / f"{name}.jsonl"
    path.write_text('{"prompt": [1, 2]}\n')
    if len(name) == 1:
        assert len(generate(lm, path, tmp_path / "out")) == 1
        return
    with pytest.raises(bs.SurgeryError, match=r"at most 255 bytes. Received 257, the name of a fi"):
        generate(lm, path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_job_on_a_mesh_is_another_one(lm, lines, tmp_path, monkeypatch):
    generate(lm, lines, tmp_path / "out")
    monkeypatch.setattr(described, "_mesh", lambda lm: {"batch": 1, "model": 4})
    with pytest.raises(bs.SurgeryError, match=r"differs in: mesh \(None there, \{'batch': 1, 'mo"):
        generate(lm, lines, tmp_path / "out")


def test_a_folder_that_stays_locked_is_told_of(lm, lines, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "_PATIENCE", 0.1)
    generate(lm, lines, tmp_path / "out")
    with lock_on(tmp_path / "out") as lock:
        assert lock.take(alone=True)
        with pytest.raises(bs.SurgeryError, match="expected a folder that no other process has"):
            generate(lm, lines, tmp_path / "out")


def test_a_job_that_is_done_needs_nothing_written(lm, lines, tmp_path, monkeypatch):
    paths = generate(lm, lines, tmp_path / "out")
    monkeypatch.setattr(os, "access", lambda *args: False)  # a folder that is only read
    assert generate(lm, lines, tmp_path / "out") == paths
    with pytest.raises(bs.SurgeryError, match="expected a folder that can be read and written"):
        generate(lm, lines, tmp_path / "other")


def test_a_job_knows_how_precise_its_products_are(lm, lines, tmp_path):
    generate(lm, lines, tmp_path / "out")
    precise = bs.CachedCausalLM(lm.backbone, precision="highest")
    precise.compile(sampler=lm.sampler)
    with pytest.raises(bs.SurgeryError, match=r"differs in: model\.precision"):
        generate(precise, lines, tmp_path / "out")


def test_files_of_other_endings_are_told_of(lm, lines, tmp_path):
    for name in ("c.ndjson", "D.JSONL", "_hidden.txt", ".hidden"):
        (tmp_path / name).write_text('{"prompt": [1]}\n')
    (tmp_path / "in.jsonl").write_text('{"prompt": [1]}\n')
    with pytest.warns(UserWarning, match=r"\['D.JSONL', 'c.ndjson'\] left out, since only files"):
        paths = bs.generate_dataset(lm, tmp_path, tmp_path / "out", **OPTIONS)
    assert [path.name for path in paths] == ["in-00000.jsonl"]


def test_a_job_that_lost_its_manifest_writes_nothing(lm, lines, tmp_path):
    def score(text):
        (tmp_path / "out" / "_manifest.json").unlink(missing_ok=True)
        return 1.0

    words = "expected the manifest of this job, which it began with. Received another, or none"
    with pytest.raises(bs.SurgeryError, match=words):
        bs.generate_dataset(lm, lines, tmp_path / "out", score=score, **OPTIONS)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("run", "owner", "write"),
    [(generate, JsonRows, "write"), (harvest, pq.ParquetWriter, "write_table")],
)
def test_a_job_goes_on_once_its_disk_has_room(lm, lines, tmp_path, monkeypatch, run, owner, write):
    whole = [path.read_bytes() for path in run(lm, lines, tmp_path / "whole")]
    own, done = getattr(owner, write), []

    def full(self, *args, **kwargs):
        if done:
            raise OSError(errno.ENOSPC, "Error writing bytes to file")  # as PyArrow words it
        done.append(own(self, *args, **kwargs))

    words = r"-00001\..*': expected a place .* No space left on device\. .* call then goes on"
    with monkeypatch.context() as patch:
        patch.setattr(owner, write, full)
        with pytest.raises(bs.SurgeryError, match=words):
            run(lm, lines, tmp_path / "out")
    held = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert held == ["_manifest.json", f"a-00000.{'parquet' if run is harvest else 'jsonl'}"]
    paths = run(lm, lines, tmp_path / "out")
    assert [path.read_bytes() for path in paths] == whole


def test_a_manifest_that_cannot_be_written_is_told_of(lm, lines, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.EROFS, "")

    monkeypatch.setattr(job, "replace_file", full)
    words = r"^generate_dataset at '.*_manifest.json': .* an error: Read-only file system"
    with pytest.raises(bs.SurgeryError, match=words):
        generate(lm, lines, tmp_path / "out")


def test_a_broken_link_is_no_folder_of_output(lm, lines, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    words = f"at '{tmp_path / 'out'}': expected a folder, .* a link to '{tmp_path / 'gone'}', where"
    for run in (generate, harvest):
        with pytest.raises(bs.SurgeryError, match=words):
            run(lm, lines, tmp_path / "out")
    (tmp_path / "gone").mkdir()
    assert all(path.is_file() for path in generate(lm, lines, tmp_path / "out"))


@pytest.mark.slow
def test_a_job_goes_on_with_the_response_format_that_it_began_with(tmp_path):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    lm.compile(sampler="greedy")
    prompts = ["Tom is", "Once upon a time", "A"]
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    (tmp_path / "in.jsonl").write_text(lines)
    digits, letters = bs.ResponseFormat("[0-9]{4}"), bs.ResponseFormat("[a-z]{4}")
    asked = {"max_new_tokens": 9, "shard_rows": 2, "batch_size": 2, "verbose": 0}

    def run(wanted):
        inputs, out = tmp_path / "in.jsonl", tmp_path / "out"
        return bs.generate_dataset(lm, inputs, out, response_format=wanted, **asked)

    paths = run(digits)
    for prompt, row in zip(prompts, read_lines(paths), strict=True):
        asked_alone = {"max_new_tokens": 9, "response_format": digits, "strip_prompt": True}
        assert row["generated"] == lm.generate(prompt, **asked_alone)
    paths[-1].unlink()
    assert run(bs.ResponseFormat("[0-9]{4}")) == paths
    for other in (None, letters):
        with pytest.raises(bs.SurgeryError, match="differs in: options"):
            run(other)
    with pytest.raises(bs.SurgeryError, match="it is no regular expression of the Rust"):
        bs.generate_dataset(
            lm, tmp_path / "in.jsonl", tmp_path / "new", response_format=bs.ResponseFormat("(a")
        )
    assert not (tmp_path / "new").exists()
