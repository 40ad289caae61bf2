"""What `score` runs: the edited graph, with a user's function between its layers."""

import contextvars
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.contexts import setting
from backbone_surgery.errors import SurgeryError, shown, shown_array, shown_ids
from backbone_surgery.generation.controls import (
    bind_controls,
    check_names,
    read_inputs,
)
from backbone_surgery.numbers import read_int32, read_mask
from backbone_surgery.opening.layers import is_unknown
from backbone_surgery.opening.logits import logits_of
from backbone_surgery.opening.model import EditedBackbone, arrays_in_place
from backbone_surgery.opening.once import made_once
from backbone_surgery.opening.site import BLOCK, Identity, Site
from backbone_surgery.rewriting.rewrite import by_control

InterceptFn = Callable[[Any, int], Any]
"""Maps activations float[batch, time, hidden_dim] and a layer's index to what takes their place."""

_intercept: contextvars.ContextVar[InterceptFn | None] = contextvars.ContextVar(
    "intercept", default=None
)


class Intercept(Identity):
    """A node where the function of the call at hand may change what passes."""

    def __init__(self, index: int) -> None:
        super().__init__(name=f"intercept_{index + 1}")
        self.index = index

    def call(self, inputs):
        """Hand on what the function of the call at hand makes of the input."""
        intercept = _intercept.get()
        if intercept is None:
            return inputs
        result = intercept(inputs, self.index)
        try:
            outputs = ops.convert_to_tensor(result)
        except (TypeError, ValueError):
            outputs = None
        if outputs is None or outputs.shape != inputs.shape:
            raise SurgeryError(
                f"score at 'layer_intercept_fn': expected activations {list(inputs.shape)} for "
                f"index {self.index}, as it is given. Received {shown_array(result)}. Return what "
                "takes their place."
            )
        return outputs


def score(
    lm: Any,
    token_ids: Any,
    padding_mask: Any,
    scoring_mode: str,
    layer_intercept_fn: InterceptFn | None,
    target_ids: Any,
    controls: Mapping[str, Any] | None,
    prompt_lengths: Any,
) -> Any:
    """Score token ids by the edited graph of a task; see `CachedCausalLM.score`."""
    _check_arguments(scoring_mode, layer_intercept_fn, target_ids)
    model = made_once(lm.opened, "interceptable", lambda: interceptable(lm.opened))
    if keras.config.backend() == "jax":
        arrays_in_place(model.variables)
    head = lm.programs.head
    ids = _read_ids("token_ids", token_ids, head.input_dim)
    mask = _read_padding(padding_mask, ids)
    tensors = model.control_inputs
    by_name, by_input = _split(lm.opened, tensors, controls)
    values = read_inputs("score", tensors, by_input, ids.shape[0])
    from_end = any(is_unknown(x) for name, x in lm.opened.defaults.items() if name not in values)
    if prompt_lengths is not None or by_name or from_end:
        counts = _prompt_lengths(prompt_lengths, padding_mask, *ids.shape)
        values = {**_bound(lm.opened, by_name, *counts), **values}
    with setting({_intercept: layer_intercept_fn}):
        hidden_states = model({**values, "token_ids": ids, "padding_mask": mask})
    logits = logits_of(head, hidden_states)
    if scoring_mode == "logits":
        return logits
    targets = _read_ids("target_ids", target_ids, head.input_dim, ids)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    return loss(targets, logits)


@graph.building()
def interceptable(opened: EditedBackbone) -> EditedBackbone:
    """Put an `Intercept` after the embeddings, with index -1, and after each block, from 0 on."""
    embeddings = opened.family.embeddings
    blocks = iter(range(10**9))
    if not any(node.operation.name == embeddings for node in graph.graph_nodes(opened)):
        raise SurgeryError(
            f"score at '{opened.name}': expected the layer '{embeddings}' in the graph, whose "
            "output `layer_intercept_fn` gets with index -1. Received a graph without it. Keep "
            "the backbone's own embeddings."
        )

    def visit(layer: Any, *args: Any, **kwargs: Any) -> Any:
        is_block = isinstance(layer, Site) and layer.role == BLOCK
        if not is_block and layer.name != embeddings:
            return graph.KEEP
        return Intercept(next(blocks) if is_block else -1)(layer(*args, **kwargs))

    inputs = dict(opened.input)
    outputs, _ = graph.replay(
        opened.hidden_states(opened.output),
        {id(t): t for t in inputs.values()},
        visit,
        per_use=True,
    )
    return EditedBackbone(
        inputs,
        outputs,
        owner=opened.owner,
        family=opened.family,
        defaults=opened.defaults,
        name=f"interceptable_{opened.name}",
    )


def _check_arguments(scoring_mode: Any, layer_intercept_fn: Any, target_ids: Any) -> None:
    """Refuse another mode than the two, a loss without targets, and what is no function."""
    if not isinstance(scoring_mode, str) or scoring_mode not in ("logits", "loss"):
        raise SurgeryError(
            "score at 'scoring_mode': expected 'logits' or 'loss'. Received "
            f"{shown(scoring_mode)}. Pass one of them."
        )
    if scoring_mode == "loss" and target_ids is None:
        raise SurgeryError(
            "score at 'target_ids': expected token ids, to take the loss against. Received None. "
            "Pass the ids shifted by one, say: `np.roll(token_ids, -1, axis=1)`."
        )
    if layer_intercept_fn is not None and not callable(layer_intercept_fn):
        raise SurgeryError(
            "score at 'layer_intercept_fn': expected a function of activations and an index. "
            f"Received {shown(layer_intercept_fn)}. Leave it out to score as it is."
        )


def _read_ids(name: str, value: Any, count: int, like: Any = None) -> Any:
    """Read int32[batch, time] of tokens from 0 to below a count; tensors stay as they are.

    Args:
        name: the argument, for the error.
        value: what was passed.
        count: how many tokens the model knows.
        like: an array whose shape it must have.
    """
    is_tensor = ops.is_tensor(value) and keras.backend.is_int_dtype(value.dtype)
    ids = value if is_tensor else read_int32(value, 0, count - 1)
    shape = None if ids is None else tuple(ids.shape)
    if shape is None or len(shape) != 2 or 0 in shape or (like is not None and shape != like.shape):
        size = "[batch, time]" if like is None else f"{list(like.shape)}, as `token_ids`"
        raise SurgeryError(
            f"score at '{name}': expected int{size}, from 0 to {count - 1}. Received "
            f"{shown_ids(value)}. Pass what `generate` returned, say."
        )
    return ids


def _prompt_lengths(
    value: Any, padding_mask: Any, batch: int, time: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Read how many tokens of each row are its prompt, by default all of them: int32[batch].

    And how many it has, if `padding_mask` tells.
    """
    mask = None if padding_mask is None else read_mask(padding_mask)
    if value is None and mask is None and padding_mask is not None:
        raise SurgeryError(
            "score at 'prompt_lengths': expected an int, or one for each row, since JAX traces "
            "`padding_mask`, which would tell. Received None. Pass how many tokens prompts have."
        )
    tokens = np.full(batch, time) if mask is None else mask.sum(axis=1)
    known = tokens if padding_mask is None or mask is not None else None
    if value is None:
        return tokens, known
    lengths = read_int32(value, 0)
    if lengths is None or lengths.shape not in ((), (batch,)) or (lengths > tokens).any():
        raise SurgeryError(
            f"score at 'prompt_lengths': expected an int, or int[{batch}], one for each row, of at "
            f"most as many tokens as the rows have: {shown(tokens.tolist())}. Received "
            f"{shown(value)}. Pass how many tokens the prompts have."
        )
    return np.broadcast_to(lengths, batch), known


def _split(
    opened: EditedBackbone, inputs: Iterable[str], controls: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell controls that are named as rewrites name them from those named as inputs."""
    names = [name for name in by_control(opened.rewrites) if name not in inputs]
    controls = check_names("score", controls, [*names, *inputs])
    by_name = {name: value for name, value in controls.items() if name in names}
    return by_name, {name: value for name, value in controls.items() if name not in names}


def _bound(
    opened: EditedBackbone,
    controls: Mapping[str, Any],
    prompt_lengths: np.ndarray,
    lengths: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Return controls and the defaults of the others, as generation binds them to prompts."""
    controls = {**dict.fromkeys(opened.inputs_by_hand, 0), **controls}
    bound = bind_controls(opened, controls, prompt_lengths, "score", lengths)
    return {name: array for name, array in bound.items() if name in opened.defaults}


def _read_padding(value: Any, token_ids: Any) -> Any:
    """Read a padding mask of the shape of the tokens; by default nothing is padding."""
    if value is None:
        return ops.ones(token_ids.shape, "int32")
    mask = value if ops.is_tensor(value) else read_mask(value)
    if mask is None or tuple(mask.shape) != tuple(token_ids.shape):
        raise SurgeryError(
            f"score at 'padding_mask': expected bool{list(token_ids.shape)}, as `token_ids`. "
            f"Received {shown(value)}. Pass one of zeros and ones."
        )
    return ops.cast(mask, "int32")
