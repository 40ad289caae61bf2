"""Control vectors in GGUF files, as llama.cpp and repeng read and write them.

Slot N is added to the output of 0-based block N. Info is kept in fields `controlvector.<name>`;
where a name has a dot in it, such as `general.name`, it is the whole name of the field. Every
length in the file is checked against its size before the `gguf` package reads it, since that
trusts them.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from backbone_surgery.errors import SurgeryError

_ARCHITECTURE = "controlvector"
_OTHERS = ("layer_count", "format", "format_version", "general.architecture", "general.alignment")
"""Fields that are no info of the vector: what the file says of itself."""
_COUNTS = "GGUF."
"""What the `gguf` package names the numbers at the head of a file by, as if they were fields."""
_NAME = re.compile(r"direction\.(0|[1-9][0-9]{0,5})")
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 0
_MOST_ENTRIES, _MOST_ELEMENTS = 4096, 65536


def write(path: Path, directions: dict[int, np.ndarray], info: dict[str, str], digest: str) -> None:
    """Write a file."""
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    try:
        _write(writer, directions, info, digest)
    finally:
        writer.close()


def _write(
    writer: gguf.GGUFWriter, directions: dict[int, np.ndarray], info: dict[str, str], digest: str
) -> None:
    writer.add_string(f"{_ARCHITECTURE}.model_hint", info.get("model_hint", "unknown"))
    writer.add_uint32(f"{_ARCHITECTURE}.layer_count", len(directions))
    for key, value in info.items():
        if key != "model_hint":
            writer.add_string(key if "." in key else f"{_ARCHITECTURE}.{key}", value)
    writer.add_string(f"{_ARCHITECTURE}.sha256", digest)
    for block, direction in directions.items():
        writer.add_tensor(f"direction.{block}", np.ascontiguousarray(direction, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()


def read(path: Path) -> tuple[dict[int, np.ndarray], dict[str, str], str | None]:
    """Read directions, info, and the checksum where the file has one."""
    _Scanner(path).check()
    try:
        reader = gguf.GGUFReader(path)
        directions = {_block(t): np.array(t.data, "float32") for t in reader.tensors}
        info = dict(_info(reader))
    except SurgeryError:
        raise
    except Exception as error:  # the package raises whatever its indexing runs into
        raise SurgeryError(f"a damaged GGUF file ({type(error).__name__}: {error})") from error
    digest = info.pop("sha256", None)
    if info.get("model_hint") == "unknown":
        del info["model_hint"]
    return directions, info, digest


def _block(tensor: Any) -> int:
    match = _NAME.fullmatch(tensor.name)
    if match is None:
        raise SurgeryError(f"a tensor named {tensor.name!r}, not direction.<block>")
    if tensor.tensor_type != gguf.GGMLQuantizationType.F32 or len(tensor.shape) != 1:
        raise SurgeryError(
            f"{tensor.tensor_type.name} of shape {list(map(int, tensor.shape))} at '{tensor.name}'"
            ", not a 1-D F32"
        )
    return int(match[1])


def _info(reader: gguf.GGUFReader) -> Iterator[tuple[str, str]]:
    architecture = reader.get_field("general.architecture")
    contents = architecture.contents() if architecture is not None else None
    if contents != _ARCHITECTURE:
        raise SurgeryError(f"a GGUF file whose general.architecture is {contents!r}")
    for name, item in reader.fields.items():
        key = name.removeprefix(f"{_ARCHITECTURE}.")
        if key not in _OTHERS and not name.startswith(_COUNTS):
            yield key, str(item.contents())


class _Scanner:
    """Walks the header of a GGUF file and checks that all it promises is inside the file."""

    def __init__(self, path: Path) -> None:
        self.size = path.stat().st_size
        # A header is a few hundred bytes for each tensor; the arrays are not read here.
        with open(path, "rb") as file:
            self.data = file.read(min(self.size, 8 << 20))
        self.at = 0

    def check(self) -> None:
        """Raise unless the header is whole."""
        try:
            self._walk()
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise SurgeryError(f"a truncated or damaged GGUF header ({error})") from error

    def _walk(self) -> None:
        if self._take("4s") != b"GGUF":
            raise SurgeryError("a file that is no GGUF file")
        version = self._take("I")
        if version not in (2, 3):
            raise SurgeryError(f"GGUF version {version}, where 2 and 3 are read (little-endian)")
        tensors, entries = self._count("Q", _MOST_ENTRIES), self._count("Q", _MOST_ENTRIES)
        if tensors == 0:
            raise SurgeryError("a file without directions")
        for _ in range(entries):
            self._string()
            self._value(self._take("I"))
        for _ in range(tensors):
            self._string()
            dims = [self._take("Q") for _ in range(self._count("I", 4))]
            kind, offset = self._take("I"), self._take("Q")
            count = int(np.prod([float(d) for d in dims]))
            if kind == _FLOAT32 and offset + 4 * count > self.size - self.at:
                raise SurgeryError(f"a tensor of {count} numbers in a file of {self.size} bytes")

    def _take(self, layout: str) -> Any:
        (value,) = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize("<" + layout)
        return value

    def _count(self, layout: str, most: int) -> int:
        count = self._take(layout)
        if count > most:
            raise SurgeryError(f"a GGUF header that promises {count} entries, over {most}")
        return count

    def _string(self) -> None:
        length = self._take("Q")
        self._skip(length)

    def _skip(self, length: int) -> None:
        if length > len(self.data) - self.at:
            raise SurgeryError(f"a field of {length} bytes in a file of {self.size}")
        self.at += length

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            inner, count = self._take("I"), self._count("Q", _MOST_ELEMENTS)
            if inner == _ARRAY:
                raise SurgeryError("an array of arrays, which no control vector has")
            for _ in range(count):
                self._value(inner)
        else:
            self._skip(_SCALAR_BYTES[kind])
