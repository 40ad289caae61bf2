"""Run one batch of prompts through the compiled programs, in chunks of steps."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from backbone_surgery import hosts
from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.buckets import bucket, next_length
from backbone_surgery.generation.captures import cut
from backbone_surgery.generation.fingerprint import digest
from backbone_surgery.generation.formats.in_loop import arrays_of
from backbone_surgery.generation.formats.table import FormatTable
from backbone_surgery.generation.loop import State
from backbone_surgery.generation.programs import Programs
from backbone_surgery.generation.prompts import pack_left
from backbone_surgery.generation.samplers import NO_TOKEN, Strategy
from backbone_surgery.generation.stopping import Stops
from backbone_surgery.target import least_rows

_SHORTEST_PROMPT = 16
_STOP_IDS = 8
_GROWS_FROM = 256
"""Slots of a cache that will have to grow: shorter ones are not worth a program of their own."""


@dataclass(frozen=True)
class Batch:
    """One batch to run.

    Attributes:
        rows: prompt token ids, one int32[length] for each row.
        budget: int32[batch], the most new tokens of each row.
        seeds: uint32[batch, 2], the random state of each row.
        controls: arrays with a row for each row.
        stops: what ends a row.
        formats: for each row the table of its response format or `None`; empty if no row has one.
        captures: whether to read what the graph captures.
        first_row: which row of the whole call the first one is.
    """

    rows: list[np.ndarray]
    budget: np.ndarray
    seeds: np.ndarray
    controls: dict[str, np.ndarray]
    stops: Stops
    formats: list[FormatTable | None] = field(default_factory=list)
    captures: bool = False
    first_row: int = 0

    def split(self, batch_size: int | None) -> Iterator["Batch"]:
        """Cut the batch into parts of at most `batch_size` rows; by default it stays whole."""
        count = len(self.rows)
        step = count if batch_size is None else min(int(batch_size), count)
        for start in range(0, count, step):
            part = slice(start, start + step)
            yield replace(
                self,
                rows=self.rows[part],
                budget=self.budget[part],
                seeds=self.seeds[part],
                controls={name: value[part] for name, value in self.controls.items()},
                formats=self.formats[part],
                first_row=start,
            )


class Row(NamedTuple):
    """The text of one row so far.

    Attributes:
        new: int32[tokens], the new tokens.
        finished: whether there will be no more.
        captures: once all rows are finished, if asked for, `{name: array}` for the tokens that
            were run: the prompt and the new ones but the last, which is chosen and never run.
    """

    new: np.ndarray
    finished: bool
    captures: dict[str, np.ndarray]


def filled_up(rows: int, prompt: int, new: int, platform: str) -> tuple[int, int, int]:
    """Return with how many rows, tokens of a prompt, and slots of the cache a batch is run.

    Args:
        rows: how many prompts there are.
        prompt: tokens of the longest one.
        new: tokens that are added, at most.
        platform: that it runs on.
    """
    prompt = bucket(prompt, _SHORTEST_PROMPT)
    length = bucket(prompt + max(new, 1), 2 * _SHORTEST_PROMPT)
    return bucket(rows, least_rows(platform)), prompt, length


def run_batch(
    programs: Programs,
    strategy: Strategy,
    batch: Batch,
    chunk: int | None = None,
    at_once: bool = False,
) -> Iterator[list[Row]]:
    """Generate, and yield the rows as far as they are.

    Args:
        programs: the compiled programs.
        strategy: how tokens are chosen.
        batch: what to run.
        chunk: how many steps to take between two yields; `None` runs to the end and yields once.
        at_once: whether to yield the first token of each row as soon as the prompts were run, and
            only then to compile what chooses the next ones. Captures are not read before the end.
    """
    count = len(batch.rows)
    longest, most = max(len(r) for r in batch.rows), int(batch.budget.max())
    filled, prompt, length = filled_up(count, longest, most, programs.platform)
    padded, last = programs.padded(filled), prompt + most
    arguments = make_arguments(strategy, batch, padded, prompt)
    _agree(programs, strategy, batch, arguments, [length, chunk, batch.captures])
    if last == prompt and not batch.captures:
        yield [Row(row[:0], True, {}) for row in batch.rows]
        return
    arguments = jax.device_put(arguments)
    # Captures of a pattern have a column for each slot, so they keep to one length.
    first = length if batch.captures else min(length, bucket(prompt + 1, _GROWS_FROM))
    # Nothing here holds on to the empty cache, which beams cannot take over.
    state = programs.prefill(
        strategy, programs.packing.new_cache(padded, first), arguments, first, batch.captures
    )

    one_of = programs.one_of(count, padded)

    def decode(state: State, until: int) -> tuple[State, State]:
        return _decode(programs, strategy, state, arguments, until, length, one_of)

    # The prompts choose the first token, so one new token needs no other program.
    prompts_suffice = last <= prompt + 1 and not hosts.span(programs.model)
    if at_once or prompts_suffice:
        rows = _read(strategy, state, batch, prompt)
        if batch.captures and prompts_suffice:
            rows = _with_captures(rows, strategy, state, batch, prompt)
        yield rows
        if all(row.finished for row in rows):
            return
    until, *slots = _slots(prompt + 1, last, chunk)
    state, copies = decode(state, until)
    while True:
        # The next chunk is begun before this one is looked at, unless it may not be wanted.
        ahead = bool(slots) and slots[0] <= state["tokens"].shape[1] and not batch.stops.by_sequence
        state, following = decode(state, slots.pop(0)) if ahead else (state, None)
        rows = _read(strategy, copies, batch, prompt)
        if all(row.finished for row in rows):
            if batch.captures:
                rows = _with_captures(rows, strategy, state, batch, prompt)
            yield rows
            return
        yield rows
        state, copies = (state, following) if following else decode(state, slots.pop(0))


def _agree(
    programs: Programs, strategy: Strategy, batch: Batch, arguments: State, lengths: list[Any]
) -> None:
    """Check that all processes of a mesh run the same batch through the same graph."""
    if not hosts.span(programs.model):
        return
    stops = batch.stops
    parts = {
        # Of two edits that look alike, one may have run already; the other would be compiled first.
        "edit": [programs.outline, programs.compilations],
        "prompts": [arguments["token_ids"], arguments["mask"]],
        "lengths": [*lengths, arguments["budget"]],
        "stops": [stops.ids, stops.texts, stops.sequences],
        "controls": arguments["controls"],
        "sampler": [digest(strategy.key), arguments["settings"]],
        "formats": arguments.get("formats"),
        "seeds": arguments["draws"],
    }
    hosts.agree(programs.model, "generate", parts)


def _slots(first: int, last: int, chunk: int | None) -> list[int]:
    """Return the slots at which to stop and look."""
    return [last] if chunk is None else [*range(first + chunk, last, chunk), last]


def _decode(
    programs: Programs,
    strategy: Strategy,
    state: State,
    arguments: State,
    until: int,
    last: int,
    one_of: int,
) -> tuple[State, State]:
    """Decode until a slot in a cache that grows, so that attention reads little that is empty."""
    while True:
        length = state["tokens"].shape[1]
        state, copies = programs.decode(strategy, state, arguments, min(until, length), one_of)
        if until <= length or np.asarray(copies["done"]).all():
            return state, copies
        state = programs.grow(state, next_length(length, last))


def make_arguments(strategy: Strategy, batch: Batch, padded: int, prompt: int) -> State:
    """Pad the batch to its bucket: rows that fill it up repeat the first one and end at once."""
    index = np.arange(padded)
    index[len(batch.rows) :] = 0
    token_ids, mask = pack_left([batch.rows[i] for i in index], prompt)
    budget = batch.budget[index]
    budget[len(batch.rows) :] = 0
    # At least one is `NO_TOKEN`, so that a row without probabilities ends.
    stop_ids = np.full(bucket(len(batch.stops.ids) + 1, _STOP_IDS), NO_TOKEN, np.int32)
    stop_ids[: len(batch.stops.ids)] = batch.stops.ids
    arguments: State = {
        "token_ids": token_ids,
        "mask": mask,
        "budget": budget,
        "stop_ids": stop_ids,
        "controls": {name: np.asarray(x)[index] for name, x in batch.controls.items()},
        "settings": strategy.settings(),
        "draws": strategy.start(batch.seeds[index]),
    }
    if any(batch.formats):  # a part of a batch may have none
        arguments["formats"] = arrays_of([batch.formats[i] for i in index])
    return arguments


def _read(strategy: Strategy, copies: State, batch: Batch, prompt: int) -> list[Row]:
    """Read the rows off copies of the state, the best beam of each, cut where they stop."""
    tokens, slot = np.asarray(copies["tokens"]), int(copies["slot"])
    done: np.ndarray = np.asarray(copies["done"]).reshape(-1, strategy.width).min(axis=1)
    best = _best(strategy, copies, len(done))
    rows = []
    for i, row in enumerate(batch.rows):
        new = tokens[best[i], prompt:slot][: batch.budget[i]]
        known = int(np.append(new == NO_TOKEN, True).argmax())
        table = batch.formats[i] if batch.formats else None
        cut_new, stopped = batch.stops.cut(row, new[:known], table)
        if known < len(new) and not stopped:
            raise SurgeryError(
                f"generate at row {batch.first_row + i}, step {known}: expected logits to choose a "
                "token by. Received NaN, an infinite one, or no finite one. Look for weights, "
                "strengths or directions that are too large or no numbers."
            )
        ended = stopped if strategy.width == 1 else bool(done[i])
        finished = ended or bool(done[i]) or len(cut_new) >= batch.budget[i]
        rows.append(Row(cut_new, finished, {}))
    return rows


def _best(strategy: Strategy, state: State, rows: int) -> np.ndarray:
    """Return the candidate row that is the best of each row."""
    first = np.arange(rows) * strategy.width
    if strategy.width == 1:
        return first
    scores = hosts.to_numpy(state["draws"]["log_probs"]).reshape(-1, strategy.width)
    return first + scores.argmax(axis=1)


def _with_captures(
    rows: list[Row], strategy: Strategy, state: State, batch: Batch, prompt: int
) -> list[Row]:
    """Cut out of the buffers what belongs to the tokens of each row that were run."""
    best = _best(strategy, state, len(state["done"]) // strategy.width)
    buffers = {
        name: np.array(hosts.to_numpy(x), np.float32) for name, x in state["captures"].items()
    }
    result = []
    for i, (token_ids, row) in enumerate(zip(batch.rows, rows, strict=True)):
        slots = slice(prompt - len(token_ids), prompt + max(len(row.new) - 1, 0))
        captured = {name: cut(name, x[best[i]], slots) for name, x in buffers.items()}
        result.append(row._replace(captures=captured))
    return result
