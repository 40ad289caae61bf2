"""The automaton over bytes of a regular expression, made by the package `outlines-core`.

It is made in a process of its own, this file as a script: the automaton of a short expression can
take hours, and fill the memory.
"""

import io
import re
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np

BYTES = 256
MOST_STATES = 2**15 - 4
"""As many as an int16 has numbers for, with those that `table` adds."""

_SECONDS = 60
_MEMORY = 2**32
_TOO_LARGE = f"its automaton takes more than {_MEMORY // 2**30} GiB of memory"
_WORDS = {
    "error building NFA": "its syntax is another one",
    "anchored universal start": "it depends on what stands before",
    "Found no transitions": "no text matches it",
}
"""What the errors of the package mean."""

_END = 0


class Automaton(NamedTuple):
    """An automaton over bytes.

    Attributes:
        table: int32[states * 256], the state after each byte. The last state is that of what may
            not follow, and leads to itself.
        first: its first state.
        ends: int64[n], the states that end a text.
    """

    table: np.ndarray
    first: int
    ends: np.ndarray


def make_automaton(regex: str) -> Automaton:
    """Make the smallest automaton of a regular expression.

    Raises:
        ValueError: it is none, or its automaton is too large.
    """
    command = [sys.executable, "-P", __file__]
    try:
        made = subprocess.run(command, input=regex.encode(), capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"its automaton takes more than {_SECONDS} seconds") from error
    if made.returncode < 0:
        raise ValueError(_TOO_LARGE)
    if made.returncode:
        raise ValueError(made.stderr.decode(errors="replace").strip())
    arrays = np.load(io.BytesIO(made.stdout))
    return Automaton(arrays["table"], int(arrays["first"]), arrays["ends"])


def _make(regex: str) -> Automaton:
    """Make an automaton, in the process that runs now."""
    import outlines_core

    vocabulary = outlines_core.Vocabulary(BYTES, {bytes([byte]): [byte] for byte in range(BYTES)})
    # A text ends with a byte that is in none: `Index` loses what goes on after the end of another.
    index: Any = outlines_core.Index(rf"(?:{regex})\x00", vocabulary)
    if _may_leave_group(regex):
        outlines_core.Index(regex, vocabulary)  # which tells what is wrong with it
    transitions, first = index.get_transitions(), index.get_initial_state()
    last = index.get_final_states()
    numbers = {state: i for i, state in enumerate({first, *transitions})}
    ends = [numbers[state] for state, row in transitions.items() if row.get(_END) in last]
    table = np.full((len(numbers) + 1, BYTES), len(numbers), np.int32)
    for state, row in transitions.items():
        for byte, target in row.items():
            if _END < byte < BYTES:
                table[numbers[state], byte] = numbers[target]
    return _smallest(table, numbers[first], ends)


def _may_leave_group(regex: str) -> bool:
    """Tell whether a bracket may close the group that is put around an expression."""
    plain = re.sub(r"\\.", "", regex, flags=re.DOTALL)
    depths = np.cumsum([(c == "(") - (c == ")") for c in plain] or [0])
    return bool(depths.min() < 0 or depths[-1] or re.search(r"\[[^\]]*[()]", plain))


def _smallest(table: np.ndarray, first: int, ends: list[int]) -> Automaton:
    """Return the smallest automaton that does the same.

    States are told apart by whether they end a text, then by which of these groups each byte leads
    to, and so on until no group is split. Groups are compared by random numbers of 64 bits.

    Source: Moore 1956, Gedanken-experiments on sequential machines.
    """
    random = np.random.default_rng(0)
    columns = np.unique(table, axis=1)
    of_column = random.integers(1, 2**64, columns.shape[1], np.uint64)
    groups, count = np.isin(np.arange(len(table)), ends).astype(np.int64), 1
    while count != groups.max() + 1:
        count = int(groups.max()) + 1
        of_group = random.integers(1, 2**64, count, np.uint64)
        keys = (of_group[groups[columns]] * of_column).sum(axis=1) + of_group[groups]
        groups = np.unique(keys, return_inverse=True)[1]
    dead = groups[-1]
    groups = np.where(groups == dead, count - 1, groups - (groups > dead))  # it comes last
    members = np.zeros(count, np.int64)
    members[groups] = np.arange(len(table))
    smallest = groups[table[members]].astype(np.int32)
    return Automaton(smallest.reshape(-1), int(groups[first]), np.unique(groups[ends]))


def _main() -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        pass
    else:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    try:
        made = _make(sys.stdin.buffer.read().decode())
    except ValueError as error:
        text = str(error)
        sys.exit(next((words for part, words in _WORDS.items() if part in text), text))
    except MemoryError:
        sys.exit(_TOO_LARGE)
    if len(made.table) > MOST_STATES * BYTES:
        sys.exit(f"its automaton has {len(made.table) // BYTES} states, more than {MOST_STATES}")
    np.savez(sys.stdout.buffer, table=made.table, first=made.first, ends=made.ends)


if __name__ == "__main__":
    _main()
