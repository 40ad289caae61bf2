"""The folder of a recipe: `recipe.json` and `deltas.safetensors`, checked in full when read.

Nothing here knows Keras: a recipe is refused or accepted before any model is looked at.
"""

import hashlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backbone_surgery.errors import RecipeError, SurgeryError
from backbone_surgery.weights.arrays import (
    DTYPES,
    NAMES,
    Array,
    all_finite,
    open_file,
    read_arrays,
    write_arrays,
)
from backbone_surgery.weights.folder import new_folder, recover
from backbone_surgery.weights.jsontext import parse
from backbone_surgery.weights.schema import DELTAS, FORMAT, VERSION, validate

RECIPE = "recipe.json"
READABLE_BY = "0.1.0"
"""The oldest release that reads what is written here."""

_MOST = 2 * 2**20


def write_recipe(path: Path, document: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Write the folder of a recipe, whole or not at all.

    Args:
        path: of the folder.
        document: `versions`, `base`, `layers` and `rewrites`.
        arrays: what goes into `deltas.safetensors`, by name.

    Raises:
        SurgeryError: an array is not finite, the JSON is larger or deeper than what is read, or
            the folder cannot be replaced.
    """
    for name, array in arrays.items():
        if not all_finite(array.read()):
            raise SurgeryError(
                f"save_recipe at '{name}': expected finite numbers. Received NaN or infinity. A "
                "model with them computes nothing; look at how the array was made."
            )
    with new_folder(path, {RECIPE, DELTAS}.__contains__) as folder:
        sha256 = write_arrays(folder / DELTAS, arrays)
        listed = {n: {"dtype": NAMES[a.dtype], "shape": [*a.shape]} for n, a in arrays.items()}
        size = (folder / DELTAS).stat().st_size
        whole = {
            "format": FORMAT,
            "version": VERSION,
            "readable_by": READABLE_BY,
            **document,
            "files": {DELTAS: {"sha256": sha256, "size": size, "arrays": listed}},
        }
        whole["sha256"] = _own_digest(whole)
        (folder / RECIPE).write_text(_text(whole), encoding="utf-8")


def read_recipe(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Read the folder of a recipe, and check everything that can be checked without a model.

    Sizes are checked before anything is allocated: no more memory is taken than the files have
    bytes, and somewhat more for their JSON.

    Returns:
        The document, and the arrays by name.

    Raises:
        RecipeError: the folder is not there, damaged, or of another version.
    """
    document = read_document(path)
    facts = document["files"][DELTAS]
    data = _read(path / DELTAS, facts["size"])
    _check_equal(DELTAS, "size", len(data), facts["size"])
    _check_equal(DELTAS, "sha256", hashlib.sha256(data).hexdigest(), facts["sha256"])
    arrays = read_arrays(lambda: io.BytesIO(data), DELTAS)
    _check_listed(arrays, facts["arrays"])
    for name, array in arrays.items():
        if not all_finite(array.read()):
            raise RecipeError(
                f"load_recipe at '{name[:80]}': expected finite numbers. Received NaN or infinity. "
                "The recipe is damaged; get it again."
            )
    return document, arrays


def _text(document: Mapping[str, Any]) -> str:
    """Return the JSON of a recipe, after reading it as a load will."""
    text = json.dumps(document, indent=1) + "\n"
    if len(text) > _MOST:
        raise _unreadable(f"{len(text)} bytes")
    try:
        validate(parse(text.encode(), RECIPE), RECIPE)
    except RecipeError as error:
        raise _unreadable(f"some that reads as follows: {error}") from error
    return text


def _unreadable(received: str) -> SurgeryError:
    return SurgeryError(
        f"save_recipe at '{RECIPE}': expected rewrites that can be read again: JSON of at most "
        f"{_MOST} bytes, not too deep, and 10000 arrays. Received {received}. Keep "
        "numbers in arrays rather than lists, and nest less."
    )


def read_document(path: Path) -> dict[str, Any]:
    """Read and check the `recipe.json` of a recipe alone; see `read_recipe`."""
    recover(path)
    if not path.is_dir():
        raise RecipeError(
            f"load_recipe at '{path}': expected a folder. Received a path where there is none. "
            "Pass what `save_recipe` was given."
        )
    document = parse(_read(path / RECIPE, _MOST), RECIPE)
    validate(document, RECIPE)
    _check_equal(RECIPE, "sha256", _own_digest(document), document["sha256"])
    return document


def _own_digest(document: Mapping[str, Any]) -> str:
    """Return the sha256 of a recipe's JSON, all but this very entry, in one fixed spelling."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path, most: int) -> bytes:
    """Read a whole file of at most so many bytes."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise RecipeError(
                f"load_recipe at '{path.name}': expected at most {most} bytes. Received {size}. "
                "The recipe is damaged; get it again."
            )
        return file.read(size)


def _check_equal(where: str, what: str, found: Any, claimed: Any) -> None:
    if found != claimed:
        raise RecipeError(
            f"load_recipe at '{where}': expected {what} {claimed}, as recipe.json says. Received "
            f"{found}. The recipe is damaged or was changed; get it again."
        )


def _check_listed(arrays: Mapping[str, Array], listed: Mapping[str, Any]) -> None:
    found = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    wanted = {
        name: (DTYPES.get(entry["dtype"]), tuple(entry["shape"])) for name, entry in listed.items()
    }
    wrong = sorted(n for n in found.keys() | wanted.keys() if found.get(n, ()) != wanted.get(n, ()))
    if wrong:
        raise RecipeError(
            f"load_recipe at '{DELTAS}': expected the arrays that recipe.json lists. Received "
            f"others at {[name[:80] for name in wrong[:5]]}. The recipe is damaged; get it again."
        )
