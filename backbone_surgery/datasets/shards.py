"""Shards: rows of Parquet files and of files of JSON lines, a few thousand at a time."""

import functools
import itertools
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from backbone_surgery.errors import SurgeryError, closest, shown
from backbone_surgery.extras import import_extra
from backbone_surgery.files import as_path, found_at, reading, without_repeats

_ENDINGS = (".parquet", ".jsonl")
_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Ends of lines to `str.splitlines`, but not to JSON, by how JSON escapes them."""


@dataclass(frozen=True)
class Shard:
    """Some rows of a file, which make one file of output.

    Attributes:
        file: what they are read from.
        start: the first of them.
        stop: the one after the last.
        name: of its output, without an ending.
        stamp: of the file, when it was cut into shards: its size and the time of its last change.
        offset: where the first row begins in a file of JSON lines, in bytes.
    """

    file: Path
    start: int
    stop: int
    name: str
    stamp: tuple[int, int]
    offset: int = 0

    def read(self, columns: Sequence[str] | None = None) -> "Rows":
        """Read the rows: some columns of a Parquet file, or all; of JSON lines all, always.

        Raises:
            SurgeryError: the file has changed since it was cut into shards, or is damaged.
        """
        with reading(self.file, "data set", f"a {self.file.suffix} file"):
            self._check_same()
            rows = self._read(columns)
            self._check_same()  # nor while it was read
            return rows

    def _read(self, columns: Sequence[str] | None) -> "Rows":
        if self.file.suffix == ".jsonl":
            lines = itertools.islice(_lines(self.file, self.offset), self.stop - self.start)
            rows = enumerate((line for _, line in lines), self.start)
            return JsonRows([_object(self.file, row, line) for row, line in rows])
        chosen = None if columns is None else tuple(columns)
        return ParquetRows(_read_parquet(self.file, self.start, self.stop, chosen))

    def _check_same(self) -> None:
        if _stamp(self.file) != self.stamp:
            raise SurgeryError(
                f"data set at '{self.file}': expected the file as it was when the job began. "
                "Received one that was changed since. Put it back as it was, and start the job "
                "again."
            )


class Rows(Protocol):
    """Rows of a shard, by column."""

    def names(self) -> list[str]:
        """Return the names of the columns."""

    def column(self, name: str) -> list[Any]:
        """Return what the rows hold in a column, `None` where one of them lacks it."""

    def write(self, path: Path, columns: Mapping[str, list[Any]]) -> None:
        """Write the rows to a file, with more columns."""


class JsonRows:
    """Rows of a file of JSON lines."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def names(self) -> list[str]:
        """Return the keys of any of the objects."""
        return list(dict.fromkeys(key for row in self.rows for key in row))

    def column(self, name: str) -> list[Any]:
        """Return a value of each object."""
        return [row.get(name) for row in self.rows]

    def write(self, path: Path, columns: Mapping[str, list[Any]]) -> None:
        """Write an object a line."""
        with open(path, "wb") as file:
            for row, *values in zip(self.rows, *columns.values(), strict=True):
                file.write(_line({**row, **dict(zip(columns, values, strict=True))}))


class ParquetRows:
    """Rows of a Parquet file."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def names(self) -> list[str]:
        """Return the names of the columns."""
        return self.table.column_names

    def column(self, name: str) -> list[Any]:
        """Return a column as Python's values."""
        return self.table.column(name).to_pylist()

    def write(self, path: Path, columns: Mapping[str, list[Any]]) -> None:
        """Write a table with the types that the columns had."""
        arrow, parquet = _arrow()
        table = self.table
        for name, values in columns.items():
            table = table.append_column(name, arrow.array(values))
        parquet.write_table(table, path)


def find_shards(operation: str, inputs: Any, most: int) -> list[Shard]:
    """Cut files into shards, all but the last of a file of one size.

    Args:
        operation: named in errors.
        inputs: a file, a folder of files, or several of these.
        most: rows of a shard.

    Raises:
        SurgeryError: there is no such file, none with rows, or two of one name.
    """
    files: dict[str, Path] = {}
    for file in _files(operation, inputs):
        if file.stem in files:
            raise SurgeryError(
                f"{operation} at '{file}': expected files of different names, since output is "
                f"named after them. Received '{files[file.stem]}' too. Rename one."
            )
        files[file.stem] = file
    shards = []
    for name, file in files.items():
        stamp = _stamp(file)
        rows, offsets = _count(file, most)
        shards += [
            Shard(file, i * most, min((i + 1) * most, rows), f"{name}-{i:05}", stamp, offset)
            for i, offset in enumerate(offsets)
        ]
    if not shards:
        raise SurgeryError(
            f"{operation}: expected at least one row. Received files without any. Look at "
            f"{shown([str(file) for file in files.values()])}."
        )
    return shards


def check_columns(operation: str, shards: Sequence[Shard], columns: Sequence[str]) -> None:
    """Refuse files without a column, or with several of its name."""
    for file in dict.fromkeys(shard.file for shard in shards):
        known = column_names(file)
        for name in columns:
            if name not in known:
                raise SurgeryError(
                    f"{operation} at '{file}': expected a column '{name}'. Received a file without "
                    f"it. {closest(name, known)} Name one of these."
                )
            if known.count(name) > 1:
                raise SurgeryError(
                    f"{operation} at '{file}': expected one column '{name}'. Received "
                    f"{known.count(name)} of that name. Rename all but the one to be read."
                )


def column_names(file: Path) -> list[str]:
    """Return the names of the columns of a file; of JSON lines, those of its first row."""
    if file.suffix == ".jsonl":
        return Shard(file, 0, 1, "", _stamp(file)).read().names()
    with (
        reading(file, "data set", f"a {file.suffix} file"),
        _arrow()[1].ParquetFile(file) as opened,
    ):
        return opened.schema_arrow.names


def count_rows(operation: str, file: Path) -> float | None:
    """Return how many rows a file of output holds; of one that is cut short, not a whole number.

    It takes a look at the end of a Parquet file, and `None` is for one that has no such end. In
    JSON lines it counts the ends of lines.

    Args:
        operation: named in the error.
        file: what a job wrote, or a copy of that.
    """
    with reading(file, operation, "a file of output"), open(file, "rb") as opened:
        if file.suffix == ".jsonl":
            rows, last = 0, b"\n"
            while part := opened.read(2**20):
                rows += part.count(b"\n")
                last = part[-1:]
            return rows if last == b"\n" else rows + 0.5
        arrow, parquet = _arrow()
        try:
            return parquet.read_metadata(opened).num_rows
        except (arrow.ArrowException, OSError):
            return None


def _files(operation: str, inputs: Any) -> Iterator[Path]:
    listed = inputs if isinstance(inputs, list | tuple) else [inputs]
    for path in (as_path(path, operation).absolute() for path in listed):
        inner = sorted(path.iterdir()) if path.is_dir() else [path]
        files = [file for file in inner if file.suffix in _ENDINGS and file.is_file()]
        if not files:
            found = "a folder without any" if path.is_dir() else found_at(path)
            raise SurgeryError(
                f"{operation} at '{path}': expected a {' or '.join(_ENDINGS)} file that exists, or "
                f"a folder of them. Received {found}. Check the path."
            )
        if path.is_dir():
            _tell_of_others(operation, path, inner)
        yield from files


def _tell_of_others(operation: str, folder: Path, inner: Sequence[Path]) -> None:
    """Warn of the files of a folder that are left out, but for those that are hidden."""
    others = [x.name for x in inner if x.suffix not in _ENDINGS and x.is_file()]
    others = [name for name in others if not name.startswith((".", "_"))]
    if others:
        warnings.warn(
            f"{operation} at '{folder}': {shown(others[:5])} left out, since only files that end "
            f"in {' or '.join(_ENDINGS)} are read.",
            stacklevel=6,  # of who called the operation
        )


def _stamp(file: Path) -> tuple[int, int]:
    """Return the size of a file in bytes, and when it was changed, in nanoseconds."""
    facts = file.stat()
    return facts.st_size, facts.st_mtime_ns


def _count(file: Path, most: int) -> tuple[int, list[int]]:
    """Count the rows of a file, and return where each shard begins."""
    with reading(file, "data set", f"a {file.suffix} file"):
        if file.suffix == ".jsonl":
            rows, offsets = 0, []
            for rows, (offset, _) in enumerate(_lines(file), 1):
                if rows % most == 1 or most == 1:
                    offsets.append(offset)
            return rows, offsets
        with _arrow()[1].ParquetFile(file) as opened:
            rows = opened.metadata.num_rows
            return rows, [0] * -(-rows // most)


def _lines(file: Path, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not empty, from an offset on, each with its own."""
    with open(file, "rb") as opened:
        opened.seek(offset)
        for line in opened:
            if line.strip():
                yield offset, line
            offset += len(line)


def _object(file: Path, row: int, line: bytes) -> dict[str, Any]:
    """Read the object that a line holds."""
    try:
        value = json.loads(
            line.rstrip(),
            parse_constant=_refuse,
            parse_float=_finite,
            object_pairs_hook=without_repeats,
        )
        if not isinstance(value, dict):
            raise ValueError(f"a value of type {type(value).__name__}")
    except (ValueError, RecursionError) as error:
        reason = str(error).replace("line 1 ", "")  # its number in the file is another
        raise SurgeryError(
            f"data set at row {row} of '{file}': expected a JSON object in one line. Received "
            f"{shown(line.rstrip())} ({reason}). Correct the line, or leave it out."
        ) from error
    return value


def _finite(text: str) -> float:
    """Read a number: what is too large for a float could not be written as JSON again."""
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text}, which is no finite number")


def _line(row: dict[str, Any]) -> bytes:
    """Write an object as a line, which holds no other character that Python ends a line at.

    Half of a pair of surrogates, which UTF-8 has not, is escaped too.
    """
    try:
        return f"{json.dumps(row, ensure_ascii=False).translate(_ENDS)}\n".encode()
    except UnicodeEncodeError:
        return f"{json.dumps(row)}\n".encode()


def _read_parquet(file: Path, start: int, stop: int, columns: tuple[str, ...] | None) -> Any:
    """Read rows of a Parquet file, and no more row groups than they lie in."""
    arrow, parquet = _arrow()
    with parquet.ParquetFile(file) as opened:
        sizes = [opened.metadata.row_group(i).num_rows for i in range(opened.num_row_groups)]
    parts = []
    for i, (begin, end) in enumerate(itertools.pairwise(itertools.accumulate(sizes, initial=0))):
        first, last = max(start, begin), min(stop, end)
        if first < last:
            parts.append(_row_group(file, i, columns).slice(first - begin, last - first))
    return arrow.concat_tables(parts)


@functools.lru_cache(maxsize=1)
def _row_group(file: Path, index: int, columns: tuple[str, ...] | None) -> Any:
    """Read a row group, and keep it: the next shard most often begins in the same one."""
    with _arrow()[1].ParquetFile(file) as opened:
        return opened.read_row_group(index, columns=None if columns is None else list(columns))


def forget() -> None:
    """Let go of the row group that was read last."""
    _row_group.cache_clear()


def _arrow() -> tuple[Any, Any]:
    """Import PyArrow, and its module for Parquet."""
    return import_extra("data set", "pyarrow"), import_extra("data set", "pyarrow.parquet")
