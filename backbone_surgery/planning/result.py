"""The result of `plan`: what a device holds and does, as a table."""

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from backbone_surgery.errors import SurgeryError, closest, shown
from backbone_surgery.planning.compilers import CompiledProgram
from backbone_surgery.planning.devices import Device

_UNPACKED = (
    "each token unpacks {0:.0%} of the {1} weights first, which moves more than bfloat16 would; "
    "int8 does not"
)


@dataclass(frozen=True, repr=False)
class Plan:
    """What one device of a mesh holds and does; print it for a table.

    What was compiled is found by the name of the program, `plan["prefill"]` and `plan["decode"]`.

    Attributes:
        name: of the model.
        device: what each device is.
        mesh: `{axis: devices}`.
        batch: rows of the whole mesh.
        length: tokens of a row.
        rows: that run: `batch`, filled up to what programs are made for, times the beams.
        slots: of each row of the cache: `length`, filled up likewise.
        parameters: the numbers that the whole model learned, also where int4 packs them; no scales.
        weight_bytes: of the weights that a device holds.
        looked_up_bytes: of them, of tables of which a token reads one entry.
        cache_bytes: of the cache that a device holds, of all these rows and slots.
        used_cache_bytes: of it, of `batch`, each of its beams, and `length`.
        collectives: `{kind: how many for each token}`.
        collective_bytes: that a device hands over for each token, at least.
        unpacked: how weights are quantised that each token unpacks first, such as "int4".
        unpacked_share: of all weights of four bits, in bytes.
        programs: `{name: CompiledProgram}`, if they were compiled.
    """

    name: str
    device: Device
    mesh: Mapping[str, int]
    batch: int
    length: int
    rows: int
    slots: int
    parameters: int
    weight_bytes: int
    looked_up_bytes: int
    cache_bytes: int
    used_cache_bytes: int
    collectives: Mapping[str, int]
    collective_bytes: int
    unpacked: str | None = None
    unpacked_share: float = 0.0
    programs: Mapping[str, CompiledProgram] = field(default_factory=dict)

    def __getitem__(self, name: str) -> CompiledProgram:
        if name not in self.programs:
            raise SurgeryError(
                f"plan: expected a compiled program, {', '.join(self.programs) or 'none'}. "
                f"Received {shown(name)}. {closest(str(name), self.programs)} Pass `compile=True`."
            )
        return self.programs[name]

    def __post_init__(self) -> None:
        programs = dict(self.programs)
        if "decode" in programs:
            programs["decode"] = replace(programs["decode"], least_bytes=self.least_bytes)
        object.__setattr__(self, "programs", programs)

    @property
    def least_bytes(self) -> int:
        """What a token reads at least: weights and the used cache, once, but no whole table."""
        return self.weight_bytes - self.looked_up_bytes + self.used_cache_bytes

    @property
    def device_bytes(self) -> int:
        """What a device holds: weights and cache, or the most that a compiled program takes."""
        held = self.weight_bytes + self.cache_bytes
        return max([held, *(p.peak_bytes for p in self.programs.values())])

    @property
    def fits(self) -> bool:
        """Whether that is less than the device's memory; on paper, than nine tenths of it.

        A program that its compiler could not compile, for whatever reason, does not fit.
        """
        if any(program.error for program in self.programs.values()):
            return False
        return self.device_bytes <= (1.0 if self.programs else 0.9) * self.device.memory

    @property
    def tokens_per_second(self) -> float:
        """A bound, of all rows: each token reads the weights and the cache of a device once."""
        return self.batch * self.device.bandwidth / self.least_bytes

    def __str__(self) -> str:
        rows = self._rows()
        width = max(map(len, rows))
        return "\n".join([self.name, *(f"  {k:{width}}  {v}" for k, v in rows.items())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>"
            for k, v in self._rows().items()
        )
        return f"<table><caption>{html.escape(self.name)}</caption>{cells}</table>"

    def _rows(self) -> dict[str, str]:
        """Return what the table says, by what it is of."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        count = math.prod(self.mesh.values())
        room = self.device.memory / 2**30
        collectives = ", ".join(f"{n} {kind}" for kind, n in self.collectives.items()) or "none"
        used = f"{self.batch:,} x {self.length:,} tokens"
        if (self.rows, self.slots) != (self.batch, self.length):
            used = f"{self.rows:,} x {self.slots:,} slots for {used}"
        return {
            "parameters": f"{self.parameters:,}",
            "devices": f"{count} x {self.device.name}, {room:.0f} GiB each ({mesh})",
            "weights on a device": _size(self.weight_bytes),
            "cache on a device": f"{_size(self.cache_bytes)} ({used})",
            "fits": self._fits(),
            "collectives a token": f"{collectives}; {self.collective_bytes:,} bytes",
            "bound by memory": f"{self.tokens_per_second:,.0f} tokens/s, all rows together",
            **(
                {"beware": _UNPACKED.format(self.unpacked_share, self.unpacked)}
                if self.unpacked
                else {}
            ),
            **{f"compiled {name}": _shown(p) for name, p in self.programs.items()},
        }

    def _fits(self) -> str:
        if self.fits:
            return "yes"
        room, errors = self.device.memory, [p.error for p in self.programs.values() if p.error]
        if self.device_bytes > (1.0 if self.programs else 0.9) * room:
            spare = "" if self.programs else ", a tenth of which is left free on paper"
            return f"no: {_size(self.device_bytes)} of {room / 2**30:.0f} GiB{spare}"
        known = all("RESOURCE_EXHAUSTED" in error for error in errors)
        return "no, by the compiler" if known else "not known: a program does not compile"


def _shown(program: CompiledProgram) -> str:
    """Write what a compiler says of a program on a line."""
    if program.error:
        return f"does not compile: {program.error.strip().splitlines()[0]}"
    collectives = ", ".join(f"{n} {kind}" for kind, n in program.collectives.items())
    transfers = f" and {program.transfers} transfers" if program.transfers else ""
    parts = [
        f"{_size(program.argument_bytes)} in, {_size(program.temporary_bytes)} temporary",
        f"{program.kernels} kernels{transfers} move {_size(program.step_bytes)}",
        collectives,
    ]
    if program.estimated_seconds is not None:
        parts.append(f"estimated {program.estimated_seconds * 1e6:,.0f} us")
    return "; ".join(part for part in parts if part)


def _size(count: int) -> str:
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    return f"{count / unit:,.2f} {name}"
