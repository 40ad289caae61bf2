"""The automaton of a regular expression accepts the texts that Python's `re` matches."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbone_surgery.generation.formats import automaton
from backbone_surgery.generation.formats.automaton import make_automaton
from backbone_surgery.generation.formats.automaton_script import BYTES
from tests.generation.formats.automata import accepts, make_here

LETTERS = "abcé"
TEXTS = ["".join(t) for n in range(5) for t in itertools.product(LETTERS, repeat=n)]
PARTS = st.sampled_from(["a", "b", "ab", "ba", "[ab]", "[^a]", "é", "c"])
COUNTS = st.sampled_from(["*", "?", "+", "{1,2}", "{2,}", "{0,3}"])
EXPRESSIONS = st.recursive(
    PARTS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, COUNTS).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS)
def test_it_accepts_what_python_matches(regex):
    made = make_here(regex)
    assert [accepts(made, text) for text in TEXTS] == [
        re.fullmatch(regex, text) is not None for text in TEXTS
    ]


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS)
def test_no_two_states_are_alike(regex):
    """Each pair is told apart by a text that ends after one of them alone."""
    made = make_here(regex)
    table = made.table.reshape(-1, BYTES)
    apart = {
        (a, b) for a in range(len(table)) for b in range(a) if (a in made.ends) != (b in made.ends)
    }
    while True:
        more = {
            (a, b)
            for a in range(len(table))
            for b in range(a)
            if any(
                (max(p), min(p)) in apart
                for p in zip(table[a].tolist(), table[b].tolist(), strict=True)
            )
        }
        if more <= apart:
            break
        apart |= more
    assert len(apart) == len(table) * (len(table) - 1) // 2


def test_a_text_may_go_on_after_the_end_of_another():
    """As it may not in an `Index` of outlines-core 0.2.14."""
    made = make_automaton(r"[0-9]+(\.[0-9]+)?")
    assert [accepts(made, text) for text in ("12", "12.", "12.5", "", ".5")] == [
        True, False, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("regex", ["(a", "a)|(b", "[(]a)(b", "^a$", "(?=a)b", r"(a)\1", "a{2"])
def test_what_is_no_expression_is_refused(regex):
    with pytest.raises(
        ValueError, match=r"it is no regular expression of|has an anchor|no text|was not opened"
    ):
        make_automaton(regex)


def test_one_that_takes_long_is_given_up(monkeypatch):
    monkeypatch.setattr(automaton, "SECONDS", 0.5)
    with pytest.raises(ValueError, match=r"its automaton takes more than 0\.5 seconds"):
        make_automaton("(a|b)*a(a|b){22}")


@pytest.mark.parametrize(
    "regex",
    [
        "(?x)a # b",
        "(?-u:a)",
        "a(?s).",
        "(?s:.)",
        "(?i-s:.)",
        "[a",
        r"\x{00}",
        r"\u0000",
        "a\0",
        r"a\z",
    ],
)
def test_what_would_mean_something_else_is_refused(regex):
    with pytest.raises(
        ValueError, match=r"of flags it may|has no end|no text has a char|an anchor"
    ):
        make_automaton(regex)


@pytest.mark.parametrize("regex", [".", "[^a]", r"\D", r"\S", r"\W", "(?s).", "[^]a]", "[]a]"])
def test_no_text_has_a_nul(regex):
    """Which is all that is taken out of what an expression matches."""
    made = make_here(regex)
    assert not accepts(made, "\0")
    for text in ("a", "\x01", "é", "\n", "7", "]", "-"):
        assert accepts(made, text) == (re.fullmatch(regex, text) is not None)


def test_properties_of_characters():
    for regex, texts, others in ((r"\PL", "1\n]", "aé\0"), (r"\p{Cc}", "\x01\n", "aé\0")):
        made = make_here(regex)
        assert all(accepts(made, text) for text in texts)
        assert not any(accepts(made, text) for text in others)


@pytest.mark.parametrize(
    "regex", [r" [a-z ]{5,40}\.", ".{3,300}!", "x[^a]{3,30}!", r'"([^"\\]|\\"){0,300}"']
)
def test_what_begins_like_its_middle_takes_no_time(regex, monkeypatch):
    """As it would where matches inside of a text were looked for."""
    monkeypatch.setattr(automaton, "SECONDS", 20)
    assert len(make_automaton(regex).table) // BYTES < 5000


@pytest.mark.slow
def test_one_with_too_many_states():
    with pytest.raises(ValueError, match="its automaton has 49161 states, more than 32764"):
        make_automaton("(a|b)*a(a|b){14}.?")


def test_states_that_are_needed_are_kept():
    """One for each of the last 9 letters, and the one that nothing follows."""
    assert len(make_automaton("(a|b)*a(a|b){8}").table) // BYTES == 2**9 + 1
