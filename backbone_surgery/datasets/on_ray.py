"""Jobs on a cluster: Ray hands the shards of a job to workers, which hold a model each."""

from typing import Any

from rich.progress import Progress

from backbone_surgery.datasets.job import Job, end, start
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
    """
    ray = import_extra(job.operation, "ray")
    data = import_extra(job.operation, "ray.data")
    ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
    data.DataContext.get_current().enable_progress_bars = False
    left = job.left()
    gpus = int(ray.cluster_resources().get("GPU", 0))
    nodes = sum(node["Alive"] for node in ray.nodes())
    workers = max(1, min(gpus or nodes, len(left)))
    shards = data.from_items(
        [{"index": i} for i in range(len(left))], override_num_blocks=max(1, len(left))
    )
    done = shards.map_batches(
        _Worker,
        fn_constructor_args=(job, left, work, make),
        batch_size=1,
        compute=data.ActorPoolStrategy(size=workers),
        num_gpus=1 if gpus else 0,
        num_cpus=1,
        scheduling_strategy="SPREAD",
    )
    with Progress(disable=not verbose) as progress:
        task = start(progress, job, left)
        for row in done.iter_rows() if left else ():
            progress.advance(task, row["rows"])
    end(job)


class _Worker:
    """Holds a model, and works on the shards that it is handed."""

    def __init__(self, job: Job, shards: list[Any], work: Any, make: Any) -> None:
        self.job, self.shards, self.work, self.lm = job, shards, work, make()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = []
        for index in batch["index"]:
            shard = self.shards[int(index)]
            if not self.job.output(shard).exists():
                self.job.do(lambda shard, path: self.work(self.lm, shard, path), shard)
            rows.append(shard.stop - shard.start)
        return {"rows": rows}
