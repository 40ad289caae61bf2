"""What the compiled loop looks up is the table, and a step looks up few numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import backbone_surgery as bs
from backbone_surgery.generation.formats import in_loop
from backbone_surgery.generation.formats import table as tables
from backbone_surgery.generation.formats.in_loop import (
    LEAST,
    arrays_of,
    keep_format,
    length_for,
    next_states,
    parts_of,
    sizes_of,
    with_stops,
)
from backbone_surgery.generation.formats.table import OVER, START, STOP, make_table, table_of
from backbone_surgery.generation.formats.token_bytes import token_bytes

FORMATS = [
    bs.ResponseFormat.choice([" girl", " green dog", "dog", "!?"]),
    bs.ResponseFormat(r" [a-z]{1,6}( [a-z]{1,6}){2,4}\."),
]
STOPS = [[0, 7], [5, -1], [-1, -1]]


@pytest.fixture(scope="module")
def gpt2():
    return bs.CachedCausalLM.from_preset("tiny_gpt2")


def tables_of(lm):
    size = lm.programs.head.input_dim
    return [table_of(f, lm.preprocessor.tokenizer, size) for f in FORMATS]


def by_hand(table, state, stops, size):
    """Return the states after each token, -1 where it may not follow, read off the table."""
    if table is None:
        return np.full(size, START)
    following = table.following[state][table.classes]
    following[[i for i in stops if i >= 0]] = table.following[state, STOP]
    return following


def in_loop_state(state, table, begin):
    """Return what the loop calls a state of a table, whose first one begins there."""
    if table is None:
        return in_loop.FREE
    width = table.following.shape[1] + 1
    return in_loop.OVER if state == OVER else begin + (state - START) * width


@pytest.mark.parametrize("width", [1, 2])
def test_every_state_allows_what_the_table_says(gpt2, width):
    size, formats = gpt2.programs.head.input_dim, [*tables_of(gpt2), None]
    arrays = arrays_of(formats)
    begins = arrays["states"].tolist()
    assert begins == [0, sizes_of(formats[0])["following"], in_loop.FREE]
    ready = with_stops(arrays, jnp.array(STOPS), width)
    logits = jnp.arange(3.0 * width * size).reshape(3 * width, size)
    states = [len(table.following) if table else 1 for table in formats]
    for step in range(max(states)):
        now = [min(step, count - 1) for count in states]
        known = [in_loop_state(*x) for x in zip(now, formats, begins, strict=True)]
        known = jnp.repeat(jnp.array(known, jnp.int32), width)
        kept = np.asarray(keep_format(logits, ready, known))
        for i in range(3 * width):
            state, table = now[i // width], formats[i // width]
            following = by_hand(table, state, STOPS[i // width], size)
            allowed = following >= 0
            if state == OVER and table is not None:
                allowed = np.arange(size) == 0
            assert np.array_equal(kept[i], np.where(allowed, logits[i], -np.inf))


def test_every_token_leads_where_the_table_says(gpt2):
    size, table = gpt2.programs.head.input_dim, tables_of(gpt2)[0]
    ready = with_stops(arrays_of([table] * size), jnp.array([0, 7]))
    for state in range(len(table.following)):
        known = jnp.full(size, in_loop_state(state, table, 0), jnp.int32)
        found = next_states(ready, known, jnp.arange(size))
        after = [max(x, OVER) for x in by_hand(table, state, [0, 7], size).tolist()]
        assert found.tolist() == [in_loop_state(x, table, 0) for x in after]
    begins = jnp.zeros(size, jnp.int32)
    none = next_states(ready, begins, jnp.full(size, -1))
    assert (none == next_states(ready, begins, jnp.zeros(size, int))).all()


def test_a_step_looks_up_three_numbers_and_a_mask_for_each_row(gpt2):
    """A number for each token would be looked up one by one on a TPU."""
    size, table = gpt2.programs.head.input_dim, tables_of(gpt2)[0]
    arrays = arrays_of([table] * 4)
    states = jnp.array(arrays["states"])

    def step(logits, ready, states):
        logits = keep_format(logits, ready, states)
        return next_states(ready, states, logits.argmax(axis=1))

    ready = with_stops(arrays, jnp.array([0]))
    jaxpr = jax.make_jaxpr(step)(jnp.zeros((4, size)), ready, states)
    gathers = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "gather"]
    assert [e.invars[1].aval.shape[0] for e in gathers] == [4] * 4
    taken = [e.outvars[0].aval.shape for e in gathers]
    assert sorted(taken) == [(4,), (4,), (4,), (4, table.masks.shape[1])]


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_masks_are_shared_by_states_and_have_room_for_those_of_other_formats(gpt2):
    table = table_of(
        bs.ResponseFormat("[a-z ]{200}"),
        gpt2.preprocessor.tokenizer,
        gpt2.programs.head.input_dim,
    )
    assert len(table.following) == 201
    assert len(table.masks) < 30
    for tables_of_rows in [table], tables_of(gpt2):
        arrays = arrays_of(tables_of_rows)
        assert {name: len(arrays[name]) for name in LEAST} == LEAST


def test_arrays_have_few_lengths(gpt2):
    assert [length_for("masks", n) for n in (1, 256, 257, 1025)] == [256, 256, 1024, 4096]
    for table in tables_of(gpt2):
        parts = parts_of(table, dict.fromkeys(LEAST, 0))
        assert sizes_of(table) == {name: len(part) for name, part in parts.items()}


def test_a_table_of_the_most_entries_takes_no_more(gpt2, monkeypatch):
    """With the mask of each state."""
    table, tokenizer = tables_of(gpt2)[1], gpt2.preprocessor.tokenizer
    tokens = token_bytes(tokenizer, gpt2.programs.head.input_dim)
    entries = len(table.following) * (table.following.shape[1] + 1)
    monkeypatch.setattr(tables, "MOST_ENTRIES", entries)
    assert make_table(FORMATS[1], tokens).following.shape == table.following.shape
    monkeypatch.setattr(tables, "MOST_ENTRIES", entries - 1)
    with pytest.raises(bs.SurgeryError, match=f"which is more than {entries - 1} entries"):
        make_table(FORMATS[1], tokens)


def test_tables_of_all_rows_that_are_too_large(gpt2, monkeypatch):
    monkeypatch.setattr(in_loop, "_MOST_ENTRIES", 300)
    words = r"at most 300 entries of tables together\. Received \d+\. Generate for fewer rows"
    with pytest.raises(bs.SurgeryError, match=words):
        gpt2.generate(["Tom"] * 2, max_new_tokens=5, response_format=FORMATS)


def test_one_whose_masks_are_too_many(gpt2, monkeypatch):
    monkeypatch.setattr(tables, "MOST_MASKS", 3)
    words = r"but \d+ of its states differ in the tokens that may follow, which is more than 3\."
    with pytest.raises(bs.SurgeryError, match=words):
        gpt2.generate("Tom", max_new_tokens=5, response_format=bs.ResponseFormat("[a-z ]{102}"))
