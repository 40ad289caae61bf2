"""What a job is asked for: the model, its controls, and the facts that its output depends on."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.controls import bind_controls, check_names
from backbone_surgery.presets import preset_of
from backbone_surgery.recipes.recipe import edit_digest, versions
from backbone_surgery.vectors.activations import check_task

LM = CachedCausalLM | Callable[[], CachedCausalLM]
Controls = Mapping[str, Any]


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


def read_controls(controls: Controls | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the controls that have one value, and those that have a column of values."""
    read = check_names("generate_dataset", controls)
    by_column = {name: value for name, value in read.items() if isinstance(value, str)}
    return {name: value for name, value in read.items() if name not in by_column}, by_column


def controls_digest(lm: CachedCausalLM, controls: Controls | None) -> str:
    """Return the digest of what controls bind to, in a short row and in a longer one.

    Raises:
        SurgeryError: a control is not known, or its value does not fit.
    """
    total = hashlib.sha256()
    for name, value in sorted(bind_controls(lm.opened, controls, np.array([1, 9])).items()):
        total.update(f"{name} {value.dtype} {value.shape} ".encode())
        total.update(np.ascontiguousarray(value).tobytes())
    return f"sha256:{total.hexdigest()}"


def described(lm: CachedCausalLM) -> dict[str, Any]:
    """Return what is to be known of a model and of the code that runs it, as JSON.

    Raises:
        SurgeryError: the edit has no description, see `save_recipe`.
    """
    owner = lm.opened.owner
    return {
        "model": {"class": type(owner).__name__, "preset": preset_of(owner)},
        "edit": {
            "rewrites": [type(rewrite).__name__ for rewrite in lm.opened.rewrites],
            "digest": edit_digest(lm.opened),
        },
        "versions": versions(),
    }
