"""Train the control vectors that come with the bundled models, one for each story attribute.

Rebuilds `models/*/vectors/*.gguf` from the models and the story grammar, the same bytes each time:

    KERAS_BACKEND=jax python scripts/train_vectors.py --models models
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Annotated

import typer
from story_grammar import ATTRIBUTES, contrast_pairs, split_sentences
from train_tiny_models import RECIPES, write_checksums

import backbone_surgery as bs

STORIES, SEED = 128, 11
BLOCKS = (4, 5)
LENGTHS = {
    ("tiny_gpt2", "mood"): 0.3,
}
"""How long the vector of each block is, in units of the residual norm there, at strength 1."""


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


def train(lm: bs.CachedCausalLM, attribute: str, length: float) -> bs.ControlVector:
    """Train the vector from the second to the first value of an attribute.

    Args:
        lm: one of the bundled models.
        attribute: one of `ATTRIBUTES`.
        length: of the direction of each block at strength 1, in units of the residual norm.

    Returns:
        The vector, for `BLOCKS`.
    """
    pairs = choice_points(contrast_pairs(attribute, Random(SEED), STORIES))
    found = bs.ControlVector.train(lm, pairs, method="mean_diff")
    kept = bs.ControlVector({b: found.directions[b] for b in BLOCKS}, found.info)
    return length * kept.relative_to(lm)


def main(
    models: Annotated[Path, typer.Option(help="Folder with the models.")] = Path("models"),
) -> None:
    """Train the control vectors of the bundled models."""
    for name in RECIPES:
        lm = bs.CachedCausalLM.from_preset(str(models / name))
        (models / name / "vectors").mkdir(exist_ok=True)
        for attribute, (first, second) in ATTRIBUTES.items():
            vector = train(lm, attribute, LENGTHS[name, attribute])
            vector.save(models / name / "vectors" / f"{attribute}.gguf")
            typer.echo(f"{name} {attribute}: from {second} to {first}")
        write_checksums(models / name)


if __name__ == "__main__":
    typer.run(main)
