"""Train the control vectors that come with the bundled models, one for each story attribute.

Rebuilds `models/*/vectors/*.gguf` from the models and the story grammar, the same bytes each time:

    KERAS_BACKEND=jax python scripts/train_vectors.py --models models
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Annotated

import typer
from story_grammar import ATTRIBUTES, contrast_pairs
from train_tiny_models import RECIPES, write_checksums

import backbone_surgery as bs

PAIRS, SEED = 256, 11
METHOD = "mean_diff"
BLOCKS = (1, 2, 3, 4)
LENGTHS = {
    ("tiny_gpt2", "mood"): 0.3,
}
"""How long the vector of each block is, in units of the residual norm there, at strength 1."""


def train(lm: bs.CachedCausalLM, attribute: str, length: float) -> bs.ControlVector:
    """Train the vector from the second to the first value of an attribute.

    Args:
        lm: one of the bundled models.
        attribute: one of `ATTRIBUTES`.
        length: of the direction of each block at strength 1, in units of the residual norm.

    Returns:
        The vector, for `BLOCKS`.
    """
    pairs = contrast_pairs(attribute, Random(SEED), PAIRS)
    found = bs.ControlVector.train(lm, pairs, METHOD)
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
            typer.echo(f"{name} {attribute}: from {second} to {first}, {PAIRS} pairs")
        write_checksums(models / name)


if __name__ == "__main__":
    typer.run(main)
