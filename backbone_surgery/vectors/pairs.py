"""Contrast pairs: texts that differ in one thing only, to find the direction of that thing."""

from collections.abc import Iterable, Sequence
from typing import Any

from backbone_surgery.errors import SurgeryError

Pair = tuple[Any, Any]


def contrast_pairs(
    template: str, positives: Sequence[str], negatives: Sequence[str], suffixes: Sequence[str]
) -> list[tuple[str, str]]:
    """Write the pairs that repeng users write by hand.

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

    Example:
        >>> import backbone_surgery as bs
        >>> bs.contrast_pairs("I am {persona}. {suffix}", ["glad"], ["sad"], ["I", "So I"])
        [('I am glad. I', 'I am sad. I'), ('I am glad. So I', 'I am sad. So I')]
    """
    for name, texts in (("positives", positives), ("negatives", negatives), ("suffixes", suffixes)):
        if isinstance(texts, str) or not texts or not all(isinstance(t, str) for t in texts):
            raise SurgeryError(
                f"contrast_pairs at '{name}': expected a list of strings, at least one. Received "
                f"{texts!r}. Pass a list."
            )
    if len(positives) != len(negatives):
        raise SurgeryError(
            "contrast_pairs: expected as many negatives as positives, since they are taken "
            f"together one by one. Received {len(positives)} and {len(negatives)}. Add the "
            "missing ones."
        )
    missing = [part for part in ("{persona}", "{suffix}") if part not in template]
    if missing:
        raise SurgeryError(
            f"contrast_pairs: expected a template with {{persona}} and {{suffix}}. Received "
            f"{template!r}, without {' and '.join(missing)}. Put it in."
        )
    pairs = []
    for suffix in suffixes:
        for personas in zip(positives, negatives, strict=True):
            filled = (_fill(template, persona, suffix) for persona in personas)
            pairs.append(tuple(filled))
    return check_pairs(pairs)


def _fill(template: str, persona: str, suffix: str) -> str:
    # Not `str.format`: prompts of chat models are full of braces.
    before, _, after = template.partition("{persona}")
    parts = (part.replace("{suffix}", suffix) for part in (before, after))
    return persona.join(parts)


def check_pairs(pairs: Iterable[Any]) -> list[Any]:
    """Return the pairs as a list; raises for none, for what is no pair, and for identical texts."""
    listed = list(pairs)
    if not listed:
        raise SurgeryError(
            "pairs: expected at least one pair of texts. Received none. Pass [(positive, "
            "negative), ...]."
        )
    for i, pair in enumerate(listed):
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise SurgeryError(
                f"pairs at {i}: expected (positive, negative). Received {pair!r}. Pass two texts."
            )
        if len(pair[0]) == 0 or len(pair[1]) == 0:
            raise SurgeryError(
                f"pairs at {i}: expected two texts. Received an empty one in {pair!r}. Fill it in."
            )
        if list(pair[0]) == list(pair[1]):
            raise SurgeryError(
                f"pairs at {i}: expected two texts that differ. Received {pair[0]!r} twice. Change "
                "one side, or drop the pair."
            )
    return listed
