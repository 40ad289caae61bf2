"""Files of control vectors: the format that a path means, and what both formats share."""

import hashlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.files import found_at, replace_file, writing
from backbone_surgery.numbers import read_number
from backbone_surgery.rewriting.directions import read_directions
from backbone_surgery.vectors import gguf_file, safetensors_file

Directions = dict[int, np.ndarray]
Info = dict[str, str]

_LONGEST_TEXT = 2**20
_FORMATS = {".gguf": gguf_file, ".safetensors": safetensors_file}
_CHECKED = ("family", "hidden_dim", "num_blocks", "source_digest")
_RESERVED = (
    *("format", "format_version", "layer_count", "sha256"),
    *("general.architecture", "general.alignment"),
)
"""What files hold beside the info of a vector, under names of their own."""
_RESERVED_PREFIXES = ("controlvector.", "GGUF.")


def check_info(info: object) -> Info:
    """Return info as text; refuse what a file could not hold, or would read back as another."""
    texts = {k: _as_text(v) for k, v in info.items()} if isinstance(info, Mapping) else {"": None}
    if None in texts.values() or not all(map(_is_name, texts)):
        prefixes = " or ".join(map(repr, _RESERVED_PREFIXES))
        raise SurgeryError(
            f"ControlVector: expected `info` to be {{name: text}}, with names other than "
            f"{', '.join(_RESERVED)}, and none that begins with {prefixes}. Received "
            f"{shown(info)}. Rename or shorten what does not fit."
        )
    # What is empty or "unknown" says nothing, and a GGUF file would not keep it.
    return {k: v for k, v in texts.items() if v and (k, v) != ("model_hint", "unknown")}


def _is_name(key: object) -> bool:
    if not isinstance(key, str) or not key or _as_text(key) != key:
        return False
    return key not in _RESERVED and not key.startswith(_RESERVED_PREFIXES)


def _as_text(value: object) -> str | None:
    """Return a text or a number as the text that a file can hold; `None` for anything else."""
    if not isinstance(value, str) and read_number(value) is None:
        return None
    text = str(value)
    try:
        fits = "\0" not in text and len(text.encode()) <= _LONGEST_TEXT
    except UnicodeEncodeError:
        return None
    return text if fits else None


def read(path: Path) -> tuple[Directions, Info]:
    """Read directions and info from a file; raises `SurgeryError` for anything else than one."""
    format_ = _format(path)
    if not os.path.isfile(path):
        raise SurgeryError(
            f"load at '{path}': expected a file. Received a path where there is none. Check it."
        )
    try:
        directions, info, digest = format_.read(path)
    except SurgeryError as error:
        raise SurgeryError(
            f"load at '{path}': expected a control vector. Received {error}. Get the file again, "
            "or save the vector anew."
        ) from error
    directions = read_directions(directions, f"load at '{path}'")
    is_ours = digest is not None or "hidden_dim" in info  # `write` saves both
    if is_ours and digest != checksum(directions, info):
        raise SurgeryError(
            f"load at '{path}': expected the contents that were saved. Received others: their "
            "checksum differs, so the file is damaged. Get it again."
        )
    hidden_dim = len(next(iter(directions.values())))
    if info.get("hidden_dim", str(hidden_dim)) != str(hidden_dim):
        raise SurgeryError(
            f"load at '{path}': expected directions of size {info['hidden_dim']}, as its field "
            f"'hidden_dim' says. Received size {hidden_dim}. Get the file again."
        )
    return directions, info


def write(path: Path, directions: Directions, info: Info) -> None:
    """Write a file in one step: it is there whole, or what was there before still is."""
    format_ = _format(path)
    info = {**info, "hidden_dim": str(len(next(iter(directions.values()))))}
    if os.path.isdir(path) or not path.parent.is_dir():
        found = "a folder" if os.path.isdir(path) else f"one in {found_at(path.parent)}"
        raise SurgeryError(
            f"save at '{path}': expected a file in a folder that exists. Received {found}. Make "
            "the folder first, or choose another path."
        )
    if format_ is gguf_file and 0 in directions:
        if len(directions) == 1:
            raise SurgeryError(
                f"save at '{path}': expected a direction for a block other than 0, which GGUF "
                "files have no place for. Received one for block 0 alone. Save to .safetensors."
            )
        warnings.warn(
            f"save at '{path}': the direction of block 0 is left out, since GGUF files have no "
            "place for it. A .safetensors file keeps it.",
            stacklevel=3,
        )
        directions = {block: d for block, d in directions.items() if block != 0}
    digest = checksum(directions, info)

    def put(part: Path) -> None:
        format_.write(part, directions, info, digest)
        if not _holds(format_, part, digest):  # the `gguf` package does not tell of a full disk
            raise OSError("the file came out incomplete, as on a full disk")

    with writing(path, "save"):
        replace_file(path, put)


def _holds(format_: Any, path: Path, digest: str) -> bool:
    """Tell whether a file can be read, and holds what a checksum was made of."""
    try:
        directions, info, _ = format_.read(path)
    except SurgeryError:
        return False
    return checksum(directions, info) == digest


def checksum(directions: Mapping[int, np.ndarray], info: Mapping[str, str]) -> str:
    """Return a sha256 over directions and info, the same for every format."""
    digest = hashlib.sha256()
    for block, direction in sorted(directions.items()):
        digest.update(f"direction.{block}\0".encode())
        digest.update(np.ascontiguousarray(direction, "<f4").tobytes())
    for key, value in sorted(info.items()):
        digest.update(f"{key}\0{value}\0".encode())
    return digest.hexdigest()


def check_made_for(
    path: Path,
    info: Info,
    model: Info,
    types: tuple[str, ...],
    directions: Directions,
    strict: bool,
) -> None:
    """Refuse, or warn of, a vector that was made for another model."""
    where = f"load at '{path}'"
    size = len(next(iter(directions.values())))
    outside = [b for b in directions if not 0 <= b < int(model["num_blocks"])]
    if str(size) != model["hidden_dim"] or outside:
        raise SurgeryError(
            f"{where}: expected directions of size {model['hidden_dim']} for blocks 0 to "
            f"{int(model['num_blocks']) - 1} of this model. Received size {size} for blocks "
            f"{list(directions)}. Use a vector made for this model."
        )
    for name in _CHECKED if strict else ():
        if name in info and info[name] != model[name]:
            raise SurgeryError(
                f"{where}: expected a vector made for this model, with field '{name}' "
                f"{model[name]!r}. Received {info[name]!r}. Load the vector of this model, or "
                "leave out `lm` to go without this check."
            )
    hint = info.get("model_hint")
    if hint is not None and hint not in types:
        warnings.warn(
            f"{where}: the file says that it was made for a model of type '{hint}'; this one is "
            f"of type {' or '.join(map(repr, types))}.",
            stacklevel=4,
        )


def _format(path: Path):
    if path.suffix not in _FORMATS:
        raise SurgeryError(
            f"control vector file '{path}': expected a name that ends in {' or '.join(_FORMATS)}. "
            f"Received '{path.name}'. Choose one of these formats."
        )
    return _FORMATS[path.suffix]
