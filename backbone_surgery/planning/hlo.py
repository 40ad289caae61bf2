"""Reading the text of a compiled program: what runs for each token, and what it moves.

The text is optimised HLO, after XLA's own passes for a chip: each instruction of the loop is a
kernel, a copy or an exchange. https://openxla.org/xla/operation_semantics names them.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from backbone_surgery.kernels import gpu, tpu

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64}
_ARRAY = re.compile(r"\b([a-z]\w*?)\[([\d,]*)\](\{[^}]*\})?")
_LAYOUT = re.compile(r"\{[^}]*\}")
_FREE = {
    *("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"),
    *("opt-barrier", "partition-id", "replica-id"),
}
_SLICES = {"slice", "dynamic-slice", "gather"}
_WHOLE = {"dot", "convolution", "custom-call", "sort", "while", "conditional", "call"}
_TRANSFERS = {"copy-start", "slice-start"}
_NAME = r"%?[\w.\-]+"
_NO_ESTIMATE = 2**63 - 1
_BRANCHES = ("true_computation", "false_computation")
_COUNTED = ("get-tuple-element", "constant")
_NAMES_ALONE = re.compile(r'custom_call_target="(?:ConcatBitcast|AssumeGatherIndicesInBound)"')
_OWN_TARGETS = "|".join(map(re.escape, (*gpu.CALL_TARGETS, tpu.CALL_TARGET)))
_OWN = re.compile(f'custom_call_target="(?:{_OWN_TARGETS})"')
_OF_CHOSEN = re.compile(r'\bname = "product_of_chosen"|/product_of_used/')
EXCHANGES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


class Instruction(NamedTuple):
    """A line of HLO: `%name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    def calls(self, *keys: str) -> list[str]:
        """Return the computations that it names under some keys, such as `body`."""
        found = re.findall(rf"\b(?:{'|'.join(keys)})=({_NAME}|\{{[^}}]*\}})", self.attributes)
        return [name.lstrip("%") for names in found for name in re.findall(_NAME, names)]

    @property
    def number(self) -> int:
        """Which parameter it is."""
        return int(self.operands[0])


Computation = dict[str, Instruction]


@dataclass
class Step:
    """What a program does for each token.

    Attributes:
        kernels: `{kind of instruction: how many}`.
        transfers: how often a TPU brings something onto the chip, or back, while kernels run.
        instructions: both, told apart by what they write: `{"fusion bf16[8,768]": how many}`.
        exchanges: `{kind of collective: how many}`.
        bytes: read from and written to the memory of the device.
        copied_bytes: of arrays that are copied as they are, or turned, within that memory.
        cycles: what a TPU's compiler estimates, without waiting for memory; `None` elsewhere, and
            where it has no estimate of an instruction.
        seconds: what a GPU's compiler estimates; `None` elsewhere, and where it has no estimate of
            an exchange.
        own_bytes: of `bytes`, those of kernels that are not the compiler's own, which it has no
            estimate of.
    """

    kernels: Counter = field(default_factory=Counter)
    transfers: int = 0
    instructions: Counter = field(default_factory=Counter)
    exchanges: Counter = field(default_factory=Counter)
    bytes: int = 0
    copied_bytes: int = 0
    cycles: int | None = None
    seconds: float | None = None
    own_bytes: int = 0


def read_step(text: str, in_loop: bool) -> Step:
    """Read what a program does for each token, or once.

    Args:
        text: optimised HLO.
        in_loop: whether to read the loop over tokens alone, and not all of it.
    """
    module = read_module(text)
    name = _loop(module) if in_loop else _entry(text)
    step, fused = Step(), dict[tuple[str, str], int]()
    for instruction, lines, times in _flat(module[name], module):
        _count(step, instruction, lines, module, times)
        fused |= dict.fromkeys(_fused_exchanges(instruction, module), times)
    for (kind, _), times in fused.items():
        step.exchanges[kind] += times
    if step.cycles is not None and step.cycles >= _NO_ESTIMATE:
        step.cycles = None
    if step.seconds == math.inf:
        step.seconds = None
    return step


def _loop(module: dict[str, Computation]) -> str:
    """Return the name of the body of the loop over tokens: it carries weights and caches."""
    loops = [i for lines in module.values() for i in lines.values() if i.opcode == "while"]
    return max(loops, key=lambda i: size_of(i.shape)).calls("body")[0]


def _entry(text: str) -> str:
    """Return the name of the computation that a program begins with."""
    return re.search(r"^ENTRY %?([\w.\-]+) ", text, re.MULTILINE)[1]  # type: ignore[index]


def read_module(text: str) -> dict[str, Computation]:
    """Read the computations of a program, by name."""
    module: dict[str, Computation] = {}
    current: Computation = {}
    for line in text.splitlines():
        if line and not line[0].isspace() and line.rstrip().endswith("{"):
            header = re.match(r"(?:ENTRY )?%?([\w.\-]+) ", line)
            current = module.setdefault(header[1], {}) if header else {}
        elif re.match(r"\s+(ROOT )?%[\w.\-]+ = ", line):
            instruction = _read_line(line)
            current[instruction.name] = instruction
    return module


def _read_line(line: str) -> Instruction:
    name, _, rest = line.strip().partition(" = ")
    is_root = name.startswith("ROOT ")
    name = name.removeprefix("ROOT ").lstrip("%")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = _closing(rest, len(opcode))
    inside, attributes = rest[len(opcode) + 1 : end], rest[end + 1 :]
    if opcode in ("parameter", "constant"):
        operands: tuple[str, ...] = (inside,)
    else:
        operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, shape, opcode, operands, attributes, is_root)


def _closing(text: str, start: int) -> int:
    """Return where the bracket that opens at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)


def size_of(shape: str, on_chip: bool = False) -> int:
    """Return the bytes of a shape in the memory of the device.

    Args:
        shape: as HLO writes it.
        on_chip: whether what lies on the chip counts too.

    Examples:
        >>> shape = "(bf16[8,64]{1,0}, s32[2], f32[4]{0:T(128)S(1)})"
        >>> size_of(shape), size_of(shape, on_chip=True)
        (1032, 1048)
    """
    total = 0
    for kind, sizes, layout in _ARRAY.findall(shape):
        if "S(" in layout and not on_chip:
            continue
        bits = _BITS.get(kind) or int(next(iter(re.findall(r"\d+", kind)), 0))
        total += math.prod(int(n) for n in sizes.split(",") if n) * bits // 8
    return total


def _flat(
    lines: Computation, module: dict[str, Computation], times: int = 1
) -> Iterator[tuple[Instruction, Computation, int]]:
    """Yield what runs, in order, with the computation that it stands in, and how often it runs."""
    for instruction in lines.values():
        if instruction.opcode in ("call", "while", "conditional"):
            keys = ("to_apply", "calls", "body", "branch_computations", *_BRANCHES)
            for name in instruction.calls(*keys):
                yield from _flat(module[name], module, times * _turns(instruction, module))
        elif _runs(instruction):
            yield instruction, lines, times


def _turns(instruction: Instruction, module: dict[str, Computation]) -> int:
    """Return how many turns a loop takes, if it counts them; else one.

    A GPU's compiler says so. A TPU's does not, but has all counts begin at zero: there the loop
    itself says up to where it counts, and by how much at a time.
    """
    known = re.search(r'"known_trip_count":{"n":"(\d+)"', instruction.attributes)
    if known:
        return int(known[1])
    for name in instruction.calls("condition"):
        lines = module.get(name, {})
        last = next((i for i in lines.values() if i.is_root), None)
        if last is not None and last.opcode == "compare" and "direction=LT" in last.attributes:
            counter, bound = (lines.get(x) for x in last.operands)
            if counter and bound and (counter.opcode, bound.opcode) == _COUNTED:
                return -(-int(bound.operands[0]) // _step(instruction, counter, module))
    return 1


def _step(loop: Instruction, counter: Instruction, module: dict[str, Computation]) -> int:
    """Return by how much a loop counts at a time; one, where it is not written as a sum."""
    lines = module[loop.calls("body")[0]]
    last = next(i for i in lines.values() if i.is_root)
    (index,) = re.findall(r"index=(\d+)", counter.attributes)
    made = lines.get(last.operands[int(index)]) if last.opcode == "tuple" else None
    while made is not None and made.opcode in ("copy", "bitcast"):
        made = lines.get(made.operands[0])
    if made is None or made.opcode != "add":
        return 1
    steps = [lines[x] for x in made.operands if lines[x].opcode == "constant"]
    return max(int(steps[0].operands[0]), 1) if steps else 1


def _runs(instruction: Instruction) -> bool:
    """Tell whether a chip does something; the end of what was begun before is nothing more."""
    is_name = instruction.opcode == "custom-call" and _NAMES_ALONE.search(instruction.attributes)
    is_end = instruction.opcode.endswith("-done")
    return not (is_name or is_end or instruction.opcode in _FREE)


def _fused_exchanges(
    instruction: Instruction, module: dict[str, Computation]
) -> Iterator[tuple[str, str]]:
    """Yield the kind and the channel of each exchange within a fusion.

    A TPU exchanges while it computes: the fusions that begin an exchange, go on with it and end it
    all name it, under one channel.
    """
    for name in instruction.calls("calls") if instruction.opcode == "fusion" else ():
        for inner in module[name].values():
            channel = re.search(r"channel_id=(\d+)", inner.attributes)
            if inner.opcode in EXCHANGES and channel:
                yield inner.opcode, channel[1]
            yield from _fused_exchanges(inner, module)


def _count(
    step: Step,
    instruction: Instruction,
    lines: Computation,
    module: dict[str, Computation],
    times: int,
) -> None:
    opcode = instruction.opcode.removesuffix("-start")
    exchange = next((kind for kind in EXCHANGES if opcode == kind), None)
    if exchange is not None:
        step.exchanges[exchange] += times
    if instruction.opcode in _TRANSFERS:
        step.transfers += times
    else:
        step.kernels[opcode] += times
    step.instructions[f"{opcode} {re.sub(_LAYOUT, '', instruction.shape)}"] += times
    written = _written(instruction, lines, module)
    if opcode in ("copy", "transpose") and _read(instruction, lines, module):
        step.copied_bytes += times * written
    moved = times * (_read(instruction, lines, module) + written)
    step.bytes += moved
    step.own_bytes += moved if _OWN.search(instruction.attributes) else 0
    # For norms in Triton the model of costs says seconds where it means microseconds.
    estimate = re.search(r'"exec_time_us":([\d.]+)', instruction.attributes)
    if estimate and '"kind":"__triton"' not in instruction.attributes:
        step.seconds = (step.seconds or 0.0) + times * float(estimate[1]) / 1e6
    elif exchange is not None:
        step.seconds = math.inf
    estimate = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    if estimate:
        step.cycles = (step.cycles or 0) + times * int(estimate[1])


def _read(instruction: Instruction, lines: Computation, module: dict[str, Computation]) -> int:
    """Return the bytes that an instruction reads."""
    operands = [lines[name] for name in instruction.operands if name in lines]
    if instruction.opcode == "fusion":
        fused = _Fused(module[instruction.calls("calls")[0]], module)
        return sum(fused.read(i, size_of(x.shape)) for i, x in enumerate(operands))
    if instruction.opcode.removesuffix("-start") in _SLICES:
        part = _first(instruction.shape, 1 if "-start" in instruction.opcode else 0)
        return size_of(part, on_chip=True) if size_of(operands[0].shape) else 0
    if instruction.opcode == "dynamic-update-slice":
        return size_of(operands[1].shape)
    sizes = [size_of(x.shape) for x in operands]
    if instruction.opcode == "custom-call" and _OF_CHOSEN.search(instruction.attributes):
        index, *_, bank = operands  # see `kernels.gpu_experts` and `kernels.tpu_experts`
        sizes[-1] = min(sizes[-1] * _first_axis(index.shape) // _first_axis(bank.shape), sizes[-1])
    return sum(sizes)


def _first_axis(shape: str) -> int:
    return int(_ARRAY.search(shape)[2].split(",")[0])  # type: ignore[index]


def _written(instruction: Instruction, lines: Computation, module: dict[str, Computation]) -> int:
    """Return the bytes that an instruction writes."""
    if instruction.opcode == "fusion":
        return _Fused(module[instruction.calls("calls")[0]], module).written()
    if instruction.opcode == "dynamic-update-slice":
        return size_of(lines[instruction.operands[1]].shape)
    if instruction.opcode == "custom-call":
        return size_of(_first(instruction.shape, 0))  # what follows is room to work in
    if instruction.opcode.endswith("-start"):
        return size_of(_first(instruction.shape, 1 if "slice" in instruction.opcode else 0))
    return size_of(instruction.shape)


def _first(shape: str, index: int) -> str:
    """Return an array out of a shape that may be a tuple."""
    arrays = [match[0] for match in _ARRAY.finditer(shape)]
    return arrays[min(index, len(arrays) - 1)] if arrays else ""


class _Fused:
    """The inside of a fusion: how much it needs of each of its parameters."""

    def __init__(self, lines: Computation, module: dict[str, Computation]) -> None:
        self.lines, self.module = lines, module
        self.users: defaultdict[str, list[Instruction]] = defaultdict(list)
        for instruction in lines.values():
            for name in set(instruction.operands):
                self.users[name].append(instruction)
        self.root = next(i for i in lines.values() if i.is_root)
        self.made = self._handed_out(self.root)
        self._shares: dict[str, float] = {}

    def read(self, number: int, size: int) -> int:
        """Return how many bytes are read of a parameter of some size."""
        return int(self.share_of(number) * size)

    def share_of(self, number: int) -> float:
        """Return how much is read of a parameter, from 0 to 1."""
        for instruction in self.lines.values():
            if instruction.opcode == "parameter" and instruction.number == number:
                return self._share(instruction.name)
        return 0.0

    def written(self) -> int:
        """Return how many bytes are written: of what is updated in place, the update alone."""
        total = 0
        for instruction in self.made:
            if instruction.opcode == "dynamic-update-slice":
                total += size_of(self.lines[instruction.operands[1]].shape)
            elif instruction.opcode != "parameter":
                total += size_of(instruction.shape)
        return total

    def _handed_out(self, instruction: Instruction) -> list[Instruction]:
        if instruction.opcode == "tuple":
            return [y for x in instruction.operands for y in self._handed_out(self.lines[x])]
        if instruction.opcode == "bitcast":
            return self._handed_out(self.lines[instruction.operands[0]])
        return [instruction]

    def _share(self, name: str) -> float:
        """Return how much of a value is needed, from 0 to 1."""
        if name not in self._shares:
            wanted = sum(self._wanted(user, name) for user in self.users[name])
            is_made = any(i.name == name and i.opcode != "parameter" for i in self.made)
            self._shares[name] = 1.0 if is_made else min(wanted, 1.0)
        return self._shares[name]

    def _wanted(self, user: Instruction, name: str) -> float:
        if user.opcode == "fusion":
            inner = _Fused(self.module[user.calls("calls")[0]], self.module)
            return sum(inner.share_of(i) for i, x in enumerate(user.operands) if x == name)
        if user.opcode in _WHOLE:
            return 1.0
        first = user.operands[0] == name
        if user.opcode in _SLICES and first:
            size = size_of(self.lines[name].shape, on_chip=True) or 1
            return self._share(user.name) * size_of(user.shape, on_chip=True) / size
        if user.opcode == "dynamic-update-slice" and first and user in self.made:
            return 0.0  # in place
        if user.opcode == "tuple" and self.lines[name].opcode == "parameter":
            return 0.0
        return 1.0 if user.is_root else self._share(user.name)
