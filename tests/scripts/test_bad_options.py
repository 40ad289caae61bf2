"""Scripts that run for hours refuse bad options before they begin."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)


@pytest.mark.parametrize("case", ["tiny_gpt2", "tiny_gpt2:moot", "big_gpt2:mood"])
def test_cases_that_there_are_not(case):
    import measure_methods

    with pytest.raises(typer.BadParameter, match=f"Received '{case}'"):
        measure_methods.main(case=["tiny_gpt2:mood", case])


def test_vectors_of_no_model_or_attribute(tmp_path):
    import train_vectors

    for options in ({"only": "big_gpt2"}, {"only": "tiny_gpt2", "attribute": ["moot"]}):
        with pytest.raises(typer.BadParameter, match="expected some of the cases"):
            train_vectors.main(tmp_path, **options)


def test_what_was_measured_is_read_before_anything_is_compared(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import compare_steering

    file = tmp_path / "methods.json"
    for _ in range(2):  # there is no such file, and then one without the case
        with pytest.raises(typer.BadParameter, match="Measure them first"):
            compare_steering.main(file, case=["tiny_gpt2:mood"])
        file.write_text(json.dumps({"tiny_gpt2:pet": {}}))


@pytest.mark.parametrize(("rounds", "warm_up"), [(0, 100), (100, 100), (5, 10)])
def test_rounds_that_compare_nothing(monkeypatch, rounds, warm_up):
    import bench_leaks

    monkeypatch.setattr(bench_leaks, "run_round", pytest.fail)
    with pytest.raises(typer.BadParameter, match="expected more rounds"):
        bench_leaks.main(rounds, warm_up)


@pytest.mark.parametrize("given", [[], ["tset"], ["test", "test"]])
def test_commands_that_the_readme_has_not(given):
    script = [sys.executable, f"{SCRIPTS}/readme_command.py"]
    result = subprocess.run([*script, *given], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert not result.stdout
    assert "expected the name of a command that the README marks: steer" in result.stderr


def test_parts_of_steering(monkeypatch):
    import measure_steering

    monkeypatch.setattr(measure_steering, "measure_effect", pytest.fail)
    app = typer.Typer()
    app.command()(measure_steering.main)
    result = CliRunner().invoke(app, ["--part", "foo"])
    assert result.exit_code == 2
    assert "--part" in result.output


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["gpt2"], "expected model/rows or model/rows/prompt/length"),
        (["gpt2/8", "gpt2/8/16"], "Received 'gpt2/8/16'. The models are gpt2, gemma2"),
        (["gpt2/8/int9"], "Received 'gpt2/8/int9'"),
        (["big_gpt2/8"], "Received 'big_gpt2/8'"),
        (["gpt2/0"], "expected a row or more"),
        (["gpt2/8/16/16"], "prompts shorter than the length"),
        (["gpt2/8", "--runs", "0"], "--runs: expected 1 or more. Received '0'"),
        (["gpt2/8", "--write", "no/such/file.json"], "--write: there is no folder"),
    ],
)
def test_cases_that_no_device_can_run(monkeypatch, capsys, given, words):
    import measure_device

    monkeypatch.setattr(measure_device, "read_bandwidth", pytest.fail)
    monkeypatch.setattr(sys, "argv", ["measure_device.py", *given])
    with pytest.raises(SystemExit):
        measure_device.main()
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--models", "gpt3"], ["--int4", "--models", "gpt2,mixtral"]])
def test_models_that_no_accelerator_is_measured_with(monkeypatch, capsys, given):
    import measure_accelerators

    monkeypatch.setattr(measure_accelerators, "ours", pytest.fail)
    monkeypatch.setattr(sys, "argv", ["measure_accelerators.py", *given])
    with pytest.raises(SystemExit):
        measure_accelerators.main()
    assert "--models: expected some of gpt2, gemma2" in capsys.readouterr().err


def test_a_case_that_fails_is_told_in_the_end(monkeypatch, tmp_path):
    import measure_device

    def run(case, options):
        if case.rows == 1:
            raise MemoryError
        return {"case": case.text}

    file = tmp_path / "figures.json"
    monkeypatch.setattr(measure_device, "read_bandwidth", lambda: 1.0)
    monkeypatch.setattr(measure_device, "run", run)
    monkeypatch.setattr(sys, "argv", ["", "gpt2/1", "gemma2/8/int8", "--write", str(file)])
    with pytest.raises(SystemExit) as raised:
        measure_device.main()
    assert raised.value.code == 1
    assert json.loads(file.read_text())["lines"] == [
        {"case": "gpt2/1", "error": "MemoryError()"},
        {"case": "gemma2/8/int8"},
    ]
