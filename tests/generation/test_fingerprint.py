"""Two samplers have one fingerprint if and only if they depend on the same."""

import functools
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import jax
import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.fingerprint import digest, fingerprint, fingerprint_function

ROOT = Path(__file__).parents[2]

LIMIT = 3
TABLE = [1]


def helper(probabilities):
    return probabilities if TABLE else None


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def make_class():
    class Own(keras_hub.samplers.Sampler):
        shared = 1

        def __init__(self, **attributes):
            super().__init__()
            self.__dict__.update(attributes)

        def get_next_token(self, probabilities):
            return [helper(p) for p in probabilities] if LIMIT else None

    return Own


Own = make_class()


def make():
    """Make a sampler with attributes of many kinds, each time of new objects."""
    closed_over = [1, 2]
    return Own(
        number=0.5,
        not_a_number=float("nan"),
        listed=[1, [2, "three"]],
        banned={4, 5},
        table={"a": {"b": 1}},
        bias=np.zeros(6),
        on_device=jax.numpy.arange(3),
        variable=keras.Variable(np.ones(2)),
        function=lambda x, y=2: x + y + closed_over[0],
        partial=functools.partial(max, 1),
        jitted=jax.jit(helper),
        generator=np.random.default_rng(3),
        twister=random.Random(3),
        nested=Plain(plain=Plain(values=[1])),
        seed_generator=keras.random.SeedGenerator(1),
    )


def set_cell(sampler):
    sampler.function.__closure__[0].cell_contents[0] = 7


CHANGES = {
    "number": lambda s: setattr(s, "number", 0.25),
    "kind of number": lambda s: setattr(s, "number", np.float32(0.5)),
    "another attribute": lambda s: setattr(s, "new", None),
    "list within a list": lambda s: s.listed[1].append(1),
    "set": lambda s: s.banned.add(6),
    "dict within a dict": lambda s: s.table["a"].update(b=2),
    "array in place": lambda s: s.bias.__setitem__(0, 1.0),
    "dtype": lambda s: setattr(s, "bias", s.bias.astype("float32")),
    "shape": lambda s: setattr(s, "bias", s.bias.reshape(2, 3)),
    "device array": lambda s: setattr(s, "on_device", s.on_device + 1),
    "variable": lambda s: s.variable.assign([1.0, 2.0]),
    "function": lambda s: setattr(s, "function", lambda x, y=2: x - y),
    "default of a function": lambda s: setattr(s.function, "__defaults__", (3,)),
    "what a function closes over": set_cell,
    "partial": lambda s: setattr(s, "partial", functools.partial(max, 2)),
    "state of a generator": lambda s: s.generator.random(),
    "state of a Python generator": lambda s: s.twister.random(),
    "object within an object": lambda s: s.nested.plain.values.append(2),
    "method of the instance": lambda s: setattr(s, "get_next_token", helper),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_changes_it(change):
    sampler = make()
    before = fingerprint(sampler)
    assert {before: 1}[fingerprint(make())] == 1  # equal, and of one hash
    text = digest(before)
    assert text == digest(fingerprint(make()))
    change(sampler)
    assert digest(fingerprint(sampler)) != text
    assert fingerprint(sampler) != before
    assert fingerprint(sampler) == fingerprint(sampler)


@pytest.mark.parametrize("name", ["LIMIT", "TABLE", "helper", "shared", "get_next_token"])
def test_what_is_changed_around_it_changes_it(name, monkeypatch):
    before = fingerprint(make())
    another = [9] if name in ("LIMIT", "TABLE", "shared") else lambda probabilities: 0
    if hasattr(Own, name):
        monkeypatch.setattr(Own, name, another)
    else:
        monkeypatch.setitem(globals(), name, another)
    assert fingerprint(make()) != before
    monkeypatch.undo()
    assert fingerprint(make()) == before


def test_draws_and_what_is_left_out_change_nothing():
    sampler = make()
    before = fingerprint(sampler, ["number"])
    sampler.seed_generator.next()
    sampler.number = 9
    assert fingerprint(sampler, ["number"]) == before


def test_what_holds_itself():
    samplers = [make(), make()]
    for sampler in samplers:
        sampler.listed.append(sampler.listed)
        sampler.me = sampler
    assert fingerprint(samplers[0]) == fingerprint(samplers[1])


def test_slots_count():
    class Slotted(keras_hub.samplers.Sampler):
        __slots__ = ("limit",)

    sampler = Slotted()
    before = fingerprint(sampler)
    sampler.limit = 1
    assert fingerprint(sampler) != before


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (threading.Lock(), "a lock"),
        ({"deep": [threading.Lock()]}, "a lock"),
        ((i for i in ()), "a generator"),
        (np.array([None]), "an array of objects"),
        (jax.random.key(0), "no array of numbers"),
        (keras.layers.Dense(2), "a Keras object, Dense"),
    ],
    ids=["lock", "lock within", "generator", "array of objects", "key", "layer"],
)
def test_what_has_no_value_is_refused_by_name(value, words):
    with pytest.raises(bs.SurgeryError, match=f"sampler Own at 'odd': expected .*{words}"):
        fingerprint(Own(odd=value))


def test_what_is_too_deep_is_refused_by_name():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(bs.SurgeryError, match=r"sampler Own at 'odd': .*recursion"):
        fingerprint(Own(odd=nested))


SOURCE = (
    "def judge(text, most=2):\n    return [len(w) for w in text if w in {'a', 'b', 'c'}][:most]"
)


def function_of(source, file="judges.py"):
    names = {}
    exec(compile(source, file, "exec"), names)
    return names["judge"]


def test_functions_count_by_what_they_do():
    def digest_of(source, **other):
        return digest(fingerprint_function("here", function_of(source, **other)))

    before = digest_of(SOURCE)
    assert digest_of(f"\n\n{SOURCE}", file="moved.py") == before
    for old, new in (("most=2", "most=3"), ("len(w)", "-len(w)"), ("'b'", "'d'"), ("len", "hash")):
        assert digest_of(SOURCE.replace(old, new)) != before


def test_a_function_that_closes_over_something_without_a_value_is_refused():
    lock = threading.Lock()
    with pytest.raises(bs.SurgeryError, match=r"here: expected a function .* a lock"):
        fingerprint_function("here", lambda text: lock)


@pytest.mark.slow
def test_digests_are_the_same_in_another_process():
    code = (
        "import tests.generation.test_fingerprint as t; f = t.function_of(t.SOURCE); "
        "print(t.digest(t.fingerprint(t.make())), t.digest(t.fingerprint_function('here', f)))"
    )
    runs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-W", "ignore", "-c", code]
        runs.append(subprocess.check_output(command, env=environment, cwd=ROOT, text=True))
    assert runs[0] == runs[1] != ""
