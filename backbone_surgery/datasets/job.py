"""Jobs: work on every shard of a data set, once each, however often the job is killed.

The output of a shard is put in place whole. So what is there is done, and a job that is started
again does the rest. A manifest says what the output was made of; a job of other settings is
refused.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from backbone_surgery import hosts
from backbone_surgery.datasets.shards import Shard, find_shards
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.files import (
    as_path,
    hidden_beside,
    is_part,
    put_in_place,
    read_json,
    reading,
    replace_file,
    target_of,
)
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.numbers import check_count

MANIFEST = "_manifest.json"
"""What reads all Parquet files of a folder passes over names that begin so."""
_VERSION = 3
"""Of the manifest: a release that counts something else among what made the output raises it."""
_MOST = 2**28
"""Bytes of a manifest."""

Advance = Callable[[int], object]
"""Is told how many more rows are done."""

Work = Callable[[CachedCausalLM, Shard, Path, Advance], object]
"""Writes the output of a shard to a path, with a model."""


@dataclass(frozen=True)
class Job:
    """Work on the shards of a data set.

    Attributes:
        operation: what is done, for errors.
        folder: of the output.
        shards: all of them.
        ending: of the files of output; `None` for that of the input.
    """

    operation: str
    folder: Path
    shards: tuple[Shard, ...]
    ending: str | None = None

    def output(self, shard: Shard) -> Path:
        """Return the file of output of a shard."""
        return self.folder / f"{shard.name}{self.ending or shard.file.suffix}"

    @property
    def outputs(self) -> list[Path]:
        """All files of output."""
        return [self.output(shard) for shard in self.shards]

    def left(self) -> list[Shard]:
        """Return the shards without output."""
        return [shard for shard in self.shards if not self.output(shard).exists()]

    def do(self, work: Work, lm: CachedCausalLM, shard: Shard, advance: Advance) -> None:
        """Work on one shard, and put its output in place."""
        output = target_of(self.output(shard))
        part = hidden_beside(output)
        try:
            work(lm, shard, part, advance)
            # Where processes hold a model together, all of them compute, and one writes.
            parts = {"shard": shard.name}
            hosts.by_first(lm, self.operation, parts, lambda: put_in_place(part, output))
        except SurgeryError as error:
            rows = f"rows {shard.start} to {shard.stop - 1} of '{shard.file}'"
            raise SurgeryError(f"{self.operation} in {rows}: {error}") from error
        finally:
            part.unlink(missing_ok=True)


def plan_job(
    operation: str, inputs: Any, output: Any, shard_rows: int, ending: str | None = None
) -> Job:
    """Find the shards of a job; nothing is written.

    Raises:
        SurgeryError: bad input, or a folder of output that is none.
    """
    folder = as_path(output, operation).absolute()  # workers may run in other folders
    check_count(operation, "shard_rows", shard_rows, "rows")
    if (folder.exists() and not folder.is_dir()) or not folder.parent.is_dir():
        raise SurgeryError(
            f"{operation} at '{folder}': expected a new folder, or that of the same job, in one "
            "that exists. Received another path. Choose one."
        )
    return Job(operation, folder, tuple(find_shards(operation, inputs, shard_rows)), ending)


def check(job: Job, look: Callable[[Shard], object], verbose: int) -> None:
    """Look at the rows of each shard that is left, so that a bad one is found before work begins.

    Args:
        job: the job.
        look: is called with each shard, and raises a `SurgeryError` for a bad row.
        verbose: whether to show a progress bar.
    """
    with Progress(disable=not verbose) as progress:
        for shard in progress.track(job.left(), description="checking"):
            look(shard)


def begin(job: Job, lm: CachedCausalLM, facts: Mapping[str, Any]) -> None:
    """Write the manifest of a job, or check that it is the one that is there.

    Args:
        job: the job.
        lm: the model that it is done with.
        facts: all that its output depends on but the files of input, as JSON.

    Raises:
        SurgeryError: the folder holds the output of another job, or other files; or not all
            processes see it.
    """
    files = {shard.file: shard.stop for shard in job.shards}
    inputs = [{"file": f.name, "rows": n, "sha256": _sha256(f)} for f, n in files.items()]
    outputs = [path.name for path in job.outputs]
    known = {"format": "backbone_surgery.dataset", "version": _VERSION, "operation": job.operation}
    manifest = {**known, **facts, "inputs": inputs, "outputs": outputs}
    text = json.dumps(manifest, default=_plain, indent=1) + "\n"
    hosts.by_first(lm, job.operation, {"job": text}, lambda: _write_manifest(job, text))
    path = job.folder / MANIFEST
    seen = path.read_text(encoding="utf-8") if path.is_file() else None
    hosts.agree(lm, job.operation, {"manifest, in a folder that all of them share,": seen})


def _write_manifest(job: Job, text: str) -> None:
    manifest = json.loads(text)
    path = job.folder / MANIFEST
    if path.is_file():
        with reading(path, job.operation, "the manifest of a job"):
            before = read_json(path, _MOST)
            version = before.get("version")
            others = [k for k in {**before, **manifest} if before.get(k) != manifest.get(k)]
        if version != _VERSION:
            raise SurgeryError(
                f"{job.operation} at '{job.folder}': expected a manifest of version {_VERSION}. "
                f"Received version {shown(version)}, of another release of backbone-surgery, which "
                "tells jobs apart by other things. Choose a new folder, or go on with that release."
            )
        if others:
            raise SurgeryError(
                f"{job.operation} at '{job.folder}': expected the job that the folder was made by. "
                f"Received one that differs in: {', '.join(others)}. Choose a new folder, or ask "
                "for the same."
            )
        return
    others = sorted(p.name for p in job.folder.iterdir()) if job.folder.is_dir() else []
    if [name for name in others if not is_part(name)]:
        raise SurgeryError(
            f"{job.operation} at '{job.folder}': expected a new folder, or that of the same job. "
            f"Received one that holds {shown(others[:5])}. Choose another."
        )
    job.folder.mkdir(exist_ok=True)
    replace_file(path, lambda part: part.write_text(text, encoding="utf-8"))


def run(job: Job, work: Work, lm: CachedCausalLM, verbose: int) -> None:
    """Work on the shards that are left, one after the other."""
    left = job.left()
    hosts.agree(lm, job.operation, {"shards without output": [shard.name for shard in left]})
    with Progress(disable=not verbose) as progress:
        task = start(progress, job, left)
        for shard in left:
            job.do(work, lm, shard, lambda rows: progress.advance(task, rows))
    hosts.by_first(lm, job.operation, {}, lambda: end(job))


def start(progress: Progress, job: Job, left: list[Shard]) -> Any:
    """Show what there is to do, and how much of it is done."""
    rows = sum(shard.stop - shard.start for shard in job.shards)
    rest = sum(shard.stop - shard.start for shard in left)
    return progress.add_task("rows", total=rows, completed=rows - rest)


def end(job: Job) -> None:
    """Remove what processes that were killed left behind."""
    for path in job.folder.iterdir():
        if is_part(path.name):
            path.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """Write arrays and numbers of NumPy as lists and numbers, and anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
