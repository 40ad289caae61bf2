"""Jobs: work on every shard of a data set, once each, however often the job is killed.

The output of a shard is put in place whole. So what is there is done, unless a copy cut it short,
and a job that is started again does the rest. A manifest says what the output was made of; a job
of other settings is refused.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.progress import Progress

from backbone_surgery import hosts
from backbone_surgery.datasets.folder_lock import FolderLock, lock_on
from backbone_surgery.datasets.shards import Shard, count_rows, find_shards
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.files import (
    as_path,
    check_writable,
    found_at,
    hidden_beside,
    is_part,
    put_in_place,
    read_json,
    reading,
    replace_file,
    target_of,
    writing,
)
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.numbers import check_count

MANIFEST = "_manifest.json"
"""What reads all Parquet files of a folder passes over names that begin so."""
_FORMAT = "backbone_surgery.dataset"
_VERSION = 6
"""A release that counts something else among what made the output raises it."""
_LONGEST = 255
"""Bytes that a file system takes as a name."""
_SHOWN = 4
"""Differences of two jobs that an error names, at most."""
_MOST = 2**28
"""Bytes of a manifest."""
_PATIENCE = 2.0
"""Seconds for a process that does the same job to write the manifest."""
_AGAIN = "Make room there, or make it writable: the same call then goes on where it was."

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
        ending: of the files of output, which then hold rows of their own; `None` for that of the
            input, and its rows.
        manifest: says what the output is made of.
    """

    operation: str
    folder: Path
    shards: tuple[Shard, ...]
    ending: str | None = None
    manifest: str = ""

    def output(self, shard: Shard) -> Path:
        """Return the file of output of a shard."""
        return self.folder / f"{shard.name}{self.ending or shard.file.suffix}"

    @property
    def outputs(self) -> list[Path]:
        """All files of output."""
        return [self.output(shard) for shard in self.shards]

    def is_done(self, shard: Shard) -> bool:
        """Tell whether the output of a shard is there, and whole.

        Raises:
            SurgeryError: there is a file of more rows than the shard, which this job did not write.
        """
        output = self.output(shard)
        if not output.exists():
            return False
        rows = count_rows(self.operation, output)
        if self.ending is not None or rows is None:
            return rows is not None
        wanted = shard.stop - shard.start
        if rows > wanted:
            raise SurgeryError(
                f"{self.operation} at '{output}': expected the {wanted} rows of a shard, or fewer, "
                "to be made anew. Received more. Move the file away, and start the job again."
            )
        return rows == wanted

    def left(self) -> list[Shard]:
        """Return the shards without output, or with one that is cut short."""
        return [shard for shard in self.shards if not self.is_done(shard)]

    def do(self, work: Work, lm: CachedCausalLM, shard: Shard, advance: Advance) -> None:
        """Work on one shard, and put its output in place."""
        output = target_of(self.output(shard))
        part = hidden_beside(output)
        try:
            with writing(output, self.operation, _AGAIN):
                work(lm, shard, part, advance)
                # Where processes hold a model together, all of them compute, and one writes.
                parts = {"shard": shard.name}
                hosts.by_first(lm, self.operation, parts, lambda: self._put(part, output))
        except SurgeryError as error:
            rows = f"rows {shard.start} to {shard.stop - 1} of '{shard.file}'"
            words = str(error).removeprefix(self.operation).lstrip(": ")
            raise SurgeryError(f"{self.operation} in {rows}: {words}") from error
        finally:
            with contextlib.suppress(OSError):  # of a disk that is read-only by now, say
                part.unlink(missing_ok=True)

    def _put(self, part: Path, output: Path) -> None:
        """Put a file of output in place, unless the folder is another job's by now."""
        if not is_begun(self):
            raise SurgeryError(
                f"{self.operation} at '{self.folder / MANIFEST}': expected the manifest of this "
                "job, which it began with. Received another, or none. Choose a new folder, and "
                "run one job at a time there."
            )
        put_in_place(part, output)


def plan_job(
    operation: str, inputs: Any, output: Any, shard_rows: int, ending: str | None = None
) -> Job:
    """Find the shards of a job; nothing is written.

    Raises:
        SurgeryError: bad input, or a folder of output that is none.
    """
    folder = as_path(output, operation).absolute()  # workers may run in other folders
    check_count(operation, "shard_rows", shard_rows, "rows")
    if folder.is_symlink() and not folder.exists():
        raise SurgeryError(
            f"{operation} at '{folder}': expected a folder, or a link to one. Received a link to "
            f"'{folder.readlink()}', where there is nothing. Make that folder, or choose another."
        )
    if (folder.exists() and not folder.is_dir()) or not folder.parent.is_dir():
        found = "a file" if folder.exists() else f"one in {found_at(folder.parent)}"
        raise SurgeryError(
            f"{operation} at '{folder}': expected a new folder, or that of the same job, in one "
            f"that exists. Received {found}. Choose another path."
        )
    if not (folder / MANIFEST).is_file():  # else there may be nothing left to write
        check_writable(folder if folder.exists() else folder.parent, operation)
    shards = tuple(find_shards(operation, inputs, shard_rows))
    job = Job(operation, folder, shards, ending)
    longest = max((os.fsencode(path.name) for path in job.outputs), key=len)
    if len(longest) > _LONGEST:
        raise SurgeryError(
            f"{operation} at '{os.fsdecode(longest)}': expected names of output of at most "
            f"{_LONGEST} bytes. Received {len(longest)}, the name of a file of input with the "
            "number of a shard. Rename that file."
        )
    return job


def check(left: Sequence[Shard], look: Callable[[Shard], object], verbose: int) -> None:
    """Look at the rows of each shard that is left, so that a bad one is found before work begins.

    Args:
        left: the shards.
        look: is called with each shard, and raises a `SurgeryError` for a bad row.
        verbose: whether to show a progress bar.
    """
    with Progress(disable=not verbose) as progress:
        for shard in progress.track(left, description="checking"):
            look(shard)


def make_manifest(job: Job, facts: Mapping[str, Any]) -> str:
    """Return the manifest of a job.

    Args:
        job: the job.
        facts: all that its output depends on but the files of input, as JSON.
    """
    files = {shard.file: shard.stop for shard in job.shards}
    inputs = {f.name: {"rows": n, "sha256": _sha256(f)} for f, n in files.items()}
    outputs = {job.output(shard).name: [shard.start, shard.stop] for shard in job.shards}
    known = {"format": _FORMAT, "version": _VERSION, "operation": job.operation}
    manifest = {**known, **facts, "inputs": inputs, "outputs": outputs}
    return json.dumps(manifest, default=_plain, indent=1) + "\n"


@contextlib.contextmanager
def begun(job: Job, lm: CachedCausalLM) -> Iterator[None]:
    """Write the manifest of a job, unless it is there, and keep other jobs out while it runs.

    Args:
        job: the job.
        lm: the model that it is done with.

    Raises:
        SurgeryError: see `is_begun`; another job runs there; or not all processes see the folder.
    """
    with contextlib.ExitStack() as held:
        parts = {"job": job.manifest}
        hosts.by_first(lm, job.operation, parts, lambda: held.enter_context(_taken(job)))
        path = job.folder / MANIFEST
        seen = path.read_text(encoding="utf-8") if path.is_file() else None
        hosts.agree(lm, job.operation, {"manifest, in a folder that all of them share,": seen})
        yield


@contextlib.contextmanager
def _taken(job: Job) -> Iterator[None]:
    """Hold the folder of a job together with processes that do the same one."""
    with contextlib.ExitStack() as opened:
        with writing(job.folder / MANIFEST, job.operation, _AGAIN):
            job.folder.mkdir(exist_ok=True)
            lock = opened.enter_context(lock_on(job.folder))
        # One of several processes writes the manifest. The others wait until it is there.
        _wait(job, lambda: is_begun(job) or _write_alone(job, lock))
        _wait(job, lambda: lock.take(alone=False))
        if not is_begun(job):  # another one came between
            raise _busy(job)
        yield
        if lock.is_real and lock.take(alone=True):
            _remove_parts(job)


def _wait(job: Job, is_done: Callable[[], bool]) -> None:
    """Wait for other processes, which hold a folder alone for a moment only."""
    end = time.monotonic() + _PATIENCE
    while not is_done():
        if time.monotonic() > end:
            raise _busy(job)
        time.sleep(0.05)


def _write_alone(job: Job, lock: FolderLock) -> bool:
    """Write the manifest of a job, if nobody else holds the folder; whether that is so."""
    if not lock.take(alone=True):
        return False
    path = job.folder / MANIFEST
    if not is_begun(job):
        with writing(path, job.operation, _AGAIN):
            replace_file(path, lambda part: part.write_text(job.manifest, encoding="utf-8"))
    return True


def _busy(job: Job) -> SurgeryError:
    other = "perhaps by a job with other settings"
    with contextlib.suppress(OSError, SurgeryError):
        before = read_json(job.folder / MANIFEST, _MOST)
        if named := _named_differences(before, json.loads(job.manifest)):
            other = f"by a job that differs in: {named}"
    return SurgeryError(
        f"{job.operation} at '{job.folder}': expected a folder that no other process has locked. "
        f"Received one that is locked, {other}. Wait until that has ended, or choose a new folder."
    )


def _remove_parts(job: Job) -> None:
    """Remove what processes that were killed left behind."""
    with contextlib.suppress(OSError):
        for path in job.folder.iterdir():
            if is_part(path.name):
                path.unlink(missing_ok=True)


def is_begun(job: Job) -> bool:
    """Tell whether the folder of a job has its manifest; else there is nothing to be kept.

    The manifest of another job is not, before its first file of output is in place.

    Raises:
        SurgeryError: it holds the output of another job, or other files.
    """
    path, before, own = job.folder / MANIFEST, None, ""
    if path.is_file():
        with reading(path, job.operation, "the manifest of a job"):
            before = read_json(path, _MOST)
            own = MANIFEST if before.get("format") == _FORMAT else ""
    manifest = json.loads(job.manifest)
    if before == manifest:
        return True
    names = sorted(p.name for p in job.folder.iterdir()) if job.folder.is_dir() else []
    names = [name for name in names if name != own and not is_part(name)]
    if names and before is not None:
        _refuse(job, before, manifest)
    if names:
        raise SurgeryError(
            f"{job.operation} at '{job.folder}': expected a new folder, or that of the same job. "
            f"Received one that holds {shown(names[:5])}. Choose another."
        )
    return False


def _refuse(job: Job, before: Mapping[str, Any], manifest: Mapping[str, Any]) -> NoReturn:
    """Say how the job that made a folder differs from another one."""
    version = before.get("version")
    if version != _VERSION:
        raise SurgeryError(
            f"{job.operation} at '{job.folder}': expected a manifest of version {_VERSION}. "
            f"Received version {shown(version)}, of another release of backbone-surgery, which "
            "tells jobs apart by other things. Choose a new folder, or go on with that release."
        )
    raise SurgeryError(
        f"{job.operation} at '{job.folder}': expected the job that the folder was made by. "
        f"Received one that differs in: {_named_differences(before, manifest)}. Choose a new "
        "folder, or ask for the same."
    )


def _named_differences(before: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """Name the first few entries in which two manifests differ."""
    others = list(_differences("", before, manifest))
    more = f", and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    return f"{', '.join(others[:_SHOWN])}{more}"


def _differences(name: str, before: Any, now: Any) -> Iterator[str]:
    """Name the entries in which two manifests differ, with both values."""
    if isinstance(before, list) and isinstance(now, list):
        before, now = dict(enumerate(before)), dict(enumerate(now))
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _differences(f"{name}.{key}", before.get(key), now.get(key))
    elif before != now:
        yield f"{name[1:]} ({shown(before, 60)} there, {shown(now, 60)} here)"


def run(job: Job, left: list[Shard], work: Work, lm: CachedCausalLM, verbose: int) -> None:
    """Work on the shards that are left, one after the other."""
    hosts.agree(lm, job.operation, {"shards without output": [shard.name for shard in left]})
    with Progress(disable=not verbose) as progress:
        task = start(progress, job, left)
        for shard in left:
            job.do(work, lm, shard, lambda rows: progress.advance(task, rows))


def start(progress: Progress, job: Job, left: list[Shard]) -> Any:
    """Show what there is to do, and how much of it is done."""
    rows = sum(shard.stop - shard.start for shard in job.shards)
    rest = sum(shard.stop - shard.start for shard in left)
    return progress.add_task("rows", total=rows, completed=rows - rest)


def _plain(value: Any) -> Any:
    """Write arrays and numbers of NumPy as lists and numbers, and anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
