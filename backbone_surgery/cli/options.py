"""Options that several commands share, and how they are read."""

import contextlib
import math
import re
from collections.abc import Callable, Container, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from backbone_surgery.errors import SurgeryError


class SamplerName(StrEnum):
    """The samplers that can be chosen by name."""

    greedy = "greedy"
    random = "random"
    top_k = "top_k"
    top_p = "top_p"
    beam = "beam"


Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="tiny_gpt2, tiny_gemma, a KerasHub preset or its URL, or a folder.",
    ),
]
_VECTOR = typer.Option(
    "--vector",
    "-v",
    help="A control vector: the name of one that comes with the model, or a .gguf or .safetensors "
    "file. The control is named after it, or by you with NAME=FILE.",
)
Vector = Annotated[str | None, _VECTOR]
Vectors = Annotated[list[str], _VECTOR]
Adapters = Annotated[
    list[str],
    typer.Option(
        "--adapter",
        help="NAME=FOLDER of a LoRA adapter that PEFT saved. Its control NAME is 0 at first.",
    ),
]
Control = Annotated[
    str | None,
    typer.Option(
        "--control",
        "-c",
        help="In place of --vector: a control of the model's own edit, or a vector that comes with "
        "the model.",
    ),
]
Strengths = Annotated[str, typer.Option(help="Strengths, separated by commas.")]
NewTokens = Annotated[int, typer.Option(min=0, help="How many tokens to add at most.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampler, for each prompt.")]
Sampler = Annotated[SamplerName, typer.Option(help="How to choose each token.")]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        min=0.01, max=100, help="Against repetition: 1 is none, 1.1 usual, as of Hugging Face."
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(help="What the new text has to be as a whole: a match of this expression."),
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(help="What the new text has to be: JSON that fits the schema in this file."),
]
_BATCH_SIZE = typer.Option(min=1, help="How many texts to run at once.")
BatchSize = Annotated[int, _BATCH_SIZE]
Mesh = Annotated[
    str | None,
    typer.Option(
        help="Devices to run on, such as batch=2,model=4: rows are shared by the one axis, the "
        "model by the other."
    ),
]
AnyBatchSize = Annotated[int | None, _BATCH_SIZE]


def parse_format(regex: str | None, json_schema: Path | None) -> Any:
    """Return the response format that is asked for, or `None`.

    Raises:
        SurgeryError: there are two, or the file cannot be read or holds no schema.
    """
    import backbone_surgery as bs

    if regex is not None and json_schema is not None:
        raise SurgeryError(
            "--regex: expected one of --regex and --json-schema. Received both. Leave one out."
        )
    if json_schema is None:
        return None if regex is None else bs.ResponseFormat(regex)
    try:
        text = json_schema.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SurgeryError(
            f"--json-schema: expected a file of JSON. Received '{json_schema}', which cannot be "
            f"read: {error}. Pass another."
        ) from error
    return bs.ResponseFormat.json_schema(text)


def parse_vectors(texts: Sequence[str]) -> dict[str, str]:
    """Parse `FILE` and `NAME=FILE` into `{name: file}`.

    Raises:
        SurgeryError: one of them is neither, or two have the same name.
    """
    files: dict[str, str] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        name, file = (name, file) if equals else (re.sub(r"\W", "_", Path(text).stem), text)
        if not name or not file:
            raise SurgeryError(
                f"--vector: expected FILE or NAME=FILE. Received {text!r}. Pass one of them."
            )
        if name in files:
            raise SurgeryError(
                f"--vector at '{name}': expected one vector of each name. Received two. Name them "
                "as NAME=FILE."
            )
        files[name] = file
    return files


def parse_adapters(texts: Sequence[str]) -> dict[str, str]:
    """Parse `NAME=FOLDER` into `{name: folder}`.

    Raises:
        SurgeryError: one of them is none, or two have the same name.
    """
    return _parse_named(
        "--adapter", "NAME=FOLDER, such as french=./lora", texts, lambda x: x or None
    )


def parse_controls(texts: Sequence[str]) -> dict[str, float]:
    """Parse `NAME=STRENGTH` into `{name: strength}`.

    Raises:
        SurgeryError: a strength is no number, or a control is named twice.
    """
    return _parse_named("--control", "NAME=STRENGTH, such as mood=1.5", texts, _number)


def check_strengths(
    option: str, vectors: Iterable[str], controls: Container[str], of: str = "--vector"
) -> None:
    """Refuse a vector or an adapter that is given no strength, since it would change nothing.

    Raises:
        SurgeryError: one of them has no control.
    """
    for name in vectors:
        if name not in controls:
            raise SurgeryError(
                f"{of} at '{name}': expected a strength for it. Received none, so it would "
                f"change nothing. Add {option} {name}=1."
            )


def parse_columns(texts: Sequence[str]) -> dict[str, Any]:
    """Parse `NAME=STRENGTH`, `NAME=COLUMN` and `NAME=COLUMN,COLUMN` by name.

    Raises:
        SurgeryError: one of them is neither, or a control is named twice.
    """

    def read(text: str) -> Any:
        with contextlib.suppress(ValueError):
            number = float(text)
            return number if math.isfinite(number) else None
        columns = text.split(",")
        if len(columns) > 2 or not all(columns):
            return None
        return text if len(columns) == 1 else tuple(columns)

    expected = "NAME=COLUMN or NAME=STRENGTH, such as mood=strength or mood=1.5"
    return _parse_named("--controls", expected, texts, read)


def _parse_named(
    option: str, expected: str, texts: Sequence[str], read: Callable[[str], Any]
) -> dict[str, Any]:
    """Parse `NAME=VALUE`, each name once; `read` returns `None` for what is no value."""
    values: dict[str, Any] = {}
    for text in texts:
        name, _, rest = text.partition("=")
        value = read(rest)
        if not name or value is None:
            raise SurgeryError(f"{option}: expected {expected}. Received {text!r}. Pass that.")
        if name in values:
            raise SurgeryError(
                f"{option} at '{name}': expected each name once. Received it twice. Pass one of "
                "them."
            )
        values[name] = value
    return values


def parse_mesh(text: str) -> dict[str, int]:
    """Parse `batch=2,model=4` into `{"batch": 2, "model": 4}`; an axis that is left out has 1.

    Raises:
        SurgeryError: another axis is named, one is named twice, or a number is none.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        known = name in ("batch", "model") and name not in sizes
        if not known or not number.isdecimal() or not 1 <= int(number) < 2**20:
            raise SurgeryError(
                f"--mesh: expected numbers of devices, such as batch=2,model=4. Received {text!r}. "
                "Name one of these axes, or each once, with one device or more."
            )
        sizes[name] = int(number)
    return {"batch": 1, "model": 1, **sizes}


def parse_strengths(text: str) -> list[float]:
    """Parse numbers that are separated by commas.

    Raises:
        SurgeryError: one of them is no number.
    """
    strengths = [_number(part) for part in text.split(",")]
    if None in strengths:
        raise SurgeryError(
            f"--strengths: expected numbers separated by commas, such as -2,0,2. Received "
            f"{text!r}. Put a number between any two commas."
        )
    return [strength for strength in strengths if strength is not None]


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
