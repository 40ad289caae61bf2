"""`sweep --words` counts what a reader would."""

import pytest

from backbone_surgery.cli.console import read_text
from backbone_surgery.cli.steering import _count, _plain


@pytest.mark.parametrize(
    ("text", "word", "times"),
    [
        ("Happy, unhappy, happy_1; HAPPY", "happy", 2),
        ("Lily had a little kitten. A little dog.", "little kitten", 1),
        ("She didn't cry.", "didn't", 1),
        ("a well-known dog", "well-known", 1),
        ("happyhappy happy", "happy", 1),
        ("हिन्दी", "हिन्दी", 1),
        ("हिन्दी", "हिन्द", 0),
        ("cafe\u0301", "caf\u00e9", 1),
        ("cafe\u0301", "cafe", 0),
    ],
)
def test_words_and_phrases(text, word, times):
    assert _count(text, [_plain(word)]) == times


def test_a_file_that_begins_with_a_mark(tmp_path):
    (tmp_path / "prompts.txt").write_text("\ufeffOnce upon a time", encoding="utf-8")
    assert read_text(tmp_path / "prompts.txt", "sweep") == "Once upon a time"
