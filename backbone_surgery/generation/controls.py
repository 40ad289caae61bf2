"""Controls: from what a user passes as `controls=` to arrays for the inputs of the graph."""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery.errors import SurgeryError, closest, shown, shown_array
from backbone_surgery.numbers import fits, read_as
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.rewriting import Condition, Rows
from backbone_surgery.rewriting.control import is_after
from backbone_surgery.rewriting.rewrite import by_control

ends_count: ContextVar[bool] = ContextVar("ends_count", default=True)
"""Whether a control may not name tokens that a row has not; in a job over many rows it may."""


def bind_controls(
    model: EditedBackbone,
    controls: Mapping[str, Any] | None,
    prompt_lengths: np.ndarray,
    operation: str = "generate",
    lengths: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Return an array `[batch, ...]` for each input of the graph that is a control.

    A control is known by the name of the rewrite that declares it, or, for an input that a user
    put into the graph by hand, by the name of that input.

    Args:
        model: the opened graph.
        controls: `{name: value}`; a control that is left out takes its default.
        prompt_lengths: int[batch].
        operation: whose controls they are, for errors.
        lengths: int[batch], how many tokens of each row are run at most, if that is known.
    """
    inputs, by_hand = model.control_inputs, model.inputs_by_hand
    shapes = {name: t.shape[1:] for name, t in inputs.items()}
    known = np.asarray(prompt_lengths), (), shapes, model.defaults, model.max_positions
    rows = Rows(*known, lengths if ends_count.get() else None)
    fired = {id(f.rewrite): f.sites for f in model.report}
    rewrites = by_control(model.rewrites)
    values = check_names(operation, controls, [*rewrites, *by_hand])
    bound = {name: np.broadcast_to(d, (rows.batch, *d.shape)) for name, d in model.defaults.items()}
    for name, rewrite in rewrites.items():
        bound.update(rewrite.bind(values.get(name), replace(rows, sites=fired[id(rewrite)])))
        _check_condition(operation, rewrite, rewrites, values)
    for name, tensor in by_hand.items():
        bound[name] = _by_hand(operation, name, tensor, values, rows.batch)
    return {name: np.asarray(value, inputs[name].dtype) for name, value in bound.items()}


def _check_condition(
    operation: str, rewrite: Any, rewrites: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """Refuse to steer tokens before those that the condition watches: nothing would happen."""
    condition = rewrites.get(getattr(rewrite, "when", None) or "")
    if not isinstance(condition, Condition):
        return
    chosen = [getattr(values.get(r.name), "tokens", None) for r in (condition, rewrite)]
    watched, steered = (
        r.tokens if own is None else own
        for own, r in zip(chosen, (condition, rewrite), strict=True)
    )
    if is_after(watched, steered):
        raise SurgeryError(
            f"{operation} at control '{rewrite.name}': expected tokens that come after the first "
            f"one that its condition watches, '{rewrite.when}'. Received {shown(steered)}, and "
            f"{shown(watched)} watched: nothing would be steered. Watch earlier tokens, or steer "
            "later ones."
        )


def check_names(
    operation: str, controls: Any, known: Iterable[str] | None = None
) -> Mapping[str, Any]:
    """Return the controls, none as an empty dict; refuse what is no mapping, and other names.

    Args:
        operation: whose controls they are, for the error.
        controls: what a user passed.
        known: the names that may be in it; by default any.
    """
    if controls is None:
        return {}
    if not isinstance(controls, Mapping):
        raise SurgeryError(
            f"{operation} at 'controls': expected a dict of controls by name. Received "
            f"{shown(controls)}. Pass `{{name: value}}`."
        )
    names = [*controls] if known is None else [*known]
    for name in controls:
        if name not in names:
            hint = closest(name if isinstance(name, str) else shown(name), names)
            raise SurgeryError(
                f"{operation} at control {shown(name)}: expected a control of this model. {hint} "
                "Declare it with a rewrite."
            )
    return controls


def check_by_hand(inputs: Iterable[keras.KerasTensor]) -> None:
    """Refuse inputs that a user put into the graph and that have no fixed size for each row.

    Raises:
        SurgeryError: by name.
    """
    for tensor in inputs:
        shape = tuple(tensor.shape)
        if not shape or shape[0] is not None or None in shape[1:]:
            raise SurgeryError(
                f"CachedCausalLM at input '{tensor.name}': expected run-time inputs of any number "
                f"of rows, and of a fixed size for each, such as (None, 8). Received {shape}. Make "
                "the input with all sizes of a row, by `keras.Input((8,))` say."
            )


def _by_hand(
    operation: str, name: str, tensor: Any, values: Mapping[str, Any], batch: int
) -> np.ndarray:
    if name not in values:
        raise SurgeryError(
            f"{operation} at control '{name}': expected a value, since the graph has an input of "
            f"that name and no default for it. Received controls {sorted(values)}. Pass "
            f"`controls={{'{name}': ...}}`."
        )
    size = (batch, *tensor.shape[1:])
    value = read_as(tensor.dtype, values[name])
    try:
        if value is not None:
            return np.broadcast_to(value, size)
    except ValueError:
        pass
    raise SurgeryError(
        f"{operation} at control '{name}': expected {tensor.dtype} numbers that broadcast to "
        f"{size}. Received {shown(values[name])}. Pass one row for each prompt."
    )


def read_inputs(
    operation: str, tensors: Mapping[str, keras.KerasTensor], controls: Any, batch: int
) -> dict[str, Any]:
    """Read the values of inputs that are controls, a row for each row of tokens.

    Tensors are checked by their shape alone, since looking at one waits for it.

    Args:
        operation: whose controls they are, for the error.
        tensors: the inputs that are controls, by name.
        controls: `{input name: array[batch, ...]}`, or `None`.
        batch: how many rows there are.

    Raises:
        SurgeryError: another name, or a value that does not fit.
    """
    values = dict(check_names(operation, controls, tensors))
    for name, value in values.items():
        tensor = tensors[name]
        array = value if ops.is_tensor(value) else read_as(tensor.dtype, value)
        wanted = (batch, *tensor.shape[1:])
        if array is None or not fits(array.shape, wanted):
            raise SurgeryError(
                f"{operation} at '{name}': expected {tensor.dtype}{list(wanted)}. Received "
                f"{shown_array(value)}. Pass a row for each row of tokens."
            )
        values[name] = array
    return values
