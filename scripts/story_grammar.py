"""A small story grammar: the training data, and the ruler, of the bundled tiny models.

The idea this file holds: one table of sentence templates (`story_templates`) is both the generator
and the checker.
`generate_story` fills templates; `classify`, `well_formed` and `recall` read text back with
word lists and regular expressions that are built from the same templates, so the two can't drift.

A story has five attributes, each drawn with probability 1/2, independently of the others and of
every name, object and wording:

* mood: happy or sad,
* place: indoors or outdoors,
* characters: one child or two,
* time: day or night,
* pet: dog or cat.

It opens with one or two neutral sentences (the prompt). Sentences that set up each attribute
follow in random order, then a body in which every attribute comes back, then an ending. The
child's name and coloured object, the friend's name and coloured object, the pet's name and the
room are drawn once, and come back until the last sentence, so a model has to remember who owns
what.

Template language: `{slot}` is filled from the story or from a list; `[x|y]` reads x for the first
value of the template's attribute and y for the second. Random choices never depend on an
attribute's value: that is what makes contrast pairs differ in one attribute only.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from random import Random

from story_templates import (
    ATTRIBUTES,
    COLOURS,
    FILLERS,
    GENDERED,
    NAMES,
    SENTENCE_FILLERS,
    STORY_FILLERS,
    TEMPLATES,
    THINGS,
)

_SLOT = re.compile(r"\{(\w+)\}")
_CHOICE = re.compile(r"\[([^|\]]*)\|([^|\]]*)\]")
_SENTENCE = re.compile(r"[^.!?]+[.!?]")
_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True)
class Story:
    """One story, what it shows, and the neutral opening it starts with.

    Attributes:
        text: the whole story, sentences joined by single spaces.
        attributes: for each name in `ATTRIBUTES`, the value this story shows.
        prompt: the first one or two sentences of `text`, which leave every attribute open.
    """

    text: str
    attributes: dict[str, str]
    prompt: str


def generate_story(rng: Random, **fixed_attributes: str) -> Story:
    """Write one story.

    The same state of `rng` gives the same story, and fixing an attribute changes the sentences
    that express it and nothing else.

    Args:
        rng: the source of every random choice.
        **fixed_attributes: values for some of `ATTRIBUTES`; the others are drawn 50/50.

    Returns:
        The story.

    Raises:
        ValueError: for a name or value that `ATTRIBUTES` does not list.

    Example:
        >>> generate_story(Random(0), mood="happy").attributes["mood"]
        'happy'
    """
    for name, value in fixed_attributes.items():
        _value_index(name, value)
    drawn = {name: rng.choice(values) for name, values in ATTRIBUTES.items()}
    attributes = {**drawn, **fixed_attributes}
    slots = _story_slots(rng, attributes)
    sentences = [
        _fill(template, attribute, attributes, slots, rng) for attribute, template in _plot(rng)
    ]
    prompt = " ".join(sentences[: rng.choice((1, 2))])
    return Story(" ".join(sentences), attributes, prompt)


def contrast_pairs(
    attribute: str, rng: Random, n: int, sentences: int | None = None
) -> list[tuple[str, str]]:
    """Write pairs of texts that differ in one attribute only, to train control vectors on.

    Both texts of a pair come from the same seed, so they share names, objects, order, wording and
    the other attributes; sentences that do not express `attribute` are the same in both.

    Args:
        attribute: one of `ATTRIBUTES`.
        rng: the source of every random choice.
        n: how many pairs.
        sentences: how many sentences of each story to keep; all of them when None.

    Returns:
        `n` pairs (text with the first value, text with the second value) of equal sentence count.

    Raises:
        ValueError: if `attribute` is unknown or `sentences` is below 1.

    Example:
        >>> happy, sad = contrast_pairs("mood", Random(0), 1)[0]
        >>> classify(happy, "mood"), classify(sad, "mood")
        ('happy', 'sad')
    """
    if sentences is not None and sentences < 1:
        raise ValueError(
            f"contrast_pairs: expected sentences >= 1, or None for whole stories. "
            f"Received sentences={sentences}. Pass how many sentences to keep."
        )
    values = _values(attribute)
    pairs = []
    for _ in range(n):
        seed = rng.getrandbits(64)
        first, second = (
            _keep_sentences(generate_story(Random(seed), **{attribute: value}).text, sentences)
            for value in values
        )
        pairs.append((first, second))
    return pairs


def classify(text: str, attribute: str) -> str | None:
    """Judge which value of an attribute a text shows.

    Counts the words that only that value's templates contain, and takes the majority. The text
    may start or stop anywhere.

    Args:
        text: a story, a part of one, or a model's continuation.
        attribute: one of `ATTRIBUTES`.

    Returns:
        The value with more evidence; None when there is none, or as much for either.

    Raises:
        ValueError: if `attribute` is unknown.

    Example:
        >>> classify("Lily smiled at the red ball.", "mood")
        'happy'
    """
    values = _values(attribute)
    counts = Counter(_WORD.findall(text.lower()))
    scores = [sum(counts[word] for word in markers()[attribute, value]) for value in values]
    if scores[0] == scores[1]:
        return None
    return values[scores[1] > scores[0]]


def well_formed(text: str) -> tuple[int, int]:
    """Count the complete sentences of a text, and those that the grammar can produce.

    A last sentence that lacks its full stop is not counted.

    Args:
        text: a story, the start of one, or a continuation that starts with a whole sentence.

    Returns:
        (sentences the grammar can produce, complete sentences).

    Example:
        >>> well_formed("Lily had a red ball. Ball a had Lily red. Lily")
        (1, 2)
    """
    sentences = split_sentences(text)
    return sum(bool(_parse(sentence)) for sentence in sentences), len(sentences)


def recall(text: str) -> tuple[int, int]:
    """Count how often a story mentions again what it introduced, and how often it gets it right.

    Looks at the child's name, the friend's name, the object of each, the word for the
    pet, and the room. The first mention of each introduces it. A sentence that reads in two ways
    ("Tom had a blue car") is read in the way that agrees best. Malformed sentences are skipped.

    Args:
        text: a story from its beginning.

    Returns:
        (later mentions that agree with the first, later mentions).

    Example:
        >>> recall("Lily had a red ball. Lily smiled at the blue ball.")
        (1, 2)
    """
    known: dict[str, str] = {}
    right = total = 0
    for sentence in split_sentences(text):
        readings = _parse(sentence)
        if not readings:
            continue
        best = max(readings, key=lambda reading: _agreement(reading, known))
        for role, filler in best:
            if role in known:
                total += 1
                right += known[role] == filler
            known.setdefault(role, filler)
    return right, total


def split_sentences(text: str) -> list[str]:
    """Split a text into its complete sentences.

    Args:
        text: any text; an end without a full stop is dropped.

    Returns:
        The sentences, with their full stops and without the spaces around them.

    Example:
        >>> split_sentences("Lily had a red ball. She smiled. Then")
        ['Lily had a red ball.', 'She smiled.']
    """
    return [sentence.strip() for sentence in _SENTENCE.findall(text)]


@cache
def markers() -> dict[tuple[str, str], frozenset[str]]:
    """Return the words that give away each value of each attribute.

    A word is a marker when only the templates or fillers of that one value contain it.

    Returns:
        A map from (attribute, value) to lower-case words.

    Example:
        >>> "smiled" in markers()["mood", "happy"]
        True
    """
    homes: dict[str, set[tuple[str, str]]] = {}

    def note(words: str, home: tuple[str, str]) -> None:
        for word in _WORD.findall(_SLOT.sub("", words).lower()):
            homes.setdefault(word, set()).add(home)

    for (_, attribute), templates in TEMPLATES.items():
        for template in templates:
            note(_CHOICE.sub(" ", template), ("", ""))
            for alternatives in _CHOICE.findall(template):
                for value, words in zip(ATTRIBUTES[attribute], alternatives, strict=True):
                    note(words, (attribute, value))
    for attribute, lists in FILLERS.values():
        for value, fillers in zip(ATTRIBUTES[attribute], lists, strict=True):
            note(" ".join(fillers), (attribute, value))
    for words in (*NAMES.values(), COLOURS, THINGS):
        note(" ".join(words), ("", ""))
    for forms in GENDERED.values():
        note(" ".join(forms.values()), ("", ""))
    return {
        (attribute, value): frozenset(
            w for w, home in homes.items() if home == {(attribute, value)}
        )
        for attribute, values in ATTRIBUTES.items()
        for value in values
    }


def _values(attribute: str) -> tuple[str, str]:
    if attribute not in ATTRIBUTES:
        raise ValueError(
            f"story grammar: expected an attribute out of {sorted(ATTRIBUTES)}. "
            f"Received {attribute!r}. Pass one of the listed names."
        )
    return ATTRIBUTES[attribute]


def _value_index(attribute: str, value: str) -> int:
    values = _values(attribute)
    if value not in values:
        raise ValueError(
            f"story grammar: expected {attribute} to be {values[0]!r} or {values[1]!r}. "
            f"Received {value!r}. Pass one of the two."
        )
    return values.index(value)


def _story_slots(rng: Random, attributes: dict[str, str]) -> dict[str, str]:
    """Draw everything that stays the same through a story."""
    gender = rng.choice(("girl", "boy"))
    first = rng.choice(NAMES[gender])
    friend = rng.choice([name for names in NAMES.values() for name in names if name != first])
    colours, things = rng.sample(COLOURS, 2), rng.sample(THINGS, 2)
    slots = {"A": first, "B": friend, **GENDERED[gender]}
    for slot, colour, thing in zip(("thing_a", "thing_b"), colours, things, strict=True):
        slots[slot] = f"{colour} {thing}"
    return slots | _draw_fillers(STORY_FILLERS, attributes, rng)


def _draw_fillers(
    names: tuple[str, ...], attributes: dict[str, str], rng: Random
) -> dict[str, str]:
    drawn = {}
    for name in names:
        attribute, lists = FILLERS[name]
        index = rng.randrange(len(lists[0]))
        drawn[name] = lists[_value_index(attribute, attributes[attribute])][index]
    return drawn


def _plot(rng: Random) -> list[tuple[str, str]]:
    """Draw the order of a story as (attribute, template)."""

    def some(part: str, attribute: str = "", count: int = 1) -> list[tuple[str, str]]:
        return [(attribute, text) for text in rng.sample(TEMPLATES[part, attribute], count)]

    setup = [
        some("setup", name) + (some("friend", name) if name == "characters" else [])
        for name in ATTRIBUTES
    ]
    # Mood comes back most often, as steering is shown on it, and so do the friend and what is
    # whose: that takes a model longest to learn.
    body = [
        event
        for name in ATTRIBUTES
        for event in some("body", name, 1 + (name in ("mood", "characters")))
    ]
    rng.shuffle(setup)
    rng.shuffle(body)
    return [
        *some("opening"),
        *some("possession"),
        *(sentence for group in setup for sentence in group),
        *body,
        *some("ending", "characters"),
        *some("ending", "mood"),
    ]


def _fill(
    template: str, attribute: str, attributes: dict[str, str], slots: dict[str, str], rng: Random
) -> str:
    # Every sentence draws all fillers, used or not, so that a change of one attribute's value
    # can't shift the random choices of the sentences after it.
    slots = slots | _draw_fillers(SENTENCE_FILLERS, attributes, rng)
    if attribute:
        template = _choose(template, _value_index(attribute, attributes[attribute]))
    return _SLOT.sub(lambda match: slots[match[1]], template)


def _choose(template: str, index: int) -> str:
    return _CHOICE.sub(lambda match: match[index + 1], template)


def _keep_sentences(text: str, count: int | None) -> str:
    return " ".join(split_sentences(text)[:count])


def _agreement(reading: tuple[tuple[str, str], ...], known: dict[str, str]) -> int:
    return sum((known[role] == filler) * 2 - 1 for role, filler in reading if role in known)


@cache
def _parse(sentence: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return every way the grammar reads a sentence, as ((role, filler), ...)."""
    readings = {}
    for pattern in _patterns().get(len(sentence.split()), ()):
        if match := pattern.fullmatch(sentence):
            readings[tuple(match.groupdict().items())] = None
    return tuple(readings)


@cache
def _patterns() -> dict[int, list[re.Pattern[str]]]:
    """Compile the templates, keyed by words per sentence (fillers of a slot are as long)."""
    patterns: dict[int, dict[str, re.Pattern[str]]] = {}
    for (_, attribute), templates in TEMPLATES.items():
        for template in templates:
            for index in range(2 if attribute else 1):
                chosen = _choose(template, index)
                length = len(_SLOT.sub(lambda match: _example(match[1]), chosen).split())
                for gender in NAMES:
                    source = _pattern_source(chosen, gender)
                    patterns.setdefault(length, {})[source] = re.compile(source)
    return {length: list(by_source.values()) for length, by_source in patterns.items()}


def _example(slot: str) -> str:
    if slot in FILLERS:
        return FILLERS[slot][1][0][0]
    return "red ball" if slot.startswith("thing") else slot


def _pattern_source(template: str, gender: str) -> str:
    """Write one template as a regular expression; roles become groups, repeats must agree."""
    used: set[str] = set()

    def slot_source(match: re.Match[str]) -> str:
        slot = match[1]
        if slot in used:
            return f"(?P={slot})"
        used.add(slot)
        if slot in GENDERED[gender]:
            used.discard(slot)
            return GENDERED[gender][slot]
        return _group_source(slot, gender, used)

    return _SLOT.sub(slot_source, template.replace(".", r"\."))


def _group_source(slot: str, gender: str, used: set[str]) -> str:
    if slot in FILLERS:
        words = "|".join(word for fillers in FILLERS[slot][1] for word in fillers)
        return f"(?P<{slot}>{words})" if slot in STORY_FILLERS else f"(?:{words})"
    if slot.startswith("thing"):
        return f"(?P<{slot}>(?:{'|'.join(COLOURS)}) (?:{'|'.join(THINGS)}))"
    names = NAMES[gender] if slot == "A" else [n for group in NAMES.values() for n in group]
    # A child is never their own friend.
    other = r"(?!(?P=A)\b)" if slot == "B" and "A" in used else ""
    return f"{other}(?P<{slot}>{'|'.join(names)})"
