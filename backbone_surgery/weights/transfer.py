"""Transfer: copy weights from one model to another by path, and explain what does not match.

Both sides are walked and compared in full before the first array is written. Arrays are then read
and written one at a time, each of them in memory once more for as long as that takes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, WeightMismatchError
from backbone_surgery.weights.arrays import FLOATS, Array, held, open_file, read_arrays
from backbone_surgery.weights.paths import aliases, is_lora, owner_of, resolve, variable_paths
from backbone_surgery.weights.report import Difference, TransferReport
from backbone_surgery.weights.selecting import Rename, renamed, scopes
from backbone_surgery.weights.tree import flatten, of_variable

Source = Any


def transfer_weights(
    destination: Any,
    source: Source,
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

    Example:
        >>> import backbone_surgery as bs, keras_hub
        >>> make = lambda layers: keras_hub.models.GPT2Backbone(50, layers, 2, 8, 16)
        >>> rename = {"blocks.1": None, "blocks.2": "blocks.1"}
        >>> report = bs.transfer_weights(make(2), make(3), rename=rename)
        >>> len(report.copied)
        36
    """
    plan = _Plan(destination, source, only, rename, cast)
    report = plan.report()
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
        raise WeightMismatchError(
            f"{where}: expected a source with weights for it. Received none that match. Compare "
            "the paths with `weight_tree`.",
            report,
        )
    plan.write()
    return report


class _Plan:
    """What is to be written where; made by looking at both sides, before anything is written."""

    def __init__(
        self,
        destination: Any,
        source: Source,
        only: str | Sequence[str] | None,
        rename: Rename | None,
        cast: bool,
    ) -> None:
        self.model = resolve(destination)
        self.variables = variable_paths(self.model)
        self.tied = aliases(self.model)
        self.cast = cast
        arrays, tied = _arrays(source, self.variables)
        names = renamed([*arrays], _rules(rename, arrays, tied))
        self.arrays = {new: arrays[old] for old, new in names.items()}
        self.source_tied = {
            new: names[tied[old]]
            for old, new in renamed([*tied], _rules(rename, tied, arrays)).items()
            if tied[old] in names
        }
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
            wanted = of_variable(variable)
            if path not in self.arrays:
                absent.append(path)
                continue
            array = self.arrays[path]
            if array is None:
                left.append(path)
            elif kind := self._mismatch(wanted, array):
                differences.append(Difference(kind, path, str(wanted), str(array)))
            else:
                self.writes[path] = array
                copied.append(path)
        for path in absent:
            wanted = of_variable(self.variables[path])
            # What is absent goes with the layer: a bias is zero where its kernel is copied.
            if _is_bias(path) and self._has_layer(path, copied):
                self.writes[path] = held(np.zeros(wanted.shape, wanted.dtype))
                zeroed.append(path)
            elif _is_bias(path) and self._has_layer(path, left):
                left.append(path)
            else:
                differences.append(self._missing(path, wanted))
        differences += self._unexpected()
        return TransferReport(tuple(copied), tuple(zeroed), tuple(left), tuple(differences))

    def _mismatch(self, wanted: Array, array: Array) -> str | None:
        if wanted.shape != array.shape:
            return "shape"
        if wanted.dtype == array.dtype:
            return None
        if not (self.cast and {wanted.dtype, array.dtype} <= FLOATS):
            return "dtype"
        return None if _fits(array, wanted.dtype) else "dtype"

    def _missing(self, path: str, wanted: Array) -> Difference:
        if path in self.source_tied:
            return Difference("tied", path, str(wanted), f"tied to {self.source_tied[path]}")
        return Difference("missing", path, str(wanted), "-")

    def _unexpected(self) -> Iterator[Difference]:
        for path, array in self.arrays.items():
            if path in self.variables or not self.chosen(path):
                continue
            received = "None" if array is None else str(array)
            if path in self.tied:
                own = self.arrays.get(self.tied[path])
                if array is None or (own is not None and _equal(own, array)):
                    continue
                yield Difference("tied", path, f"tied to {self.tied[path]}", received)
            elif array is None or not self._is_zero_bias(path, array):
                yield Difference("unexpected", path, "-", received)

    def _is_zero_bias(self, path: str, array: Array) -> bool:
        layer = _is_bias(path) and self._has_layer(path, self.variables)
        return layer and not array.read().any()

    def _has_layer(self, path: str, paths: Iterable[str]) -> bool:
        """Tell whether the layer of a bias has another weight, no LoRA, among these paths."""
        layer = path.rpartition(".")[0]
        return any(p != path and p.rpartition(".")[0] == layer and not is_lora(p) for p in paths)

    def write(self) -> None:
        """Write what was planned, one array at a time."""
        for path, array in self.writes.items():
            variable = self.variables[path]
            place = getattr(variable.value, "sharding", None)
            value = array.read() if array.variable is None else array.variable.value
            # `ops.array` copies: no two models share the memory of a weight.
            variable.assign(value if array.new else keras.ops.array(value, variable.dtype))
            if keras.config.backend() == "jax":
                _settle(variable, place)
        finalize_layers(self.model)
        finalize_layers(owner_of(self.model))


def finalize_layers(model: keras.Model) -> None:
    """Let layers that compute with a copy of their weights make it anew, as loading does."""
    copies = [x for x in graph.layers_within(model) if isinstance(x, keras.layers.Normalization)]
    for layer in copies:
        layer.finalize_state()
    if copies:  # which are constants in what was compiled
        model.predict_function = model.test_function = model.train_function = None


def _settle(variable: keras.Variable, place: Any) -> None:
    """Put the new value of a variable of JAX on the devices of the old one."""
    import jax

    if variable.value.sharding != place:
        variable.assign(jax.device_put(variable.value, place))
    # Else JAX runs ahead, with the old and new arrays of many weights in memory.
    variable.value.block_until_ready()


def _arrays(
    source: Source, destination: Mapping[str, keras.Variable]
) -> tuple[dict[str, Array | None], dict[str, str]]:
    """Return the arrays of a source by path, and which of its paths are tied to which."""
    if isinstance(source, Mapping):
        return _safe(flatten(source), destination), {}
    if isinstance(source, str | Path):
        file = Path(source)
        if file.suffix != ".safetensors" or not file.is_file():
            raise SurgeryError(
                f"transfer_weights at '{source}': expected a `.safetensors` file that exists. "
                "Received another path. Files of Keras are loaded by `load_weights` of the "
                "backbone that they were saved from."
            )
        return {**read_arrays(lambda: open_file(file.resolve()), file.name)}, {}
    if not isinstance(source, keras.Model):
        raise SurgeryError(
            f"transfer_weights: expected a Keras model, a weight tree or the path of a "
            f"`.safetensors` file as source. Received {type(source).__name__}. Pass one of them."
        )
    variables = variable_paths(source)
    arrays = {path: of_variable(variable) for path, variable in variables.items()}
    return _safe(arrays, destination), aliases(source)


def _safe(
    arrays: Mapping[str, Array | None], destination: Mapping[str, keras.Variable]
) -> dict[str, Array | None]:
    """Read what is about to be overwritten before it is."""
    own = {id(v) for v in destination.values()}
    return {
        path: held(array.read().copy()) if array and id(array.variable) in own else array
        for path, array in arrays.items()
    }


def _rules(rename: Rename | None, paths: Iterable[str], others: Iterable[str]) -> Rename | None:
    """Return a mapping without the rules that are for other paths."""
    if not isinstance(rename, Mapping):
        return rename

    def fits(rule: str, among: Iterable[str]) -> bool:
        return any(f"{path}.".startswith(f"{rule}.") for path in among)

    return {r: new for r, new in rename.items() if fits(r, paths) or not fits(r, others)}


def _is_bias(path: str) -> bool:
    return path.rpartition(".")[2].partition("#")[0] == "bias"


def _equal(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a.read(), b.read())


def _fits(array: Array, dtype: np.dtype) -> bool:
    """Tell whether no value becomes infinite in another dtype."""
    value = array.read()
    with np.errstate(over="ignore"):
        return bool((np.isfinite(value.astype(dtype)) == np.isfinite(value)).all())
