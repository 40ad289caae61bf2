"""Contrast pairs: texts that differ in one thing only, to find the direction of that thing."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.prompts import text_list
from backbone_surgery.numbers import read_array


def contrast_pairs(
    template: str, positives: Sequence[str], negatives: Sequence[str], suffixes: Sequence[str]
) -> list[tuple[str, str]]:
    """Make contrast pairs from a template and two lists of personas.

    Positives and negatives are taken together one by one, not crossed; each such pair is written
    once with each suffix, the same one on both sides.

    Args:
        template: text with `{persona}` and `{suffix}` in it.
        positives: personas of the positive side.
        negatives: personas of the negative side, as many.
        suffixes: how the texts go on, such as the beginnings of some sentences.

    Returns:
        `[(positive text, negative text), ...]`, `len(positives) * len(suffixes)` of them.

    Raises:
        SurgeryError: a list is empty, lengths differ, a pair has the same persona twice, or the
            template lacks a placeholder.

    Source: the recipe in the documentation of repeng (github.com/vgel/repeng).

    Examples:
        >>> import backbone_surgery as bs
        >>> bs.contrast_pairs("I am {persona}. {suffix}", ["glad"], ["sad"], ["I", "So I"])
        [('I am glad. I', 'I am sad. I'), ('I am glad. So I', 'I am sad. So I')]
    """
    positives, negatives, suffixes = map(text_list, (positives, negatives, suffixes))
    for name, texts in (("positives", positives), ("negatives", negatives), ("suffixes", suffixes)):
        listed = isinstance(texts, Sequence) and not isinstance(texts, str | bytes)
        if not listed or not texts or not all(isinstance(t, str) for t in texts):
            raise SurgeryError(
                f"contrast_pairs at '{name}': expected a list of strings, at least one. Received "
                f"{shown(texts)}. Pass a list."
            )
    if len(positives) != len(negatives):
        raise SurgeryError(
            "contrast_pairs: expected as many negatives as positives, since they are taken "
            f"together one by one. Received {len(positives)} and {len(negatives)}. Add the "
            "missing ones."
        )
    parts = ("{persona}", "{suffix}")
    missing = [part for part in parts if not isinstance(template, str) or part not in template]
    if missing:
        raise SurgeryError(
            f"contrast_pairs: expected a template with {{persona}} and {{suffix}}. Received "
            f"{shown(template)}, without {' and '.join(missing)}. Put it in."
        )
    pairs = []
    for suffix in suffixes:
        for personas in zip(positives, negatives, strict=True):
            filled = (_fill(template, persona, suffix) for persona in personas)
            pairs.append(tuple(filled))
    return check_pairs(pairs)


def _fill(template: str, persona: str, suffix: str) -> str:
    # Not `str.format`: prompts of chat models are full of braces.
    texts = {"{persona}": persona, "{suffix}": suffix}
    return re.sub(r"\{persona\}|\{suffix\}", lambda found: texts[found[0]], template)


def listable(value: Any) -> bool:
    """Tell whether a value can be gone through item by item, and is no text."""
    return not isinstance(value, str | bytes | keras.KerasTensor) and np.iterable(value)


def check_pairs(pairs: Iterable[Any]) -> list[Any]:
    """Return the pairs as a list; raises for none, for what is no pair, and for identical texts."""
    listed = [text_list(pair) for pair in pairs] if listable(pairs) else []
    if not listed:
        raise SurgeryError(
            f"pairs: expected at least one pair of texts. Received {shown(pairs)}. Pass "
            "[(positive, negative), ...]."
        )
    for i, pair in enumerate(listed):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise SurgeryError(
                f"pairs at {i}: expected (positive, negative). Received {shown(pair)}. Pass two "
                "texts."
            )
        positive, negative = (_comparable(text, i) for text in pair)
        if positive == negative:
            raise SurgeryError(
                f"pairs at {i}: expected two texts that differ. Received {shown(pair[0])} twice. "
                "Change one side, or drop the pair."
            )
    return listed


def _comparable(text: Any, i: int) -> str | list[Any]:
    """Return a text as it can be compared; refuse what is neither text nor token ids."""
    ids = None if isinstance(text, str) else read_array(text)
    value = text if isinstance(text, str) else [] if ids is None or ids.ndim != 1 else ids.tolist()
    if not value:
        empty = "an empty one" if isinstance(text, str | list | tuple) and not text else shown(text)
        raise SurgeryError(
            f"pairs at {i}: expected two texts, or two lists of token ids. Received {empty}. Fill "
            "it in."
        )
    return value
