"""The folder of a recipe: `recipe.json`, and the arrays in a file that is named by its digest.

A file of arrays is never changed. A save adds its own, replaces `recipe.json`, which names it, in
one step, and then removes the file that the old one named. A process that is killed at any moment
leaves the old recipe or the new one.

Nothing here knows Keras: a recipe is refused or accepted before any model is looked at.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from backbone_surgery.errors import RecipeError, SurgeryError
from backbone_surgery.files import (
    FLOATS,
    flush,
    is_part,
    read_arrays,
    read_json,
    reading,
    replace_file,
    writing,
)
from backbone_surgery.recipes.folder import check_folder

RECIPE = "recipe.json"
_FORMAT, _VERSION, _READABLE_BY = "backbone_surgery.recipe", 1, "0.1.0"
_MOST = 2 * 2**20
"""Bytes of `recipe.json`."""

_OURS = re.compile(r"recipe\.json|deltas-[0-9a-f]{16}\.safetensors")


def write_recipe(path: Path, document: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write the folder of a recipe, whole or not at all.

    Raises:
        SurgeryError: an array is not finite, the JSON is larger than what is read, the folder
            holds something else, or links, or the system does not write it.
    """
    _check_finite(arrays)
    check_folder(path, lambda name: _is_ours(path, name))
    data = save({name: np.asarray(array, order="C") for name, array in arrays.items()})
    whole = {
        **{"format": _FORMAT, "version": _VERSION, "readable_by": _READABLE_BY, **document},
        "deltas": hashlib.sha256(data).hexdigest(),
    }
    text = json.dumps({**whole, "sha256": _seal(whole)}, indent=1) + "\n"
    if len(text) > _MOST:
        raise SurgeryError(
            f"save_recipe at '{RECIPE}': expected JSON of at most {_MOST} bytes. Received "
            f"{len(text)} bytes. Keep numbers in arrays rather than lists."
        )
    deltas = before = _deltas(path, whole)
    with writing(path, "save_recipe"):
        path.mkdir(exist_ok=True)
        flush(path.parent)
        with contextlib.suppress(RecipeError):
            before = _deltas(path, read_document(path))
        replace_file(deltas, lambda part: part.write_bytes(data))
        replace_file(path / RECIPE, lambda part: part.write_text(text, encoding="utf-8"))
        if before != deltas:
            before.unlink(missing_ok=True)


def read_recipe(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read document and arrays of a recipe, and check all that can be checked without a model.

    Raises:
        RecipeError: the folder is not there, damaged, or of another version.
    """
    document = read_document(path)
    deltas = _regular(_deltas(path, document))
    with reading(deltas, "load_recipe", "a `.safetensors` file", RecipeError):
        with open(deltas, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        _check_digest(deltas, sha256, document["deltas"])
        arrays = read_arrays(deltas)
    _check_finite(arrays)
    return document, arrays


def read_document(path: Path) -> dict[str, Any]:
    """Read and check the `recipe.json` of a recipe alone; see `read_recipe`."""
    file = _regular(path / RECIPE)
    with reading(file, "load_recipe", f"JSON of at most {_MOST} bytes", RecipeError):
        document = read_json(file, _MOST)
        _check_version(document)
        _check_digest(file, _seal(document), document["sha256"])
    return document


def _check_version(document: Any) -> None:
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise RecipeError(
            f"load_recipe at '{RECIPE}': expected a recipe of format '{_FORMAT}'. Received another "
            "kind of file. Pass a folder that `save_recipe` wrote."
        )
    version, release = document.get("version"), document.get("readable_by", "(a newer one)")
    if version != _VERSION or type(version) is not int:
        raise RecipeError(
            f"load_recipe at '{RECIPE}': expected version {_VERSION} of the format. Received "
            f"version {str(version)[:20]!r}. Release {str(release)[:20]} of backbone-surgery "
            "reads it."
        )


def _check_digest(path: Path, digest: str, claimed: str) -> None:
    if digest != claimed:
        raise RecipeError(
            f"load_recipe at '{path.name}': expected sha256 {claimed[:64]}, as {RECIPE} says. "
            f"Received {digest}. The recipe is damaged or was changed; get it again."
        )


def _check_finite(arrays: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        if array.dtype in FLOATS and not np.isfinite(array).all():
            raise RecipeError(
                f"recipe at '{name[:80]}': expected finite numbers. Received NaN or infinity. A "
                "model with them computes nothing; look at how the array was made."
            )


def _deltas(path: Path, document: Mapping[str, Any]) -> Path:
    """Return the file of arrays that a document names by its digest."""
    if not re.fullmatch("[0-9a-f]{64}", document["deltas"]):
        raise ValueError("the digest of the arrays is none")
    return path / f"deltas-{document['deltas'][:16]}.safetensors"


def _seal(document: Mapping[str, Any]) -> str:
    """Return the sha256 of a recipe's JSON, all but this very entry, in one fixed spelling."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _is_ours(folder: Path, name: str) -> bool:
    """Tell whether a save wrote a file. It writes no links, and one would choose what is lost."""
    named = _OURS.fullmatch(name) or is_part(name)
    return bool(named) and not (folder / name).is_symlink()


def _regular(path: Path) -> Path:
    """Refuse what is no regular file, or a link to one."""
    if path.is_symlink() or not path.is_file():
        raise RecipeError(
            f"load_recipe at '{path}': expected a regular file. Received something else, or none. "
            "Links are not followed. Pass a folder that `save_recipe` wrote."
        )
    return path
