"""Devices that models are planned for: their memory, and how fast they read it, by their makers."""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from backbone_surgery.errors import SurgeryError, closest

_GIB = 2**30


class Device(NamedTuple):
    """An accelerator.

    Attributes:
        name: of the device.
        platform: "gpu" or "tpu".
        memory: in bytes.
        bandwidth: bytes of memory read in a second, at best.
        clock: cycles in a second.
    """

    name: str
    platform: str
    memory: int
    bandwidth: float
    clock: float


@dataclass(frozen=True)
class Devices:
    """Devices of one kind, and how they are connected.

    Attributes:
        device: what each of them is.
        shape: a slice of TPU chips, or hosts and the GPUs of each; empty if it was not said.
    """

    device: Device
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many devices there are; one if it was not said."""
        return math.prod(self.shape)


DEVICES = {
    device.name.lower(): device
    for device in (
        # GPUs: data sheets of NVIDIA, of the SXM variants; clocks are those of a boost.
        Device("A100", "gpu", 80 * _GIB, 2.039e12, 1.41e9),
        Device("H100", "gpu", 80 * _GIB, 3.35e12, 1.98e9),
        Device("H200", "gpu", 141 * _GIB, 4.8e12, 1.98e9),
        Device("L4", "gpu", 24 * _GIB, 0.3e12, 2.04e9),
        # TPUs: pages of Google Cloud; clocks follow from peak FLOP/s and matrix units.
        Device("v4", "tpu", 32 * _GIB, 1.228e12, 1.05e9),
        Device("v5e", "tpu", 16 * _GIB, 0.819e12, 1.5e9),
        Device("v5p", "tpu", 95 * _GIB, 2.765e12, 1.75e9),
        Device("v6e", "tpu", 32 * _GIB, 1.64e12, 1.75e9),
    )
}


# Slices of TPUs: pages of Google Cloud.
_FLAT = ("v5e", "v6e")
_FLAT_SLICES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_FLAT_SAID = ", ".join("x".join(map(str, sizes)) for sizes in _FLAT_SLICES)
_CUBIC_SAID = "2x2x1, 2x2x2, 2x2x4, 2x4x4, or from 4x4x4 on multiples of 4 that do not get smaller"


def find_devices(name: str) -> Devices:
    """Return devices by their usual names, in upper or lower case.

    Args:
        name: a GPU, `h100`, or several, `h100:8`, or hosts with several, `h100:2x8`; a TPU, `v5e`,
            or a slice, `v5e:4x4`, `v5p:2x2x4`.

    Raises:
        SurgeryError: it is not known, or has no such shape.

    Examples:
        >>> find_devices("h100:2x8").count
        16
    """
    known = [device.name for device in DEVICES.values()]
    kind, _, shape = str(name).partition(":")
    device = DEVICES.get(kind.lower())
    if device is None:
        raise SurgeryError(
            f"plan at 'device': expected one of {', '.join(known)}. Received {name!r}. "
            f"{closest(kind.upper(), known)}"
        )
    sizes = tuple(int(size) for size in re.findall(r"\d+", shape))
    as_written = shape == "x".join(map(str, sizes)) and 0 not in sizes
    if ":" in str(name) and not (as_written and _there_is(device, sizes)):
        rule = "numbers of GPUs, or of hosts and GPUs"
        if device.platform == "tpu":
            rule = f"a slice that there is, {_FLAT_SAID if device.name in _FLAT else _CUBIC_SAID},"
        raise SurgeryError(
            f"plan at 'device': expected {rule} after '{kind}:'. Received {shape!r}. Write, say, "
            f"{'h100:8 or h100:2x8' if device.platform == 'gpu' else 'v5e:4x4 or v5p:2x2x4'}."
        )
    return Devices(device, sizes)


def _there_is(device: Device, sizes: tuple[int, ...]) -> bool:
    """Tell whether devices are connected like this."""
    if device.platform == "gpu":
        return len(sizes) in (1, 2)
    if device.name in _FLAT:
        return sizes in _FLAT_SLICES
    small = sizes in ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
    cubes = (
        len(sizes) == 3 and all(size % 4 == 0 for size in sizes) and list(sizes) == sorted(sizes)
    )
    return small or (cubes and sizes[-1] <= 32)
