"""Bad input gives a message and exit code 2, never a traceback."""

import json
import shutil

import pytest

from tests.cli.conftest import PROMPT

GENERATE, STEER = ["generate", PROMPT], ["steer", PROMPT, "--vector"]
SWEEP = ["sweep", PROMPT, "--vector", "mood"]


@pytest.mark.by_default(6)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([*GENERATE, "--max-new-tokens", "900"], "tokens in a row"),
        ([*GENERATE, "--max-new-tokens", "-1"], "--max-new-tokens"),
        ([*GENERATE, "--seed", str(2**40)], "seed"),
        ([*GENERATE, "--seed", "x"], "--seed"),
        ([*GENERATE, "--sampler", "best"], "--sampler"),
        ([*GENERATE, "--control", "mood"], "expected NAME=STRENGTH"),
        ([*GENERATE, "--control", "=1"], "expected NAME=STRENGTH"),
        ([*GENERATE, "--control", "mood=nan"], "expected NAME=STRENGTH"),
        ([*GENERATE, "-c", "mood=1", "-c", "mood=2"], "expected each name once"),
        ([*GENERATE, "-v", "mood", "-v", "mood"], "expected one vector of each name"),
        ([*GENERATE, "-v", "a b=mood", "-c", "a b=1"], "a b"),
        ([*GENERATE, "-v", "=mood"], "expected FILE or NAME=FILE. Received '=mood'"),
        ([*GENERATE, "-v", "mood=", "-c", "mood=1"], "expected FILE or NAME=FILE"),
        ([*GENERATE, "-v", "mood"], "Add --control mood=1"),
        ([*GENERATE, "-v", "mood", "-c", "pet=1"], "Add --control mood=1"),
        ([*GENERATE, "--adapter", "./lora"], "expected NAME=FOLDER"),
        ([*GENERATE, "--adapter", "tuned=./nowhere"], "Add --control tuned=1"),
        ([*GENERATE, "--adapter", "x=docs", "-c", "x=1"], "without adapter_config.json and"),
        ([*GENERATE, "--regex", "(a"], "it is no regular expression"),
        (
            [*GENERATE, "--regex", "a", "--json-schema", "a.json"],
            "one of --regex and --json-sc",
        ),
        ([*GENERATE, "--json-schema", "nowhere.json"], "Received 'nowhere.json', which cannot be"),
        ([*GENERATE, "--json-schema", "README.md"], "expected JSON. Received '"),
        (["generate"], "prompts"),
        (["inspect", "--model", "./nowhere"], "expected a folder that exists"),
        (["inspect", "--model", "README.md"], "README.md"),
        (["inspect", "--model", "docs"], "without `config.json`"),
        (["inspect", "--model", ""], "from_preset"),
        (["plot", "missing/x.mmd"], "plot at 'missing/x.mmd': expected a file in a folder that"),
        (["plot", "x"], "ends in one of .png, .svg, .pdf, .jpg, .jpeg, .mmd"),
        (["plot", "missing/x.png"], "a folder that exists"),
        (["batch", "a.jsonl", "out", "-c", "mood= nan"], "expected NAME=COLUMN or NAME=STRENGTH"),
        (["batch", "a.jsonl", "out", "-c", "mood=a,b,c"], "expected NAME=COLUMN or NAME=STRENGTH"),
        (["batch", "a.jsonl", "out", "-c", "mood=a,"], "expected NAME=COLUMN or NAME=STRENGTH"),
        ([*STEER, "moot"], "Did you mean 'mood'"),
        ([*STEER, "no.gguf"], "expected a file"),
        ([*STEER, "mood", "--strengths", "1,x"], "numbers separated by"),
        ([*STEER, "mood", "--strengths", ""], "numbers separated by"),
        ([*STEER, "mood", "--strengths", "1,inf"], "numbers separated by"),
        ([*STEER, "mood", "--strengths", "1e300"], "mood"),
        (["steer", PROMPT], "expected one of --vector and --control"),
        ([*SWEEP, "--control", "mood"], "Received both"),
        ([*SWEEP, "--plot", "x.png"], "Name words to count"),
        ([*SWEEP, "--words", "a", "--plot", "missing/x.png"], "a folder that exists"),
        ([*SWEEP, "--words", "a", "--plot", "x"], "ends in one of .png"),
        ([*SWEEP, "--batch-size", "0"], "--batch-size"),
        (
            ["sweep", "missing.txt", "--vector", "mood"],
            "'missing.txt': expected a text file in UTF-8. Received none",
        ),
        (["serve", "--sampler", "beam"], "expected greedy, random, top_k or top_p"),
        (["serve", "--api-key", ""], "'api_key': expected a text of letters"),
        (["serve", "--chat-template", "missing"], "'missing': expected a text file"),
        (["train-vector", "pyproject.toml", "v.gguf"], "pyproject.toml:1: expected"),
        (["train-vector", "missing.jsonl", "v.gguf"], "'missing.jsonl': expected a text file"),
        (["train-vector", "models", "v.gguf"], "'models': expected a text file"),
        (["train-vector", "README.md", "v.npz"], "ends in .gguf or .safetensors"),
        (["train-vector", "README.md", "missing/v.gguf"], "a folder that exists"),
        (["paint"], "paint"),
    ],
    ids=str,
)
def test_arguments(run, args, words):
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert not isinstance(result.exception, Exception)


FILES = {
    "pairs.jsonl": (b"\n", "pairs.jsonl': expected at least one pair of texts"),
    "latin.jsonl": ('["caf\xe9", "x"]'.encode("latin-1"), "latin.jsonl': expected a text file"),
    "deep.jsonl": (b"[" * 100_000, "deep.jsonl:1"),
    "numbers.jsonl": (b"[1, 2]", "numbers.jsonl:1"),
    "twice.jsonl": (b'{"positive": "a", "positive": "b", "negative": "c"}', "twice.jsonl:1"),
    "short.jsonl": (b'["a"]', "short.jsonl:1"),
    "text.jsonl": (b'"ab"', "text.jsonl:1"),
}


@pytest.mark.parametrize("name", list(FILES))
def test_files_of_pairs(run, tmp_path, name):
    content, words = FILES[name]
    (tmp_path / name).write_bytes(content)
    result = run("train-vector", tmp_path / name, tmp_path / "v.gguf")
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("ending", [".mmd", ".png"])
def test_a_folder_in_place_of_a_picture(run, tmp_path, ending):
    (tmp_path / f"x{ending}").mkdir()
    result = run("plot", str(tmp_path / f"x{ending}"))
    assert result.exit_code == 2
    assert "expected the name of a file. Received a folder" in " ".join(result.stderr.split())


def test_a_module_of_scores_that_ends_the_process(run, tmp_path, monkeypatch):
    (tmp_path / "ends_the_process.py").write_text("import sys; sys.exit(0)")
    (tmp_path / "in.jsonl").write_text('{"prompt": "Once"}\n')
    monkeypatch.chdir(tmp_path)
    result = run("batch", "in.jsonl", "out", "--score", "ends_the_process:score")
    assert result.exit_code == 2
    assert "expected MODULE:FUNCTION that can be imported" in " ".join(result.stderr.split())


def test_a_file_without_prompts(run, tmp_path):
    (tmp_path / "some.txt").write_text(PROMPT)
    (tmp_path / "none.txt").write_text("\n \n")
    result = run("sweep", tmp_path / "some.txt", tmp_path / "none.txt", "--vector", "mood")
    assert result.exit_code == 2, result.output
    assert "none.txt': expected a prompt on each line" in " ".join(result.stderr.split())


def test_a_token_that_no_text_has(run, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps(["a happy girl", "a sad girl"]))
    result = run("train-vector", pairs, tmp_path / "v.gguf", "--token", "1000")
    assert result.exit_code == 2, result.output
    assert "1000" in result.stderr


@pytest.mark.parametrize("name", ["v.gguf", "v.safetensors"])
def test_damaged_vectors(run, tmp_path, name):
    (tmp_path / name).write_bytes(b"GGUF but no more")
    result = run(*STEER, tmp_path / name)
    assert result.exit_code == 2, result.output
    assert name in result.stderr


FOLDERS = {
    "config.json": [b"null", b"[]", b'{"config": {}}'],
    "preprocessor.json": [b"[]"],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, x) for name, contents in FOLDERS.items() for x in contents]
)
def test_damaged_models(run, tmp_path, name, content):
    shutil.copytree("models/tiny_gpt2", tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(content)
    result = run("inspect", "--model", tmp_path / "model")
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert not isinstance(result.exception, Exception)
