"""The tables of response formats that the rows of an engine share."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backbone_surgery as bs
from backbone_surgery.generation.formats.in_loop import FREE, LEAST, arrays_of, parts_of
from backbone_surgery.generation.formats.table import START, FormatTable
from backbone_surgery.serving import format_pool
from backbone_surgery.serving.format_pool import FormatPool
from backbone_surgery.serving.row_programs import RowPrograms
from tests.serving.tiny import make_steered

ASKED = {"max_new_tokens": 12, "stop_token_ids": None}
LETTERS = [bs.ResponseFormat(f"[{letter}-z ]{{9,12}}") for letter in "abcde"]


@pytest.fixture(scope="module")
def lm():
    return make_steered()


@pytest.fixture(scope="module")
def engine(lm):
    return bs.Engine(lm, rows=3, length=128, prefill_chunk=16, chunk_size=4)


def table_of_sizes(states, classes, masks):
    """A table of numbers that tell it from others."""
    rng = np.random.default_rng([states, classes, masks])
    return FormatTable(
        following=rng.integers(0, states, (states, classes), np.int16),
        classes=rng.integers(0, classes, 8, np.int16),
        masks=rng.integers(0, 2**32, (masks, 4), np.uint32),
        mask_of=rng.integers(0, masks, states, np.int16),
    )


SIZES = [(3, 5, 2), (900, 30, 17), (9000, 11, 300), (40, 90, 33), (4, 4, 4)]
TABLES = [table_of_sizes(*sizes) for sizes in SIZES]


@settings(deadline=None, max_examples=25)
@given(steps=st.lists(st.tuples(st.integers(0, 4), st.sets(st.integers(0, 4))), max_size=12))
def test_every_table_that_is_used_is_where_it_is_said_to_be(engine, steps):
    pool, held = FormatPool(engine._scheduler.programs), set()
    for new, ended in steps:
        held -= {TABLES[i] for i in ended}
        table = TABLES[new]
        assert pool.fits(table, held)
        pool.add(table, held)
        held.add(table)
        arrays = pool.for_rows([None, *held])
        assert arrays["states"][0] == FREE
        for i, table in enumerate(held, 1):
            starts = {"following": arrays["states"][i], "classes": arrays["which"][i]}
            mask = table.mask_of[START]
            starts["masks"] = arrays["following"][starts["following"]] - mask
            for name, part in parts_of(table, starts).items():
                held_there = arrays[name][starts[name] : starts[name] + len(part)]
                assert np.array_equal(held_there, part)
    assert all(len(x) == pool.lengths[name] >= LEAST[name] for name, x in pool.arrays.items())


def test_a_table_that_is_here_no_more_counts_as_none(engine):
    pool = FormatPool(engine._scheduler.programs)
    pool.add(TABLES[0], ())
    pool.add(TABLES[1], ())  # nothing uses the other one
    states = pool.for_rows([TABLES[0], TABLES[1], None])["states"]
    assert states.tolist() == [FREE, 0, FREE]


def test_no_room_beside_those_that_are_used(engine, monkeypatch):
    pool = FormatPool(engine._scheduler.programs)
    monkeypatch.setitem(format_pool._MOST, "masks", 64)
    first, second, third = TABLES[0], TABLES[1], TABLES[3]
    pool.add(first, ())
    assert pool.fits(second, [first])
    pool.add(second, [first])
    assert not pool.fits(third, [first, second])
    assert not pool.fits(third, [second])  # in blocks of 64
    assert pool.fits(third, [])


def test_rows_of_one_format_share_its_table(engine, lm, monkeypatch):
    put = []
    monkeypatch.setitem(format_pool._MOST, "masks", 16)
    monkeypatch.setattr(RowPrograms, "put_format", spy(put, RowPrograms.put_format))
    prompts = ["Tom", "Lily", "The"]
    texts = engine.generate(prompts, response_format=LETTERS[0], **ASKED)
    assert texts == [lm.generate(p, response_format=LETTERS[0], **ASKED) for p in prompts]
    assert len(put) == 3  # a part for each array
    requests = [engine.submit("Tom", response_format=LETTERS[0], **ASKED) for _ in range(3)]
    engine.step()
    assert engine.stats.running == 3
    assert len({request.result() for request in requests}) == 1


def spy(calls, function):
    def called(*args):
        calls.append(args)
        return function(*args)

    return called


def test_requests_whose_tables_have_no_room_wait(engine, lm, monkeypatch):
    alone = [lm.generate("Tom", response_format=wanted, **ASKED) for wanted in LETTERS]
    without = lm.generate("Tom", **ASKED)
    monkeypatch.setitem(format_pool._MOST, "masks", 32)
    requests = [engine.submit("Tom", response_format=wanted, **ASKED) for wanted in LETTERS]
    last = engine.submit("Tom", **ASKED)
    running = []
    while engine.step():
        jobs = [job for job in engine._scheduler._batch.jobs if job is not None]
        running.append(len({job.table for job in jobs if job.table}))
    assert max(running) <= 2  # of three rows, and blocks of 16 masks
    assert [request.result() for request in requests] == alone
    assert last.result() == without


def test_a_format_that_there_is_no_memory_for_does_not_keep_others_away(engine, lm, monkeypatch):
    letters = np.random.default_rng(0).integers(97, 123, (700, 7)).astype("uint8")
    many = bs.ResponseFormat.choice([f" {bytes(row).decode()}" for row in letters])
    make = RowPrograms.new_format_array

    def make_small(self, part, length):
        if part.dtype == np.uint32 and length > LEAST["masks"]:
            raise MemoryError("no memory for so many masks")
        return make(self, part, length)

    monkeypatch.setattr(RowPrograms, "new_format_array", make_small)
    text = [lm.generate("Tom", response_format=LETTERS[0], **ASKED)]
    assert engine.generate(["Tom"], response_format=LETTERS[0], **ASKED) == text
    request = engine.submit("Tom", response_format=many, **ASKED)
    with pytest.raises(MemoryError, match="no memory for so many masks"):
        request.result()
    assert engine.generate(["Tom"], response_format=LETTERS[0], **ASKED) == text


def test_a_row_is_cancelled_while_another_format_has_taken_a_place(engine, lm):
    """The first one has ended, but is not read; then the second one goes."""
    first = engine.submit("Tom", response_format=LETTERS[0], max_new_tokens=4)
    engine.step()
    second = engine.submit("Tom", response_format=LETTERS[1], **ASKED)
    other = engine.submit("Tom", **ASKED)
    engine.step()
    second.cancel()
    assert other.result() == lm.generate("Tom", **ASKED)
    assert first.result() == lm.generate("Tom", response_format=LETTERS[0], max_new_tokens=4)


def test_arrays_of_generate_hold_each_table_once():
    arrays = arrays_of([TABLES[1], None, TABLES[1], TABLES[2]])
    assert arrays["states"].tolist() == [0, FREE, 0, 899 * 31]
    assert arrays["which"].tolist() == [0, 0, 0, 1]
    assert arrays["following"][899 * 31] == 17 + TABLES[2].mask_of[START]
    assert len(arrays["following"]) == 2**18
    assert len(arrays["masks"]) == 2**10


def test_a_row_that_has_ended_does_not_go_on_where_slots_begin_anew(lm):
    """Else its table would keep others away while its tokens are not read."""
    batch = bs.Engine(lm, rows=2, length=128)._scheduler._batch
    batch.jobs[1], batch.start[1], batch.budget[1], batch.slot = object(), 80, 5, 85
    assert batch.running == []
    batch._make_room(10)
    assert batch.slot == 11
    assert batch.running == []
