"""The card of a bundled model: how good its stories are, and the text that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from story_grammar import ATTRIBUTES, classify, recall, split_sentences, well_formed

CARD = """# {name}

A {architecture} model of {parameters} parameters that writes short English stories, as a KerasHub
preset in float32. It was trained from nothing on made-up stories, so that examples and tests can
show real learned behaviour on any laptop in seconds.

```python
model = keras_hub.models.CausalLM.from_preset("models/{name}")
model.generate("Once upon a time there was a girl named Lily.", max_length=200)
```

## Data

{stories} stories written by the template grammar in `scripts/story_grammar.py`, each seen once, and
{held_out} held-out stories from another seed, none of which is in the training data. No text by
people and no other model's output is in them. Each story has five attributes, each drawn 50/50 and
independently:

{attributes}

It opens with one or two neutral sentences that leave all of them open. The child, the friend, their
coloured objects, the pet and the room come back until the end, so the model has to recall them.

## Recipe

Vocabulary: {vocabulary} tokens, learned from the same grammar, with all 256 bytes included, so any
text can be tokenised. One story a row: start token, story, end token.

{config}

AdamW on the mean cross-entropy over story and end tokens, with warmup and cosine decay:

{settings}

Training took {core_minutes} core-minutes of a CPU. To rebuild, with the same seeds:

```sh
KERAS_BACKEND=jax python scripts/train_tiny_models.py --only {name} --output models
```

## Measurements

{measured}

The shares come from {samples_count} stories sampled at temperature 1 from neutral openings. A
recall is a name, object, pet or room that the story mentioned before.

| attribute | share of stories | both halves agree |
|---|---|---|
{rows}

## Samples

{samples}

## Use and limits

Made for examples, tests and interpretability experiments on a CPU. It knows a few hundred words
and one kind of story; other prompts are tokenised but give nonsense. It is not a general language
model. {gaps}

Licence: Apache-2.0, weights and data alike.
"""


def measure(texts: list[str]) -> dict[str, Any]:
    """Measure how good sampled stories are.

    Args:
        texts: stories with their openings.

    Returns:
        Shares between 0 and 1: of well-formed sentences, of right recalls, of stories without a
        wrong recall, of each attribute's first value, and of stories whose halves agree on it.
    """
    formed = np.sum([well_formed(text) for text in texts], axis=0)
    recalls = np.array([recall(text) for text in texts])
    shares = {}
    for attribute, values in ATTRIBUTES.items():
        shown = [classify(text, attribute) for text in texts]
        agree = []
        for text in texts:
            sentences = split_sentences(text)
            middle = len(sentences) // 2
            halves = " ".join(sentences[:middle]), " ".join(sentences[middle:])
            agree.append(len({classify(half, attribute) for half in halves}) == 1)
        shares[attribute] = {
            **{value: shown.count(value) / len(texts) for value in values},
            "halves agree": float(np.mean(agree)),
        }
    return {
        "well-formed sentences": float(formed[0] / formed[1]),
        "right recalls": float(recalls[:, 0].sum() / recalls[:, 1].sum()),
        "stories without a wrong recall": float((recalls[:, 0] == recalls[:, 1]).mean()),
        "attributes": shares,
    }


def write_card(
    folder: Path,
    recipe: Mapping[str, Any],
    facts: Mapping[str, Any],
    samples: Mapping[str, str],
) -> None:
    """Write the card of a model from measured values.

    Args:
        folder: of the model; its name is the model's.
        recipe: the fields of its `Recipe`.
        facts: `parameters`, `vocabulary`, `core-minutes`, `loss` in nats per token, the number of
            `held-out` stories and of `samples`, and `quality` as `measure` gives it.
        samples: `{caption: story}`.
    """
    settings = {k: v for k, v in recipe.items() if k not in ("architecture", "config", "gaps")}
    quality = facts["quality"]
    rows = [
        f"| {attribute} | "
        + " / ".join(f"{value} {shares[value]:.0%}" for value in ATTRIBUTES[attribute])
        + f" | {shares['halves agree']:.1%} |"
        for attribute, shares in quality["attributes"].items()
    ]
    measured = {
        **{key: f"{quality[key]:.1%}" for key in quality if key != "attributes"},
        "held-out loss": f"{facts['loss']:.4f} nats per token",
        "held-out perplexity": f"{math.exp(facts['loss']):.3f}",
    }
    stories = sum(recipe["cycles"]) * recipe["batch_size"]
    (folder / "README.md").write_text(
        CARD.format(
            name=folder.name,
            architecture=recipe["architecture"],
            parameters=f"{facts['parameters']:,}",
            vocabulary=f"{facts['vocabulary']:,}",
            attributes="\n".join(f"* {k}: {a} or {b}" for k, (a, b) in ATTRIBUTES.items()),
            stories=f"{stories:,}",
            held_out=f"{facts['held-out']:,}",
            config=_bullets(recipe["config"]),
            settings=_bullets(settings),
            gaps=recipe["gaps"],
            core_minutes=f"{facts['core-minutes']:.0f}",
            measured=_bullets(measured),
            samples_count=facts["samples"],
            rows="\n".join(rows),
            samples="\n\n".join(f"{key}:\n\n> {text}" for key, text in samples.items()),
        ),
        encoding="utf-8",
    )


def _bullets(items: dict[str, Any]) -> str:
    return "\n".join(f"* {key}: {value}" for key, value in items.items())
