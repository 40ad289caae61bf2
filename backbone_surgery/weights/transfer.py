"""Transfer: copy weights from one model to another by path, and explain what does not match.

Both sides are compared in full before the first array is written. Arrays are then copied one at a
time: one array is in memory once more while it is copied.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from backbone_surgery import graph, hosts
from backbone_surgery.errors import SurgeryError, WeightMismatchError
from backbone_surgery.files import FLOATS, found_at, reading
from backbone_surgery.weights.arrays import Array, of_file, of_value, of_variable
from backbone_surgery.weights.paths import aliases, is_lora, owner_of, resolve, variable_paths
from backbone_surgery.weights.report import Difference, TransferReport
from backbone_surgery.weights.selecting import Rename, renamed, scopes
from backbone_surgery.weights.tree import flatten


def transfer_weights(
    destination: Any,
    source: Any,
    strict: bool = True,
    only: str | Sequence[str] | None = None,
    rename: Rename | None = None,
    cast: bool = False,
) -> TransferReport:
    """Copy the weights of one model into another, matched by path.

    Trainable and other weights are copied, never configuration. The weights of an edited model are
    addressed as the backbone that owns them has them. A bias that is missing and one that is all
    zeros are the same thing. Tied weights are one.

    Args:
        destination: a Keras model, a causal LM task, or what `operate` or `rewire` made.
        source: the same, a `weight_tree` (in which `None` leaves a weight as it is), or the path
            of a `.safetensors` file with such paths as names.
        strict: whether any difference is an error. Else what matches is copied.
        only: site selectors, such as `"blocks.4:8"` or `"blocks.*.query"`, for the blocks of the
            owner of the destination: nothing else is looked at.
        rename: `{path or its first parts in the source: in the destination}`, such as
            `{"blocks.3": "blocks.5"}`, or a function of a path. `None` leaves an array out.
        cast: whether one floating-point dtype may be converted to another.

    Returns:
        What was copied, and the differences.

    Raises:
        WeightMismatchError: with a table of all differences, before anything is written.
        SurgeryError: an argument is wrong, or there is nothing to copy.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> make = lambda layers: keras_hub.models.GPT2Backbone(50, layers, 2, 8, 16)
        >>> rename = {"blocks.1": None, "blocks.2": "blocks.1"}
        >>> report = bs.transfer_weights(make(2), make(3), rename=rename)
        >>> len(report.copied)
        36
    """
    plan = _Plan(destination, source, only, rename, cast)
    report = plan.report()
    hosts.agree(plan.model, "transfer_weights", {"weights to copy": plan.to_compare(report)})
    where = f"transfer_weights at '{plan.model.name}'"
    if report.differences and strict:
        table = "\n".join(report.table())
        raise WeightMismatchError(
            f"{where}: expected the same weights on both sides. Received "
            f"{len(report.differences)} differences:\n{table}\nNothing was written. Use `rename`, "
            "`only` or `cast`, or strict=False to copy what matches.",
            report,
        )
    if not (report.copied or report.zeroed):
        message = f"{where}: expected a source with weights for it. Received none that match. "
        raise WeightMismatchError(f"{message}Compare the paths with `weight_tree`.", report)
    plan.write()
    return report


class _Plan:
    """What is to be written where: found by comparing both sides, before anything is written."""

    def __init__(self, destination: Any, source: Any, only: Any, rename: Any, cast: bool) -> None:
        self.model = resolve(destination, "transfer_weights")
        self.variables = variable_paths(self.model)
        self.tied = aliases(self.model)
        self.cast = cast
        arrays, tied = _arrays(source, self.variables)
        names, aliased = renamed(arrays, tied, rename)
        self.arrays = {name: arrays[path] for path, name in names.items()}
        self.source_tied = {new: names.get(tied[path]) for path, new in aliased.items()}
        owner = owner_of(self.model)
        self.scopes = None if only is None else scopes(owner, only, variable_paths(owner))
        self.writes: dict[str, Array] = {}

    def chosen(self, path: str) -> bool:
        """Tell whether `only` picks a path."""
        return self.scopes is None or path.startswith(self.scopes)

    def report(self) -> TransferReport:
        """Compare both sides, and note what to write."""
        copied, zeroed, left, absent, differences = [], [], [], [], []
        for path, variable in self.variables.items():
            if not self.chosen(path):
                continue
            own = of_variable(variable)
            if path not in self.arrays:
                absent.append(path)
                continue
            if (array := self.arrays[path]) is None:
                left.append(path)
            elif kind := self._mismatch(own, array):
                differences.append(Difference(kind, path, str(own), str(array)))
            else:
                self.writes[path] = array
                copied.append(path)
        for path in absent:
            own = of_variable(self.variables[path])
            # What is absent goes with the layer: a bias is zero where its kernel is copied.
            if _is_bias(path) and self._has_layer(path, copied):
                self.writes[path] = of_value(np.zeros(own.shape, own.dtype))
                zeroed.append(path)
            elif _is_bias(path) and self._has_layer(path, left):
                left.append(path)
            else:
                tie = self.source_tied.get(path)
                kind, received = ("tied", f"tied to {tie}") if tie else ("missing", "-")
                differences.append(Difference(kind, path, str(own), received))
        differences += self._unexpected()
        return TransferReport(tuple(copied), tuple(zeroed), tuple(left), tuple(differences))

    def to_compare(self, report: TransferReport) -> list[str]:
        """Return in words what is written and what differs, for hosts to compare."""
        written = [f"{path} {array}" for path, array in self.writes.items()]
        return [*written, *map(str, report.differences)]

    def _mismatch(self, own: Array, array: Array) -> str | None:
        if own.shape != array.shape:
            return "shape"
        if own.dtype == array.dtype:
            return None
        castable = self.cast and {own.dtype, array.dtype} <= FLOATS
        return None if castable and _fits(array, own.dtype) else "dtype"

    def _unexpected(self) -> Iterator[Difference]:
        for path, array in self.arrays.items():
            if path in self.variables or not self.chosen(path):
                continue
            received = "None" if array is None else str(array)
            if path in self.tied:
                own = self.arrays.get(self.tied[path])
                if array and not (own and _equal(own, array)):
                    yield Difference("tied", path, f"tied to {self.tied[path]}", received)
                continue
            zero = _is_bias(path) and array is not None and not array.read().any()
            if not (zero and self._has_layer(path, self.variables)):
                yield Difference("unexpected", path, "-", received)

    def _has_layer(self, path: str, paths: Iterable[str]) -> bool:
        """Tell whether the layer of a bias has another weight, no LoRA, among these paths."""
        layer = path.rpartition(".")[0]
        return any(p != path and p.rpartition(".")[0] == layer and not is_lora(p) for p in paths)

    def write(self) -> None:
        """Write what was planned, one array at a time."""
        for path, array in self.writes.items():
            variable = self.variables[path]
            sharding = getattr(variable.value, "sharding", None)
            value = array.read() if array.variable is None else array.variable.value
            with hosts.host_memory(getattr(sharding, "num_devices", 1) > 1):
                # `ops.array` copies: no two models share the memory of a weight.
                value = value if array.new else keras.ops.array(value, variable.dtype)
                assign_in_place(variable, value)
        finalize_layers(self.model)
        finalize_layers(owner_of(self.model))


def finalize_layers(model: keras.Model) -> None:
    """Update what `Normalization` layers computed from their weights, as loading does."""
    layers = [x for x in graph.layers_within(model) if isinstance(x, keras.layers.Normalization)]
    for layer in layers:
        layer.finalize_state()
    if layers:  # their statistics are constants in compiled functions
        model.predict_function = model.test_function = model.train_function = None


def assign_in_place(variable: keras.Variable, value: Any) -> None:
    """Assign a value to a variable, which stays on its devices, and wait for it."""
    sharding = getattr(variable.value, "sharding", None)
    variable.assign(value)
    if keras.config.backend() != "jax":
        return
    import jax

    if not variable.value.sharding.is_equivalent_to(sharding, variable.value.ndim):
        variable.assign(jax.device_put(variable.value, sharding))
    # Else JAX runs ahead, with the old and new arrays of many weights in memory.
    variable.value.block_until_ready()


def _arrays(
    source: Any, destination: Mapping[str, keras.Variable]
) -> tuple[dict[str, Array | None], dict[str, str]]:
    """Return the arrays of a source by path, and which of its paths are tied to which."""
    if isinstance(source, Mapping):
        return _safe(flatten(source), destination), {}
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix != ".safetensors" or not path.is_file():
            raise SurgeryError(
                f"transfer_weights at '{source}': expected a `.safetensors` file that exists. "
                f"Received {found_at(path)}. Load files of Keras by `load_weights`, into the "
                "backbone that they were saved from."
            )
        with reading(path, "transfer_weights", "a `.safetensors` file"):
            return {**of_file(path)}, {}
    if not isinstance(source, keras.Model):
        raise SurgeryError(
            f"transfer_weights: expected a Keras model, a weight tree or the path of a "
            f"`.safetensors` file as source. Received {type(source).__name__}. Pass one of them."
        )
    arrays = {path: of_variable(variable) for path, variable in variable_paths(source).items()}
    return _safe(arrays, destination), aliases(source)


def _safe(
    arrays: Mapping[str, Array | None], destination: Mapping[str, keras.Variable]
) -> dict[str, Array | None]:
    """Copy the arrays that the transfer itself will overwrite."""
    own = {id(v) for v in destination.values()}
    return {
        path: of_value(array.read().copy()) if array and id(array.variable) in own else array
        for path, array in arrays.items()
    }


def _is_bias(path: str) -> bool:
    return path.rpartition(".")[2].partition("#")[0] == "bias"


def _equal(a: Array, b: Array) -> bool:
    return str(a) == str(b) and np.array_equal(a.read(), b.read())


def _fits(array: Array, dtype: np.dtype) -> bool:
    """Tell whether no value becomes infinite in another dtype."""
    value = array.read()
    with np.errstate(over="ignore"):
        return bool((np.isfinite(value.astype(dtype)) == np.isfinite(value)).all())
