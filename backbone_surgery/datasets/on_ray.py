"""Jobs on a cluster: Ray hands the shards of a job to workers, which hold a model each."""

import functools
import logging
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
from rich.progress import Progress

from backbone_surgery.datasets.facts import sampler_facts
from backbone_surgery.datasets.job import Job, start
from backbone_surgery.datasets.shards import Shard
from backbone_surgery.errors import SurgeryError
from backbone_surgery.extras import import_extra
from backbone_surgery.generation.described import described

_SECONDS = 30.0
"""How long a cluster may take to answer."""
_DEATHS = 3
"""How often a worker that died is started again."""


def run(
    job: Job,
    left: list[Shard],
    work: Any,
    make: Any,
    known: dict[str, Any],
    address: str,
    verbose: int,
) -> None:
    """Work on the shards that are left, with a worker for each GPU, or node without one.

    A shard that Ray hands out twice gives the same file twice.

    Args:
        job: the job. Its folders are the same on every node.
        left: its shards that are left.
        work: called with a model, a shard and a path.
        make: makes a model.
        known: what is known of the model by `described`, and of its sampler where the output
            depends on it; that of a worker must be the same.
        address: of the cluster, as of `ray.init`.
        verbose: whether to show a progress bar.

    Raises:
        SurgeryError: no cluster answers, or a worker failed.
    """
    ray = import_extra(job.operation, "ray")
    data = import_extra(job.operation, "ray.data")
    own = not ray.is_initialized()
    if own:
        _connect(ray, job, address)
    try:
        workers = _workers(ray, job, address, len(left))
        with Progress(disable=not verbose) as progress:
            task = start(progress, job, left)
            for row in _rows(data, (job, left, work, make, known), *workers) if left else ():
                if row["error"]:
                    raise SurgeryError(
                        f"{job.operation} at '{address}': expected workers that end well. Received "
                        f"{row['error'][:1000]} What is written stays: start it again to go on."
                    )
                progress.advance(task, int(row["rows"]))
    except ray.exceptions.RayError as error:
        raise SurgeryError(
            f"{job.operation} at '{address}': expected a cluster whose workers go on. Received "
            f"{type(error).__name__}: {str(error)[:1000]} Look at the logs of Ray for the cause. "
            "What is written stays: start it again to go on."
        ) from error
    finally:
        if own:
            _shut_down(ray)


def _connect(ray: Any, job: Job, address: str) -> None:
    backend = {"env_vars": {"KERAS_BACKEND": keras.config.backend()}}
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address=address, runtime_env=backend, **quiet)
    except Exception as error:  # Ray raises several kinds for an address that is none
        raise _unreachable(job, address, error) from error


def reach(job: Job, address: str) -> None:
    """Connect to `host:port` once: Ray itself tries again for ever where nobody listens.

    Raises:
        SurgeryError: nobody does.
    """
    host, _, port = str(address).removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _SECONDS).close()
        except (OSError, ValueError) as error:  # ValueError: no name that a host can have
            raise _unreachable(job, address, error) from error


def _shut_down(ray: Any) -> None:
    """Leave the cluster, once no thread of Ray Data asks it for anything: that would begin another.

    Ray would end the whole process a minute later, when it finds that one gone.
    """
    for thread in threading.enumerate():
        if thread.name.startswith("StreamingExecutor"):
            thread.join(60)
    ray.shutdown()


def _unreachable(job: Job, address: str, error: Exception) -> SurgeryError:
    return SurgeryError(
        f"{job.operation} at '{address}': expected a cluster of Ray that answers. Received "
        f"{type(error).__name__}: {str(error)[:1000]} Start the job again to go on, with "
        "RAY_AUTH_MODE=token in its environment if the cluster asks for a token."
    )


def _workers(ray: Any, job: Job, address: str, count: int) -> tuple[int, int]:
    """Return how many workers there are to be, and how many GPUs each of them takes.

    A node without CPUs, as the head of a cluster may be, has none. A warning says that others use
    what the workers for so many shards need.
    """
    resources = ray.cluster_resources()
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    workers = gpus or len(nodes)
    if cpus <= workers:
        raise SurgeryError(
            f"{job.operation} at '{address}': expected more CPUs than the {workers} workers, since "
            f"Ray Data needs one to read. Received {cpus}. Start the nodes with more `--num-cpus`."
        )
    wanted = {"CPU": min(workers, count) + 1, "GPU": min(gpus, count)}
    free = ray.available_resources()
    if any(free.get(name, 0) < n for name, n in wanted.items()):
        has = ", ".join(f"{int(free.get(name, 0))} {name}s" for name in wanted)
        warnings.warn(
            f"{job.operation} at '{address}': the job takes {wanted['CPU']} CPUs and "
            f"{wanted['GPU']} GPUs of the cluster, of which {has} are free. It waits for the rest.",
            stacklevel=2,
        )
    return workers, 1 if gpus else 0


def _rows(data: Any, arguments: tuple[Any, ...], workers: int, gpus: int) -> Iterator[Any]:
    """Hand the shards to workers, and yield a row for each that is done."""
    data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    count = len(arguments[1])
    items = [{"index": i} for i in range(count)]
    done = data.from_items(items, override_num_blocks=count).map_batches(
        _Worker,
        fn_constructor_args=arguments,
        batch_size=1,
        compute=data.ActorPoolStrategy(size=min(workers, count)),
        num_gpus=gpus,
        num_cpus=1,  # spread over the nodes, as Ray Data does by itself
        max_restarts=_DEATHS,  # else one that dies each time would be started for ever
        max_task_retries=_DEATHS,
    )
    # Blocks that are fetched ahead are asked for by a thread that may outlive the iteration.
    for batch in done.iter_batches(batch_size=1, prefetch_batches=0):
        yield {name: values[0] for name, values in batch.items()}


class _Worker:
    """Holds a model, and works on the shards that it is handed.

    What Ray hands on of an error is not its cause, so errors are told as text.
    """

    def __init__(
        self, job: Job, shards: list[Any], work: Any, make: Any, known: dict[str, Any]
    ) -> None:
        self.job, self.shards, self.work = job, shards, work
        self.lm: Any = None
        self.error = _told(lambda: self._begin(make, known))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Work on some shards, and tell of how many rows, or of an error."""
        shards = [self.shards[int(index)] for index in batch["index"]]
        rows = [shard.stop - shard.start for shard in shards]
        errors = [self.error or _told(functools.partial(self._do, shard)) for shard in shards]
        return {"rows": rows, "error": errors}

    def _begin(self, make: Any, known: dict[str, Any]) -> None:
        """Make the model, and refuse another one than that of the job."""
        self.lm = make()
        here = described(self.job.operation, self.lm)
        here["sampler"] = sampler_facts(self.lm.sampler)
        others = [f"{name} {here[name]}" for name in known if here[name] != known[name]]
        if others:
            raise SurgeryError(
                f"{self.job.operation} in a worker of Ray: expected the model and the code that "
                f"the job was begun with. Received another {', another '.join(others)}. Have the "
                "same files and releases on all nodes."
            )

    def _do(self, shard: Any) -> None:
        if not self.job.is_done(shard):
            self.job.do(self.work, self.lm, shard, lambda rows: None)


def _told(do: Callable[[], object]) -> str:
    """Do something, and return the error that it ran into as text."""
    try:
        do()
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return ""
