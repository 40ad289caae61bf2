"""`steer` and `sweep`: texts at several strengths of a control vector."""

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from backbone_surgery.cli.console import read_text, write, write_table
from backbone_surgery.cli.loading import load
from backbone_surgery.cli.options import (
    AnyBatchSize,
    Control,
    JsonSchema,
    Mesh,
    Model,
    NewTokens,
    Regex,
    RepetitionPenalty,
    Sampler,
    SamplerName,
    Seed,
    Strengths,
    Vector,
    parse_format,
    parse_strengths,
    parse_vectors,
)
from backbone_surgery.errors import SurgeryError


def steer(
    prompt: Annotated[str, typer.Argument(help="How the text begins.")],
    vector: Vector = None,
    control: Control = None,
    strengths: Strengths = "-1,0,1",
    model: Model = "tiny_gpt2",
    max_new_tokens: NewTokens = 60,
    sampler: Sampler = SamplerName.greedy,
    seed: Seed = 0,
    mesh: Mesh = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    regex: Regex = None,
    json_schema: JsonSchema = None,
) -> None:
    """Show what a control vector does: one text for each strength, all in one batch."""
    import backbone_surgery as bs

    values, wanted = parse_strengths(strengths), parse_format(regex, json_schema)
    lm, name = _load(vector, control, model, sampler, mesh)
    result = bs.sweep(
        lm,
        prompt,
        name,
        values,
        max_new_tokens=max_new_tokens,
        seed=seed,
        penalties=bs.Penalties(repetition_penalty),
        response_format=wanted,
    )
    typer.secho(prompt, bold=True)
    table = Table(show_lines=True)
    table.add_column(f"{result.control} at", justify="right")
    table.add_column("goes on")
    for row in result.rows:
        table.add_row(f"{row.strength:+g}" if row.strength else "0", row.text.strip())
    write_table(table)


def sweep(
    prompts: Annotated[
        list[str], typer.Argument(help="Prompts, or .txt files with a prompt on each line.")
    ],
    vector: Vector = None,
    control: Control = None,
    strengths: Strengths = "-3,-2,-1,0,1,2,3",
    model: Model = "tiny_gpt2",
    words: Annotated[
        str, typer.Option(help="Words or phrases to count in each text, separated by commas.")
    ] = "",
    plot: Annotated[
        Path | None, typer.Option(help="Picture of the counts to write, such as out.png.")
    ] = None,
    max_new_tokens: NewTokens = 60,
    sampler: Sampler = SamplerName.random,
    seed: Seed = 0,
    batch_size: AnyBatchSize = None,
    mesh: Mesh = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    regex: Regex = None,
    json_schema: JsonSchema = None,
) -> None:
    """Generate from many prompts at several strengths, and count words in the texts."""
    import backbone_surgery as bs
    from backbone_surgery.files import picture_path

    values, wanted = parse_strengths(strengths), parse_format(regex, json_schema)
    counted = list(dict.fromkeys(_plain(word.strip()) for word in words.split(",") if word.strip()))
    if plot is not None and not counted:
        raise SurgeryError(
            "sweep --plot: expected something to plot. Received no --words. Name words to count."
        )
    if plot is not None:
        picture_path(plot, "sweep --plot")
    listed = _read_prompts(prompts)
    lm, name = _load(vector, control, model, sampler, mesh)
    result = bs.sweep(
        lm,
        listed,
        name,
        values,
        score={"words": lambda text: _count(text, counted)} if counted else None,
        max_new_tokens=max_new_tokens,
        seed=seed,
        batch_size=batch_size,
        verbose=1,
        penalties=bs.Penalties(repetition_penalty),
        response_format=wanted,
    )
    write_table(result.table())
    if plot is not None:
        result.plot(plot)
        write(f"wrote {plot}")


def _load(
    vector: str | None, control: str | None, model: str, sampler: SamplerName, mesh: str | None
) -> tuple[Any, str]:
    """Load the model; return it with the name of the control whose strengths are compared."""
    if (vector is None) == (control is None):
        raise SurgeryError(
            "--vector: expected one of --vector and --control, to compare strengths of. Received "
            f"{'neither' if vector is None else 'both'}. Name a vector, such as --vector mood."
        )
    vectors = {} if vector is None else parse_vectors([vector])
    name = next(iter(vectors)) if control is None else control
    return load(model, vectors, sampler, mesh=mesh, controls=[name]), name


def _read_prompts(prompts: Sequence[str]) -> list[str]:
    """Return the prompts, with the lines of .txt files in place of these."""
    listed: list[str] = []
    for prompt in prompts:
        if not prompt.endswith(".txt"):
            listed.append(prompt)
            continue
        lines = read_text(Path(prompt), "sweep").split("\n")
        found = [line for line in lines if line.strip()]
        if not found:
            raise SurgeryError(
                f"sweep at '{prompt}': expected a prompt on each line. Received a file without "
                "any. Add some, or leave it out."
            )
        listed += found
    return listed


def _count(text: str, words: Sequence[str]) -> int:
    """Count words, or phrases, where no letter or accent stands beside them."""
    text = _plain(text)
    found = (match.span() for word in words for match in re.finditer(re.escape(word), text))
    return sum(
        not _continues(text[start - 1 : start] + text[end : end + 1]) for start, end in found
    )


def _plain(text: str) -> str:
    """Return a text in small letters, each accent composed with its letter."""
    return unicodedata.normalize("NFC", text).lower()


def _continues(beside: str) -> bool:
    """Whether one of some characters is part of a word."""
    return any(c.isalnum() or c == "_" or unicodedata.category(c)[0] == "M" for c in beside)
