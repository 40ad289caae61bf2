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
    flat = device.name in ("v5e", "v6e")
    ranks = (1, 2) if device.platform == "gpu" else (2,) if flat else (3,)
    if ":" in str(name) and (
        len(sizes) not in ranks or 0 in sizes or shape != "x".join(map(str, sizes))
    ):
        rule = "a slice such as 4x4" if flat else "a slice such as 2x2x4"
        rule = "numbers of GPUs, or of hosts and GPUs" if device.platform == "gpu" else rule
        raise SurgeryError(
            f"plan at 'device': expected {rule} after '{kind}:'. Received {shape!r}. Write, say, "
            f"{'h100:8 or h100:2x8' if device.platform == 'gpu' else 'v5e:4x4 or v5p:2x2x4'}."
        )
    return Devices(device, sizes)
