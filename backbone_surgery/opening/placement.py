"""Placement: where arrays lie that a model runs on, when its weights lie on a mesh of devices.

Rows are split over the batch axis of the mesh where they divide by it, attention heads over the
other axes where they do; the rest is on every device. Mesh and axis are read off the weights, so it
does not matter whether a `keras.distribution` is still set, or set in this thread.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from backbone_surgery import graph, target
from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening.state import StateSpec

_BATCH_AXES = ("batch", "data")


@dataclass(frozen=True)
class Placement:
    """Where arrays lie on a mesh.

    Attributes:
        mesh: a `jax.sharding.Mesh`.
        batch_axis: the axis of it that rows are split over, if there is one.
        planned: on paper, which axis of a weight is shared, by its path.
    """

    mesh: Any
    batch_axis: str | None
    planned: Mapping[str, int] | None = field(default=None, compare=False)

    def padded(self, rows: int) -> int:
        """Return the least number of rows, from this on, that divides by the batch axis."""
        return -(-rows // self._shares) * self._shares

    def of_state(self, spec: StateSpec, rows: int) -> Any:
        """Return the sharding of an array of state, unpacked."""
        axes = self._rows(rows, len(spec.shape))
        if (axis := self._shared_axis(spec)) is not None:
            axes[axis] = self.axes_of_heads
        return self._sharding(axes)

    def has_all_heads(self, spec: StateSpec) -> bool:
        """Tell whether an array of state has heads, of which no device holds only a part."""
        alone = self.shares_of_heads == 1 or self._shared_axis(spec) is None
        return spec.head_axis is not None and alone

    def _shared_axis(self, spec: StateSpec) -> int | None:
        """Return the axis of an array of state along which devices share it, if they do."""
        axis = spec.head_axis
        divides = axis and spec.sizes(1, 1)[axis] % self.shares_of_heads == 0
        return axis if divides and self.axes_of_heads else None

    def axis_of(self, variable: keras.Variable) -> int | None:
        """Return the axis of a weight that those devices share which share heads, if they do."""
        if self.planned is not None:
            return self.planned.get(variable.path)
        sharding = getattr(graph.array_of(variable), "sharding", None)
        spec = getattr(sharding, "spec", ())
        parts = [part if isinstance(part, tuple) else (part,) for part in spec]
        found = [axis for axis, part in enumerate(parts) if part == self.axes_of_heads]
        return found[0] if found else None

    def put(self, values: Any, by_rows: bool = False) -> Any:
        """Put arrays on the devices, but for those that lie on the mesh already.

        Args:
            values: a tree of arrays.
            by_rows: whether their first axis counts rows, which go where the rows are; else all of
                an array goes to every device.
        """
        import jax

        devices = set(self.mesh.devices.flat)

        def put(x: Any) -> Any:
            if isinstance(x, jax.Array) and x.sharding.device_set == devices:
                return x
            value = np.asarray(x)
            sharding = self._of_rows(value) if by_rows else self._sharding([])
            # `device_put` would compare the values of all processes, for each array.
            return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

        return jax.tree.map(put, values)

    def pin_state(self, spec: StateSpec, array: Any) -> Any:
        """Hold an array of state, unpacked, in its shards; inside a program."""
        return self._pin(array, self.of_state(spec, array.shape[0]))

    def pin_rows(self, values: Any) -> Any:
        """Hold arrays whose first axis counts rows, where the rows are; inside a program."""
        import jax

        return jax.tree.map(lambda x: self._pin(x, self._of_rows(x)), values)

    def pin_everywhere(self, values: Any) -> Any:
        """Have arrays on every device, for the host to read; inside a program."""
        import jax

        return jax.tree.map(lambda x: self._pin(x, self._sharding([])), values)

    @property
    def shares_of_heads(self) -> int:
        """How many devices share the heads of a row."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes_of_heads)

    @property
    def axes_of_heads(self) -> tuple[str, ...]:
        """The axes of the mesh that those devices lie along."""
        return tuple(axis for axis in self.mesh.axis_names if axis != self.batch_axis)

    @property
    def _shares(self) -> int:
        return 1 if self.batch_axis is None else self.mesh.shape[self.batch_axis]

    def _of_rows(self, x: Any) -> Any:
        return self._sharding(self._rows(x.shape[0], x.ndim) if x.ndim else [])

    def rows_axis(self, rows: int) -> str | None:
        """Return the axis that so many rows are split over, if they are."""
        return self.batch_axis if rows % self._shares == 0 else None

    def share_out(self, run: Callable[..., Any], args: Any, parts: Any, made: Any) -> Any:
        """Run a function on each device by itself, on its share of arrays; inside a program.

        Args:
            run: the function.
            args: what it is called with.
            parts: for each argument, a `PartitionSpec` or a tree of them: what each device gets.
            made: the same, of what it returns.
        """
        import jax

        def on_each(*arrays: Any) -> Any:
            with target.on_each_device():
                return run(*arrays)

        program = jax.shard_map(
            on_each, mesh=self.mesh, in_specs=parts, out_specs=made, check_vma=False
        )
        return program(*args)

    def _rows(self, rows: int, rank: int) -> list[Any]:
        return [self.rows_axis(rows), *[None] * (rank - 1)]

    def _sharding(self, axes: list[Any]) -> Any:
        from jax.sharding import NamedSharding, PartitionSpec

        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def _pin(self, x: Any, sharding: Any) -> Any:
        import jax

        return jax.lax.with_sharding_constraint(x, sharding)


def placement_of(variables: Iterable[keras.Variable]) -> Placement | None:
    """Return where the arrays of a model with these variables lie; `None` on one device."""
    if keras.config.backend() != "jax":
        return None
    shardings = [getattr(graph.array_of(variable), "sharding", None) for variable in variables]
    mesh = _mesh(shardings)
    return None if mesh is None else Placement(mesh, _batch_axis(mesh, shardings))


def check_stayed(placement: Placement | None, arrays: Iterable[Any]) -> None:
    """Refuse weights that were moved to another mesh, onto one or off it.

    Args:
        placement: what `placement_of` returned before.
        arrays: the values of the weights now.

    Raises:
        SurgeryError: they were moved.
    """
    meshes = None if placement is None else placement.mesh, _mesh(x.sharding for x in arrays)
    if meshes[0] != meshes[1]:
        then, now = ("one device" if m is None else f"a mesh {dict(m.shape)}" for m in meshes)
        raise SurgeryError(
            "generate: expected the weights where they were when the task was made, on "
            f"{then}. Received weights on {now}. Make another CachedCausalLM of the backbone: "
            "its cached graph is for where they are."
        )


def _mesh(shardings: Iterable[Any]) -> Any:
    meshes = (getattr(sharding, "mesh", None) for sharding in shardings)
    return next((mesh for mesh in meshes if mesh is not None and mesh.size > 1), None)


def _batch_axis(mesh: Any, shardings: Iterable[Any]) -> str | None:
    """Return the axis for rows: one that no weight is split over, by name if there are several.

    A layout that is made for training, such as KerasHub's, splits weights over the batch axis too.
    There the name alone tells.
    """
    parts = [part for s in shardings for part in getattr(s, "spec", ())]
    taken = {axis for part in parts for axis in (part if isinstance(part, tuple) else (part,))}
    named = [axis for axis in mesh.axis_names if axis in _BATCH_AXES]
    free = [axis for axis in mesh.axis_names if axis not in taken]
    chosen = [*(axis for axis in named if axis in free), *free, *named]
    return chosen[0] if chosen else None
