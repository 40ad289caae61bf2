"""What the command line sets before Keras and XLA begin."""

import os

import pytest

from backbone_surgery import startup


@pytest.fixture(autouse=True)
def _keep_modules(monkeypatch):
    """Else TensorFlow would be kept out of the tests that follow."""
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")


@pytest.mark.parametrize(
    ("is_there", "before", "after"),
    [
        (False, "", ""),
        (True, "", "--xla_gpu_enable_command_buffer=+WHILE"),
        (True, "--a=1", "--a=1 --xla_gpu_enable_command_buffer=+WHILE"),
        (True, "--xla_gpu_enable_command_buffer=", "--xla_gpu_enable_command_buffer="),
    ],
)
def test_a_gpu_runs_the_loop_as_one_graph(monkeypatch, tmp_path, is_there, before, after):
    gpu = tmp_path / "nvidia0"
    monkeypatch.setattr(startup, "_GPU", gpu)
    monkeypatch.setenv("XLA_FLAGS", before)
    if is_there:
        gpu.touch()
    startup.run_loops_as_graphs()
    assert os.environ["XLA_FLAGS"] == after


def test_a_plan_looks_for_no_chips(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    startup.prepare_command_line(["/usr/bin/backbone-surgery", "generate"])
    assert "JAX_PLATFORMS" not in os.environ
    startup.prepare_command_line(["/usr/bin/backbone-surgery", "plan", "tiny_gpt2"])
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_a_library_sets_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(startup, "_GPU", tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "")
    startup.prepare_command_line(["python"])
    assert os.environ["XLA_FLAGS"] == ""
    startup.prepare_command_line(["/usr/bin/backbone-surgery"])
    assert os.environ["XLA_FLAGS"]
