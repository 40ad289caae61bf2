"""Make the control vectors that come with the bundled models, one for each story attribute.

Rebuilds `models/*/vectors/*.gguf` from the models and the story grammar, the same bytes each time:

    KERAS_BACKEND=jax python scripts/train_vectors.py --models models

`bs.tune` learns the directions of each and finds blocks and strength, from pairs alone, by the
grammar's judge. What is orthogonal to the mean differences of the other attributes is taken
instead, where it steers as well on the prompts searched on. Both get the length that steers best
there, of some up to the one found, among those with well-formed texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from measure_steering import held_out_prompts
from steering_cases import cases_of, formed, judge_of, open_model, pairs_of, searched_prompts
from story_grammar import ATTRIBUTES
from tiny_models import RECIPES
from train_tiny_models import write_checksums

import backbone_surgery as bs

METHODS, BUDGET = ("learned",), 1200
MEASURED = 200
"""How many prompts `measure_steering.py` measures on: none of them is searched on."""

LOST = 0.01
"""How much of the score a vector that is apart from the others may lose."""

LENGTHS, FLUENT = (1.0, 0.9, 0.8, 0.7), 0.96
"""Shares of the length that was found, to try, and the share of well-formed sentences to reach."""


class Finder:
    """Finds vectors for one model.

    Args:
        model: its name or folder.
    """

    def __init__(self, model: str) -> None:
        self.lm = open_model(model)
        self.prompts = searched_prompts(held_out_prompts(MEASURED))
        size = self.lm.opened.token_embedding.output_dim
        self.nothing = {block: np.zeros(size) for block in range(self.lm.backbone.num_layers)}
        steer = bs.Steer("vector", self.nothing, strength=0.0)
        self.steered = bs.CachedCausalLM(
            bs.operate(self.lm.backbone, [steer]), self.lm.preprocessor
        )
        self.steered.compile(sampler=self.lm.sampler)
        self.means = {
            attribute: bs.ControlVector.train(self.lm, pairs_of(attribute), "mean_diff", verbose=0)
            for attribute in ATTRIBUTES
        }

    def find(self, attribute: str) -> bs.ControlVector:
        """Find the vector of an attribute, apart from the others where that costs nothing."""
        judge = judge_of(attribute)
        options: dict[str, Any] = {"fluency": formed, "max_new_tokens": 100, "verbose": 0}
        result = bs.tune(
            self.lm, pairs_of(attribute), judge, self.prompts, METHODS, BUDGET, **options
        )
        vector = result.best.vector
        if 0 in vector.directions:
            raise ValueError(f"{attribute}: GGUF files of llama.cpp have no place for block 0.")
        others = [self.means[other] for other in ATTRIBUTES if other != attribute]
        apart = _as_long_as(vector, vector.orthogonal_to(*others))
        (alone, first), (kept, second) = (self.shorten(attribute, v) for v in (vector, apart))
        keeps = second.score >= first.score - LOST
        typer.echo(
            f"  {attribute}: blocks {[*vector.directions]}, score {first.score:.3f}, and "
            f"{second.score:.3f} if orthogonal to the others: {'made' if keeps else 'not made'} so"
        )
        return kept if keeps else alone

    def shorten(
        self, attribute: str, vector: bs.ControlVector
    ) -> tuple[bs.ControlVector, bs.Trial]:
        """Return the vector at the length that steers best while texts are well formed."""
        vectors = [vector * length for length in LENGTHS]
        tried = [(made, self.measure(attribute, made)) for made in vectors]
        fluent = [own for own in tried if own[1].fluency >= FLUENT]
        return max(fluent or tried, key=lambda own: own[1].score)

    def measure(self, attribute: str, vector: bs.ControlVector) -> bs.Trial:
        """Measure a vector on the prompts searched on, as `tune` does."""
        whole = bs.ControlVector({**self.nothing, **vector.directions})
        judged, fluent = {}, {}
        for sign in (-1, 1):
            texts = self.steered.generate(
                self.prompts,
                controls={"vector": bs.Control(strength=sign, directions=whole)},
                max_new_tokens=100,
                strip_prompt=True,
                batch_size=64,
                seed=list(range(len(self.prompts))),
            )
            judged[sign] = float(np.mean(judge_of(attribute)(texts)))
            fluent[sign] = float(np.mean(formed(texts)))
        return bs.Trial(None, judged[1], judged[-1], min(fluent.values()), len(texts))


def _as_long_as(vector: bs.ControlVector, other: bs.ControlVector) -> bs.ControlVector:
    """Return other directions at the lengths of those of a vector."""
    unit = other.normalized().directions
    own = {b: float(np.linalg.norm(d)) * unit[b] for b, d in vector.directions.items()}
    return bs.ControlVector(own, vector.info)


def main(
    models: Annotated[Path, typer.Option(help="Folder with the models.")] = Path("models"),
    only: Annotated[str | None, typer.Option(help=f"One of {', '.join(RECIPES)}.")] = None,
    attribute: Annotated[list[str], typer.Option(help="All by default.")] = [],  # noqa: B006
) -> None:
    """Make the control vectors of the bundled models."""
    names, attributes = [only] if only else list(RECIPES), attribute or list(ATTRIBUTES)
    cases_of([f"{name}:{found}" for name in names for found in attributes])
    for name in names:
        typer.echo(name)
        finder = Finder(str(models / name))
        folder = models / name / "vectors"
        folder.mkdir(exist_ok=True)
        for found in attributes:
            finder.find(found).save(folder / f"{found}.gguf")
        write_checksums(models / name)


if __name__ == "__main__":
    typer.run(main)
