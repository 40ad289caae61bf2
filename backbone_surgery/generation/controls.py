"""Controls: from what a user passes as `controls=` to arrays for the inputs of the graph."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from backbone_surgery.backbone import EditedBackbone
from backbone_surgery.errors import SurgeryError, closest
from backbone_surgery.rewrites import Rewrite, Rows


def bind_controls(
    model: EditedBackbone, controls: Mapping[str, Any] | None, prompt_lengths: np.ndarray
) -> dict[str, np.ndarray]:
    """Return an array `[batch, ...]` for each input of the graph that is a control.

    A control is known by the name of the rewrite that declares it, or, for an input that a user
    put into the graph by hand, by the name of that input.

    Args:
        model: the opened graph.
        controls: `{name: value}`; a control that is left out takes its default.
        prompt_lengths: int[batch].
    """
    given = dict(controls or {})
    inputs = {t.name: t for t in model.inputs if t.name not in ("token_ids", "padding_mask")}
    shapes = {name: t.shape[1:] for name, t in inputs.items()}
    rows = Rows(np.asarray(prompt_lengths), (), shapes, model.defaults)
    fired = {id(f.rewrite): f.sites for f in model.report}
    rewrites = {r.control: r for r in model.rewrites if isinstance(r, Rewrite) and r.control}
    by_hand = {name: t for name, t in inputs.items() if name not in model.defaults}
    for name in given:
        if name not in rewrites and name not in by_hand:
            raise SurgeryError(
                f"generate at control '{name}': expected a control of this model. "
                f"{closest(name, [*rewrites, *by_hand])} Declare it with a rewrite."
            )
    bound = {name: np.broadcast_to(d, (rows.batch, *d.shape)) for name, d in model.defaults.items()}
    for name, rewrite in rewrites.items():
        bound.update(rewrite.bind(given.get(name), replace(rows, sites=fired[id(rewrite)])))
    for name, tensor in by_hand.items():
        bound[name] = _by_hand(name, tensor, given, rows.batch)
    return {name: np.asarray(value, inputs[name].dtype) for name, value in bound.items()}


def _by_hand(name: str, tensor: Any, given: Mapping[str, Any], batch: int) -> np.ndarray:
    if name not in given:
        raise SurgeryError(
            f"generate at control '{name}': expected a value, since the graph has an input of that "
            f"name and no default for it. Received controls {sorted(given)}. Pass "
            f"`controls={{'{name}': ...}}`."
        )
    value = np.asarray(given[name])
    wanted = (batch, *tensor.shape[1:])
    try:
        return np.broadcast_to(value, wanted)
    except ValueError:
        raise SurgeryError(
            f"generate at control '{name}': expected an array that broadcasts to {wanted}. "
            f"Received shape {value.shape}. Pass one row for each prompt."
        ) from None
