"""The tables of response formats that the rows of an engine use, each once, on the device."""

from collections.abc import Callable, Collection, Sequence

from backbone_surgery.generation.formats.in_loop import (
    LEAST,
    for_rows,
    length_for,
    lengthened,
    parts_of,
    sizes_of,
)
from backbone_surgery.generation.formats.table import FormatTable
from backbone_surgery.generation.loop import State, pad
from backbone_surgery.serving.row_programs import RowPrograms

_MOST = {"following": 2**24, "masks": 2**14, "classes": 2**8}
"""How long the arrays are at most: 545 MB of masks with 262,144 tokens. One table fits always."""

_BLOCKS = {"following": 2**12, "masks": 2**4, "classes": 1}
"""The least lengths of the parts of a table. Others are 2, 4, 8... times as long."""


class FormatPool:
    """Holds tables while rows use them; each lies in blocks of the same few arrays.

    A block begins at a multiple of its length, which is a power of two. So no room is lost between
    them, and all that is compiled depends on few lengths.

    Args:
        programs: of the engine.

    Attributes:
        lengths: of the arrays, as long as any were; they are made when a table comes.
        arrays: see `parts_of`; none without a table.
    """

    def __init__(self, programs: RowPrograms) -> None:
        self._programs = programs
        self._blocks: dict[FormatTable, dict[str, range]] = {}
        self.lengths = dict(LEAST)
        self.arrays: State = {}

    def fits(self, table: FormatTable, used: Collection[FormatTable]) -> bool:
        """Tell whether there is room for a table beside those that are used."""
        return table in self._blocks or None not in self._room_for(table, used).values()

    def add(self, table: FormatTable, used: Collection[FormatTable]) -> None:
        """Put a table in, which `fits`, in the place of those that are not used."""
        if table in self._blocks:
            return
        blocks = {name: x for name, x in self._room_for(table, used).items() if x is not None}
        self._blocks = {other: self._blocks[other] for other in used}
        starts = {name: block.start for name, block in blocks.items()}
        for name, part in parts_of(table, starts).items():
            block = blocks[name]
            length = max(self.lengths[name], length_for(name, block.stop))
            if name not in self.arrays:
                self.arrays[name] = self._programs.new_format_array(part, length)
            elif len(self.arrays[name]) < length:
                self.arrays[name] = pad(self.arrays[name], length, 0, 0)
            part = lengthened(part, len(block))
            self.arrays[name] = self._programs.put_format(self.arrays[name], part, block.start)
            self.lengths[name] = length  # not before there was memory for it
        self._blocks[table] = blocks

    def for_rows(self, tables: Sequence[FormatTable | None]) -> State:
        """Return the arrays, and what rows know of their tables, see `in_loop.for_rows`.

        Args:
            tables: of the rows. One that is here no more counts as none.
        """
        starts = {
            table: {name: block.start for name, block in blocks.items()}
            for table, blocks in self._blocks.items()
        }
        return {**self.arrays, **for_rows(tables, starts)}

    def clear(self) -> None:
        """Let go of all tables."""
        self._blocks, self.arrays = {}, {}

    def warm_up(self, table: FormatTable) -> Callable[[int], State]:
        """Have room for such a table for each row, and compile what puts one in, or a smaller one.

        Returns:
            What gives `for_rows` of so many rows with this table.
        """
        pool = FormatPool(self._programs)  # rows may run, and use this one
        for name, size in sizes_of(table).items():
            needed = min(self._programs.rows * _block(name, size), _MOST[name])
            pool.lengths[name] = max(self.lengths[name], length_for(name, needed))
        for name, part in parts_of(table, dict.fromkeys(LEAST, 0)).items():
            block = _BLOCKS[name]
            array = self._programs.new_format_array(part, pool.lengths[name])
            while block <= max(LEAST[name], _block(name, len(part))):
                array = self._programs.put_format(array, lengthened(part[:1], block), 0)
                block *= 2
            pool.arrays[name] = array
        pool.add(table, ())
        self.lengths = pool.lengths
        return lambda rows: pool.for_rows([table] * rows)

    def _room_for(
        self, table: FormatTable, used: Collection[FormatTable]
    ) -> dict[str, range | None]:
        """Return free blocks for the parts of a table, the first ones of each array."""
        others = [self._blocks[other] for other in used]
        return {
            name: _first_free(_block(name, size), [blocks[name] for blocks in others], _MOST[name])
            for name, size in sizes_of(table).items()
        }


def _block(name: str, size: int) -> int:
    """Return the length of a block for so much."""
    return max(_BLOCKS[name], 1 << (size - 1).bit_length())


def _first_free(length: int, taken: list[range], most: int) -> range | None:
    """Return the first block that overlaps with none of those that are taken."""
    starts = range(0, most, length)
    free = (i for i in starts if all(i + length <= x.start or x.stop <= i for x in taken))
    return next((range(i, i + length) for i in free), None)
