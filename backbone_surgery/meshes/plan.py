"""`plan`: what a model takes on each device of a mesh, and what bounds a token; on paper."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import ml_dtypes
import numpy as np

from backbone_surgery import graph
from backbone_surgery.caching.rewire import rewire
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.meshes.devices import Device, find_device
from backbone_surgery.meshes.layout_map import Split, splits
from backbone_surgery.numbers import is_int
from backbone_surgery.presets import load_backbone

AXES = ("batch", "model")


@dataclass(frozen=True)
class Plan:
    """What one device of a mesh holds and does; print it for a table.

    Attributes:
        name: of the model.
        device: what each device is.
        mesh: `{axis: devices}`.
        batch: rows of the whole mesh.
        length: tokens of a row.
        parameters: of the whole model.
        weight_bytes: of the weights that a device holds.
        cache_bytes: of the cache that a device holds, at that length.
        collectives: `{kind: how many for each token}`.
        collective_bytes: that a device hands over for each token, at least.
    """

    name: str
    device: Device
    mesh: Mapping[str, int]
    batch: int
    length: int
    parameters: int
    weight_bytes: int
    cache_bytes: int
    collectives: Mapping[str, int]
    collective_bytes: int

    @property
    def device_bytes(self) -> int:
        """What a device holds: weights and cache. Programs need some more while they run."""
        return self.weight_bytes + self.cache_bytes

    @property
    def fits(self) -> bool:
        """Whether that is less than nine tenths of the device's memory."""
        return self.device_bytes <= 0.9 * self.device.memory

    @property
    def tokens_per_second(self) -> float:
        """A bound, of all rows: each token reads the weights and the cache of a device once."""
        return self.batch * self.device.bandwidth / self.device_bytes

    def __str__(self) -> str:
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        count = math.prod(self.mesh.values())
        room = self.device.memory / 2**30
        collectives = ", ".join(f"{n} {kind}" for kind, n in self.collectives.items()) or "none"
        rows = {
            "parameters": f"{self.parameters:,}",
            "devices": f"{count} x {self.device.name}, {room:.0f} GiB each ({mesh})",
            "weights on a device": _size(self.weight_bytes),
            "cache on a device": f"{_size(self.cache_bytes)} ({self.batch} x {self.length} tokens)",
            "fits": "yes" if self.fits else f"no: {_size(self.device_bytes)} of {room:.0f} GiB",
            "collectives a token": f"{collectives}; {self.collective_bytes:,} bytes",
            "bound by memory": f"{self.tokens_per_second:,.0f} tokens/s, all rows together",
        }
        width = max(map(len, rows))
        return "\n".join([self.name, *(f"  {k:{width}}  {v}" for k, v in rows.items())])


def plan(
    preset_or_backbone: Any,
    mesh: Any = None,
    batch: int = 1,
    length: int = 2048,
    device: str = "H100",
    dtype: str = "bfloat16",
) -> Plan:
    """Tell what a model takes on each device of a mesh, without taking memory for it.

    Weights lie as `layout_map` lays them out, rows and caches as generation does. The bound is that
    of reading: a device cannot make tokens faster than it reads its weights and cache.

    Args:
        preset_or_backbone: the name of a preset or a folder, of which `config.json` is enough; or a
            backbone, edited or not.
        mesh: `{"batch": n, "model": n}`, or a `keras.distribution.DeviceMesh` of these axes; one
            device by default.
        batch: rows that run at once.
        length: tokens of each row, prompt and new ones.
        device: one of A100, H100, H200, v5e, v5p and v6e.
        dtype: of the weights and the cache of a preset; a backbone has its own.

    Raises:
        SurgeryError: an argument does not fit.

    Examples:
        >>> import backbone_surgery as bs
        >>> bs.plan("tiny_gpt2", {"batch": 1, "model": 2}, batch=8, length=256).fits
        True
    """
    sizes = _read_mesh(mesh)
    for name, value in (("batch", batch), ("length", length)):
        if not is_int(value) or value < 1:
            raise SurgeryError(
                f"plan at '{name}': expected a positive int. Received {shown(value)}. Pass one."
            )
    spec = find_device(device)
    with graph.without_values():
        backbone = preset_or_backbone
        if not isinstance(backbone, keras.Model):
            backbone = load_backbone(preset_or_backbone, load_weights=False, dtype=dtype)
        shared = {split.variable.path: split for split in splits(backbone)}
        cached = rewire(backbone)
        states = [state for entry in cached.states for state in entry.values()]
    rows = math.ceil(batch / sizes["batch"])
    return Plan(
        name=preset_or_backbone if isinstance(preset_or_backbone, str) else backbone.name,
        device=spec,
        mesh=sizes,
        batch=batch,
        length=length,
        parameters=sum(math.prod(v.shape) for v in backbone.variables),
        weight_bytes=sum(_bytes_of(v, shared, sizes["model"]) for v in backbone.variables),
        cache_bytes=sum(_state_bytes(state, rows, length, sizes["model"]) for state in states),
        **_collectives(backbone, shared, sizes, rows),
    )


def _read_mesh(mesh: Any) -> dict[str, int]:
    if isinstance(mesh, keras.distribution.DeviceMesh):
        mesh = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    mesh = {} if mesh is None else mesh
    if not isinstance(mesh, Mapping) or not all(
        axis in AXES and is_int(size) and size >= 1 for axis, size in mesh.items()
    ):
        raise SurgeryError(
            "plan at 'mesh': expected numbers of devices for the axes `batch` and `model`. "
            f'Received {shown(mesh)}. Pass {{"batch": 1, "model": 4}}, say.'
        )
    return {axis: int(mesh.get(axis, 1)) for axis in AXES}


def _bytes_of(variable: keras.Variable, shared: Mapping[str, Split], shares: int) -> int:
    count = math.prod(variable.shape) * _itemsize(keras.backend.standardize_dtype(variable.dtype))
    split = shared.get(variable.path)
    return count // shares if split and split.units % shares == 0 else count


def _state_bytes(state: Any, rows: int, length: int, shares: int) -> int:
    count = state.nbytes(rows, length)
    heads = state.head_axis and state.sizes(rows, length)[state.head_axis]
    return count // shares if heads and heads % shares == 0 else count


def _collectives(
    backbone: keras.Model, shared: Mapping[str, Split], sizes: Mapping[str, int], rows: int
) -> dict[str, Any]:
    """Count what is exchanged for each token, as it was counted in compiled programs."""
    model = sizes["model"]
    split = [s for s in shared.values() if model > 1 and s.units % model == 0]
    sums = sum(s.summed for s in split)
    # The likeliest token: its logit, and its number, over the shares of the vocabulary.
    choices = 2 if any(s.vocabulary for s in split) else 0
    test = 1 if sizes["batch"] > 1 else 0
    count = sums + choices + test
    size = _itemsize(backbone.compute_dtype)
    return {
        "collectives": {"all-reduce": count} if count else {},
        "collective_bytes": sums * rows * backbone.hidden_dim * size + choices * rows * 4 + test,
    }


def _itemsize(dtype: str) -> int:
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


def _size(count: int) -> str:
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    return f"{count / unit:,.2f} {name}"
