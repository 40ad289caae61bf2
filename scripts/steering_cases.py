"""Cases of steering: pairs, prompts and judges by the story grammar, for search and measurement."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random

import keras_hub
import typer
from measure_steering import TEMPERATURE
from story_grammar import (
    ATTRIBUTES,
    classify,
    contrast_pairs,
    generate_story,
    split_sentences,
    well_formed,
)
from tiny_models import RECIPES

import backbone_surgery as bs

STORIES, SEED = 48, 11
SEARCHED, SEARCH_SEED = 64, 30_000


def cases_of(names: list[str]) -> list[str]:
    """Return the cases that are named, each as MODEL:ATTRIBUTE; all of them if none is.

    Raises:
        typer.BadParameter: a case that there is not.
    """
    known = [f"{model}:{attribute}" for model in RECIPES for attribute in ATTRIBUTES]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"expected some of the cases {known}. Received {name!r}.")
    return names or known


def open_model(model: str) -> bs.CachedCausalLM:
    """Load a bundled model, with the sampler that steering is measured by."""
    lm = bs.CachedCausalLM.from_preset(model)
    lm.compile(sampler=keras_hub.samplers.RandomSampler(temperature=TEMPERATURE))
    return lm


def choice_points(stories: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Cut pairs of stories where they are about to say again what they differ in.

    The last words of such a pair are the same, and so is everything the model needs to go on but
    for the attribute: what differs in its state is what it is going to say about that.

    Args:
        stories: pairs of stories that differ in one attribute.

    Returns:
        One pair for every second sentence that differs, but for the first, up to the word before.

    Example:
        >>> choice_points([("I am glad. I sing. So I smile.", "I am sad. I sing. So I cry.")])
        [('I am glad. I sing. So I', 'I am sad. I sing. So I')]
    """
    pairs = []
    for texts in stories:
        sides = [split_sentences(text) for text in texts]
        differing = [k for k, (a, b) in enumerate(zip(*sides, strict=True)) if a != b]
        for k in differing[1::2]:
            words = [side[k].split() for side in sides]
            same = next(j for j, (a, b) in enumerate(zip(*words, strict=False)) if a != b)
            if same:
                pairs.append(
                    tuple(
                        " ".join(side[:k] + w[:same]) for side, w in zip(sides, words, strict=True)
                    )
                )
    return pairs


def pairs_of(attribute: str) -> list[tuple[str, str]]:
    """Write the pairs that all methods find their edit from."""
    return choice_points(contrast_pairs(attribute, Random(SEED), STORIES))


def searched_prompts(without: list[str]) -> list[str]:
    """Write openings to search on, other than those that are measured on."""
    rng = Random(SEARCH_SEED)
    stories = (generate_story(rng).prompt for _ in itertools.count())
    return list(itertools.islice((s for s in stories if s not in without), SEARCHED))


def judge_of(attribute: str) -> Callable[[list[str]], list[float]]:
    """Return what gives 1 for the first value of an attribute, 0 for the second, else 1/2."""
    first, second = ATTRIBUTES[attribute]
    worth = {first: 1.0, second: 0.0}
    return lambda texts: [worth.get(classify(text, attribute) or "", 0.5) for text in texts]


def formed(texts: list[str]) -> list[float]:
    """Return the share of well-formed sentences of each text."""
    return [good / max(total, 1) for good, total in map(well_formed, texts)]
