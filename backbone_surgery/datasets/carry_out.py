"""Carrying a job out: begin it with its facts, and run it here or on a cluster."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from backbone_surgery import hosts
from backbone_surgery.datasets import on_ray
from backbone_surgery.datasets.facts import LM, make
from backbone_surgery.datasets.job import Job, begun, check, is_begun, make_manifest, run
from backbone_surgery.datasets.shards import forget
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.described import described


def carry_out(
    job: Job,
    lm: LM,
    work: Any,
    facts: Callable[[CachedCausalLM], dict[str, Any]],
    ray: str | None,
    verbose: int,
) -> list[Path]:
    """Do what is left of a job, and return its files of output.

    Args:
        job: the job.
        lm: a model, or a function that makes one.
        work: called with a model, a shard, a path and what is told of progress. Its `check` looks
            at the rows of a shard, with a model.
        facts: checks the settings with the model, and returns what else the output depends on.
        ray: address of a Ray cluster, if it is to run on one.
        verbose: whether to show a progress bar.
    """
    if ray is not None:
        on_ray.reach(job, ray)
    model = make(job.operation, lm, ray)
    try:
        with hosts.telling(None if ray else model):
            outputs = {"files of output": [path.name for path in job.outputs]}
            hosts.agree(model, job.operation, outputs)  # before weights are gathered
            known = described(job.operation, model)
            settings = facts(model)
            job = replace(job, manifest=make_manifest(job, {**known, **settings}))
            is_begun(job)  # the output of another job is no business of this one
            left = job.left()
            check(left, functools.partial(work.check, model), verbose)
            with begun(job, model):
                if ray is None:
                    run(job, left, work, model, verbose)
                    hosts.agree(model, job.operation, {})  # an error at the end is heard of, too
                else:
                    del model  # the workers make their own
                    known |= {name: x for name, x in settings.items() if name == "sampler"}
                    on_ray.run(job, left, work, lm, known, ray, verbose)
    finally:
        forget()
    return job.outputs
