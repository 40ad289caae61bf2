"""Automata, made without a process of their own."""

from backbone_surgery.generation.formats.automaton import Automaton
from backbone_surgery.generation.formats.automaton_script import make
from backbone_surgery.generation.formats.expressions import without_nul


def make_here(regex):
    return Automaton(**make(without_nul(regex)))
