"""`batch` and `harvest`: texts and activations for every row of a data set."""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from backbone_surgery.cli.console import count_files, write
from backbone_surgery.cli.interrupt import resumable
from backbone_surgery.cli.loading import is_vector_file, load, load_vectors
from backbone_surgery.cli.options import (
    BatchSize,
    JsonSchema,
    Mesh,
    Model,
    NewTokens,
    Regex,
    RepetitionPenalty,
    Sampler,
    SamplerName,
    Vectors,
    check_strengths,
    parse_columns,
    parse_format,
    parse_vectors,
)
from backbone_surgery.errors import SurgeryError

Inputs = Annotated[
    list[Path], typer.Argument(help="Files of Parquet or JSON lines, or folders of them.")
]
Output = Annotated[
    Path, typer.Argument(help="The folder to write: a new one, or that of a job to go on with.")
]
Recipe = Annotated[
    Path | None, typer.Option(help="An edit that `save_recipe` wrote, to apply to the model.")
]
Controls = Annotated[
    list[str],
    typer.Option(
        "--controls",
        "-c",
        help="NAME=COLUMN of strengths, NAME=COLUMN,COLUMN of strengths and of names of "
        "--row-vector, or NAME=STRENGTH for all rows. Unless the edit has that control, or "
        "--vector names a file for it, the vector NAME that comes with the model is loaded.",
    ),
]


Ray = Annotated[str | None, typer.Option(help="Address of a Ray cluster to work on, such as auto.")]


class Dtype(StrEnum):
    """What activations can be written as."""

    float16 = "float16"
    float32 = "float32"


def batch(
    inputs: Inputs,
    output: Output,
    model: Model = "tiny_gpt2",
    recipe: Recipe = None,
    vector: Vectors = [],  # noqa: B006 - typer copies it
    controls: Controls = [],  # noqa: B006
    row_vector: Annotated[
        list[str], typer.Option(help="A vector that rows may name, as --vector takes it.")
    ] = [],  # noqa: B006
    column: Annotated[str, typer.Option(help="The column of the prompts.")] = "prompt",
    output_column: Annotated[
        str, typer.Option(help="The column to write the texts to.")
    ] = "generated",
    max_new_tokens: NewTokens = 64,
    sampler: Sampler = SamplerName.greedy,
    seed: Annotated[int, typer.Option(help="Seed of the job; each row has its own of it.")] = 0,
    id_column: Annotated[
        str | None, typer.Option(help="The column that tells rows apart, for their seeds.")
    ] = None,
    score: Annotated[
        list[str],
        typer.Option(help="MODULE:FUNCTION of a text, which returns a number: a column."),
    ] = [],  # noqa: B006
    batch_size: BatchSize = 32,
    shard_rows: Annotated[int, typer.Option(min=1, help="Rows for a file of output.")] = 4096,
    mesh: Mesh = None,
    ray: Ray = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    regex: Regex = None,
    json_schema: JsonSchema = None,
) -> None:
    """Generate from every row of a data set, and go on where a job was killed."""
    import backbone_surgery as bs

    if ray is not None and mesh is not None:
        raise SurgeryError(
            "batch --mesh: expected one of --mesh and --ray, since a worker has one device. "
            "Received both. Leave one out."
        )
    wanted = parse_format(regex, json_schema)
    strengths = parse_columns(controls)
    files = parse_vectors(vector)
    check_strengths("--controls", files, strengths)
    vectors = {name: _absolute_vector(file) for name, file in files.items()}
    args, names = (_absolute(model), vectors, sampler, _absolute(recipe)), list(strengths)
    make = functools.partial(load, *args, mesh=mesh, controls=names)
    with resumable():
        written = bs.generate_dataset(
            make,
            inputs,
            output,
            column,
            output_column=output_column,
            controls=strengths,
            vectors=load_vectors(model, parse_vectors(row_vector)),
            max_new_tokens=max_new_tokens,
            score=_find_scores(score),
            seed=seed,
            id_column=id_column,
            batch_size=batch_size,
            shard_rows=shard_rows,
            ray=ray,
            penalties=bs.Penalties(repetition_penalty),
            response_format=wanted,
        )
    write(f"{count_files(written)} in {output}")


def harvest(
    inputs: Inputs,
    output: Output,
    site: Annotated[
        list[str],
        typer.Option(help="Site or selector of sites, such as blocks.3 or blocks.*.mlp_output."),
    ],
    model: Model = "tiny_gpt2",
    recipe: Recipe = None,
    column: Annotated[str, typer.Option(help="The column of the texts.")] = "text",
    dtype: Annotated[Dtype, typer.Option(help="Of the numbers that are written.")] = Dtype.float16,
    length: Annotated[
        int | None, typer.Option(min=1, help="Cut texts of more tokens than this.")
    ] = None,
    batch_size: BatchSize = 32,
    mesh: Mesh = None,
    ray: Ray = None,
) -> None:
    """Write the activations of sites over a corpus, and go on where a job was killed."""
    import backbone_surgery as bs

    if ray is not None and mesh is not None:
        raise SurgeryError(
            "harvest --mesh: expected one of --mesh and --ray, since a worker has one device. "
            "Received both. Leave one out."
        )
    make = functools.partial(load, _absolute(model), recipe=_absolute(recipe), mesh=mesh)
    with resumable():
        written = bs.harvest(
            make,
            inputs,
            output,
            site,
            column,
            dtype=dtype.value,
            length=length,
            batch_size=batch_size,
            ray=ray,
        )
    write(f"{count_files(written)} in {output}")


def _absolute(path: Any) -> Any:
    """Make the path of a folder absolute, since workers may run in others; leave names."""
    from backbone_surgery.bundled import bundled_models

    is_name = path is None or str(path) in bundled_models() or not Path(path).is_dir()
    return path if is_name else type(path)(Path(path).absolute())


def _absolute_vector(file: str) -> str:
    """Make the path of the file of a vector absolute; leave names."""
    return str(Path(file).absolute()) if is_vector_file(file) else file


def _find_scores(texts: Sequence[str]) -> dict[str, Callable[[str], Any]]:
    """Import functions named as MODULE:FUNCTION, by the name of the function."""
    sys.path.insert(0, str(Path.cwd()))
    scores = {}
    for text in texts:
        module, _, name = text.partition(":")
        if name in scores:
            raise SurgeryError(
                f"--score: expected functions of different names. Received two of '{name}', which "
                "would be one column. Rename one."
            )
        try:
            scores[name] = getattr(importlib.import_module(module), name)
        except (Exception, SystemExit) as error:  # whatever the module of a user runs into
            raise SurgeryError(
                f"--score: expected MODULE:FUNCTION that can be imported. Received {text!r}: "
                f"{type(error).__name__}: {error}. Run it in the folder of the module, or install "
                "that."
            ) from error
    return scores
