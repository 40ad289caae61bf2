"""The automaton over bytes of a regular expression, made by the package `outlines-core`.

It is made in a process of its own, since that of a short expression can take hours and fill the
memory.
"""

import io
import subprocess
import sys
from typing import NamedTuple

import numpy as np

from backbone_surgery.generation.formats import automaton_script
from backbone_surgery.generation.formats.expressions import without_nul

SECONDS = 60


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
    command = [sys.executable, "-P", automaton_script.__file__]
    plain = without_nul(regex).encode()
    try:
        made = subprocess.run(command, input=plain, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"its automaton takes more than {SECONDS} seconds") from error
    if made.returncode < 0:
        raise ValueError(automaton_script.TOO_LARGE)
    if made.returncode:
        raise ValueError(made.stderr.decode(errors="replace").strip())
    arrays = np.load(io.BytesIO(made.stdout))
    return Automaton(arrays["table"], int(arrays["first"]), arrays["ends"])
