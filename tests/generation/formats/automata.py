"""Automata, made without a process of their own."""

import numpy as np

from backbone_surgery.generation.formats.automaton import Automaton
from backbone_surgery.generation.formats.automaton_script import BYTES, make
from backbone_surgery.generation.formats.expressions import without_nul


def make_here(regex):
    return Automaton(**make(without_nul(regex)))


def accepts(automaton, text):
    """Tell whether a text leads to an end."""
    state = automaton.first
    for byte in text.encode():
        state = automaton.table[state * BYTES + byte]
    return state in automaton.ends


def random_texts(regex, count, rng):
    """Return texts that a walk through the automaton writes, which soon goes to an end."""
    found = make_here(regex)
    table, first, ends = found.table.reshape(-1, BYTES), found.first, found.ends
    distance, texts = to_an_end(table, ends), []
    while len(texts) < count:
        state, text, until = first, b"", rng.randrange(40)
        while state not in ends or (len(text) < until and table[state].min() < len(table) - 1):
            following = [b for b in range(BYTES) if distance[table[state, b]] < np.inf]
            plain = [b for b in following if chr(b) in '"{}[]:,ab01\\'] or following
            nearer = [b for b in following if distance[table[state, b]] < distance[state]]
            past = len(text) >= until and nearer
            byte = rng.choice(nearer if past else rng.choice([following, plain]))
            state, text = table[state, byte], text + bytes([byte])
        texts.append(text.decode())
    return texts


def to_an_end(table, ends):
    """Return how many bytes lead from each state to an end at least."""
    distance = np.full(len(table), np.inf)
    distance[np.array(list(ends))] = 0
    while True:
        nearer = np.minimum(distance, distance[table].min(axis=1) + 1)
        if (nearer == distance).all():
            return distance
        distance = nearer
