"""Hosts: processes that hold one mesh together, run the same Python, and feed the devices.

Whether they do is read off the weights of a model. Where each process holds a whole model, or there
is one process, which is the rule, nothing here does anything.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import tree

from backbone_surgery.errors import SurgeryError

_PARTS, _WORDS = 8, 8
"""What processes compare always has one shape, so that those in different calls meet too."""
_FAILED = 2**32 - 1
"""All words of a process that stands for one that raised an error."""


def span(model: keras.Model) -> bool:
    """Tell whether the weights of a model lie on a mesh that spans several processes."""
    if keras.config.backend() != "jax":
        return False
    import jax

    if jax.process_count() == 1:
        return False
    return not all(getattr(v.value, "is_fully_addressable", True) for v in model.variables)


def host_memory(sharded: bool) -> contextlib.AbstractContextManager[Any]:
    """Have arrays that are on their way to a mesh of devices wait in the memory of the host.

    Keras makes each weight whole before it lays it out. It does so on the default device: the
    first of the mesh, which would hold some of the largest weights whole beside its own shards.

    Args:
        sharded: whether weights go to a mesh; else nothing changes.
    """
    if not sharded or keras.config.backend() != "jax":
        return contextlib.nullcontext()
    import jax

    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX was told to do without the CPU
        return contextlib.nullcontext()


def to_numpy(x: Any) -> np.ndarray:
    """Return the value of an array or a variable, not to be written to.

    One that lies in parts on several hosts is gathered. So all of them must ask for it.
    """
    value = x.value if isinstance(x, keras.Variable) else x
    if keras.config.backend() != "jax":
        return keras.ops.convert_to_numpy(value)
    if getattr(value, "is_fully_addressable", True) or value.is_fully_replicated:
        return np.asarray(value)  # Keras would copy what can be looked at where it is
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(value, tiled=True)


def agree(model: keras.Model, operation: str, parts: Mapping[str, Any]) -> None:
    """Check that all processes that hold a model together pass the same values to one operation.

    Args:
        model: the model.
        operation: named in the error.
        parts: at most eight trees of arrays, numbers and text, by what they are called.

    Raises:
        SurgeryError: they do not; in every process.
    """
    if not span(model):
        return
    from jax.experimental import multihost_utils

    own = np.zeros((1 + _PARTS, _WORDS), np.uint32)
    for i, value in enumerate((operation, *parts.values())):
        own[i] = np.frombuffer(digest(value), np.uint32)
    found = np.asarray(multihost_utils.process_allgather(own))
    equal = (found == own).all(axis=-1)
    if equal.all():
        return
    failed = [int(process) for process in np.flatnonzero((found == _FAILED).all(axis=(1, 2)))]
    if failed:
        raise _told(
            f"{operation}: expected all processes to get here. Received an error in process "
            f"{', '.join(map(str, failed))}. Look at what it says there."
        )
    others = [int(process) for process in np.flatnonzero(~equal.all(axis=1))]
    names = [name for i, name in enumerate(parts, 1) if not equal[:, i].all()]
    same = " and ".join(names) if equal[:, 0].all() else "call"
    raise _told(
        f"{operation}: expected the same {same} in every process. Received another in process "
        f"{', '.join(map(str, others))}. Run one script in all of them, with one set of arguments."
    )


@contextlib.contextmanager
def telling(model: Any) -> Iterator[None]:
    """Have the other processes that hold a model hear of an error in this one.

    They would wait for it for ever, where they next `agree`. There each of them raises an error
    too. Of an error of JAX itself nobody is told: that would take JAX.

    Args:
        model: the model; of anything else nobody hears.
    """
    try:
        yield
    except Exception as error:
        if isinstance(model, keras.Model) and span(model) and not _is_known(error):
            from jax.experimental import multihost_utils

            failed = np.full((1 + _PARTS, _WORDS), _FAILED, np.uint32)
            multihost_utils.process_allgather(failed)
            _mark(error)
        raise


def _is_known(error: BaseException) -> bool:
    """Tell whether other processes know of an error, or cannot be told."""
    import jax

    cause: BaseException | None = error
    while cause is not None:
        if hasattr(cause, "all_know") or isinstance(cause, jax.errors.JaxRuntimeError):
            return True
        cause = cause.__cause__
    return False


def _told(words: str) -> SurgeryError:
    """Return an error that every process raises, or knows of."""
    error = SurgeryError(words)
    _mark(error)
    return error


def _mark(error: Exception) -> None:
    error.all_know = True  # type: ignore[attr-defined]


def refuse(model: keras.Model, operation: str, instead: str) -> None:
    """Refuse what one process cannot do alone while others hold parts of the weights.

    Args:
        model: the model.
        operation: named in the error.
        instead: what to do, a sentence.
    """
    if span(model):
        raise SurgeryError(
            f"{operation}: expected one process that holds the whole model. Received one of "
            f"several on a mesh. {instead}"
        )


def refuse_parts(model: keras.Model, operation: str, instead: str) -> None:
    """Refuse what reads weights where no process has all parts of one.

    Args:
        model: the model.
        operation: named in the error.
        instead: what to do, a sentence.
    """
    if span(model) and not all(_is_here(v.value) for v in model.variables):
        raise SurgeryError(
            f"{operation}: expected weights that one process can read. Received a model whose "
            f"weights several processes hold in parts. {instead}"
        )


def _is_here(value: Any) -> bool:
    """Whether the devices of this process hold all parts of an array."""
    here = value.sharding.addressable_devices
    parts = value.sharding.devices_indices_map(value.shape).items()
    return {str(part) for _, part in parts} == {str(part) for d, part in parts if d in here}


def by_first(
    model: keras.Model, operation: str, parts: Mapping[str, Any], write: Callable[[], object]
) -> None:
    """Have the first of the processes that hold a model write, and the others wait until it has.

    Args:
        model: the model.
        operation: named in errors.
        parts: what is written and where to: see `agree`.
        write: writes it.

    Raises:
        SurgeryError: the processes do not agree on what is to be written, or the first one failed,
            which raises the error itself.
    """
    if not span(model):
        write()
        return
    agree(model, operation, parts)
    import jax
    from jax.experimental import multihost_utils

    error = None
    if jax.process_index() == 0:
        try:
            write()
        except Exception as caught:  # the others must hear of it before it goes on
            error = caught
    failed = multihost_utils.process_allgather(np.array(error is not None))
    if error is not None:
        _mark(error)
        raise error
    if np.asarray(failed).any():
        raise _told(
            f"{operation}: expected process 0 to write. Received an error there. Look at what it "
            "says."
        )


def digest(value: Any) -> bytes:
    """Return the sha256 of a tree of arrays, numbers and text."""
    total = hashlib.sha256()
    for path, leaf in tree.flatten_with_path(value):
        if not hasattr(leaf, "dtype"):
            total.update(f"{path} {leaf!r} ".encode())
            continue
        array = to_numpy(leaf) if keras.ops.is_tensor(leaf) else np.asarray(leaf)
        total.update(f"{path} {array.dtype} {array.shape} ".encode())
        total.update(array.tobytes())
    return total.digest()
