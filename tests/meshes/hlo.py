"""Count what devices exchange in a compiled program."""

import re
from collections import Counter

COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
    r"(?:-start)?\("
)


def exchanged(text):
    """Count collectives: (of one step of the loop, of its test whether to go on, of the rest).

    Args:
        text: the HLO of a program with one loop at the top.
    """
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{\n((?:.*\n)*?)\}", text, re.M))
    (entry,) = re.findall(r"^ENTRY %?([\w.-]+) ", text, re.M)
    (loop,) = [line for line in bodies[entry].splitlines() if " while(" in line]
    body, test = (re.search(rf"{part}=%?([\w.-]+)", loop)[1] for part in ("body", "condition"))
    everything = _count(entry, bodies)
    step, asked = _count(body, bodies), _count(test, bodies)
    return step, asked, everything - step - asked


def _count(name, bodies):
    """Count in one computation and all that it calls."""
    calls = r"(?:body|condition|calls|to_apply|branch_computations)=(\{[^}]*\}|%?[\w.-]+)"
    found = Counter(COLLECTIVE.findall(bodies[name]))
    for names in re.findall(calls, bodies[name]):
        for called in re.findall(r"[\w.-]+", names):
            found += _count(called, bodies)
    return found
