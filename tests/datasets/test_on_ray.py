"""Jobs that Ray's workers do give the same files."""

import os
import socket
import threading
import time
import warnings

import pytest

import backbone_surgery as bs
from backbone_surgery.datasets import job, on_ray
from tests.datasets.conftest import OPTIONS, make_lm

ray = pytest.importorskip("ray")
# Ray warns of its own old names, and starts processes by a fork, at which JAX warns.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CONTROLS = {"mood": "strength"}


def make():
    from tests.datasets.conftest import make_lm

    return make_lm()


def test_workers_write_what_one_process_writes(lines, tmp_path):
    options = {**OPTIONS, "controls": CONTROLS, "shard_rows": 3}
    alone = bs.generate_dataset(make_lm(), lines, tmp_path / "alone", **options)
    (tmp_path / "out").mkdir()
    paths = bs.generate_dataset(make, lines, tmp_path / "out", ray="local", **options)
    assert [p.read_bytes() for p in paths] == [p.read_bytes() for p in alone]
    before = [p.stat().st_mtime_ns for p in paths]
    paths[2].unlink()
    bs.generate_dataset(make, lines, tmp_path / "out", ray="local", **options)
    assert [p.read_bytes() for p in paths] == [p.read_bytes() for p in alone]
    assert sum(p.stat().st_mtime_ns != t for p, t in zip(paths, before, strict=True)) == 1


def test_workers_harvest_what_one_process_harvests(lines, tmp_path):
    options = {"column": "prompt", "batch_size": 4, "verbose": 0, "shard_rows": 3}
    alone = bs.harvest(make_lm(), lines, tmp_path / "alone", "blocks.1", **options)
    paths = bs.harvest(make, lines, tmp_path / "out", "blocks.1", ray="local", **options)
    assert [p.read_bytes() for p in paths] == [p.read_bytes() for p in alone]


class Cluster:
    """What Ray says of a cluster whose head has no CPUs, and whose nodes others use."""

    def __init__(self, head, free):
        cpus = [head, 4, 4]
        self.nodes = lambda: [{"Alive": True, "Resources": {"CPU": n} if n else {}} for n in cpus]
        self.cluster_resources = lambda: {"CPU": sum(cpus)}
        self.available_resources = lambda: {"CPU": free}


def test_nodes_without_cpus_have_no_worker(tmp_path):
    asked = job.Job("generate_dataset", tmp_path, ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on_ray._workers(Cluster(0, 8), asked, "auto", 9) == (2, 0)
        assert on_ray._workers(Cluster(4, 12), asked, "auto", 9) == (3, 0)
        assert on_ray._workers(Cluster(0, 2), asked, "auto", 1) == (2, 0)
    with pytest.warns(UserWarning, match="takes 3 CPUs and 0 GPUs .* 2 CPUs, 0 GPUs are free. It"):
        on_ray._workers(Cluster(0, 2), asked, "auto", 9)


def test_a_worker_that_fails_is_told_of(lines, tmp_path):
    def fails(text):
        raise ValueError("no judgement")

    options = {**OPTIONS, "score": fails, "ray": "local"}
    with pytest.raises(
        bs.SurgeryError, match=r"end well. Received SurgeryError: .* ValueError, no judgement"
    ):
        bs.generate_dataset(make, lines, tmp_path / "out", **options)


def test_ray_is_left_once_no_thread_asks_it_for_anything(lines, tmp_path, monkeypatch):
    wait, shutdown, waiting, left = ray.wait, ray.shutdown, [], []

    def wait_on_a_slow_machine(*args, **kwargs):
        thread = threading.current_thread()
        waiting.append(thread)
        time.sleep(2.5 if thread.name == "Prefetcher" else 0)
        try:
            return wait(*args, **kwargs)
        finally:
            waiting.remove(thread)

    def fails(text):
        raise ValueError("no judgement")

    monkeypatch.setattr(ray, "wait", wait_on_a_slow_machine)
    monkeypatch.setattr(ray, "shutdown", lambda: left.append(list(waiting)) or shutdown())
    options = {**OPTIONS, "score": fails, "ray": "local"}
    with pytest.raises(bs.SurgeryError, match="no judgement"):
        bs.generate_dataset(make, lines, tmp_path / "out", **options)
    assert left == [[]]


def test_a_worker_with_another_model_is_refused(lines, tmp_path):
    here = os.getpid()

    def make():
        from tests.datasets.conftest import make_lm

        lm = make_lm()
        if os.getpid() != here:
            lm.opened.token_embedding.embeddings.assign(lm.opened.token_embedding.embeddings + 1)
        return lm

    with pytest.raises(bs.SurgeryError, match=r"expected the model and .*Received another edit"):
        bs.generate_dataset(make, lines, tmp_path / "out", ray="local", **OPTIONS)
    assert not list((tmp_path / "out").glob("*.jsonl"))


def test_a_worker_with_another_sampler_is_refused(lines, tmp_path):
    here = os.getpid()

    def make():
        from tests.datasets.conftest import make_lm

        lm = make_lm()
        lm.compile(sampler="top_k" if os.getpid() == here else "greedy")
        return lm

    with pytest.raises(bs.SurgeryError, match=r"Received another sampler .*GreedySampler"):
        bs.generate_dataset(make, lines, tmp_path / "out", ray="local", **OPTIONS)
    options = {"column": "prompt", "batch_size": 4, "verbose": 0}
    bs.harvest(make, lines, tmp_path / "activations", "blocks.1", ray="local", **options)


def test_workers_that_die_each_time_end_the_job(lines, tmp_path):
    here = os.getpid()

    def make():
        from tests.datasets.conftest import make_lm

        if os.getpid() != here:
            os._exit(7)
        return make_lm()

    with pytest.raises(bs.SurgeryError, match=r"expected a cluster whose workers go on.* died"):
        bs.generate_dataset(make, lines, tmp_path / "out", ray="local", **OPTIONS)


def test_no_cluster_at_an_address(lines, tmp_path):
    """Ray itself would try again for ever."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for where in (address, f"ray://{address}"):
        words = f"at '{where}': expected a cluster of Ray that answers. Received ConnectionRefused"
        with pytest.raises(bs.SurgeryError, match=words):
            bs.generate_dataset(make_lm, lines, tmp_path / "out", ray=where, **OPTIONS)


def test_a_cluster_that_does_not_answer_may_ask_for_a_token(lines, tmp_path, monkeypatch):
    def init(**options):
        raise ConnectionError("Failed to connect")

    monkeypatch.setattr(ray, "init", init)
    words = "expected a cluster of Ray that answers. Received ConnectionError.* RAY_AUTH_MODE=token"
    with pytest.raises(bs.SurgeryError, match=words):
        bs.generate_dataset(make, lines, tmp_path / "out", ray="auto", **OPTIONS)
