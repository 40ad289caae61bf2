"""The logit lens: the next token that the model would predict if it ended after each block."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from backbone_surgery import graph
from backbone_surgery.analysis.question import (
    bind_row,
    check_finite,
    check_selector,
    derived,
    read_text,
    token_label,
)
from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.once import made_once
from backbone_surgery.opening.predict import predict
from backbone_surgery.opening.site import is_block, is_stream
from backbone_surgery.rewriting import Capture

_NAME = "lens"
_STREAM = "residual_stream"
_BESIDE = "beside_stream"


@dataclass(frozen=True, eq=False)
class LogitLens:
    """What `logit_lens` returns.

    Attributes:
        token_ids: int32[sites, tokens], the likeliest next token.
        probabilities: float32[sites, tokens], its probability.
        entropies: float32[sites, tokens], of the whole distribution, in nats.
        labels: the likeliest tokens as text, one list for each site.
        sites: paths of the sites.
        tokens: labels of the text's own tokens.
    """

    token_ids: np.ndarray
    probabilities: np.ndarray
    entropies: np.ndarray
    labels: list[list[str]]
    sites: list[str]
    tokens: list[str]

    def __repr__(self) -> str:
        return f"LogitLens({len(self.sites)} sites x {len(self.tokens)} tokens)"


def logit_lens(
    lm: CachedCausalLM,
    text: Any,
    at: str = "blocks.*",
    controls: Mapping[str, Any] | None = None,
    prompt_length: int | None = None,
) -> LogitLens:
    """Read the residual stream after each block by the final norm and the output embedding.

    Source: nostalgebraist 2020, "interpreting GPT: the logit lens".

    Args:
        lm: the model, edited or not.
        text: a string (without a preprocessor, token ids).
        at: selector of sites of the residual stream: `embeddings`, whole blocks, or their
            `residual_mid`; of Gemma 3n whole blocks, which are read with their other streams.
        controls: for the controls of `lm`'s own rewrites.
        prompt_length: how many tokens of the text are its prompt, for edits of generated tokens;
            all by default.

    Returns:
        A `LogitLens`, with arrays [sites, tokens].

    Raises:
        SurgeryError: a site that is not of the residual stream, or the model gives NaN.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> bs.logit_lens(lm, [1, 2, 3]).probabilities.shape
        (2, 3)
    """
    question = read_text(lm, text, "logit_lens")
    check_selector(at, "logit_lens")
    beside = lm.opened.family.beside
    capturing = derived(lm, Capture(at, name=_NAME))
    sites = list(capturing.report[-1].sites)
    for site in sites:
        if beside and site.count(".") != 1:
            raise SurgeryError(
                f"logit_lens at '{site}': expected whole blocks, since several streams go from "
                f"each block to the next. Received another site. Use `at='blocks.*'`."
            )
        if not is_stream(site):
            raise SurgeryError(
                f"logit_lens at '{site}': expected a site of the residual stream, such as "
                "'embeddings', 'blocks.3' or 'blocks.3.residual_mid'. Received another one. Use "
                "`at='blocks.*'`."
            )
    if beside:
        others = [f"{site}.{beside}" for site in sites]
        capturing = derived(lm, Capture(*sites, *others, name=_NAME))
    reader = made_once(lm.opened, "reader", lambda: _reader(lm.opened))
    bound = bind_row(lm, controls, question, "logit_lens", prompt_length)
    inputs = lm.opened.with_defaults({**question.inputs(), **bound})
    captured = predict(capturing, inputs)["captures"]
    length, logits = len(question.token_ids), []
    for site in sites:
        streams = {_STREAM: captured[f"{_NAME}/{site}"]}
        if beside:
            streams[_BESIDE] = captured[f"{_NAME}/{site}.{beside}"]
        logits.append(predict(reader, {**inputs, **streams})[0, :length])
    shifted = np.asarray(logits, "float32")
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    probabilities = np.exp(log_probabilities)
    check_finite(probabilities, lm, "logit_lens")
    best = probabilities.argmax(axis=-1).astype(np.int32)
    return LogitLens(
        token_ids=best,
        probabilities=probabilities.max(axis=-1),
        entropies=-(probabilities * log_probabilities).sum(axis=-1),
        labels=[[token_label(lm, i) for i in row] for row in best],
        sites=sites,
        tokens=question.labels,
    )


@graph.building()
def _reader(opened: EditedBackbone) -> keras.Model:
    """Build a model of what comes after the last block, from the residual stream to logits.

    It has the inputs of `lm`'s own model too, for rewrites after the last block.
    """
    blocks = [node for node in graph.graph_nodes(opened) if is_block(node.operation)]
    if not blocks:
        raise SurgeryError(
            f"logit_lens at '{opened.name}': expected decoder blocks. Received a graph without "
            "any. Keep at least one."
        )
    names = (_STREAM, _BESIDE) if opened.family.beside else (_STREAM,)
    inputs, mapping = dict(opened.input), {id(t): t for t in opened.inputs}
    for name, end in zip(names, blocks[-1].outputs, strict=False):
        inputs[name] = mapping[id(end)] = keras.Input(end.shape[1:], dtype=end.dtype, name=name)
    hidden_states = opened.hidden_states(opened.output)
    (normed,), _ = graph.replay([hidden_states], mapping, _keep)
    return keras.Model(inputs, opened.token_embedding(normed, reverse=True))


def _keep(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return graph.KEEP
