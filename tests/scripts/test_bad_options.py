"""Scripts that run for hours refuse bad options before they begin."""

import json
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


def test_parts_of_steering(monkeypatch):
    import measure_steering

    monkeypatch.setattr(measure_steering, "measure_effect", pytest.fail)
    app = typer.Typer()
    app.command()(measure_steering.main)
    result = CliRunner().invoke(app, ["--part", "foo"])
    assert result.exit_code == 2
    assert "--part" in result.output
