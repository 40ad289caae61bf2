"""The text of a bundled model's card; `train_tiny_models` fills in what it measured."""

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
