"""Measure what steering does and what it costs: the figures of the README.

    KERAS_BACKEND=jax python scripts/measure_steering.py --output steering.json

1. For both bundled models and each attribute of the story grammar: the share of continuations that
   show its first value, at strengths -1, 0 and 1, on held-out prompts, sampled at temperature 0.8
   and judged by the grammar; how many sentences are well formed; and by how many points the other
   attributes move.
2. The cost of steering every block, and of as many settings as rows, in tokens per second.
3. How many programs are compiled by a sweep over strengths, vectors and ranges of tokens.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Annotated, Any

import keras_hub
import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from story_grammar import ATTRIBUTES, classify, generate_story, well_formed
from tiny_models import RECIPES

import backbone_surgery as bs

PROMPT_SEED = 20_000
"""Of the held-out prompts; vectors are trained on the pairs of another seed."""

TEMPERATURE = 0.8

console = Console()


def steered(model: str) -> bs.CachedCausalLM:
    """Load a bundled model with all of its vectors, each under its own control."""
    lm = bs.CachedCausalLM.from_preset(model)
    steers = [
        bs.Steer(name, bs.ControlVector.from_preset(model, name), strength=0.0)
        for name in ATTRIBUTES
    ]
    return bs.CachedCausalLM(bs.operate(lm.backbone, steers), lm.preprocessor)


def held_out_prompts(count: int) -> list[str]:
    """Write openings of stories, which leave every attribute open."""
    rng = Random(PROMPT_SEED)
    return [generate_story(rng).prompt for _ in range(count)]


def measure_effect(model: str, count: int, new_tokens: int) -> dict[str, Any]:
    """Measure how far each attribute follows its vector, and what else moves."""
    lm = steered(model)
    lm.compile(sampler=keras_hub.samplers.RandomSampler(temperature=TEMPERATURE))
    prompts = held_out_prompts(count)
    scores: dict[str, Callable[[str], float]] = {
        attribute: lambda text, a=attribute: classify(text, a) == ATTRIBUTES[a][0]
        for attribute in ATTRIBUTES
    }
    effects = {}
    for attribute in ATTRIBUTES:
        strengths = [-1.0, 0.0, 1.0]
        seeds = np.repeat(np.arange(count), len(strengths)).tolist()
        result = bs.sweep(
            lm, prompts, attribute, strengths, scores, max_new_tokens=new_tokens, seed=seeds
        )
        shares = {name: list(result.mean(name).values()) for name in ATTRIBUTES}
        formed = [
            np.sum([well_formed(r.text) for r in result.rows if r.strength == s], axis=0)
            for s in strengths
        ]
        moved = {
            name: max(abs(share[i] - share[1]) for i in (0, 2))
            for name, share in shares.items()
            if name != attribute
        }
        effects[attribute] = {
            "share": shares[attribute],
            "well formed": [float(good / total) for good, total in formed],
            "others move": max(moved.values()),
            "moved most": max(moved, key=moved.get),
        }
    return effects


def tokens_per_second(
    runs: dict[str, Callable[[], Any]], tokens: int, repeats: int
) -> dict[str, float]:
    """Time some runs in turn, each round from the next one on; return the median rate of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    names = list(runs)
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - start)
    return {name: tokens / statistics.median(seconds) for name, seconds in times.items()}


def measure_cost(backbone: Any, batch: int, new_tokens: int, repeats: int) -> dict[str, float]:
    """Measure decoding unsteered, steered at all blocks, and with a setting for each row."""
    rng = np.random.default_rng(0)
    blocks, hidden = backbone.num_layers, backbone.hidden_dim
    vectors = [
        bs.ControlVector({b: rng.normal(size=hidden) for b in range(blocks)}) for _ in range(batch)
    ]
    plain = bs.CachedCausalLM(backbone)
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Steer("v", vectors[0])]))
    prompt = {
        "token_ids": rng.integers(1, 500, (batch, 16)),
        "padding_mask": np.ones((batch, 16), bool),
    }
    for task in (plain, lm):
        task.compile(sampler="greedy")
    options = {"max_new_tokens": new_tokens, "stop_token_ids": None}
    different = bs.Control(strength=np.linspace(0.1, 1, batch), directions=vectors)
    runs = {
        "unsteered": lambda: plain.generate(prompt, **options),
        "steered": lambda: lm.generate(prompt, controls={"v": 0.5}, **options),
        "a setting for each row": lambda: lm.generate(prompt, controls={"v": different}, **options),
    }
    return tokens_per_second(runs, batch * new_tokens, repeats)


def count_compilations(model: str) -> dict[str, int]:
    """Count programs over 20 strengths, 5 vectors and 3 ranges, after a first call."""
    lm = steered(model)
    lm.compile(sampler="greedy")
    prompts, rng = held_out_prompts(4), np.random.default_rng(0)
    vector = bs.ControlVector.from_preset(model, "mood")
    options = {"max_new_tokens": 8, "seed": 0}
    lm.generate(prompts, **options)
    before = sum(lm.programs.compilations.values())
    calls = 0
    for strength in np.linspace(-2, 2, 20):
        for _ in range(5):
            noise = {b: rng.normal(size=d.shape) for b, d in vector.directions.items()}
            for tokens in ("prompt", "generated", (3, 9)):
                control = bs.Control(float(strength), bs.ControlVector(noise), tokens)
                lm.generate(prompts, controls={"mood": control}, **options)
                calls += 1
    return {"calls": calls, "compilations": sum(lm.programs.compilations.values()) - before}


def _small_gpt2() -> Any:
    return keras_hub.models.GPT2Backbone(
        vocabulary_size=50257,
        num_layers=12,
        num_heads=12,
        hidden_dim=768,
        intermediate_dim=3072,
        max_sequence_length=1024,
        dropout=0.0,
    )


def show(results: dict[str, Any]) -> None:
    """Print what was measured as tables."""
    table = Table(title="share of continuations with the first value, at strengths -1, 0, 1")
    for column in ("model", "attribute", "first value", "share", "well formed", "others move"):
        table.add_column(column)
    for model, effects in results["effect"].items():
        for attribute, row in effects.items():
            share, formed = (
                " / ".join(f"{100 * x:.0f} %" for x in row[k]) for k in ("share", "well formed")
            )
            moved = f"{100 * row['others move']:.0f} points ({row['moved most']})"
            table.add_row(model, attribute, ATTRIBUTES[attribute][0], share, formed, moved)
    console.print(table)
    for name, rates in results["cost"].items():
        steered_rate = rates["steered"] / rates["unsteered"]
        settings = rates["a setting for each row"] / rates["steered"]
        console.print(
            f"{name}: {rates['unsteered']:.0f} tokens/s unsteered; steered at all blocks "
            f"{steered_rate:.3f} of it; a setting for each row {settings:.3f} of one for all"
        )
    if "compilations" in results:
        console.print(f"compilations after the first call: {results['compilations']}")


class Part(StrEnum):
    """What can be measured by itself."""

    all = "all"
    effect = "effect"
    cost = "cost"


def main(
    output: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")] = None,
    prompts: Annotated[int, typer.Option(help="How many held-out prompts.")] = 200,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each continuation.")] = 120,
    repeats: Annotated[int, typer.Option(help="Runs of each timing.")] = 9,
    part: Annotated[Part, typer.Option(help="What to measure.")] = Part.all,
) -> None:
    """Measure what steering does and costs."""
    results: dict[str, Any] = {"effect": {}, "cost": {}}
    if part is not Part.cost:
        for model in RECIPES:
            results["effect"][model] = measure_effect(model, prompts, new_tokens)
        results["compilations"] = count_compilations("tiny_gpt2")
    if part is not Part.effect:
        small = _small_gpt2()
        for batch, tokens in ((1, 64), (64, 16)):
            name = f"GPT-2 124M, random weights, batch {batch}"
            results["cost"][name] = measure_cost(small, batch, tokens, repeats)
    show(results)
    if output is not None:
        output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
