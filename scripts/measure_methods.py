"""Measure methods of steering side by side: the table and the figure of docs/steering.md.

    KERAS_BACKEND=jax python scripts/measure_methods.py --output methods.json --plot methods.png

For both bundled models and each attribute of the story grammar, `bs.tune` chooses blocks and
strength of each method from pairs alone, by the grammar's judge. Each is then measured on prompts
that nothing was chosen by: the share of continuations with the attribute's first value at
strengths -1, 0 and 1, the share of sentences that are well formed, by how many points another
attribute moves, and how well the direction tells stories of both kinds apart (AUROC). The baseline
says the attribute in the prompt, in a sentence of the grammar, instead of steering.

Cases can be shared out over processes, each with its own `--output`, and shown together:

    python scripts/measure_methods.py --known a.json --known b.json --output methods.json
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import typer
from measure_steering import PROMPT_SEED, held_out_prompts
from rich.console import Console
from rich.table import Table
from steering_cases import (
    SEARCH_SEED,
    cases_of,
    formed,
    judge_of,
    open_model,
    pairs_of,
    searched_prompts,
)
from story_grammar import ATTRIBUTES, contrast_pairs, split_sentences
from train_autoencoders import autoencoders_of

import backbone_surgery as bs

DEFAULT = ("mean_diff", "pca_diff", "logistic", "learned", "reft")
METHODS = (*DEFAULT, "bipo", "reft_r1", "sae", "lora")
SAID = "said in the prompt"
GOAL = {"down": 0.15, "up": 0.85, "well formed": 0.95}

console = Console()


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


def write_steered(
    lm: bs.CachedCausalLM, edits: Mapping[str, bs.Rewrite], prompts: list[str], options: Any
) -> dict[str, dict[int, list[str]]]:
    """Write at strengths -1 and 1 by each edit: directions in one graph, other edits in their own.

    Returns:
        `{method: {strength: texts}}`.
    """
    size = lm.opened.token_embedding.output_dim
    nothing = {block: np.zeros(size) for block in range(lm.backbone.num_layers)}
    vectors = {
        method: bs.ControlVector({**nothing, **edit.directions})
        for method, edit in edits.items()
        if isinstance(edit, bs.Steer)
    }
    found: dict[str, dict[int, list[str]]] = {method: {} for method in edits}
    shared = _edited(lm, bs.Steer("tuned", nothing, strength=0.0)) if vectors else None
    for method, edit in edits.items():
        edited = shared if method in vectors else _edited(lm, edit)
        for sign in (-1, 1):
            value = sign * edit.strength
            if method in vectors:
                value = bs.Control(strength=value, directions=vectors[method])
            found[method][sign] = edited.generate(prompts, controls={"tuned": value}, **options)
    return found


def _edited(lm: bs.CachedCausalLM, edit: bs.Rewrite) -> bs.CachedCausalLM:
    edited = bs.CachedCausalLM(bs.operate(lm.backbone, [edit]), lm.preprocessor)
    edited.compile(sampler=lm.sampler)
    return edited


def measure_case(
    model: str, attribute: str, count: int, tokens: int, methods: list[str], folder: Path
) -> dict[str, Any]:
    """Tune all methods for one attribute of one model, and measure each."""
    lm, pairs = open_model(model), pairs_of(attribute)
    prompts = held_out_prompts(count)
    folder.mkdir(parents=True, exist_ok=True)
    encoders = autoencoders_of(model, lm, folder) if "sae" in methods else None
    start = time.perf_counter()
    result = bs.tune(
        lm,
        pairs,
        judge_of(attribute),
        searched_prompts(prompts),
        methods,
        fluency=formed,
        max_new_tokens=100,
        autoencoders=encoders,
        file=folder / f"{model}-{attribute}-{'-'.join(methods)}.jsonl",
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
    stories = contrast_pairs(attribute, Random(SEARCH_SEED), 60)
    kinds = [[pair[side] for pair in stories] for side in (0, 1)]
    finals = {t.candidate.method: t for t in result.finals if t.candidate}
    rows = {}
    for method, texts in write_steered(lm, result.edits, prompts, options).items():
        candidate, edit = finals[method].candidate, result.edits[method]
        rows[method] = {
            **measure({**texts, 0: alone}, attribute),
            "blocks": candidate.blocks,
            "strength": candidate.strength,
            "searched": finals[method].score,
        }
        if isinstance(edit, bs.Steer):
            edit.vector.save(folder / f"{model}-{attribute}-{method}.safetensors")
            areas = bs.score_detection(lm, edit.vector, *kinds)
            rows[method]["AUROC"] = max(areas.values())
    down, up = said_in_prompts(attribute, count)
    said = {-1: lm.generate(down, **options), 0: alone, 1: lm.generate(up, **options)}
    rows[SAID] = measure(said, attribute)
    return {"seconds": {",".join(methods): seconds}, "methods": rows}


def join(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """Join what two runs measured of a case."""
    return {key: {**(one or {}).get(key, {}), **other[key]} for key in ("seconds", "methods")}


def chosen_of(found: dict[str, Any]) -> str:
    """Return which of the methods that `tune` tries by default came out best in the search."""
    rows = found["methods"]
    return max((m for m in DEFAULT if m in rows), key=lambda m: rows[m]["searched"])


def show(results: dict[str, Any]) -> None:
    """Print a line for each method of each case."""
    table = Table()
    for column in ("case", "method", "share at -1, 0, 1", "well formed", "others", "AUROC", "mean"):
        table.add_column(column)
    for case, found in results.items():
        for method, row in found["methods"].items():
            mark = " *" if method == chosen_of(found) else ""
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
    chosen = sum(found["methods"][chosen_of(found)]["reached"] for found in results.values())
    console.print(f"reached by some method: {reached} of {len(results)}; by the chosen: {chosen}")


def summarise(results: dict[str, Any]) -> None:
    """Print a line for each method over all cases."""
    table = Table(title=f"{len(results)} cases")
    columns = ("at the goal", "mean", "others in the median", "at most", "AUROC", "chosen in")
    for column in ("method", *columns):
        table.add_column(column)
    for method in methods_of(results):
        rows = [found["methods"][method] for found in results.values()]
        areas = [row["AUROC"] for row in rows if "AUROC" in row]
        chosen = sum(chosen_of(found) == method for found in results.values())
        table.add_row(
            method,
            f"{sum(row['reached'] for row in rows)}",
            f"{np.mean([row['harmonic mean'] for row in rows]):.2f}",
            f"{100 * np.median([row['others move in the median'] for row in rows]):.1f}",
            f"{100 * max(row['others move'] for row in rows):.0f}",
            f"{np.mean(areas):.2f}" if areas else "",
            str(chosen),
        )
    console.print(table)


def methods_of(results: dict[str, Any]) -> list[str]:
    """Return the methods that were measured in all cases."""
    measured = [set(found["methods"]) for found in results.values()]
    return [m for m in (*METHODS, SAID) if all(m in own for own in measured)]


def plot(results: dict[str, Any], file: Path) -> None:
    """Draw the share at strengths -1 and 1 of each case and method."""
    from matplotlib import pyplot

    names, cases = methods_of(results), list(results)
    lines = -(-len(names) // 6)
    columns = -(-len(names) // lines)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(11, 3.1 * lines), sharex=True, sharey=True, layout="constrained"
    )
    axes = np.ravel(grid)
    for axis in axes[len(names) :]:
        axis.set_axis_off()
    for axis, method in zip(axes, names, strict=False):
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
        axis.set_yticks(range(len(cases)), [case.replace(":", ", ") for case in reversed(cases)])
        axis.set_title(method, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("share with the first value: at strength -1, unsteered, at 1", fontsize=10)
    figure.savefig(file, dpi=130)


def main(
    output: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Where to draw them.")] = None,
    prompts: Annotated[int, typer.Option(help="How many held-out prompts.")] = 200,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each continuation.")] = 120,
    case: Annotated[list[str], typer.Option(help="MODEL:ATTRIBUTE; all by default.")] = [],  # noqa: B006
    method: Annotated[list[str], typer.Option(help="All by default.")] = [],  # noqa: B006
    folder: Annotated[
        Path, typer.Option(help="Where to keep searches, vectors, autoencoders.")
    ] = Path("searches"),
    known: Annotated[list[Path], typer.Option(help="JSON of other runs, to take in.")] = [],  # noqa: B006
) -> None:
    """Measure methods on all cases; what is in the output file already is kept."""
    cases = cases_of(case)
    done: dict[str, Any] = {}
    for file in (*known, output):
        if file is not None and file.exists():
            for name, found in json.loads(file.read_text()).items():
                done[name] = join(done.get(name), found)
    for name in cases:
        measured = done.get(name, {"methods": {}})["methods"]
        missing = [m for m in method or METHODS if m not in measured]
        if missing:
            found = measure_case(*name.split(":"), prompts, new_tokens, missing, folder)
            done[name] = join(done.get(name), found)
        if output is not None:
            output.write_text(json.dumps(done, indent=1) + "\n")
    done = {name: done[name] for name in cases}
    show(done)
    summarise(done)
    if plot_file is not None:
        plot(done, plot_file)


if __name__ == "__main__":
    typer.run(main)
