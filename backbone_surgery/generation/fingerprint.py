"""Fingerprints: everything that a sampler depends on, as one hashable value.

A compiled program holds what a sampler was when it was compiled, so the program is kept under the
sampler's fingerprint. Objects count by value, not by identity: a sampler made anew for each call
compiles once, and one whose attributes were changed compiles again. What has no value to compare,
such as a lock or a Keras layer, is refused by name.
"""

import dis
import hashlib
import sys
import types
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from backbone_surgery.errors import SurgeryError

_ATOMS = (type(None), bool, int, str, bytes, types.EllipsisType, types.NotImplementedType)
_NAMED = (type, types.ModuleType, np.ufunc)
_ARRAYS = (np.ndarray, np.generic, jax.Array, keras.Variable)
_WITHOUT_VALUE = (keras.Layer, keras.Optimizer, keras.Metric, keras.Loss)


def fingerprint(sampler: Any, leave_out: Iterable[str] = ()) -> Hashable:
    """Return a hashable value of everything that a sampler depends on.

    That is: its class, and what a user's own classes define; its attributes, with the arrays,
    functions and objects in them; and, for each function, what it closes over and the globals that
    it reads in the modules of the sampler's classes. Other modules count as they are imported.

    Args:
        sampler: a `keras_hub.samplers.Sampler`.
        leave_out: names of attributes that do not count. Its seed generators never do.

    Raises:
        SurgeryError: an attribute has no value to compare, by name.
    """
    classes = [c for c in type(sampler).__mro__ if c is not object and not _is_kerashubs(c)]
    walk = _Walk([vars(sys.modules[c.__module__]) for c in classes if c.__module__ in sys.modules])
    walk.enter(sampler)
    parts: list[Hashable] = [_Identity(type(sampler))]
    for name, value in _members(sampler, classes):
        if name in leave_out or _draws(value):
            continue
        try:
            parts.append((name, walk.value(value)))
        except (_UnknownError, RecursionError) as error:
            raise SurgeryError(
                f"compile with sampler {type(sampler).__name__} at '{name}': expected numbers, "
                "text, arrays, functions, and containers and plain objects of these, so that a "
                f"change can be noticed. Received {error}. Keep in the sampler what it needs of "
                "that, as an array or a list."
            ) from None
    return tuple(parts)


def as_text(value: Any) -> str:
    """Return a fingerprint, or a key made of one, as text: alike in all processes."""
    if isinstance(value, _Identity):
        return as_text(value.of)
    if isinstance(value, _NAMED):
        name = getattr(value, "__qualname__", value.__name__)
        return f"{getattr(value, '__module__', '')}.{name}"
    if isinstance(value, types.CodeType):
        return as_text((value.co_code, value.co_consts, value.co_names))
    if isinstance(value, tuple):
        return f"({', '.join(map(as_text, value))})"
    if isinstance(value, frozenset):  # in the order of their hashes, which differ
        return f"{{{', '.join(sorted(map(as_text, value)))}}}"
    return repr(value) if isinstance(value, (*_ATOMS, float, complex)) else type(value).__name__


def _is_kerashubs(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "keras_hub"


def _draws(value: Any) -> bool:
    """Tell whether an attribute is a seed generator, or the list that a sampler keeps of them."""
    values = value if isinstance(value, list) and value else [value]
    return all(isinstance(v, keras.random.SeedGenerator) for v in values)


def _members(sampler: Any, classes: list[type]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a sampler, and the methods and values of a user's own classes."""
    yield from sorted(vars(sampler).items())
    for cls in classes:
        for name, value in vars(cls).items():
            if isinstance(value, types.MemberDescriptorType):  # of `__slots__`
                yield name, getattr(sampler, name, None)
            elif not name.startswith(("__", "_abc_")):
                yield f"{cls.__name__}.{name}", value


class _UnknownError(Exception):
    """Something has no value that could be compared."""


class _Identity:
    """Something that is compared by identity, and kept alive meanwhile."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


class _Walk:
    """One walk over a sampler. What is met again counts as the place where it was met first."""

    def __init__(self, modules: list[dict[str, Any]]) -> None:
        self.modules = modules
        self.met: dict[int, int] = {}
        self.alive: list[Any] = []

    def enter(self, x: Any) -> None:
        self.met[id(x)] = len(self.met)
        self.alive.append(x)

    def value(self, x: Any) -> Hashable:
        if isinstance(x, _ATOMS):
            return type(x), x
        if isinstance(x, float | complex):
            return type(x), repr(x)  # NaN equals itself, and 0.0 differs from -0.0
        if isinstance(x, _NAMED):
            return _Identity(x)
        if id(x) in self.met:
            return "again", self.met[id(x)]
        self.enter(x)
        if isinstance(x, _ARRAYS):
            return _array(x)
        if type(x) in (list, tuple):
            return type(x), self.values(x)
        if type(x) is dict:
            return dict, self.values(x), self.values(x.values())
        if type(x) in (set, frozenset):
            return type(x), frozenset(map(self.value, x))
        if isinstance(x, types.FunctionType):
            return self.function(x)
        if isinstance(x, types.MethodType | types.BuiltinMethodType):
            return x.__name__, self.value(getattr(x, "__func__", None)), self.value(x.__self__)
        for inner in ("__func__", "__wrapped__", "fget"):  # static methods, `jax.jit`, properties
            if callable(getattr(x, inner, None)):
                return type(x), self.value(getattr(x, inner))
        return self.instance(x)

    def values(self, items: Iterable[Any]) -> Hashable:
        return tuple(map(self.value, items))

    def function(self, function: types.FunctionType) -> Hashable:
        scope = function.__globals__
        names = _globals_read(function.__code__) if any(scope is m for m in self.modules) else ()
        return (
            function.__code__,
            tuple(self.cell(cell) for cell in function.__closure__ or ()),
            self.values((function.__defaults__, function.__kwdefaults__, vars(function))),
            tuple((name, self.module_value(scope[name])) for name in names if name in scope),
        )

    def cell(self, cell: Any) -> Hashable:
        try:
            return self.value(cell.cell_contents)
        except ValueError:  # it is empty
            return None

    def module_value(self, x: Any) -> Hashable:
        """Return the value of a global; what has none counts as itself."""
        try:
            return self.value(x)
        except _UnknownError:
            return _Identity(x)

    def instance(self, x: Any) -> Hashable:
        """Return the value of an object, as it would be pickled."""
        if isinstance(x, _WITHOUT_VALUE):
            raise _UnknownError(f"a Keras object, {type(x).__name__}")
        try:
            reduced = x.__reduce_ex__(2)
        except Exception:
            raise _UnknownError(f"a {type(x).__name__}") from None
        if isinstance(reduced, str):
            return type(x), reduced
        parts = (list(part) if isinstance(part, Iterator) else part for part in reduced)
        return type(x), self.values(parts)


def _array(x: Any) -> Hashable:
    try:
        array = np.ascontiguousarray(x)
    except Exception:
        raise _UnknownError(f"a {type(x).__name__} that is no array of numbers") from None
    if array.dtype.hasobject:
        raise _UnknownError("an array of objects")
    return type(x), str(array.dtype), np.shape(x), hashlib.sha256(array.tobytes()).digest()


def _globals_read(code: types.CodeType) -> list[str]:
    """Return the names of the globals that some code, or a function in it, reads."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_globals_read(constant))
    return sorted(names)
