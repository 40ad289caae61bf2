"""Warm-up: compile every program that an engine can need, before the first request."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from backbone_surgery.generation.formats.in_loop import FREE
from backbone_surgery.generation.loop import State
from backbone_surgery.serving.prefill import tail_size
from backbone_surgery.serving.row_programs import RowPrograms
from backbone_surgery.serving.sampling import Sampling


def warm_up(
    programs: RowPrograms,
    controls: State,
    lengths: tuple[int, ...],
    chunk: int,
    stop_ids: int,
    captures: bool,
    keeps_prefixes: bool,
    prompt_logprobs: bool,
    formats: Callable[[int], State] | None,
) -> None:
    """Run each program once, on rows that hold nothing.

    Args:
        programs: of the engine.
        controls: `{input name: array[1, ...]}`.
        lengths: that the cache can have.
        chunk: tokens of a chunk of a prompt.
        stop_ids: how many stop tokens a request can have.
        captures: whether requests ask for captures.
        keeps_prefixes: whether there is a prefix cache.
        prompt_logprobs: whether requests ask for log-probabilities of their prompts.
        formats: for how many rows it is called, it returns their response formats; if there are to
            be any.
    """
    staged = {}
    for length in lengths:
        if prompt_logprobs:
            _run_prompt(
                programs, controls, length, chunk, captures, keeps_prefixes=False, notes=True
            )
        staged[length], logits = _run_prompt(
            programs, controls, length, chunk, captures, keeps_prefixes
        )
    new = _new_row(programs, controls, stop_ids, logits)
    for length in lengths:
        _run_rows(programs, new, staged, length, captures)
        if formats is not None:
            _run_rows(programs, new, staged, length, captures, formats)


def _run_rows(
    programs: RowPrograms,
    new: State,
    staged: dict[int, State],
    length: int,
    captures: bool,
    formats: Callable[[int], State] | None = None,
) -> None:
    """Run what works on all rows, in a cache of one length.

    Args:
        programs: of the engine.
        new: a row to insert.
        staged: its cache, for each length that this may have.
        length: of the cache of all rows.
        captures: whether requests ask for captures.
        formats: see `warm_up`.
    """
    rows, sizes = programs.rows, [n for n in staged if n <= length]
    state = programs.new_state(length)
    if captures:
        state["captures"] = programs.new_captures(rows, length)
    controls = jax.tree.map(lambda x: np.repeat(x, rows, axis=0), new["controls"])
    controls = programs.lay_out(jax.device_put(controls))
    if formats is not None:
        state.update(programs.lay_out({"formats": jnp.full(rows, FREE, jnp.int32)}))
    for size in sizes:
        row = {**new, "tokens": np.zeros((1, size), np.int32)}
        state, controls, _ = programs.insert(state, controls, staged[size], row, size)
        if formats is not None:
            row["formats"] = formats(1)
            state, controls, _ = programs.insert(state, controls, staged[size], row, size)
    arguments = {
        "controls": controls,
        "settings": jax.tree.map(lambda x: np.repeat(x, rows, axis=0), new["settings"]),
        "stop_ids": np.zeros(new["stop_ids"].shape, np.int32).repeat(rows, axis=0),
        "budget": np.ones(rows, np.int32),
    }
    if formats is not None:
        arguments["formats"] = formats(rows)
    state, _ = programs.decode(state, arguments, 2)
    for size in sizes:
        programs.shift(state, 0, size)


def _run_prompt(
    programs: RowPrograms,
    controls: State,
    length: int,
    chunk: int,
    captures: bool,
    keeps_prefixes: bool,
    notes: bool = False,
) -> tuple[State, jax.Array]:
    """Return the staging of a prompt of one token, and its logits."""
    for size in {chunk, tail_size(chunk)}:
        staging = _staging(programs, length, captures)
        part = {
            "token_ids": np.zeros((1, size), np.int32),
            "first": np.int32(0),
            "count": np.int32(1),
            "controls": controls,
        }
        if notes:
            part["next"] = np.zeros(size, np.int32)
        staging, logits, _ = programs.extend(staging, part, length)
    if keeps_prefixes:
        kept = programs.cut(staging, 0, chunk, length)
        staging = programs.restore(staging, kept, 0, length)
    return staging, logits


def _new_row(programs: RowPrograms, controls: State, stop_ids: int, logits: jax.Array) -> State:
    """Return what `RowPrograms.insert` needs to know of a request that makes one token."""
    return {
        "row": np.int32(0),
        "slot": np.int32(2),
        "length": np.int32(1),
        "logits": logits,
        "budget": np.ones(1, np.int32),
        "stop_ids": np.zeros((1, stop_ids), np.int32),
        "settings": jax.tree.map(lambda x: x[None], Sampling().arrays()),
        "draws": programs.strategy.start(np.zeros((1, 2), np.uint32)),
        "controls": controls,
    }


def _staging(programs: RowPrograms, length: int, captures: bool) -> State:
    staging: State = {"cache": programs.packing.new_cache(1, length)}
    if captures:
        staging["captures"] = programs.new_captures(1, length)
    return staging
