"""Make the control vectors that come with the bundled models, one for each story attribute.

Rebuilds `models/*/vectors/*.gguf` from the models and the story grammar, the same bytes each time:

    KERAS_BACKEND=jax python scripts/train_vectors.py --models models

`bs.tune` finds each from pairs alone, by the grammar's judge. A second search takes only what is
orthogonal to the mean differences of the other attributes. It is kept where it steers as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from measure_steering import held_out_prompts
from steering_cases import formed, judge_of, open_model, pairs_of, searched_prompts
from story_grammar import ATTRIBUTES
from tiny_models import RECIPES
from train_tiny_models import write_checksums

import backbone_surgery as bs

METHODS = ("mean_diff", "learned", "bipo")
MEASURED = 200
"""How many prompts `measure_steering.py` measures on: none of them is searched on."""

LOST = 0.01
"""How much of the score a vector that is apart from the others may lose."""


def search(
    lm: bs.CachedCausalLM, attribute: str, others: Sequence[bs.ControlVector] = ()
) -> tuple[bs.Steer, float]:
    """Return the best edit that adds a direction, and its score on the prompts searched on."""
    result = bs.tune(
        lm,
        pairs_of(attribute),
        judge_of(attribute),
        searched_prompts(held_out_prompts(MEASURED)),
        METHODS,
        fluency=formed,
        max_new_tokens=100,
        orthogonal_to=others,
        verbose=0,
    )
    scores = {t.candidate: t.score for t in result.tried}
    # GGUF files of llama.cpp have no place for block 0.
    ends = [t.candidate for t in result.trials if t.candidate and 0 not in t.candidate.blocks]
    best = max(ends, key=lambda candidate: (scores[candidate], candidate.method))
    return result.edits[best.method], scores[best]


def find_vector(
    lm: bs.CachedCausalLM, attribute: str, others: Sequence[bs.ControlVector]
) -> bs.ControlVector:
    """Find the vector of an attribute, apart from others where that costs nothing."""
    (edit, score), (apart, score_apart) = (search(lm, attribute, o) for o in ((), others))
    keeps = score_apart >= score - LOST
    chosen = apart if keeps else edit
    typer.echo(
        f"  {attribute}: {chosen.vector.info['method']} at blocks {[*chosen.vector.directions]}, "
        f"{'orthogonal to the others' if keeps else 'not made orthogonal'} "
        f"({score:.3f}, and {score_apart:.3f} if orthogonal)"
    )
    return chosen.vector


def main(
    models: Annotated[Path, typer.Option(help="Folder with the models.")] = Path("models"),
    only: Annotated[str | None, typer.Option(help=f"One of {', '.join(RECIPES)}.")] = None,
) -> None:
    """Make the control vectors of the bundled models."""
    for name in [only] if only else RECIPES:
        typer.echo(name)
        lm = open_model(str(models / name))
        means = {
            attribute: bs.ControlVector.train(lm, pairs_of(attribute), "mean_diff", verbose=0)
            for attribute in ATTRIBUTES
        }
        (models / name / "vectors").mkdir(exist_ok=True)
        for attribute in ATTRIBUTES:
            others = [means[other] for other in ATTRIBUTES if other != attribute]
            vector = find_vector(lm, attribute, others)
            vector.save(models / name / "vectors" / f"{attribute}.gguf")
        write_checksums(models / name)


if __name__ == "__main__":
    typer.run(main)
