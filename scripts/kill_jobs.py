"""Kill a job of `batch` on two Ray nodes at random, and compare what it wrote with a quiet run.

    python scripts/kill_jobs.py --kills 50 --prompts 4000

Two nodes are started on loopback. One run shows that both of them compute rows. Then a job is begun
again and again: each time, after a random while, the command or one of its workers gets SIGKILL,
until there were that many. A run that ends by itself must have written the bytes of a run in one
process without Ray; if it ends before there were enough, the next one begins from nothing. No run
may write a file again that was in place when it began. (What one run did twice within itself could
not be seen.) Only processes that this script started, or that these started, are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()
JUDGE = """
def node(text):
    import ray

    return int(ray.get_runtime_context().get_node_id()[:12], 16)
"""


def command(folder: Path, output: str, *options: str) -> list[str]:
    """Return the command of a job."""
    run = "from backbone_surgery.cli import app; app()"
    words = ["batch", str(folder / "in.jsonl"), str(folder / output), "--max-new-tokens", "24"]
    words += ["--sampler", "top_p", "--controls", "mood=strength", "--shard-rows", "50"]
    return [sys.executable, "-W", "ignore", "-c", run, *words, *options]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Cluster:
    """Two nodes of Ray on loopback, with two CPUs each on paper."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        common = ["--node-ip-address=127.0.0.1", "--num-cpus=2", "--block"]
        head = ["--head", f"--port={port}", "--include-dashboard=false"]
        self.nodes = [self.start(*head, *common)]
        time.sleep(8)
        self.nodes.append(self.start(f"--address={self.address}", *common))
        time.sleep(5)

    def start(self, *options: str) -> subprocess.Popen:
        """Start a node."""
        ray = Path(sys.executable).with_name("ray")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(
            [ray, "start", *options], env=self.environment, start_new_session=True, **quiet
        )

    def stop(self) -> None:
        """End the nodes and what they started."""
        for node in self.nodes:
            os.killpg(node.pid, signal.SIGTERM)
        for node in self.nodes:
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)

    def workers(self) -> list[int]:
        """Return the ids of processes of the nodes that hold a model."""
        command = ["ps", "-eo", "pid=,ppid=,args="]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        known = [(int(pid), int(of), words) for pid, of, words in (x.split(None, 2) for x in lines)]
        own = {node.pid for node in self.nodes}
        while new := {pid for pid, of, _ in known if of in own} - own:
            own |= new
        return [pid for pid, _, words in known if pid in own and "MapWorker" in words]


def written(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the files in a folder, but for parts: when they were written, and their bytes."""
    paths = [path for path in folder.glob("*") if not path.name.startswith(".")]
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def main(
    kills: Annotated[int, typer.Option(min=0)] = 50,
    prompts: Annotated[int, typer.Option(min=1)] = 4000,
    longest: Annotated[float, typer.Option(help="Seconds until a kill, at most.")] = 40,
    seed: int = 0,
) -> None:
    """Run it, and exit with 1 if anything differs."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "judges.py").write_text(JUDGE)
        with open(folder / "in.jsonl", "w") as file:
            for i in range(prompts):
                words = rng.choices(["the", "little", "dog", "ran", "home"], k=rng.randint(1, 9))
                row = {"prompt": " ".join(words), "strength": rng.uniform(-1, 1), "n": i}
                file.write(json.dumps(row) + "\n")
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join([root, name, os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "KERAS_BACKEND": "jax"}
        environment["RAY_AUTH_MODE"] = "disabled"  # nobody else is on this machine
        options = {"cwd": folder, "env": environment, "check": True}
        subprocess.run(command(folder, "quiet"), **options)
        cluster = Cluster(environment)
        try:
            ray = ["--ray", cluster.address]
            subprocess.run(command(folder, "nodes", "--score", "judges:node", *ray), **options)
            lines = [p.read_text().splitlines() for p in (folder / "nodes").glob("in-*.jsonl")]
            nodes = [json.loads(line)["node"] for part in lines for line in part]
            counts = sorted(nodes.count(node) for node in set(nodes))
            console.print(f"rows by node: {counts}")
            if len(counts) != 2:
                raise typer.Exit(1)
            words, left = command(folder, "out", *ray), kills
            while left:
                left = killed(cluster, words, folder / "out", left, longest, rng)
                compare(folder / "quiet", folder / "out")
                shutil.rmtree(folder / "out")
        finally:
            cluster.stop()


def compare(quiet: Path, out: Path) -> None:
    """Exit with 1 if two folders differ, or parts of files are left over."""
    first, second = written(quiet), written(out)
    same = {k: v[1] for k, v in first.items()} == {k: v[1] for k, v in second.items()}
    parts = [path.name for path in out.glob(".*")]
    console.print(f"{len(second)} files, bytes {'equal' if same else 'DIFFER'}, left over: {parts}")
    if not same or parts:
        raise typer.Exit(1)


def killed(
    cluster: Cluster,
    words: list[str],
    output: Path,
    kills: int,
    longest: float,
    rng: random.Random,
) -> int:
    """Run a job, killing it or its workers, until it has ended; return how many kills are left."""
    count = {"command": 0, "worker": 0}
    environment = cluster.environment
    log = output.with_name("log")
    while True:
        before = written(output) if output.is_dir() else {}
        with open(log, "w") as stream:
            streams = {"stdout": stream, "stderr": stream}
            job = subprocess.Popen(words, env=environment, cwd=output.parent, **streams)
        while job.poll() is None and sum(count.values()) < kills:
            try:
                job.wait(rng.uniform(2, longest))
                break
            except subprocess.TimeoutExpired:
                pass
            workers = cluster.workers()
            who = "worker" if workers and rng.random() < 0.5 else "command"
            with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
                os.kill(rng.choice(workers) if who == "worker" else job.pid, signal.SIGKILL)
                count[who] += 1
        job.wait()
        after = written(output) if output.is_dir() else {}
        again = [name for name, (at, _) in before.items() if after[name][0] != at]
        console.print(f"{count}: {len(after)} files, {len(again)} written again")
        if again:
            raise typer.Exit(1)
        if job.returncode == 0:
            return kills - sum(count.values())
        if job.returncode != -signal.SIGKILL:
            console.print(log.read_text()[-2000:], f"status {job.returncode}")
            raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
