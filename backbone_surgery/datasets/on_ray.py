"""Jobs on a cluster: Ray hands the shards of a job to workers, which hold a model each."""

import logging
from typing import Any

import keras
from rich.progress import Progress

from backbone_surgery.datasets.job import Job, end, start
from backbone_surgery.errors import SurgeryError
from backbone_surgery.extras import import_extra


def run(job: Job, work: Any, make: Any, address: str, verbose: int) -> None:
    """Work on the shards that are left, with a worker for each GPU, or node without one.

    A shard that Ray hands out twice gives the same file twice.

    Args:
        job: the job. Its folders are the same on every node.
        work: called with a model, a shard and a path.
        make: makes a model.
        address: of the cluster, as of `ray.init`.
        verbose: whether to show a progress bar.

    Raises:
        SurgeryError: no cluster answers, or a worker failed.
    """
    ray = import_extra(job.operation, "ray")
    data = import_extra(job.operation, "ray.data")
    left, own = job.left(), not ray.is_initialized()
    try:
        if own:
            backend = {"env_vars": {"KERAS_BACKEND": keras.config.backend()}}
            quiet = {"log_to_driver": False, "logging_level": "ERROR"}
            ray.init(address=address, runtime_env=backend, **quiet)
        with Progress(disable=not verbose) as progress:
            task = start(progress, job, left)
            for row in _rows(ray, data, (job, left, work, make)) if left else ():
                if row["error"]:
                    raise SurgeryError(
                        f"{job.operation} at '{address}': expected workers that end well. Received "
                        f"{row['error'][:1000]} What is written stays: start it again to go on."
                    )
                progress.advance(task, row["rows"])
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise SurgeryError(
            f"{job.operation} at '{address}': expected a cluster of Ray that answers. Received "
            f"{type(error).__name__}: {str(error)[:1000]} Start the job again to go on."
        ) from error
    finally:
        if own:
            ray.shutdown()
    end(job)


def _rows(ray: Any, data: Any, arguments: tuple[Any, ...]) -> Any:
    """Hand the shards to workers, and yield a row for each that is done."""
    data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    count = len(arguments[1])
    gpus = int(ray.cluster_resources().get("GPU", 0))
    nodes = sum(node["Alive"] for node in ray.nodes())
    items = [{"index": i} for i in range(count)]
    done = data.from_items(items, override_num_blocks=count).map_batches(
        _Worker,
        fn_constructor_args=arguments,
        batch_size=1,
        compute=data.ActorPoolStrategy(size=min(gpus or nodes, count)),
        num_gpus=1 if gpus else 0,
        num_cpus=1,
        scheduling_strategy="SPREAD",
    )
    return done.iter_rows()


class _Worker:
    """Holds a model, and works on the shards that it is handed."""

    def __init__(self, job: Job, shards: list[Any], work: Any, make: Any) -> None:
        self.job, self.shards, self.work, self.lm = job, shards, work, make()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Work on some shards, and tell of how many rows, or of an error."""
        rows, errors = [], []
        for index in batch["index"]:
            shard, error = self.shards[int(index)], ""
            try:
                if not self.job.output(shard).exists():
                    self.job.do(lambda shard, path: self.work(self.lm, shard, path), shard)
            except Exception as caught:  # what Ray hands on of an error is not its cause
                error = f"{type(caught).__name__}: {caught}"
            rows.append(shard.stop - shard.start)
            errors.append(error)
        return {"rows": rows, "error": errors}
