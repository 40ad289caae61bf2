"""Hosts: two processes that hold a mesh together give what one gives, or one clear error each."""

import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.meshes.on_devices import compare
from tests.meshes.test_meshes import ROOT

pytestmark = pytest.mark.slow

DEVICES = 4


def start(kind, what, mesh="1,4", processes=2):
    """Start processes that share four devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    count = f"--xla_force_host_platform_device_count={DEVICES // processes}"
    env = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {count}"}
    module = [sys.executable, "-W", "ignore", "-m", "tests.meshes.on_hosts", kind, str(what)]
    options = ["--mesh", mesh, "--processes", str(processes), "--port", str(port)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen([*module, *options, "--process", str(i)], cwd=ROOT, env=env, **pipes)
        for i in range(processes)
    ]


def finish(processes, seconds=300):
    """Wait for processes: `[(exit status, output, errors)]`."""
    try:
        ended = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *texts) for p, texts in zip(processes, ended, strict=True)]


@pytest.mark.parametrize("mesh", ["2,2", "1,4"])
def test_two_processes_give_what_one_gives(tmp_path, mesh):
    for processes in (1, 2):
        for status, _, errors in finish(start("texts", tmp_path, mesh, processes)):
            assert status == 0, errors[-3000:]
    wanted = np.load(tmp_path / "1_0.npz")
    assert wanted["digest"]
    for process in (0, 1):
        compare(np.load(tmp_path / f"2_{process}.npz"), wanted)


@pytest.mark.parametrize("mesh", ["2,2", "1,4"])
def test_two_processes_quantise_and_learn_as_one_does(tmp_path, mesh):
    for processes in (1, 2):
        for status, output, errors in finish(start("narrow", tmp_path, mesh, processes)):
            assert status == 0, errors[-3000:]
            # Where all devices share each row, seven texts need not divide by the processes.
            uneven = int(mesh == "2,2")
            refused = {"refused: fit": 1, "refused: evaluate": uneven, "Call the model itself": 1}
            # On the other mesh each process has all parts of the weights.
            refused |= {"refused: quantize to gptq": 1, "refused: save_weights": 1 - uneven}
            for words, times in refused.items():
                assert output.count(words) == (times if processes == 2 else 0), words
    assert (tmp_path / "saved.weights.h5").exists() == (mesh == "2,2")
    wanted = np.load(tmp_path / "1_0.npz")
    for process in (0, 1):
        compare(np.load(tmp_path / f"2_{process}.npz"), wanted)


def test_processes_that_disagree_are_told_so(tmp_path):
    for status, output, errors in finish(start("disagree", tmp_path)):
        assert status == 0, errors[-3000:]
        # Gloo writes there as well, in pieces where the machine is busy.
        lines = [line for line in output.splitlines() if ": expected the same " in line]
        answers = dict(line.split(": ", 1) for line in lines)
        assert len(answers) == 17
        for what, answer in answers.items():
            assert f"expected the same {what}" in answer, what
            assert "in every process. Received another in process" in answer, what


def test_an_error_in_one_process_is_heard_of_in_the_others(tmp_path):
    ended = finish(start("fail", tmp_path), seconds=200)
    for process, (status, output, errors) in enumerate(ended):
        assert status == 0, errors[-3000:]
        assert "whole: 1" in output
        for what in ("prompts", "inputs", "corpus", "score"):
            (line,) = (line for line in output.splitlines() if line.startswith(f"{what}: "))
            is_told = "Received an error in process 1. Look at what it says there." in line
            assert is_told == (process == 0), line
            assert "no error" not in line


def test_processes_with_a_whole_model_each_know_nothing_of_each_other(tmp_path):
    for status, output, errors in finish(start("apart", tmp_path)):
        assert status == 0, errors[-3000:]
        assert "done" in output


@pytest.mark.parametrize("mesh", ["2,2", "1,4"])
def test_kernels_of_a_tpu_are_laid_on_the_devices_of_each_process(tmp_path, mesh):
    for status, output, errors in finish(start("laid", tmp_path, mesh)):
        assert status == 0, errors[-3000:]
        assert "laid: 6" in output  # of queries, keys and values of two blocks


def test_weights_that_differ_are_refused_by_jax(tmp_path):
    for status, _, errors in finish(start("differ", tmp_path)):
        assert status == 1
        assert "must be the same on all processes" in errors or "AssertionError" in errors


@pytest.mark.parametrize("who", ["busy 1", "idle 1", "idle 0"])
def test_a_process_that_dies_ends_the_others(who):
    dying = int(who[-1])
    processes = start("die", who)
    processes[dying].wait(300)
    begun = time.monotonic()
    ended = finish(processes, seconds=60)
    assert time.monotonic() - begun < 60
    assert ended[dying][0] == 9
    assert ended[1 - dying][0] != 0
