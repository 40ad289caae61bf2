"""The batch: the rows that run together, their arrays on the device, and where they stand."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from backbone_surgery.generation.captures import cut
from backbone_surgery.generation.formats.in_loop import FREE
from backbone_surgery.generation.formats.table import FormatTable
from backbone_surgery.generation.loop import State
from backbone_surgery.generation.prompts import pack_right
from backbone_surgery.generation.samplers import NO_TOKEN
from backbone_surgery.serving.format_pool import FormatPool
from backbone_surgery.serving.job import Job, RequestError
from backbone_surgery.serving.prefill import Prefill
from backbone_surgery.serving.row_programs import RowPrograms
from backbone_surgery.serving.sampling import Sampling


class Running(NamedTuple):
    """A row as a chunk of steps found it: its job, its number, and the slot of its first token."""

    job: Job
    row: int
    start: int


class Chunk(NamedTuple):
    """A chunk of steps that was begun: what is read of it, its rows, and the slots it writes to."""

    copies: State
    rows: list[Running]
    first: int
    until: int


class RowBatch:
    """Rows that run together, each for a job of its own, or for none.

    What is known here of slots holds for the arrays as they will be once all that was begun has
    run, so nothing waits for the device but `read`.

    Args:
        programs: that run the rows.
        lengths: the lengths that the cache can have, in order.
        steps: tokens of a chunk.
        stop_ids: how many stop tokens a job can have.

    Attributes:
        new_tokens: how many were handed out so far.
        formats: the tables of response formats that rows use.
    """

    def __init__(
        self,
        programs: RowPrograms,
        lengths: tuple[int, ...],
        steps: int,
        stop_ids: int,
    ) -> None:
        self.programs, self.lengths, self.steps = programs, lengths, steps
        rows = programs.rows
        self.jobs: list[Job | None] = [None] * rows
        self.start, self.prompt = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        self.budget = np.zeros(rows, np.int32)
        self.stop_ids = np.full((rows, stop_ids), NO_TOKEN, np.int32)
        self.settings = jax.tree.map(
            lambda x: np.repeat(x[None], rows, axis=0), Sampling().arrays()
        )
        self.slot, self.length = 1, lengths[0]
        self.new_tokens = 0
        self.first_tokens: list[tuple[Job, int, State]] = []
        self.state: State = {}  # made with the first row
        self.controls: State = {}
        self.formats = FormatPool(programs)

    @property
    def running(self) -> list[int]:
        """The rows that have tokens to come."""
        ends = self.start + self.budget
        return [i for i, job in enumerate(self.jobs) if job is not None and ends[i] > self.slot]

    @property
    def count(self) -> int:
        """How many rows are taken."""
        return sum(job is not None for job in self.jobs)

    @property
    def waits_for_captures(self) -> bool:
        """Whether a row is kept only until its captures are read."""
        running = self.running
        return any(job and job.captures and i not in running for i, job in enumerate(self.jobs))

    @property
    def free_rows(self) -> list[int]:
        """The rows that can be taken: those without a job, or all of whose steps were begun."""
        running = self.running
        jobs = enumerate(self.jobs)
        return [i for i, job in jobs if job is None or (i not in running and not job.captures)]

    def clear(self) -> None:
        """Forget all rows."""
        self.jobs = [None] * len(self.jobs)
        self.budget[:] = 0
        self.first_tokens, self.state, self.controls = [], {}, {}
        self.formats = FormatPool(self.programs)  # there may be too little memory for its lengths
        self.slot, self.length = 1, self.lengths[0]

    def fits(self, job: Job) -> bool:
        """Tell whether there is room for the response format of a job, and a row."""
        if not self.free_rows:
            return False
        return job.table is None or self.formats.fits(job.table, self._used_formats())

    def let_go(self) -> None:
        """Free the rows of jobs that have ended."""
        for i, job in enumerate(self.jobs):
            if job is not None and job.ended:
                self._free(i)

    def insert(self, prefill: Prefill) -> None:
        """Take a free row for a prompt that has run, and choose its first token."""
        job, row = prefill.job, self.free_rows[0]
        length = len(job.prompt)
        self.jobs[row] = None
        self._make_room(length)
        if not self.state:
            self.state = self.programs.new_state(self.length)
        if job.captures and "captures" not in self.state:
            self.state["captures"] = self.programs.new_captures(len(self.jobs), self.length)
        self._widen(job.controls)
        self.budget[row] = job.budget
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(job.stops.ids)] = job.stops.ids
        settings = job.sampling.arrays()
        jax.tree.map(lambda table, x: table.__setitem__(row, x), self.settings, settings)
        new = {
            "row": np.int32(row),
            "slot": np.int32(self.slot),
            "tokens": pack_right([job.prompt], prefill.length, 0)["token_ids"],
            "length": np.int32(length),
            "logits": prefill.logits,
            "budget": self.budget[row : row + 1].copy(),
            "stop_ids": self.stop_ids[row : row + 1].copy(),
            "settings": jax.tree.map(lambda x: x[None], settings),
            "draws": self.programs.strategy.start(job.seeds),
            "controls": job.controls,
        }
        if job.table is not None:
            new["formats"] = self._with_format(job.table)
        self.state, self.controls, first = self.programs.insert(
            self.state, self.controls, prefill.staging, new, prefill.length
        )
        self.start[row], self.prompt[row], self.jobs[row] = self.slot - 1, length, job
        self.first_tokens.append((job, row, first))
        if job.captures and job.budget == 1:  # no step keeps its slots until they are read
            self.read_first()

    def decode(self, stop_early: bool) -> Chunk | None:
        """Begin the next chunk of steps, if there is a row with tokens to come.

        Args:
            stop_early: whether to stop where the first row ends, since others wait for it.
        """
        if not self.running:
            return None
        self._make_room()
        running = self.running
        ends = (self.start + self.budget)[running]
        until = min(self.slot + self.steps, self.length, int(ends.max()))
        if stop_early:
            until = min(until, int(ends.min()))
        # Copies, since these are changed while the device may still read them.
        arguments = {
            "controls": self.controls,
            "settings": jax.tree.map(np.copy, self.settings),
            "stop_ids": self.stop_ids.copy(),
            "budget": self.budget.copy(),
        }
        if "formats" in self.state:
            tables = [job.table if job else None for job in self.jobs]
            arguments["formats"] = self.formats.for_rows(tables)
        first, self.slot = self.slot, until
        self.state, copies = self.programs.decode(self.state, arguments, until)
        rows = [Running(job, i, int(self.start[i])) for i in running if (job := self.jobs[i])]
        return Chunk(copies, rows, first, until)

    def read_first(self) -> None:
        """Hand out the first tokens of the rows that were inserted."""
        first_tokens, self.first_tokens = self.first_tokens, []
        for job, row, first in first_tokens:
            self._note(job, first["notes"], 0, 1)
            self._hand_out(job, row, np.asarray(first["token"]))

    def read(self, chunk: Chunk) -> None:
        """Wait for a chunk, and hand its tokens out."""
        tokens = np.asarray(chunk.copies["tokens"])
        for job, row, start in chunk.rows:
            self._note(job, chunk.copies["draws"]["notes"], row, chunk.until - chunk.first)
            self._hand_out(job, row, tokens[row, start : chunk.until])

    def _note(self, job: Job, notes: State, row: int, steps: int) -> None:
        """Have a job that asks for log-probabilities keep those of some steps."""
        if job.sampling.logprobs:
            job.notes.append({k: np.asarray(x)[row, :steps].copy() for k, x in notes.items()})

    def _hand_out(self, job: Job, row: int, new: np.ndarray) -> None:
        """Tell a job its tokens so far; free its row if these are all."""
        if job.ended:
            return
        new = new[: job.budget]
        known = int(np.append(new == NO_TOKEN, True).argmax())
        new_and_cut, stopped = job.stops.cut(job.prompt, new[:known], job.table)
        before = len(job.new)
        if known < len(new) and not stopped:
            job.fail(
                RequestError(
                    f"request at step {known}: expected logits to choose a token by. Received NaN, "
                    "an infinite one, or no finite one. Look for weights, strengths or directions "
                    "that are too large or no numbers."
                )
            )
        elif stopped or len(new_and_cut) >= job.budget:
            if job.captures:
                job.captured = self._captures(row, len(job.prompt), len(new_and_cut))
            job.update(new_and_cut.copy(), "stop" if stopped else "length")
        else:
            job.update(new_and_cut.copy())
        self.new_tokens += len(job.new) - before
        if job.ended and self.jobs[row] is job:
            self._free(row)

    def _captures(self, row: int, prompt: int, new: int) -> dict[str, np.ndarray]:
        """Cut out what belongs to the tokens of a row that were run."""
        start = int(self.start[row])
        slots = slice(start - prompt, start + new - 1)
        buffers = self.programs.row_of(self.state["captures"], row)
        return {
            name: cut(name, np.asarray(x, np.float32), slots).copy() for name, x in buffers.items()
        }

    def _free(self, row: int) -> None:
        self.jobs[row], self.budget[row] = None, 0
        wanted = any(job is not None and job.captures for job in self.jobs)
        if not wanted:
            self.state.pop("captures", None)
        if not any(job is not None and job.table for job in self.jobs):
            self.state.pop("formats", None)
            self.formats.clear()

    def _make_room(self, prompt: int = 0) -> None:
        """Move rows, or change the length of the cache, so that there is room.

        Args:
            prompt: tokens of a prompt that is to end before the slot; 0 for a chunk of steps.
        """
        rows = self.running
        # A row takes a slot for each token of its prompt, and for each that was chosen.
        taken = [int(self.slot - self.start[i] + self.prompt[i]) for i in rows]
        needed = max([*taken, prompt + 1])
        if not rows:
            self.slot = needed
            self.start[:] = self.budget[:] = 0  # else rows that have ended would seem to go on
            length = self._length_for(needed)
            if length != self.length:
                self.length, self.state = length, {}
            return
        if self.slot > prompt and self.slot < self.length:
            return
        length = self._length_for(needed)
        if length > self.length:
            self.state = self.programs.grow(self.state, length)
            self.length = length
            if self.slot > prompt:
                return
        slots = self.slot - needed
        self.state = self.programs.shift(self.state, slots, length)
        self.slot, self.length = needed, length
        self.start -= slots

    def _length_for(self, needed: int) -> int:
        """Return the least length that leaves a quarter of it free; else the longest."""
        fits = (n for n in self.lengths if needed + max(self.steps, n // 4) <= n)
        return next(fits, self.lengths[-1])

    def _used_formats(self) -> set[FormatTable]:
        """Return the tables of rows that have tokens to come."""
        jobs = [self.jobs[i] for i in self.running]
        return {job.table for job in jobs if job is not None and job.table is not None}

    def _with_format(self, table: FormatTable) -> State:
        """Return the response formats for a new row, which has this one.

        Rows have response formats as long as one of them has.
        """
        self.formats.add(table, self._used_formats())
        if "formats" not in self.state:  # it may be a new one
            states = {"formats": jnp.full(len(self.jobs), FREE, jnp.int32)}
            self.state.update(self.programs.lay_out(states))
        return self.formats.for_rows([table])

    def _widen(self, controls: dict[str, np.ndarray]) -> None:
        """Give the controls of all rows the sizes that those of a job have."""
        if not self.controls:
            rows = len(self.jobs)
            tables = {
                name: jnp.asarray(np.broadcast_to(x, (rows, *x.shape[1:])))
                for name, x in controls.items()
            }
            self.controls = self.programs.lay_out(tables)
        for name, x in controls.items():
            table = self.controls[name]
            sizes = zip(table.shape[1:], x.shape[1:], strict=True)
            widths = [(0, 0), *((0, size - own) for own, size in sizes)]
            if any(width for _, width in widths):
                self.controls[name] = jnp.pad(table, widths, mode="edge")


def controls_of_sizes(
    controls: dict[str, np.ndarray], sizes: dict[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Lengthen controls of one row to some sizes; what comes past their end is their last entry."""
    result: dict[str, Any] = {}
    for name, x in controls.items():
        pairs = zip(x.shape[1:], sizes.get(name, x.shape[1:]), strict=True)
        widths = [(0, 0), *((0, size - own) for own, size in pairs)]
        result[name] = np.pad(x, widths, mode="edge")
    return result
