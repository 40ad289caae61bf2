"""Train the control vectors that come with the bundled models, one for each story attribute.

Rebuilds `models/*/vectors/*.gguf` from the models and the story grammar, the same bytes each time:

    KERAS_BACKEND=jax python scripts/train_vectors.py --models models
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Annotated

import numpy as np
import typer
from steering_cases import SEED, choice_points
from story_grammar import ATTRIBUTES, contrast_pairs
from tiny_models import RECIPES
from train_tiny_models import write_checksums

import backbone_surgery as bs

STORIES = 128
BLOCKS = {"tiny_gpt2": (3, 4, 5), "tiny_gemma": (4, 5)}
LENGTHS = {
    "tiny_gpt2": {"mood": 0.38, "place": 0.17, "characters": 0.3, "time": 0.32, "pet": 0.25},
    "tiny_gemma": {"mood": 0.25, "place": 0.3, "characters": 0.17, "time": 0.3, "pet": 0.22},
}
"""How long the direction of each block is, in units of the residual norm there, at strength 1."""


def train(lm: bs.CachedCausalLM, attribute: str) -> bs.ControlVector:
    """Train the vector from the second to the first value of an attribute, at every block."""
    pairs = choice_points(contrast_pairs(attribute, Random(SEED), STORIES))
    return bs.ControlVector.train(lm, pairs, method="mean_diff")


def apart(
    vector: bs.ControlVector, others: list[bs.ControlVector], blocks: tuple[int, ...]
) -> bs.ControlVector:
    """Take out of a vector what it shares with others, so that it moves its own attribute alone.

    Args:
        vector: what to keep.
        others: vectors of other attributes.
        blocks: which blocks to keep.

    Returns:
        The part of each direction that is at right angles to those of the others.
    """
    directions = {}
    for block in blocks:
        shared = np.stack([other.directions[block] for other in others], axis=1)
        basis, _ = np.linalg.qr(shared.astype("float64"))
        own = vector.directions[block]
        directions[block] = own - basis @ (basis.T @ own)
    return bs.ControlVector(directions, vector.info)


def main(
    models: Annotated[Path, typer.Option(help="Folder with the models.")] = Path("models"),
) -> None:
    """Train the control vectors of the bundled models."""
    for name in RECIPES:
        lm = bs.CachedCausalLM.from_preset(str(models / name))
        vectors = {attribute: train(lm, attribute) for attribute in ATTRIBUTES}
        (models / name / "vectors").mkdir(exist_ok=True)
        for attribute, (first, second) in ATTRIBUTES.items():
            others = [vectors[other] for other in ATTRIBUTES if other != attribute]
            vector = apart(vectors[attribute], others, BLOCKS[name]).relative_to(lm)
            scaled = LENGTHS[name][attribute] * vector
            scaled.save(models / name / "vectors" / f"{attribute}.gguf")
            typer.echo(f"{name} {attribute}: from {second} to {first}")
        write_checksums(models / name)


if __name__ == "__main__":
    typer.run(main)
