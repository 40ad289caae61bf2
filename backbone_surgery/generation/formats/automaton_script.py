"""A script that makes the automaton over bytes of a regular expression; see `automaton`.

It reads the expression, without NUL, and writes arrays of NumPy. It imports nothing of the package,
so that it starts at once.
"""

import sys
from typing import Any

import numpy as np

BYTES = 256
MOST_STATES = 2**15 - 4
"""As many as an int16 has numbers for, with those that `table` adds."""

MEMORY = 2**32
TOO_LARGE = f"its automaton takes more than {MEMORY // 2**30} GiB of memory"
_WORDS = {
    "error building NFA": "it is no regular expression of the Rust crate `regex`, or too large",
    "Found no transitions": "no text matches it",
}
"""What the errors of `outlines-core` mean."""

_NUL = 0


def make(regex: str) -> dict[str, Any]:
    """Return the smallest automaton of an expression without NUL, as `Automaton` has it."""
    import outlines_core

    vocabulary = outlines_core.Vocabulary(BYTES, {bytes([byte]): [byte] for byte in range(BYTES)})
    # `Index` loses what goes on after the end of a text, but for the NUL behind.
    index: Any = outlines_core.Index(rf"\x00(?:{regex})\x00", vocabulary)
    transitions, last = index.get_transitions(), index.get_final_states()
    first = transitions[index.get_initial_state()][_NUL]
    numbers = {state: i for i, state in enumerate({first, *transitions})}
    ends = [numbers[state] for state, row in transitions.items() if row.get(_NUL) in last]
    table = np.full((len(numbers) + 1, BYTES), len(numbers), np.int32)
    for state, row in transitions.items():
        for byte, target in row.items():
            if _NUL < byte < BYTES:
                table[numbers[state], byte] = numbers[target]
    return _smallest(table, numbers[first], ends)


def _smallest(table: np.ndarray, first: int, ends: list[int]) -> dict[str, Any]:
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
    table = smallest.reshape(-1)
    return {"table": table, "first": int(groups[first]), "ends": np.unique(groups[ends])}


def _main() -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        pass
    else:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        made = make(sys.stdin.buffer.read().decode())
    except ValueError as error:
        text = str(error)
        sys.exit(next((words for part, words in _WORDS.items() if part in text), text))
    except MemoryError:
        sys.exit(TOO_LARGE)
    count = len(made["table"]) // BYTES
    if count > MOST_STATES:
        sys.exit(f"its automaton has {count} states, more than {MOST_STATES}")
    np.savez(sys.stdout.buffer, **made)


if __name__ == "__main__":
    _main()
