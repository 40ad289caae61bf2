"""The command line, run as a user does."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backbone_surgery.cli import app

PROMPT = "Once upon a time there was a girl named Lily."


def run(*args):
    return CliRunner().invoke(app, list(args))


def test_generate_prints_one_text_for_each_prompt():
    result = run("generate", PROMPT, "Tom had a red ball.", "--max-new-tokens", "12")
    assert result.exit_code == 0
    lines = result.stdout.strip().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(PROMPT)
    assert len(lines[0]) > len(PROMPT) + 10


def test_stream_prints_the_same_text():
    options = ["generate", PROMPT, "--max-new-tokens", "12", "--sampler", "top_p", "--seed", "4"]
    assert run(*options, "--stream").stdout.strip() == run(*options).stdout.strip()


def test_inspect_shows_sites_parameters_and_cache():
    result = run("inspect", "--model", "tiny_gemma")
    assert result.exit_code == 0
    for word in (
        "gemma",
        "1,019,008",
        "bytes per token",
        "blocks.*.attention_pattern",
        "final_norm",
    ):
        assert word in result.stdout


def test_plot_writes_a_picture_and_mermaid(tmp_path):
    for name in ("model.mmd", "model.svg"):
        assert run("plot", str(tmp_path / name), "--expand").exit_code == 0
    assert (tmp_path / "model.mmd").read_text().startswith("flowchart TD")
    assert "cached_self_attention" in (tmp_path / "model.svg").read_text()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", PROMPT, "--max-new-tokens", "900"], "tokens in a row"),
        (["inspect", "--model", "./nowhere"], "expected a folder that exists"),
        (["plot", "missing/x.mmd"], "FileNotFoundError"),
    ],
    ids=str,
)
def test_bad_input_is_a_message_and_exit_code_2(args, words):
    result = run(*args)
    assert result.exit_code == 2
    assert words in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.output


def test_the_console_script_needs_no_configuration(tmp_path):
    """As on a fresh machine: no backend chosen, no Keras settings, and nothing else on screen."""
    script = Path(sysconfig.get_path("scripts")) / "backbone-surgery"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KERAS", "TF_"))}
    result = subprocess.run(
        [script, "generate", PROMPT, "--max-new-tokens", "5"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment, "HOME": str(tmp_path)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(PROMPT)
    assert result.stderr == ""
