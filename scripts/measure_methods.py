"""Measure methods of steering side by side: the table and the figure of docs/steering.md.

    KERAS_BACKEND=jax python scripts/measure_methods.py --output methods.json --plot methods.png

For both bundled models and each attribute of the story grammar, `bs.tune` chooses blocks and
strength of each method from pairs alone, by the grammar's judge. Each is then measured on prompts
that nothing was chosen by: the share of continuations with the attribute's first value at
strengths -1, 0 and 1, the share of sentences that are well formed, by how many points another
attribute moves, and how well the direction tells stories of both kinds apart (AUROC). The baseline
says the attribute in the prompt, in a sentence of the grammar, instead of steering.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from random import Random
from typing import Annotated, Any

import keras_hub
import numpy as np
import typer
from measure_steering import PROMPT_SEED, TEMPERATURE, held_out_prompts
from rich.console import Console
from rich.table import Table
from story_grammar import (
    ATTRIBUTES,
    classify,
    contrast_pairs,
    generate_story,
    split_sentences,
    well_formed,
)
from tiny_models import RECIPES
from train_vectors import SEED, choice_points

import backbone_surgery as bs

STORIES, SEARCH_SEED, SEARCHED = 48, 30_000, 64
METHODS = ("mean_diff", "pca_diff", "logistic", "learned", "reft")
GOAL = {"down": 0.15, "up": 0.85, "well formed": 0.95}

console = Console()


def judge_of(attribute: str) -> Any:
    """Return what gives 1 for the first value of an attribute, 0 for the second, else 1/2."""
    first, second = ATTRIBUTES[attribute]
    worth = {first: 1.0, second: 0.0}
    return lambda texts: [worth.get(classify(text, attribute), 0.5) for text in texts]


def formed(texts: list[str]) -> list[float]:
    """Return the share of well-formed sentences of each text."""
    return [good / max(total, 1) for good, total in map(well_formed, texts)]


def said_in_prompts(attribute: str, count: int) -> list[list[str]]:
    """Write openings of stories that end with a sentence on the attribute: for -1, and for 1.

    The sentence is the first in which two stories of one opening differ.
    """
    sides: list[list[str]] = [[], []]
    for texts in contrast_pairs(attribute, Random(PROMPT_SEED), count):
        sentences = [split_sentences(text) for text in texts]
        first = next(k for k, (a, b) in enumerate(zip(*sentences, strict=True)) if a != b)
        for side, own in zip(sides, sentences, strict=True):
            side.append(" ".join(own[: first + 1]))
    return [sides[1], sides[0]]


def measure(texts: dict[int, list[str]], attribute: str) -> dict[str, Any]:
    """Judge the continuations of strengths -1, 0 and 1."""
    shares = {
        name: [float(np.mean(judge_of(name)(texts[s]))) for s in (-1, 0, 1)] for name in ATTRIBUTES
    }
    moved = {
        name: max(abs(share[i] - share[1]) for i in (0, 2))
        for name, share in shares.items()
        if name != attribute
    }
    down, _, up = shares[attribute]
    fluent = [float(np.mean(formed(texts[s]))) for s in (-1, 0, 1)]
    parts = (up, 1 - down, min(fluent[0], fluent[2]))
    reached = down <= GOAL["down"] and up >= GOAL["up"] and parts[2] >= GOAL["well formed"]
    return {
        "share": shares[attribute],
        "well formed": fluent,
        "others move": max(moved.values()),
        "others move in the median": float(np.median([*moved.values()])),
        "harmonic mean": 0.0 if min(parts) <= 0 else 3 / sum(1 / p for p in parts),
        "reached": reached,
    }


def measure_case(model: str, attribute: str, count: int, tokens: int) -> dict[str, Any]:
    """Tune all methods for one attribute of one model, and measure each."""
    lm = bs.CachedCausalLM.from_preset(model)
    lm.compile(sampler=keras_hub.samplers.RandomSampler(temperature=TEMPERATURE))
    pairs = choice_points(contrast_pairs(attribute, Random(SEED), STORIES))
    prompts, rng = held_out_prompts(count), Random(SEARCH_SEED)
    stories = (generate_story(rng).prompt for _ in itertools.count())
    searched = list(itertools.islice((s for s in stories if s not in prompts), SEARCHED))
    start = time.perf_counter()
    result = bs.tune(
        lm, pairs, judge_of(attribute), searched, METHODS, fluency=formed, max_new_tokens=100
    )
    seconds = time.perf_counter() - start
    console.print(f"{model} {attribute}: {seconds:.0f} s", result.table)
    options = {
        "max_new_tokens": tokens,
        "strip_prompt": True,
        "batch_size": 100,
        "seed": list(range(count)),
    }
    alone = lm.generate(prompts, **options)
    rows = {}
    stories = contrast_pairs(attribute, Random(SEARCH_SEED), 60)
    kinds = [[pair[side] for pair in stories] for side in (0, 1)]
    for method, edit in result.edits.items():
        edited = bs.CachedCausalLM(bs.operate(lm.backbone, [edit]), lm.preprocessor)
        edited.compile(sampler=lm.sampler)
        texts = {0: alone}
        for sign in (-1, 1):
            controls = {"tuned": sign * edit.strength}
            texts[sign] = edited.generate(prompts, controls=controls, **options)
        rows[method] = measure(texts, attribute)
        vector = getattr(edit, "vector", None)
        if vector is not None:
            rows[method]["AUROC"] = max(bs.score_detection(lm, vector, *kinds).values())
    down, up = said_in_prompts(attribute, count)
    said = {-1: lm.generate(down, **options), 0: alone, 1: lm.generate(up, **options)}
    rows["said in the prompt"] = measure(said, attribute)
    return {"seconds": seconds, "chosen": result.chosen, "methods": rows}


def show(results: dict[str, Any]) -> None:
    """Print a line for each method of each case."""
    table = Table()
    for column in ("case", "method", "share at -1, 0, 1", "well formed", "others", "AUROC", "mean"):
        table.add_column(column)
    for case, found in results.items():
        for method, row in found["methods"].items():
            mark = " *" if method == found["chosen"] else ""
            table.add_row(
                case,
                method + mark,
                " / ".join(f"{100 * x:.0f}" for x in row["share"]),
                f"{100 * min(row['well formed'][0], row['well formed'][2]):.0f}",
                f"{100 * row['others move in the median']:.0f} ({100 * row['others move']:.0f})",
                f"{row['AUROC']:.2f}" if "AUROC" in row else "",
                f"{row['harmonic mean']:.2f}" + (" reached" if row["reached"] else ""),
            )
    console.print(table)
    reached = sum(
        any(m["reached"] for m in found["methods"].values()) for found in results.values()
    )
    chosen = sum(found["methods"][found["chosen"]]["reached"] for found in results.values())
    console.print(f"reached by some method: {reached} of {len(results)}; by the chosen: {chosen}")


def plot(results: dict[str, Any], file: Path) -> None:
    """Draw the share at strengths -1 and 1 of each case and method."""
    from matplotlib import pyplot

    names = [*METHODS, "said in the prompt"]
    figure, axes = pyplot.subplots(
        1, len(names), figsize=(12, 3.6), sharey=True, layout="constrained"
    )
    cases = list(results)
    for axis, method in zip(axes, names, strict=True):
        for y, case in enumerate(reversed(cases)):
            row = results[case]["methods"][method]
            down, alone, up = row["share"]
            colour = "tab:green" if row["reached"] else "tab:gray"
            axis.plot([down, up], [y, y], color=colour, linewidth=2.5, zorder=1)
            axis.scatter([down, up], [y, y], c=["tab:blue", "tab:red"], s=18, zorder=2)
            axis.scatter([alone], [y], marker="|", color="black", s=40, zorder=2)
        axis.axvspan(0, GOAL["down"], color="tab:blue", alpha=0.08)
        axis.axvspan(GOAL["up"], 1, color="tab:red", alpha=0.08)
        axis.set_xlim(-0.03, 1.03)
        axis.set_title(method, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(cases)), reversed(cases))
    figure.supxlabel("share with the first value: at strength -1, unsteered, at 1", fontsize=10)
    figure.savefig(file, dpi=130)


def main(
    output: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Where to draw them.")] = None,
    prompts: Annotated[int, typer.Option(help="How many held-out prompts.")] = 200,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each continuation.")] = 120,
    case: Annotated[list[str], typer.Option(help="MODEL:ATTRIBUTE; all by default.")] = [],  # noqa: B006
) -> None:
    """Measure all methods on all cases; cases that are in the output file already are kept."""
    cases = case or [f"{model}:{attribute}" for model in RECIPES for attribute in ATTRIBUTES]
    done = json.loads(output.read_text()) if output is not None and output.exists() else {}
    for name in cases:
        if name not in done:
            done[name] = measure_case(*name.split(":"), prompts, new_tokens)
        if output is not None:
            output.write_text(json.dumps(done, indent=1) + "\n")
    show(done)
    if plot_file is not None:
        plot(done, plot_file)


if __name__ == "__main__":
    typer.run(main)
