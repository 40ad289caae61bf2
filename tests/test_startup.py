"""What the command line sets before Keras and XLA begin."""

import os

import pytest

from backbone_surgery import startup


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


def test_a_library_sets_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(startup, "_GPU", tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "")
    startup.prepare_command_line(["python"])
    assert os.environ["XLA_FLAGS"] == ""
    startup.prepare_command_line(["/usr/bin/backbone-surgery"])
    assert os.environ["XLA_FLAGS"]
