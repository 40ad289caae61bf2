"""What a job is asked for: the model, its controls, and the facts that its output depends on."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras_hub
import numpy as np

from backbone_surgery import hosts
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.controls import bind_controls, check_names
from backbone_surgery.generation.fingerprint import digest, fingerprint, fingerprint_function
from backbone_surgery.rewriting.control import LAST
from backbone_surgery.vectors.activations import check_task
from backbone_surgery.vectors.vector import ControlVector

LM = CachedCausalLM | Callable[[], CachedCausalLM]
Controls = Mapping[str, Any]


class Columns(NamedTuple):
    """The columns of a control: of strengths, and of names of vectors, if any."""

    strength: str
    vector: str | None = None


def make(operation: str, lm: Any, ray: str | None) -> CachedCausalLM:
    """Return the model of a job, which may be passed as a function that makes it.

    Raises:
        SurgeryError: it is no model; or other processes are to make it, and cannot.
    """
    is_function = callable(lm) and not isinstance(lm, CachedCausalLM)
    if ray is not None and not is_function:
        raise SurgeryError(
            f"{operation} at 'lm': expected a function that makes a `CachedCausalLM`, since each "
            f"worker of Ray makes its own. Received {shown(lm)}. Pass "
            "`lambda: CachedCausalLM.from_preset(...)`, say."
        )
    model = lm() if is_function else lm
    check_task(model, operation)
    return model


def read_controls(controls: Controls | None) -> tuple[dict[str, Any], dict[str, Columns]]:
    """Return the controls that have one value, and the columns of the others.

    Raises:
        SurgeryError: `controls` is no mapping.
    """
    by_column: dict[str, Columns] = {}
    fixed = {}
    for name, value in check_names("generate_dataset", controls).items():
        if isinstance(value, str):
            by_column[name] = Columns(value)
        elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
            by_column[name] = Columns(*value)
        else:
            fixed[name] = value
    return fixed, by_column


def vectors_digest(vectors: Any, by_column: Mapping[str, Columns]) -> dict[str, str]:
    """Return the digest of each control vector by its name.

    Raises:
        SurgeryError: they are no mapping, one of them is no control vector, or no control has a
            column that could name them.
    """
    if not isinstance(vectors, Mapping):
        raise SurgeryError(
            "generate_dataset at 'vectors': expected control vectors by name. Received "
            f"{shown(vectors)}. Pass {{'mine': vector}}."
        )
    if vectors and all(columns.vector is None for columns in by_column.values()):
        raise SurgeryError(
            f"generate_dataset at 'vectors': expected a control with a column that names them. "
            f"Received {list(vectors)}, and no such control, so they would change nothing. Pass "
            "two columns of a control, those of strengths and of names, or leave them out."
        )
    digests = {}
    for name, vector in vectors.items():
        if not isinstance(vector, ControlVector):
            raise SurgeryError(
                f"generate_dataset at 'vectors': expected control vectors by name. Received "
                f"{shown(vector)} at '{name}'. Load it with `ControlVector.load`."
            )
        digests[name] = f"sha256:{hosts.digest(dict(vector.directions)).hex()}"
    return digests


def defaults(
    lm: CachedCausalLM, fixed: Controls, by_column: Mapping[str, Columns]
) -> dict[str, Any]:
    """Return controls of rows that are not known yet: those by column take their default.

    An input that a user put into the graph has none, and takes 0.
    """
    inputs = lm.opened.inputs_by_hand
    return {**fixed, **{name: 0 if name in inputs else None for name in by_column}}


def controls_digest(operation: str, lm: CachedCausalLM, controls: Controls | None) -> str:
    """Return the digest of what controls bind to, in a short row, a longer one and the longest.

    Raises:
        SurgeryError: a control is not known, or its value does not fit.
    """
    bound = bind_controls(lm.opened, controls, np.array([1, 9, LAST]), operation)
    return f"sha256:{hosts.digest(bound).hex()}"


def sampler_facts(sampler: Any) -> dict[str, Any]:
    """Return what is to be known of a sampler, as JSON."""
    config = keras_hub.samplers.serialize(sampler)
    return {"config": config, "digest": digest(fingerprint(sampler))}


def score_facts(operation: str, name: str, function: Any) -> dict[str, str]:
    """Return where a function is from, as far as that can be told, and its digest.

    Raises:
        SurgeryError: it closes over something that has no value to compare.
    """
    qualified = getattr(function, "__qualname__", type(function).__qualname__)
    return {
        "function": f"{getattr(function, '__module__', None)}.{qualified}",
        "digest": digest(fingerprint_function(f"{operation} at score '{name}'", function)),
    }
