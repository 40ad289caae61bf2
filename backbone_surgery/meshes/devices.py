"""Devices that models are planned for: their memory and how fast they read it, by their makers."""

from typing import NamedTuple

from backbone_surgery.errors import SurgeryError, closest


class Device(NamedTuple):
    """An accelerator.

    Attributes:
        name: of the device.
        memory: in bytes.
        bandwidth: bytes of memory read in a second, at best.
    """

    name: str
    memory: int
    bandwidth: float


_GIB = 2**30

DEVICES = {
    device.name: device
    for device in (
        Device("A100", 80 * _GIB, 2.039e12),  # SXM, NVIDIA A100 data sheet
        Device("H100", 80 * _GIB, 3.35e12),  # SXM, NVIDIA H100 data sheet
        Device("H200", 141 * _GIB, 4.8e12),  # NVIDIA H200 data sheet
        Device("v5e", 16 * _GIB, 0.819e12),  # Google Cloud, TPU v5e
        Device("v5p", 95 * _GIB, 2.765e12),  # Google Cloud, TPU v5p
        Device("v6e", 32 * _GIB, 1.64e12),  # Google Cloud, TPU v6e
    )
}


def find_device(name: str) -> Device:
    """Return a device by its name.

    Raises:
        SurgeryError: it is not known.
    """
    if name not in DEVICES:
        raise SurgeryError(
            f"plan at 'device': expected one of {', '.join(DEVICES)}. Received {name!r}. "
            f"{closest(str(name), DEVICES)}"
        )
    return DEVICES[name]
