"""`train-vector`: a control vector from contrast pairs."""

import json
import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from backbone_surgery.cli.console import note, read_text, write
from backbone_surgery.cli.loading import load
from backbone_surgery.cli.options import BatchSize, Model
from backbone_surgery.errors import SurgeryError
from backbone_surgery.files import check_folder, without_repeats


class MethodName(StrEnum):
    """The methods of `ControlVector.train`."""

    pca_diff = "pca_diff"
    pca_center = "pca_center"
    mean_diff = "mean_diff"
    logistic = "logistic"


def train_vector(
    pairs: Annotated[
        Path,
        typer.Argument(
            help='JSON lines: {"positive": "...", "negative": "..."} or ["...", "..."].'
        ),
    ],
    output: Annotated[Path, typer.Argument(help="File to write: .gguf or .safetensors.")],
    model: Model = "tiny_gpt2",
    method: Annotated[
        MethodName, typer.Option(help="How to find the direction of each block.")
    ] = MethodName.pca_diff,
    token: Annotated[int, typer.Option(help="Token of each text to measure; -1 is the last.")] = -1,
    batch_size: BatchSize = 32,
) -> None:
    """Train a control vector on contrast pairs."""
    import backbone_surgery as bs

    if output.suffix not in (".gguf", ".safetensors"):
        raise SurgeryError(
            f"train-vector at '{output}': expected a name that ends in .gguf or .safetensors. "
            f"Received the ending '{output.suffix}'. Choose such a name."
        )
    check_folder(output, "train-vector")
    listed = _read_pairs(pairs)
    lm = load(model)
    vector = bs.ControlVector.train(lm, listed, method.value, batch_size, token, verbose=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vector.save(output)
    for warning in caught:
        note(str(warning.message))
    write(f"wrote {output}: {len(listed)} pairs, {method.value}")


def _read_pairs(path: Path) -> list[tuple[str, str]]:
    """Read contrast pairs from a file of JSON lines."""
    pairs = []
    for number, line in enumerate(read_text(path, "train-vector").split("\n"), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line, object_pairs_hook=without_repeats)
            pair = (item["positive"], item["negative"]) if isinstance(item, dict) else item
        except (ValueError, KeyError, TypeError, RecursionError):
            pair = ()
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise SurgeryError(
                f"train-vector at {path}:{number}: expected "
                '{"positive": "...", "negative": "..."} or ["...", "..."]. '
                f"Received {line[:80]!r}. Correct the line, or leave it out."
            )
        pairs.append(tuple(pair))
    if not pairs:
        raise SurgeryError(
            f"train-vector at '{path}': expected at least one pair of texts, a line each. Received "
            "a file without any. Add some."
        )
    return pairs
