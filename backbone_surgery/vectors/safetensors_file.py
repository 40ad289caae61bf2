"""Control vectors in safetensors files: tensors `direction.<block>` and everything known of them.

There is no standard. Ours: float32 tensors `direction.<N>`, 1-D, N the 0-based block whose output
they are for; in the metadata `format` and `format_version`, `sha256` over all of it, and the rest.
"""

import os
import re
from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import save

from backbone_surgery.errors import SurgeryError

_FORMAT, _VERSION = "backbone-surgery control vector", "1"
_NAME = re.compile(r"direction\.(0|[1-9][0-9]{0,5})")


def write(path: Path, directions: dict[int, np.ndarray], info: dict[str, str], digest: str) -> None:
    """Write a file."""
    tensors = {f"direction.{block}": np.ascontiguousarray(d) for block, d in directions.items()}
    metadata = {**info, "format": _FORMAT, "format_version": _VERSION, "sha256": digest}
    path.write_bytes(save(tensors, metadata=metadata))


def read(path: Path) -> tuple[dict[int, np.ndarray], dict[str, str], str | None]:
    """Read directions, info and the checksum. The file is mapped, not copied, until checked."""
    try:
        with safetensors.safe_open(os.fspath(path), framework="numpy") as file:
            info = dict(file.metadata() or {})
            _check_header(info)
            return _directions(file), *_split(info)
    except (safetensors.SafetensorError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, SurgeryError):
            raise
        raise SurgeryError(f"a damaged safetensors file ({error})") from error


def _check_header(info: dict[str, str]) -> None:
    if info.get("format") != _FORMAT:
        raise SurgeryError(
            f"a file whose field 'format' is {info.get('format')!r}, not {_FORMAT!r}"
        )
    if info.get("format_version") != _VERSION:
        raise SurgeryError(
            f"a file whose field 'format_version' is {info.get('format_version')!r}, where this "
            f"release reads {_VERSION!r}"
        )
    if "sha256" not in info:
        raise SurgeryError("a file without the field 'sha256'")


def _directions(file) -> dict[int, np.ndarray]:
    directions = {}
    for name in file.keys():
        match = _NAME.fullmatch(name)
        if match is None:
            raise SurgeryError(f"a tensor named {name!r}, not direction.<block>")
        described = file.get_slice(name)
        if described.get_dtype() != "F32" or len(described.get_shape()) != 1:
            raise SurgeryError(
                f"{described.get_dtype()}{described.get_shape()} at '{name}', not a 1-D F32"
            )
        directions[int(match[1])] = file.get_tensor(name)
    return directions


def _split(info: dict[str, str]) -> tuple[dict[str, str], str]:
    own = ("format", "format_version", "sha256")
    return {k: v for k, v in info.items() if k not in own}, info["sha256"]
