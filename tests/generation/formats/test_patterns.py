"""The `pattern` of a JSON Schema, against Python's reading of it."""

import json
import random
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from backbone_surgery.generation.formats.patterns import read_pattern
from tests.generation.formats.automata import accepts, make_here, random_texts

PATTERNS = {
    "^[A-Z]{2}-[0-9]+$": ["AB-1", "ZZ-00"],
    r"^\d{4}/\d\d?$": ["2026/1", "0000/12"],
    r"^(?:\+1|0)[\d -]{3,5}$": ["+1234", "0- -"],
    r"^\S+@\S+\.\w{2,}$": ["a@b.cd"],
    "cat|^dog$": ["a cat is", "dog", "cat"],
    "": ["", 'any "text"'],
    r"^.{1,3}?$": ["a", "é .", "→"],
    r'^"[^"]*"$': ['""', '"a b"'],
    r"^a\tb\\$": ["a\tb\\"],
    r"^[\"\\\n x]+$": ['"\\\n x'],
    r"^[^\d\s]\W\D\S$": ["a--a"],
    r"^[\w.+-]+$": ["a_b.c+d-"],
    r"^[!-~]{2}$": ["!~", "a]"],
    r"^[\x41-\u0043]$": ["A", "C"],
    "^(a|b(c|d)*)?$": ["", "a", "bcdc"],
    r"^[-a]|[a-]$": ["-", "a", "-no", "no-"],
    "^[[&~|]$": ["[", "&", "~", "|"],
    "^𝄞é$": ["𝄞é"],
    r"^\/\-\.\*$": ["/-.*"],
    "^x{0}y$": ["y"],
    "^[^a]$": ["b", "é"],
    "a$|^$": ["", "a", "ba"],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_it_writes_what_fits_and_what_is_common(pattern):
    found = read_pattern(pattern)
    regex = f'"{found.regex}"'
    for text in random_texts(regex, 60, random.Random(pattern)):
        value = json.loads(text)
        assert re.search(pattern, value)
        assert found.least <= len(value) <= found.most
    automaton = make_here(regex)
    for value in PATTERNS[pattern]:
        assert re.search(pattern, value)
        assert accepts(automaton, json.dumps(value, ensure_ascii=False))


ATOMS = ["a", "b", "[ab]", "[^a]", r"\d", r"\D", r"\W", ".", "(a|b)", "(?:ab)", "[a-c]", "é"]
COUNTS = ["", "?", "*", "+", "{2}", "{1,2}", "+?"]


@settings(deadline=None, max_examples=60)
@given(
    parts=st.lists(st.sampled_from(ATOMS), max_size=3),
    counts=st.lists(st.sampled_from(COUNTS), min_size=3, max_size=3),
    ends=st.booleans(),
    text=st.text("ab1.é ²", max_size=6),
)
def test_it_is_found_where_python_finds_it(parts, counts, ends, text):
    """In texts of characters that all readers take for the same."""
    pattern = "^" + "".join(map("".join, zip(parts, counts, strict=False))) + "$" * ends
    regex = f'"{read_pattern(pattern).regex}"'
    fits = accepts(make_here(regex), json.dumps(text, ensure_ascii=False))
    by_python = re.search(pattern, text) is not None
    assert fits <= by_python
    assume("²" not in text and "é" not in text)
    assert fits == by_python


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "it is no regular expression: missing"),
        ("a{2,1}", "it is no regular expression: min repeat greater"),
        ("(?i)a", r"it may have '\(\?:' alone"),
        ("(?P<n>a)", r"it may have '\(\?:' alone"),
        ("(?<!a)b", r"it may have '\(\?:' alone"),
        ("a^b", "an anchor that is not at its beginning or end"),
        ("(^a)", "an anchor that is not at its beginning or end"),
        ("(a$)", "an anchor that is not at its beginning or end"),
        ("a$b", r"it goes on after '\$'"),
        (r"\bcat", r"'\\b' is not read alike everywhere"),
        (r"(a)\1", r"'\\1' is not read alike everywhere"),
        (r"\Z", r"'\\Z' is not read alike everywhere"),
        ("a{,2}", r"'{' has to be written as '\\{'"),
        ("a}", r"'}' has to be written as '\\}'"),
        ("a]", r"'\]' has to be written as '\\\]'"),
        ("[]a]", r"'\]' in a class has to be written as '\\\]'"),
        ("[^]a]", r"'\]' in a class has to be written as '\\\]'"),
        (r"[a-\d]", "it is no regular expression"),
        ("a*+", "what is repeated is repeated again"),
        ("^*a", "it is no regular expression: nothing to repeat"),
        ("a" * 8193, "it has more than 8192 characters"),
        (r"\ud834", "it has half of a surrogate pair"),
        (r"[\ud834-a]", "it"),
    ],
)
def test_what_is_not_read_alike_is_refused(pattern, words):
    with pytest.raises(ValueError, match=words):
        read_pattern(pattern)
