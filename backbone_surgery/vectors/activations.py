"""Activations: measure what stands at some sites, for many texts, in one graph."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import ops, tree
from rich.progress import Progress

from backbone_surgery import graph
from backbone_surgery.caching.known import is_known
from backbone_surgery.errors import PAST_FLOAT16, SurgeryError, shown, shown_ids
from backbone_surgery.generation.buckets import bucket
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.controls import bind_controls
from backbone_surgery.generation.prompts import Prompts, pack_right, read_prompts
from backbone_surgery.generation.request import LONGEST
from backbone_surgery.graph.emission import emit
from backbone_surgery.numbers import read_int32
from backbone_surgery.opening import site
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.layers import TokenPositions
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.once import made_once
from backbone_surgery.opening.predict import predict
from backbone_surgery.opening.state import Stateful
from backbone_surgery.vectors.pairs import listable
from backbone_surgery.vectors.prefixes import plan_runs

_ASKED = "measured_asked"


_Kinds = tuple[tuple[str, int], ...]
"""Dtypes and ranks of what a measuring layer is given."""


class TokenStates(keras.layers.Layer):
    """Take some tokens of each row.

    Call arguments:
        x: float[batch, time, ...].
        positions: int32[batch, time].
        padding_mask: int or bool[batch, time].
        tokens: int32[batch, asked], positions of the tokens within their row.
    """

    def __init__(self, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)

    def call(self, x, positions, padding_mask, tokens):
        """Pick by position, wherever the padding is."""
        others = [1] * (len(x.shape) - 2)
        real = ops.cast(padding_mask, "bool")[:, None]
        chosen = ops.logical_and(ops.equal(positions[:, None], tokens[:, :, None]), real)
        index = ops.argmax(ops.cast(chosen, "int32"), axis=2)
        return ops.take_along_axis(x, ops.reshape(index, (*ops.shape(index), *others)), axis=1)

    def compute_output_spec(self, x, positions, padding_mask, tokens):
        """One state for each token that is asked for."""
        return keras.KerasTensor((*tokens.shape, *x.shape[2:]), x.dtype)


def check_task(lm: Any, operation: str) -> None:
    """Refuse what is no `CachedCausalLM`; `operation` is named in the error."""
    if not isinstance(lm, CachedCausalLM):
        raise SurgeryError(
            f"{operation}: expected a `CachedCausalLM`. Received {shown(lm)} of type "
            f"{type(lm).__name__}. Make one of the backbone."
        )


def read_texts(
    lm: Any, texts: Any, operation: str, most: int | None = None, remedy: str = "Shorten it."
) -> list[np.ndarray]:
    """Turn texts into rows of token ids as generation does, start token included.

    Args:
        lm: a `CachedCausalLM`. Without a preprocessor the texts are sequences of token ids.
        texts: the texts, at least one.
        operation: for errors.
        most: how many tokens of a text to keep; all by default.
        remedy: what to do with a text that is too long, for the error.

    Returns:
        int32[tokens] for each text.
    """
    check_task(lm, operation)
    vocabulary = lm.opened.token_embedding.input_dim
    listed = list(texts) if listable(texts) else []
    if not listed:
        raise SurgeryError(
            f"{operation}: expected a list of texts. Received {shown(texts)}. Pass at least one."
        )
    if lm.preprocessor is not None:
        rows = read_prompts(listed, lm.preprocessor, vocabulary, operation).rows
    else:
        rows = [read_ids(text, vocabulary, operation) for text in listed]
    rows = [row[:most] for row in rows]
    check_lengths(lm, rows, operation, remedy)
    return rows


def check_lengths(
    lm: CachedCausalLM, rows: list[np.ndarray], operation: str, remedy: str = "Shorten it."
) -> None:
    """Refuse texts of more tokens than the model has learned positions."""
    longest = max(map(len, rows))
    if lm.max_positions is not None and longest > lm.max_positions:
        raise SurgeryError(
            f"{operation}: expected texts of at most {lm.max_positions} tokens, as many positions "
            f"as the model has learned. Received one of {longest}. {remedy}"
        )


def check_counted(rows: list[np.ndarray], operation: str) -> None:
    """Refuse a text of one token, where the first token of each is not counted."""
    for i, row in enumerate(rows):
        if len(row) < 2:
            raise SurgeryError(
                f"{operation} at text {i}: expected at least two tokens, since the first is not "
                "counted. Received one. Pass longer texts."
            )


def read_ids(text: Any, vocabulary: int, operation: str) -> np.ndarray:
    """Read the token ids of one text, int32[tokens]."""
    ids = read_int32(text, 0, vocabulary - 1)
    if ids is None or ids.ndim != 1 or not len(ids):
        raise SurgeryError(
            f"{operation}: expected token ids from 0 to {vocabulary - 1}, int[tokens], since the "
            f"model has no preprocessor. Received {shown_ids(text)}. Pass token ids, or attach a "
            "preprocessor."
        )
    return ids


def measure(
    lm: Any,
    rows: list[np.ndarray],
    layer: type[keras.layers.Layer],
    operation: str,
    *,
    at: str = "blocks.*",
    tokens: np.ndarray | None = None,
    asked: tuple[np.ndarray, ...] = (),
    batch_size: int = 32,
    controls: Mapping[str, Any] | None = None,
    verbose: int = 0,
) -> dict[str, np.ndarray]:
    """Run texts through the graph of a model, its rewrites applied, and measure at some sites.

    Batches all have one shape, so one program is compiled, and kept for the next call. With
    `tokens`, texts that begin another one are not run: theirs is read there.

    Args:
        lm: a `CachedCausalLM`.
        rows: token ids of each text.
        layer: class of what measures one site, such as `TokenStates`.
        operation: for errors.
        at: site selector.
        tokens: int32[rows], a position in each row, for `TokenStates`.
        asked: what the layer takes in place of tokens: arrays with a row for each text, or with one
            row for all.
        batch_size: how many rows to run at once.
        controls: as of `generate`.
        verbose: 1 shows a progress bar.

    Returns:
        `{site path: float32[rows, size]}`.
    """
    lengths = Prompts(rows).lengths
    bound = bind_controls(lm.opened, controls, lengths, operation)
    runs = plan_runs(rows, tokens, bound)
    each = asked or (runs.tokens,)
    kinds = tuple((x.dtype.name, x.ndim) for x in each)
    model = _measuring(lm.opened, at, layer, kinds)
    each = tuple(np.broadcast_to(x, (len(runs.texts), *x.shape[1:])) for x in each)
    width = min(bucket(int(lengths.max()), 16, steps=8), lm.max_positions or LONGEST)
    inputs = {name: value[runs.texts] for name, value in bound.items()}
    inputs |= pack_right([rows[i] for i in runs.texts], width, 0)
    inputs |= {f"{_ASKED}_{i}": x for i, x in enumerate(each)}
    count = len(runs.texts)
    size = min(batch_size, bucket(count))
    parts = []
    with Progress(disable=not verbose) as progress:
        for start in progress.track(range(0, count, size), description="measuring"):
            index = np.arange(start, start + size) % count
            part = {name: value[index] for name, value in inputs.items()}
            parts.append(predict(model, part))
    joined = {path: np.concatenate([p[path] for p in parts])[:count] for path in parts[0]}
    if tokens is not None:
        joined = {path: values[runs.run, runs.place] for path, values in joined.items()}
    measured = {path: np.asarray(values, np.float32) for path, values in joined.items()}
    _check_finite(measured, lm.opened.compute_dtype)
    return measured


def _check_finite(measured: Mapping[str, np.ndarray], dtype: str) -> None:
    for path, values in measured.items():
        finite = np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if not finite.all():
            raise SurgeryError(
                f"measuring at '{path}': expected finite activations. Received NaN or Inf for text "
                f"{finite.argmin()}, of a model that computes in {dtype}. "
                f"{PAST_FLOAT16}"
            )


def _measuring(opened: EditedBackbone, at: Any, layer: type, asked: _Kinds) -> keras.Model:
    """Return the model that gives what a layer measures at each site; it is compiled once."""
    selected = tuple(site.select(at, [place.path for place in site.places(opened)]))
    key = (selected, layer, asked)
    return made_once(opened, key, lambda: _derive(opened, *key))


@graph.building()
def _derive(
    opened: EditedBackbone, selected: tuple[str, ...], kind: type, asked: _Kinds
) -> keras.Model:
    inputs = {t.name: t for t in opened.inputs}
    given = [
        keras.Input((None,) * (rank - 1), dtype=dtype, name=f"{_ASKED}_{i}")
        for i, (dtype, rank) in enumerate(asked)
    ]
    padding_mask = inputs["padding_mask"]
    positions = TokenPositions(name="positions")(inputs["token_ids"], padding_mask)
    paths = {place.nodes: place.path for place in site.places(opened) if place.path in selected}
    last = list(paths.values())[-1]

    def visit(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(layer, TokenPositions):
            return positions
        path = paths.get(graph.visited_node())
        if path is None:
            return graph.KEEP
        x = layer(*args, **kwargs)
        if len(x.shape) != 3:
            raise SurgeryError(
                f"train at '{path}': expected a site of hidden states [batch, time, hidden_dim]. "
                f"Received one of shape {x.shape}. Choose another, such as 'blocks.*'."
            )
        emit(path, at_last(x) if path == last else apply(x))
        return x

    def apply(x: Any) -> Any:
        return kind()(x, positions, padding_mask, *given)

    def at_last(x: Any) -> Any:
        """Leave out what nothing that is measured depends on, after attention."""
        if kind is not TokenStates:
            return apply(x)
        return graph.hoist(x, apply, keeps)

    def keeps(layer: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        return _keeps_to_tokens(layer, args, kwargs, opened.family)

    mapping = {id(t): t for t in inputs.values()}
    _, emitted = graph.replay(opened.output, mapping, visit, per_use=True)
    outputs = {path: tensors[0] for path, tensors in emitted.items()}
    return keras.Model({**inputs, **{t.name: t for t in given}}, outputs, name="measuring")


def _keeps_to_tokens(layer: Any, args: tuple, kwargs: dict[str, Any], family: Family) -> bool:
    """Tell whether a layer works on each token alone, and takes values of tokens and no others."""
    tensors = [t for t in tree.flatten((args, kwargs)) if isinstance(t, keras.KerasTensor)]
    of_tokens = all(len(t.shape) > 2 and t.shape[:2] == (None, None) for t in tensors)
    return of_tokens and not isinstance(layer, Stateful) and is_known(layer, args, kwargs, family)
