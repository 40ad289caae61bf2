"""`batch` and `harvest`, run as a user does."""

import inspect
import json
import re
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

import backbone_surgery as bs
from backbone_surgery.cli import datasets

PROMPTS = ["Once upon a time there was a girl named Lily.", "Tom had a red ball.", "Mia was"]


@pytest.fixture
def lines(tmp_path):
    rows = [{"prompt": p, "strength": s} for p, s in zip(PROMPTS, (-1.0, 0.0, 1.0), strict=True)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_batch_writes_the_texts_of_steered_rows_and_goes_on(run, lines, tmp_path, monkeypatch):
    (tmp_path / "judges.py").write_text("def length(text):\n    return len(text)\n")
    monkeypatch.chdir(tmp_path)
    words = ["batch", lines, tmp_path / "out", "--controls", "mood=strength"]
    words += ["--max-new-tokens", "12", "--score", "judges:length"]
    for _ in range(2):
        result = run(*words)
        assert result.exit_code == 0, result.output
        assert "1 file in" in result.stdout
    text = (tmp_path / "out" / "in-00000.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    edit = bs.Steer("mood", bs.ControlVector.from_preset("tiny_gpt2", "mood"))
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    steered = bs.CachedCausalLM(bs.operate(lm.backbone, [edit]), lm.preprocessor)
    steered.compile(sampler="greedy")
    options = {"controls": {"mood": [-1.0, 0.0, 1.0]}, "max_new_tokens": 12, "strip_prompt": True}
    assert [row["generated"] for row in rows] == steered.generate(PROMPTS, **options)
    assert [row["length"] for row in rows] == [len(row["generated"]) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["batch", "harvest"])
def test_an_interrupt_tells_that_nothing_is_lost(lines, tmp_path, command):
    """Also while a compiled program runs, of which Python would hear only when that is done."""
    words = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import jax, numpy, sys; from backbone_surgery import cli; import backbone_surgery as bs\n"
        "count = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 1, lambda x: -x, x))\n"
        "def wait(*args, **options): print('begun', flush=True); numpy.asarray(count(0))\n"
        "bs.generate_dataset = bs.harvest = wait; cli.main()"
    )
    site = ["--site", "blocks.1"] if command == "harvest" else []
    asked = [sys.executable, "-c", words, command, str(lines), str(tmp_path / "out"), *site]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(asked, **pipes) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            time.sleep(1.0)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "note: interrupted; the same command goes on where it was." in errors


@pytest.mark.slow
def test_batch_applies_a_recipe(run, lines, tmp_path):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    edited = bs.operate(lm.backbone, [bs.Skip("blocks.3", name="skip", amount=0.0)])
    bs.save_recipe(edited, tmp_path / "skip.recipe")
    words = ["batch", lines, tmp_path / "out", "--recipe", tmp_path / "skip.recipe"]
    result = run(*words, "--controls", "skip=1", "--max-new-tokens", "8")
    assert result.exit_code == 0, result.output
    edited = bs.CachedCausalLM(edited, lm.preprocessor)
    edited.compile(sampler="greedy")
    options = {"controls": {"skip": 1.0}, "max_new_tokens": 8, "strip_prompt": True}
    text = (tmp_path / "out" / "in-00000.jsonl").read_text()
    wanted = edited.generate(PROMPTS, **options)
    assert [json.loads(line)["generated"] for line in text.splitlines()] == wanted
    words = ["batch", tmp_path / "out" / "in-00000.jsonl", tmp_path / "again"]
    refused = run(*words, "--max-new-tokens", "8")
    assert "(--output-column)" in " ".join(refused.output.split())
    result = run(*words, "--max-new-tokens", "8", "--output-column", "plain")
    assert result.exit_code == 0, result.output
    (path,) = (tmp_path / "again").glob("*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["generated"] for row in rows] == wanted
    lm.compile(sampler="greedy")
    plain = lm.generate(PROMPTS, max_new_tokens=8, strip_prompt=True)
    assert [row["plain"] for row in rows] == plain


@pytest.mark.slow
def test_batch_takes_the_vectors_that_rows_name(run, tmp_path):
    mood = bs.ControlVector.from_preset("tiny_gpt2", "mood")
    mood.save(tmp_path / "up.gguf")
    (-1 * mood).save(tmp_path / "down.gguf")
    names = ["up", "down", "up"]
    rows = [{"prompt": p, "s": 1.0, "which": n} for p, n in zip(PROMPTS, names, strict=True)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["batch", tmp_path / "in.jsonl", tmp_path / "out", "--controls", "mood=s,which"]
    words += ["--row-vector", tmp_path / "up.gguf", "--row-vector", tmp_path / "down.gguf"]
    result = run(*words, "--max-new-tokens", "12")
    assert result.exit_code == 0, result.output
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    steered = bs.CachedCausalLM(bs.operate(lm.backbone, [bs.Steer("mood", mood)]), lm.preprocessor)
    steered.compile(sampler="greedy")
    options = {"controls": {"mood": [1.0, -1.0, 1.0]}, "max_new_tokens": 12, "strip_prompt": True}
    text = (tmp_path / "out" / "in-00000.jsonl").read_text()
    wanted = steered.generate(PROMPTS, **options)
    assert [json.loads(line)["generated"] for line in text.splitlines()] == wanted


def test_workers_are_handed_whole_paths(run, lines, tmp_path, monkeypatch):
    makes = []
    monkeypatch.setattr(bs, "generate_dataset", lambda make, *_, **__: makes.append(make) or [])
    monkeypatch.chdir(tmp_path)
    words = ["--vector", "mood", "-c", "mood=1", "--vector", "own=own.gguf", "-c", "own=1"]
    words += ["--recipe", ".", "--ray", "auto"]
    result = run("batch", lines, tmp_path / "out", *words)
    assert result.exit_code == 0, result.output
    _, vectors, _, recipe = makes[0].args
    assert vectors == {"mood": "mood", "own": str(tmp_path / "own.gguf")}
    assert recipe == tmp_path


@pytest.mark.slow
def test_harvest_writes_activations(run, lines, tmp_path):
    words = ["harvest", lines, tmp_path / "out", "--site", "blocks.1", "--site", "blocks.3"]
    result = run(*words, "--column", "prompt", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    table = pq.read_table(tmp_path / "out" / "in-00000.parquet")
    assert table.column_names == ["row", "position", "token_id", "blocks.1", "blocks.3"]


@pytest.mark.by_default(5)
@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("batch", ["--controls", "mood"], "expected NAME=COLUMN or NAME=STRENGTH"),
        ("batch", ["-c", "mood=1", "-c", "mood=2"], "expected each name once"),
        ("batch", ["-v", "mood"], "Add --controls mood=1"),
        ("batch", ["--score", "no_such_module:f"], "expected MODULE:FUNCTION"),
        ("batch", ["--score", "json"], "expected MODULE:FUNCTION"),
        ("batch", ["--column", "text"], "expected a column 'text'"),
        ("batch", ["--batch-size", "0"], "--batch-size"),
        ("harvest", [], "--site"),
        ("harvest", ["--site", "blocks.1", "--dtype", "int8"], "--dtype"),
        ("harvest", ["--site", "blocks.1"], "expected a column 'text'"),
        ("harvest", ["--site", "blocks.99", "--column", "prompt"], "blocks.99"),
    ],
)
def test_bad_input_ends_with_a_message(run, lines, tmp_path, command, options, words):
    result = run(command, lines, tmp_path / "out", *options)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_the_selectors_that_help_names_pick_sites():
    selectors = re.findall(r"\bblocks\.[\w.*]*\w", inspect.getsource(datasets.harvest))
    assert selectors
    backbone = bs.CachedCausalLM.from_preset("tiny_gpt2").backbone
    for selector in selectors:
        assert bs.operate(backbone, [bs.Capture(selector)])
