"""Scores: functions of a generated text, and what they return."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from backbone_surgery.errors import SurgeryError, shown

Score = Callable[[str], float]


def read_scores(operation: str, score: Any) -> dict[str, Score]:
    """Return `{name: function}` for what a user passes as `score`."""
    if score is None:
        return {}
    scores = dict(score) if isinstance(score, Mapping) else {"score": score}
    if not all(isinstance(name, str) and callable(f) for name, f in scores.items()):
        raise SurgeryError(
            f"{operation} at 'score': expected a function of a text, or a dict of such functions "
            f"by name. Received {shown(score)}. Pass one of these."
        )
    return scores


def score_text(operation: str, name: str, function: Score, text: str) -> float:
    """Return the score of a text, a finite number."""
    try:
        value = function(text)
    except Exception as error:  # it is the user's
        raise SurgeryError(
            f"{operation} at score '{name}': expected a function that takes any text. Received "
            f"{type(error).__name__}, {error}, for the text {shown(text)}. Have it return a number."
        ) from error
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is no number, whatever it spells")
        number = float(value)
    except Exception as error:  # whatever the conversion of an object runs into
        raise SurgeryError(
            f"{operation} at score '{name}': expected a function that returns a number. Received "
            f"{shown(value)} for the text {shown(text)}. Return one number."
        ) from error
    if not math.isfinite(number):
        raise SurgeryError(
            f"{operation} at score '{name}': expected a finite number. Received {number} for the "
            f"text {shown(text)}. Return another number for such a text."
        )
    return number
