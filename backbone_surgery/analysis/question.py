"""What every analysis asks: one text as labelled tokens, and a number from next-token logits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery import hosts
from backbone_surgery.caching.model import BackboneWithCache
from backbone_surgery.caching.rewire import derive
from backbone_surgery.errors import PAST_FLOAT16, SurgeryError, shown
from backbone_surgery.generation.buckets import bucket
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.controls import bind_controls
from backbone_surgery.generation.prompts import pack_right, read_prompts, to_text, token_name
from backbone_surgery.numbers import is_int, read_int32
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.once import made_once
from backbone_surgery.opening.site import places, select
from backbone_surgery.rewriting import Rewrite
from backbone_surgery.rewriting.operate import operate
from backbone_surgery.vectors.activations import check_lengths, check_task, read_ids

Metric = Callable[[Any], Any]
"""Maps logits float[batch, vocabulary] of the next token to float[batch]."""


@dataclass(frozen=True)
class TokenLogits:
    """The metric of a token, its logit, or of a pair of tokens, the difference of their logits.

    Args:
        ids: of one token or two.
    """

    ids: Any

    def __call__(self, logits: Any) -> Any:
        """Measure logits float[batch, vocabulary], in float32."""
        first, *others = (ops.cast(logits[:, i], "float32") for i in self.ids)
        return first - others[0] if others else first


@dataclass(frozen=True)
class Text:
    """One text as the model reads it.

    Attributes:
        token_ids: int32[tokens], the start token included.
        labels: for each token how to show it, spaces as `·`.
        width: how many tokens are run, padding at the end included. Texts of about one length have
            the same, so that few programs are compiled.
    """

    token_ids: np.ndarray
    labels: list[str]
    width: int

    def inputs(self) -> dict[str, np.ndarray]:
        """Return the inputs of an uncached model, one row int32[1, width]."""
        packed = pack_right([self.token_ids], self.width, 0)
        return {name: value.astype("int32") for name, value in packed.items()}


def read_text(lm: CachedCausalLM, text: Any, operation: str) -> Text:
    """Read one text: a string, or without a preprocessor token ids int[tokens].

    Raises:
        SurgeryError: something else, or more than one text.
    """
    check_task(lm, operation)
    vocabulary = lm.opened.token_embedding.input_dim
    if lm.preprocessor is None and not isinstance(text, dict):
        ids = read_int32(text, 0, vocabulary - 1)
        texts = [text] if ids is None or ids.ndim != 2 else list(ids)
        rows = [read_ids(one, vocabulary, operation) for one in texts]
    else:
        rows = read_prompts(text, lm.preprocessor, vocabulary, operation).rows
    if len(rows) != 1:
        raise SurgeryError(
            f"{operation}: expected one text. Received {len(rows)}. Call it once for each."
        )
    check_lengths(lm, rows, operation)
    width = bucket(len(rows[0]), smallest=16, steps=4)
    labels = [token_label(lm, i) for i in rows[0]]
    return Text(rows[0], labels, min(width, lm.max_positions or width))


def read_pair(lm: CachedCausalLM, clean: Any, corrupted: Any, operation: str) -> list[Text]:
    """Read two texts that differ, of as many tokens.

    Raises:
        SurgeryError: they are none.
    """
    texts = [read_text(lm, text, operation) for text in (clean, corrupted)]
    ids = [text.token_ids for text in texts]
    if len(ids[0]) != len(ids[1]) or np.array_equal(ids[0], ids[1]):
        raise SurgeryError(
            f"{operation}: expected two different texts of as many tokens. Received "
            f"{texts[0].labels} and {texts[1].labels}. Change words for others of as many tokens."
        )
    return texts


def token_label(lm: CachedCausalLM, token_id: int) -> str:
    """Return how to show a token: its text, spaces as `·`, or its number without a tokenizer."""
    if lm.preprocessor is None:
        return str(int(token_id))
    (text,) = to_text([np.array([token_id])], lm.preprocessor)
    is_shown = text.strip(" \n\t\r\N{REPLACEMENT CHARACTER}")
    name = None if is_shown else token_name(int(token_id), lm.preprocessor.tokenizer)
    is_blank = text and not text.strip()
    other = text if is_shown or is_blank else f"<{int(token_id)}>"
    shown = name if isinstance(name, str) else other
    return shown.replace(" ", "·").replace("\u2581", "·").replace("\n", "\u23ce")


def check_selector(at: Any, operation: str, name: str = "at") -> None:
    """Refuse what is no text, and so no selector of sites."""
    if not isinstance(at, str):
        raise SurgeryError(
            f"{operation} at '{name}': expected a site selector. Received {shown(at)}. Pass "
            "'blocks.*', say."
        )


def check_sum(lm: CachedCausalLM, operation: str) -> None:
    """Refuse a model whose residual stream is no sum of what is written to it."""
    beside = lm.opened.family.beside
    if beside:
        raise SurgeryError(
            f"{operation}: expected a residual stream that is the sum of what is written to it. "
            f"Received a model of {lm.opened.family.name}, whose blocks mix it with other streams "
            f"(`{beside}`). Take `attribution`, `patch_grid` or `edge_patching`."
        )


def make_metric(lm: CachedCausalLM, metric: Any, where: str) -> Metric:
    """Make a metric of a token, a pair of tokens (right, wrong), or a function of logits.

    A token is its id or a text of exactly one token, such as `" dog"`. `where` names the argument
    in errors.
    """
    if callable(metric):
        return _checked(metric, where)
    pair = metric if isinstance(metric, tuple | list) else (metric,)
    if len(pair) not in (1, 2):
        raise SurgeryError(
            f"{where}: expected a token, a pair (right, wrong) or a function of "
            f"logits [batch, vocabulary]. Received {shown(metric)}. Pass one of these."
        )
    ids = [read_token(lm, token, where) for token in pair]
    hosts.agree(lm, where.partition(" ")[0], {"metric": ids})
    return TokenLogits(ids)


def measured(lm: CachedCausalLM, metric: Metric, logits: np.ndarray, where: str) -> np.ndarray:
    """Measure logits float[rows, vocabulary]: finite float32[rows]; see `check_measured`."""
    values = np.asarray(hosts.to_numpy(metric(ops.convert_to_tensor(logits))), "float32")
    check_measured(values, logits, lm, where, "values")
    return values


def check_measured(
    values: np.ndarray, logits: np.ndarray, lm: CachedCausalLM, where: str, kind: str
) -> None:
    """Refuse what is not finite, and NaN that a metric passes over.

    Args:
        values: of a metric, or its gradients.
        logits: what it measured.
        lm: the model that made them.
        where: the name of the metric, for the error.
        kind: what the values are, for the error.
    """
    logits = np.asarray(logits, "float32")
    if np.isnan(logits).any():
        check_finite(logits, lm, where.partition(" ")[0])
    if np.isfinite(logits).all() and not np.isfinite(values).all():
        raise SurgeryError(
            f"{where}: expected a function with finite {kind}. Received NaN or Inf, of finite "
            "logits. Look for a division by zero, or a logarithm or a root of it."
        )
    check_finite(values, lm, where.partition(" ")[0], "the metric")


def _checked(metric: Metric, where: str) -> Metric:
    """Return a user's metric, which refuses to return anything but a number for each row."""

    def measure(logits: Any) -> Any:
        try:
            value = ops.convert_to_tensor(metric(logits))
            shape, dtype = tuple(value.shape), keras.backend.standardize_dtype(value.dtype)
        except Exception as error:  # whatever the user's code runs into
            raise SurgeryError(
                f"{where}: expected a function of logits [batch, vocabulary] that "
                f"returns [batch]. Received one that fails with: {error} Use `keras.ops`."
            ) from error
        if shape != (len(logits),) or dtype == "bool":
            raise SurgeryError(
                f"{where}: expected a function of logits [batch, vocabulary] that "
                f"returns [batch], {len(logits)} numbers here. Received {dtype} of shape "
                f"{list(shape)}. Index rows by a colon: `logits[:, 7]`."
            )
        return value

    return measure


def read_token(lm: CachedCausalLM, token: Any, where: str) -> int:
    """Return the id of one token, given as that or as its text; `where` is named in the error."""
    size = lm.opened.token_embedding.input_dim
    ids = [token]
    if isinstance(token, str) and lm.preprocessor is not None:
        ids = [int(i) for i in np.asarray(lm.preprocessor.tokenizer(token)).reshape(-1)]
    known = all(is_int(i) and 0 <= i < size for i in ids)
    if len(ids) != 1 or not known:
        raise SurgeryError(
            f"{where}: expected one token, as text or as an id from 0 to {size - 1}. Received "
            f"{shown(token)}, {len(ids) if known else 'no'} token(s). Mind the space before a word."
        )
    return int(ids[0])


def derived(lm: CachedCausalLM, *rewrites: Rewrite) -> EditedBackbone:
    """Apply rewrites to a model, once: asking again gives the same, compiled model."""
    return made_once(lm.opened, rewrites, lambda: operate(lm.opened, rewrites))


def rewired(model: EditedBackbone) -> BackboneWithCache:
    """Derive the cached graph of a model whose layers were probed before, once."""
    return made_once(model, "rewired", lambda: derive(model))


def head_of(lm: CachedCausalLM) -> keras.Model:
    """Return the model that makes logits of hidden states, float[batch, hidden_dim], once."""
    return made_once(lm.opened, "head", lambda: _head_of(lm.opened))


def _head_of(opened: EditedBackbone) -> keras.Model:
    embedding = opened.token_embedding
    states = keras.Input((embedding.output_dim,), dtype=opened.compute_dtype)
    return keras.Model(states, embedding(states, reverse=True))


def bind_row(
    lm: CachedCausalLM, controls: Any, text: Text, operation: str, prompt_length: Any
) -> dict[str, np.ndarray]:
    """Bind the model's own controls for one row, that of a text.

    `prompt_length` says how many of its tokens are its prompt; `None` means all.
    """
    length = len(text.token_ids)
    if prompt_length is not None and not (is_int(prompt_length) and 0 <= prompt_length <= length):
        raise SurgeryError(
            f"{operation} at 'prompt_length': expected an int from 0 to {length}, as many tokens "
            f"as the text has. Received {shown(prompt_length)}. Leave it out where all are a "
            "prompt."
        )
    prompt = np.array([length if prompt_length is None else prompt_length], np.int32)
    return bind_controls(lm.opened, controls, prompt, operation, np.array([length]))


def check_finite(values: Any, lm: CachedCausalLM, operation: str, before: str = "") -> None:
    """Refuse results of a model whose numbers went past the range of its dtype.

    `before` names what else may be the cause.
    """
    if not np.isfinite(np.asarray(values, "float32")).all():
        raise SurgeryError(
            f"{operation}: expected finite numbers. Received NaN or Inf, of {before}"
            f"{before and ' or of '}a model that computes in {lm.opened.compute_dtype}. "
            f"{PAST_FLOAT16}"
        )


def shapes_at(lm: CachedCausalLM, at: Iterable[str]) -> dict[str, Sequence[Any]]:
    """Return what stands at the sites that some selectors pick, for one token, by path."""
    shapes = {place.path: place.shape[2:] for place in places(lm.opened)}
    picked = {path for selector in at for path in select(selector, [*shapes])}
    return {path: shape for path, shape in shapes.items() if path in picked}


def count_heads(operation: str, shapes: Mapping[str, Sequence[Any]]) -> int:
    """Return how many heads each site has; `shapes` are of one token, by the site's path."""
    shapes = {path: list(shape) for path, shape in shapes.items()}
    counts = {shape[0] if len(shape) > 1 else 0 for shape in shapes.values()}
    if len(counts) > 1 or 0 in counts:
        raise SurgeryError(
            f"{operation} with by_head=True: expected sites of as many heads each, such as "
            f"'blocks.*.head_outputs'. Received {shown(shapes)}. Select others by `at`."
        )
    return counts.pop()


def last_of(hidden_states: Any, padding_mask: Any) -> Any:
    """Return the hidden states of the last token before padding, float[batch, hidden_dim]."""
    lengths = ops.sum(ops.cast(padding_mask, "int32"), axis=1)
    return ops.take_along_axis(hidden_states, lengths[:, None, None] - 1, axis=1)[:, 0]
