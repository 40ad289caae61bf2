"""Checking: that the cached graph computes what the uncached one does, however tokens are cut."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import tree

from backbone_surgery import graph, hosts, target
from backbone_surgery.caching.cache import new_cache
from backbone_surgery.caching.choices import chooses, with_choices
from backbone_surgery.caching.model import BackboneWithCache
from backbone_surgery.caching.rewire import derive
from backbone_surgery.errors import (
    PAST_FLOAT16,
    CacheMismatchError,
    SurgeryError,
    closest,
    shown,
)
from backbone_surgery.numbers import fits, is_int, read_as
from backbone_surgery.opening.layers import is_unknown
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.open import open_backbone
from backbone_surgery.opening.predict import predict
from backbone_surgery.opening.state import Stateful

_TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 2e-2}
_SPARE = 3
"""Slots of a cache that hold no token."""
_BATCH = 3
_SOME_TOKENS = np.array([3, 12, 12], np.int32)
"""A range of tokens for what counts from the end of a prompt."""


@dataclass(frozen=True)
class CheckReport:
    """What `check` measured.

    Attributes:
        errors: `{way of cutting: largest difference of a hidden state, over the largest one}`, or
            of a score that something is chosen by where that is larger; see `check`. "opened" is
            that between the backbone and its opened graph.
        tolerance: what each of them must not exceed.
        tokens: number of tokens in a row.
        caches: number of nodes that keep state.
    """

    errors: dict[str, float]
    tolerance: float
    tokens: int
    caches: int

    def __str__(self) -> str:
        lines = [f"cached = uncached over {self.tokens} tokens and {self.caches} caches"]
        lines += [
            f"  {way}: {error:.1e} (at most {self.tolerance:.0e})"
            for way, error in self.errors.items()
        ]
        return "\n".join(lines)


@target.precision("highest")
def check(
    backbone: keras.Model, controls: Mapping[str, Any] | None = None, seed: int = 0
) -> CheckReport:
    """Check that the cached graph of a backbone computes what the uncached one does.

    Runs random tokens, in rows of different lengths padded on the left, uncached in one pass, and
    cached in one pass, token by token and in uneven chunks; and then one row alone, without
    padding. Where a layer keeps state without slots, chunks are also run with padding after them.
    What fails here must not be used to generate: some layer of the graph mixes tokens without
    keeping state, attends to other tokens than its own past, or mixes rows. Of a backbone that was
    not edited, the opened graph is compared with the backbone itself too, in float32.

    Products of float32 are whole here, whatever they are when tokens are generated, so that a GPU
    and a TPU are held to what a CPU is.

    In half precision the experts of a mixture, and the features that a `SparseAutoencoder` or a
    `Transcoder` keeps, are chosen as in the uncached pass, since rounding alone may choose others.
    The logits of the routers, and the features before some are kept, must agree as the hidden
    states must. Where layers quantise their inputs, as in int8, it is as in half precision.

    Args:
        backbone: whatever `rewire` takes.
        controls: `{input name: array of one row}` for inputs that have no default.
        seed: of the random tokens.

    Returns:
        What was measured.

    Raises:
        CacheMismatchError: the two disagree.
        SurgeryError: a control or the seed is none, or hidden states are not finite.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> report = bs.check(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> max(report.errors.values()) < 1e-5
        True
    """
    opened = open_backbone(backbone)
    dtype = _precision(opened)
    uncached, cached = _models(opened, dtype != "float32")
    if not is_int(seed) or seed < 0:
        raise SurgeryError(
            f"check at 'seed': expected an int from 0. Received {shown(seed)}. Leave it out."
        )
    rng = np.random.default_rng(seed)
    rows = _rows(opened, {} if controls is None else controls)
    time = _length(opened)
    token_ids = rng.integers(0, opened.token_embedding.input_dim, (_BATCH, time), dtype=np.int32)
    mask = np.arange(time)[None] >= np.array([0, time // 3, time // 2])[:, None]
    outputs = predict(uncached, {"token_ids": token_ids, "padding_mask": mask, **rows})
    wanted = _compared(cached, outputs)
    if not np.isfinite(_real(wanted, mask)["hidden_states"]).all():
        raise SurgeryError(
            f"check at '{opened.name}': expected finite hidden states. Received NaN or an infinite "
            f"one without a cache, of a model that computes in {opened.compute_dtype}. "
            f"{PAST_FLOAT16}"
        )
    scores = {f"{name}_given": x for name, x in wanted.items() if name != "hidden_states"}
    by_token = {"token_ids": token_ids, **scores}
    # In half precision a backbone rounds elsewhere, in every block.
    errors = _opening_error(backbone, opened, token_ids, rows) if dtype == "float32" else {}
    for way, chunks in _ways(time).items():
        got = _run_cached(cached, by_token, mask, chunks, rows)
        errors[way] = _error(_real(got, mask), _real(wanted, mask))
    if any(spec.slot_axis is None for specs in cached.states for spec in specs.values()):
        half = [time - time // 2, time // 2]
        got = _run_cached(cached, by_token, mask, half, rows, padding_after=2)
        errors["padding after chunks"] = _error(_real(got, mask), _real(wanted, mask))
    real = mask[-1]
    one = {name: value[-1:] for name, value in rows.items()}
    by_token = {name: value[-1:, real] for name, value in by_token.items()}
    alone = _run_cached(cached, by_token, mask[-1:, real], [int(real.sum())], one)
    wanted = {name: value[-1:, real] for name, value in wanted.items()}
    errors["a row alone"] = _error(alone, wanted)
    tolerance = _TOLERANCE.get(dtype, 1e-4)
    report = CheckReport(errors, tolerance, time, len(cached.output["cache"]))
    _judge(report, opened)
    return report


def _judge(report: CheckReport, opened: EditedBackbone) -> None:
    """Refuse a graph whose errors are larger than the tolerance."""
    wrong = [way for way, error in report.errors.items() if not error <= report.tolerance]
    if wrong == ["opened"]:
        raise CacheMismatchError(
            f"check at '{opened.name}': expected the hidden states of the backbone that was "
            f"opened. Received {report}. The family '{opened.family.name}' leaves something of the "
            "decoder block out, or does it in another way: look at its `open_block`."
        )
    if wrong:
        mixes = "rows, or lets padding count" if wrong == ["a row alone"] else "tokens or rows"
        raise CacheMismatchError(
            f"check at '{opened.name}': expected cached and uncached hidden states to agree. "
            f"Received {report}. Some layer mixes {mixes}, in a way that cannot be cached: look at "
            f"{_suspects(opened)}. Make it work on each token alone, or give it state, see "
            "docs/state.md. A few times the tolerance may be rounding that the model magnifies."
        )


def _precision(opened: EditedBackbone) -> str:
    """Return the dtype that a model is as precise as: bfloat16 where it rounds inputs to 8 bits."""
    layers = graph.layers_within(opened.owner)
    if any(getattr(layer, "inputs_quantizer", None) for layer in layers):
        return "bfloat16"
    return keras.backend.standardize_dtype(opened.compute_dtype)


def _rows(opened: EditedBackbone, controls: Any) -> dict[str, np.ndarray]:
    """Repeat what was passed for one row."""
    if not isinstance(controls, Mapping):
        raise SurgeryError(
            "check at 'controls': expected {input name: array of one row}. Received "
            f"{shown(controls)}. Pass a dict."
        )
    inputs, rows = {t.name: t for t in opened.inputs}, {}
    for name, value in controls.items():
        if name not in inputs:
            raise SurgeryError(
                f"check at control '{name}': expected inputs of the graph, by their own names. "
                f"{closest(name, inputs)}"
            )
        tensor = inputs[name]
        array, size = read_as(tensor.dtype, value), tensor.shape[1:]
        if array is None or not fits(array.shape, size):
            raise SurgeryError(
                f"check at control '{name}': expected {tensor.dtype}{list(size)}, one row. "
                f"Received {shown(value)}. Pass such an array."
            )
        rows[name] = np.repeat(array[None], _BATCH, 0)
    for name, default in opened.defaults.items():
        if name not in rows and is_unknown(default):
            rows[name] = np.repeat(_SOME_TOKENS[None], _BATCH, 0)
    return rows


def _opening_error(
    backbone: keras.Model,
    opened: EditedBackbone,
    token_ids: np.ndarray,
    controls: Mapping[str, np.ndarray],
) -> dict[str, float]:
    """Compare the opened graph with the backbone itself, if that takes text alone.

    Padding is on the right, since many backbones count positions from the first column.
    """
    original = opened.owner if opened.rewrites == () else backbone
    batch, time = token_ids.shape
    mask = np.arange(time)[None] < np.array([time, time - time // 3, time - time // 2])[:, None]
    inputs = {"token_ids": token_ids, "padding_mask": mask, **controls}
    numbers = np.repeat(np.arange(time, dtype=np.int32)[None], batch, 0)
    given = {**inputs, **dict.fromkeys(opened.family.position_inputs, numbers)}
    names = {tensor.name for tensor in original.inputs}
    if isinstance(original, EditedBackbone) or not names <= set(given):
        return {}
    wanted = predict(original, tree.map_structure(lambda t: given[t.name], original.input))
    wanted = tree.flatten(wanted)[0]
    got = opened.hidden_states(predict(opened, inputs))
    if opened.family.ends_in:  # of which the backbone's own outputs are
        got = hosts.to_numpy(opened.token_embedding(got, reverse=True))
    return {"opened": _error({"": got[mask]}, {"": wanted[mask]})}


def _models(opened: EditedBackbone, is_half: bool) -> tuple[EditedBackbone, BackboneWithCache]:
    """Return the models to compare; the second one chooses as the first one does, if half."""
    if not (is_half and chooses(opened)):
        return opened, derive(opened)
    return with_choices(opened, is_given=False), derive(with_choices(opened, is_given=True))


def _compared(cached: BackboneWithCache, outputs: Any) -> dict[str, np.ndarray]:
    """Return the hidden states of a call, and the scores that the cached graph is given too."""
    if not isinstance(outputs, dict):
        return {"hidden_states": outputs}
    captures = outputs.get("captures", {}).items()
    scores = {name: value for name, value in captures if f"{name}_given" in cached.input}
    return {"hidden_states": outputs["hidden_states"], **scores}


def _real(arrays: Mapping[str, np.ndarray], mask: np.ndarray) -> dict[str, np.ndarray]:
    return {name: value[mask] for name, value in arrays.items()}


def _error(got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> float:
    """Return the largest difference in an array, over the largest value of the array."""
    errors = []
    for name in wanted:
        x, y = (np.asarray(arrays[name], "float32") for arrays in (wanted, got))
        same = x == y  # also where both are infinite, as logits of ablated experts are
        size = np.abs(x, where=np.isfinite(x), out=np.zeros_like(x)).max()
        difference = np.subtract(x, y, where=~same, out=np.zeros_like(x))
        errors.append(float(np.abs(difference).max() / max(size, 1e-30)))
    return max(errors)


def _length(model: EditedBackbone) -> int:
    """Choose a length that fits the learned positions and, if it can, exceeds the windows."""
    layers = [n.operation for n in graph.all_nodes(model)]
    sizes = [getattr(x, "sliding_window_size", None) for x in layers if isinstance(x, Stateful)]
    wanted = min(max([17, *(size + 4 for size in sizes if size)]), 64)
    return min(wanted, model.max_positions or wanted)


def _ways(time: int) -> dict[str, list[int]]:
    """Cut the tokens in three ways, with few different sizes: each size is compiled once."""
    chunk = max(time // 3, 1)
    uneven = [chunk, 1, chunk, 1] if time >= 2 * chunk + 3 else [chunk]
    uneven.append(time - sum(uneven))
    return {
        "one pass": [time],
        "token by token": [1] * time,
        "uneven chunks": [size for size in uneven if size],
    }


def _run_cached(
    model: BackboneWithCache,
    by_token: dict[str, np.ndarray],
    mask: np.ndarray,
    chunks: list[int],
    controls: dict[str, np.ndarray],
    padding_after: int = 0,
) -> dict[str, np.ndarray]:
    """Run the tokens chunk by chunk, in a cache somewhat longer than they are.

    Args:
        model: the cached graph.
        by_token: its inputs that have something for each token, [batch, time, ...].
        mask: bool[batch, time], false where a token is padding.
        chunks: how many tokens to run at a time.
        controls: its other inputs.
        padding_after: how many tokens of padding to run after each chunk; the next one overwrites
            them.
    """
    batch, time = mask.shape
    extra = ((0, 0), (0, _SPARE))
    positions = np.maximum(np.cumsum(mask, axis=1, dtype=np.int32) - 1, 0)
    by_token = {**by_token, "positions": positions}
    by_token = {k: np.pad(x, [*extra, *[(0, 0)] * (x.ndim - 2)]) for k, x in by_token.items()}
    cache = new_cache(model, batch, time + _SPARE)
    cache_mask = np.pad(mask, extra, constant_values=True)
    slots = np.arange(time + _SPARE)
    outputs, start = [], 0
    for chunk in chunks:
        end = start + chunk
        run = slice(start, end + padding_after)
        inputs = {name: value[:, run] for name, value in by_token.items()}
        state = {"cache": cache, "cache_update_index": np.int32(start)}
        state["cache_mask"] = cache_mask if not padding_after else cache_mask & (slots < end)
        result = predict(model, {**inputs, **state, **controls})
        compared = _compared(model, result)
        outputs.append({name: value[:, :chunk] for name, value in compared.items()})
        cache, start = result["cache"], end
    return {name: np.concatenate([x[name] for x in outputs], axis=1) for name in outputs[0]}


def _suspects(model: EditedBackbone) -> str:
    """Name the layers that are neither the architecture's own nor this library's."""
    known = ("keras_hub", "backbone_surgery", "keras.src")
    layers = {n.operation.name: n.operation for n in graph.all_nodes(model)}
    names = [name for name, layer in layers.items() if not type(layer).__module__.startswith(known)]
    return ", ".join(f"'{n}'" for n in names) or "the layer that `rewire` names"
