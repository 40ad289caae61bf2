"""What the command line sets before Keras and XLA begin, and what it does not import."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from backbone_surgery import startup


@pytest.fixture(autouse=True)
def _keep_what_is_there(monkeypatch, tmp_path):
    """Else tests that follow would lack TensorFlow, and the user's home would get programs."""
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    for name in ("JAX_COMPILATION_CACHE_DIR", *startup._PROGRAMS):
        monkeypatch.setenv(name, "")  # put back what was there when the test ends
        monkeypatch.delenv(name)


def test_a_plan_looks_for_no_chips(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    startup.prepare_command_line(["/usr/bin/backbone-surgery", "generate"])
    assert "JAX_PLATFORMS" not in os.environ
    startup.prepare_command_line(["/usr/bin/backbone-surgery", "plan", "tiny_gpt2"])
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_a_library_sets_nothing():
    startup.prepare_command_line(["python"])
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
    startup.prepare_command_line(["/usr/bin/backbone-surgery"])
    assert os.environ["JAX_COMPILATION_CACHE_DIR"]


def test_compiled_programs_are_kept_where_nobody_else_writes(tmp_path):
    startup.prepare_command_line(["backbone-surgery", "generate"])
    folder = tmp_path / "caches" / "backbone-surgery" / "programs"
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert startup._PROGRAMS.items() <= os.environ.items()


@pytest.mark.slow
def test_compiled_programs_are_kept_where_the_user_says(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    startup.prepare_command_line(["backbone-surgery", "generate"])
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "/elsewhere"
    assert not (tmp_path / "caches").exists()


@pytest.mark.slow
def test_without_a_place_to_write_to_nothing_is_kept(tmp_path, monkeypatch):
    (tmp_path / "caches").write_text("a file")
    startup.prepare_command_line(["backbone-surgery", "generate"])
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_a_plan_keeps_no_programs(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    startup.prepare_command_line(["backbone-surgery", "plan"])
    assert not (tmp_path / "caches").exists()


IMPORTS = """
import sys
{}
unused = ["tensorflow", "sklearn", "scipy.stats", "pandas", "matplotlib", "pyarrow", "torch"]
unused += ["IPython", "nltk"]
print([name for name in {} + unused if sys.modules.get(name)])
import matplotlib, sklearn, kagglehub
"""
COMMAND = 'sys.argv = ["backbone-surgery", "generate"]; import backbone_surgery.cli'


@pytest.mark.parametrize(
    "code",
    [
        IMPORTS.format(COMMAND, ["kagglehub"]),
        pytest.param(IMPORTS.format("import backbone_surgery", []), marks=pytest.mark.slow),
    ],
)
def test_nothing_is_imported_that_is_not_used(code):
    received = _run([sys.executable, "-c", code], BACKBONE_SURGERY_LEAN="1")
    assert received.stdout == "[]\n", received.stderr


@pytest.mark.slow
def test_text_is_the_same_without_tensorflow():
    code = (
        "import backbone_surgery as bs; lm = bs.CachedCausalLM.from_preset('tiny_gpt2'); "
        "lm.compile(sampler='greedy'); print(lm.generate('Once upon a time', max_new_tokens=20)); "
        "import sys; print(bool(sys.modules.get('tensorflow')))"
    )
    texts = [_run([sys.executable, "-c", code], BACKBONE_SURGERY_LEAN=x).stdout for x in "01"]
    assert texts[0].endswith("True\n")
    assert texts[0].replace("True", "False") == texts[1]


@pytest.mark.parametrize(
    ("arguments", "may"),
    [
        (["generate", "Once"], False),
        (["generate", "--model", "tiny_gemma", "-m"], False),
        (["generate", "-m", "."], False),
        (["generate", "-m", "gpt2_base_en"], True),
        (["generate", "--model", "kaggle://keras/gpt2/keras/gpt2_base_en"], True),
        (["generate", "--model=tiny_gpt2"], True),  # not looked at
        (["generate", "-mtiny_gpt2"], True),
        (["plan", "tiny_gpt2"], True),
    ],
)
def test_what_downloads_is_kept_from_commands_that_need_no_download(arguments, may):
    assert startup._may_download(["backbone-surgery", *arguments]) == may


def _run(command, **environment):
    environment = {**os.environ, "KERAS_BACKEND": "jax", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_the_second_run_of_a_command_finds_its_programs(tmp_path):
    command = [str(Path(sys.executable).with_name("backbone-surgery")), "generate", "Once upon"]
    texts, programs = [], []
    for _ in range(2):
        received = _run(command)
        texts.append(received.stdout)
        programs.append(sorted(p.name for p in (tmp_path / "caches").rglob("*-cache")))
    assert programs[0] == programs[1] != []
    assert texts[0] == texts[1]
    assert texts[0].startswith("Once upon")
