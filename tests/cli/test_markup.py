"""What is printed is printed as it is: brackets are no markup, colons no emoji."""

import json
import shutil

import pytest

from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.sweep import Sweep, SweepRow
from backbone_surgery.presets import preset_path

HOSTILE = "[/quote] [bold]a[/bold] [red] :smile: \\[x] $y$"


@pytest.fixture
def hostile_texts(monkeypatch):
    """Let the model say what rich would take for markup."""

    def generate(self, prompts, *args, **kwargs):
        return [HOSTILE] * (1 if isinstance(prompts, str) else len(prompts))

    monkeypatch.setattr(CachedCausalLM, "generate", generate)
    monkeypatch.setattr(CachedCausalLM, "stream", lambda self, *args, **kwargs: iter(HOSTILE))


@pytest.mark.by_default(1)
@pytest.mark.usefixtures("hostile_texts")
@pytest.mark.parametrize(
    ("args", "count"),
    [
        (["generate", "x"], 1),
        (["generate", "x", "--stream"], 1),
        (["steer", HOSTILE, "--vector", "mood"], 4),
        (["sweep", "x", "--vector", "mood"], 7),
    ],
    ids=["generate", "stream", "steer", "sweep"],
)
def test_texts(run, monkeypatch, args, count):
    monkeypatch.setenv("COLUMNS", "200")
    result = run(*args)
    assert result.exit_code == 0, result.output
    assert result.stdout.count(HOSTILE) == count


@pytest.mark.slow
def test_prompts_that_are_generated_from(run):
    result = run("generate", HOSTILE, "--max-new-tokens", "1")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(HOSTILE)


def test_the_table_of_a_sweep():
    found = Sweep(HOSTILE, (1.0,), (SweepRow("x", 1.0, HOSTILE, {HOSTILE: 2.0}),), (HOSTILE,))
    words = " ".join(str(found).split())
    for word in ("[/quote]", "[bold]a[/bold]", "[red]", ":smile:", "\\[x]"):
        assert words.count(word) == 3, word


@pytest.mark.slow
def test_names_of_files_and_models(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "[bold]m["
    shutil.copytree(preset_path("tiny_gpt2"), model)
    assert "[bold]m[" in run("inspect", "--model", model).stdout
    assert "wrote [bold].mmd" in run("plot", "[bold].mmd").stdout
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join([json.dumps(["Lily laughed.", "Lily cried."])] * 2))
    trained = run("train-vector", pairs, "[bold].gguf", "--method", "mean_diff")
    assert "wrote [bold].gguf" in trained.stdout
    steered = run("steer", "x", "--vector", "[bold].gguf", "--max-new-tokens", "2")
    assert steered.exit_code == 0, steered.output
    assert "_bold_ at" in steered.stdout
    options = ["--words", "happy", "--max-new-tokens", "2", "--strengths", "0"]
    swept = run("sweep", "x", "--vector", "mood", "--plot", "[bold].png", *options)
    assert "wrote [bold].png" in swept.stdout


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "x", "--model", "./[/quote]"],
        ["generate", "x", "--control", "[/quote]"],
        ["generate", "x", "-c", "quote_=1", "--vector", "[/quote].gguf"],
        ["generate", "x", "--sampler", "[/quote]"],
        ["generate", "x", "--[/quote]"],
        ["steer", "x", "--vector", "[/quote]"],
        ["steer", "x", "--vector", "mood", "--strengths", "[/quote]"],
        ["sweep", "x", "--vector", "mood", "--words", "a", "--plot", "missing/[/quote].png"],
        ["train-vector", "[/quote]", "v.gguf"],
        ["train-vector", "pyproject.toml", "[/quote].npz"],
        ["inspect", "--model", "./[/quote]"],
        ["plot", "[/quote].xyz"],
        ["plot", "[/quote]/x.mmd"],
        ["[/quote]"],
    ],
    ids=str,
)
def test_errors(run, args):
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert "[/quote]" in result.stderr
    assert "Traceback" not in result.output
