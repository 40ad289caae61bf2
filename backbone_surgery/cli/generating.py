"""`generate`: texts from prompts."""

from typing import Annotated, Any

import typer

from backbone_surgery.cli.console import write
from backbone_surgery.cli.loading import load
from backbone_surgery.cli.options import (
    Adapters,
    JsonSchema,
    Mesh,
    Model,
    NewTokens,
    Regex,
    RepetitionPenalty,
    Sampler,
    SamplerName,
    Seed,
    Vectors,
    check_strengths,
    parse_adapters,
    parse_controls,
    parse_format,
    parse_vectors,
)


def generate(
    prompts: Annotated[
        list[str],
        typer.Argument(help="Prompts; run in one batch, or one by one with --stream or --lookup."),
    ],
    model: Model = "tiny_gpt2",
    max_new_tokens: NewTokens = 100,
    sampler: Sampler = SamplerName.greedy,
    seed: Seed = None,
    mesh: Mesh = None,
    stream: Annotated[bool, typer.Option("--stream", help="Show text as it comes.")] = False,
    lookup: Annotated[
        int | None,
        typer.Option(help="Tokens to guess at once from the text so far, such as 4, for one row."),
    ] = None,
    vector: Vectors = [],  # noqa: B006 - typer copies it
    adapter: Adapters = [],  # noqa: B006
    control: Annotated[
        list[str],
        typer.Option(
            "--control",
            "-c",
            help="NAME=STRENGTH, such as mood=1.5. Unless the model's own edit has that control, "
            "or --vector names a file for it, the vector NAME that comes with the model is loaded.",
        ),
    ] = [],  # noqa: B006
    repetition_penalty: RepetitionPenalty = 1.0,
    regex: Regex = None,
    json_schema: JsonSchema = None,
) -> None:
    """Generate text from prompts, steered by control vectors and adapters if you name any."""
    import backbone_surgery as bs

    wanted = parse_format(regex, json_schema)
    controls, vectors = parse_controls(control), parse_vectors(vector)
    adapters = parse_adapters(adapter)
    check_strengths("--control", vectors, controls)
    check_strengths("--control", adapters, controls, of="--adapter")
    lm = load(model, vectors, sampler, mesh=mesh, controls=controls, adapters=adapters)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "controls": controls,
        "lookup": lookup,
        "penalties": bs.Penalties(repetition_penalty),
        "response_format": wanted,
    }
    if stream:
        for prompt in prompts:
            for piece in lm.stream(prompt, **options):
                write(piece, end="")
            write("")
        return
    one_by_one = {} if lookup is None else {"batch_size": 1}
    for text in lm.generate(prompts, **options, **one_by_one):
        write(text)
