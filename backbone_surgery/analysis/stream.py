"""The residual stream of one text, cut at all that writes to it and at all that reads it.

With everything that is written held fast but for one thing, what a change of that one thing brings
to each reader is an edge of the graph of the model: the direct way from the one to the other.
"""

from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from backbone_surgery import graph
from backbone_surgery.analysis.pull import Pulls
from backbone_surgery.analysis.question import derived, last_of
from backbone_surgery.analysis.runs import Cut, CutAt, cut_name
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.opening.logits import logits_of
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.once import made_once
from backbone_surgery.opening.predict import predict
from backbone_surgery.opening.site import Place, is_stream, is_written, places
from backbone_surgery.rewriting import Surgery

HEADS = ("query", "key", "value", "head_outputs")

_POINTWISE = ("laurel_output", "mlp_output", "per_layer_output")
"""What is made of each token alone."""

EMBEDDINGS = "embeddings"
LOGITS = "logits"

Values = MutableMapping[int, Any]
"""Arrays by their numbers in `graph.Stages`; those of one row stand for any number of rows."""


@dataclass(frozen=True)
class CutStream(CutAt):
    """Put a `Cut` at all that is written to the stream, at the stream, and by head around heads."""

    at: str = ""
    by_head: bool = False

    def __post_init__(self) -> None:
        """Leave the selector alone: the sites are known."""

    def choose(self, surgery: Surgery) -> list[Place]:
        """Return the sites."""
        return [
            place
            for place in surgery.places
            if is_written(place.path)
            or is_stream(place.path)
            or (self.by_head and role_of(place.path) in HEADS)
        ]


@dataclass(frozen=True)
class Reader:
    """What reads the stream.

    Attributes:
        path: of the site of what it makes, or `logits`.
        number: of what it makes.
        heads: how many heads it has; `None` where it is taken as a whole.
    """

    path: str
    number: int
    heads: int | None

    @property
    def names(self) -> list[str]:
        """What to call it, head by head."""
        return names_of(self.path, self.heads)


class Streams:
    """Runs of texts of one width, by a graph that is cut along the residual stream.

    Args:
        lm: the model.
        operation: what asks, for errors.
        by_head: whether attention is taken head by head.

    Attributes:
        written: paths of what is written to the stream, in order.
        readers: what reads it, in order, the logits last.
    """

    def __init__(self, lm: CachedCausalLM, operation: str, by_head: bool) -> None:
        self.by_head = by_head
        self._model = derived(lm, CutStream(by_head=by_head))
        self._pulls = made_once(self._model, "streams", lambda: Pulls(_staged(self._model)))
        self._stages = self._pulls.stages
        paths = list(self._model.report[-1].sites)
        self._cuts = {path: self._stages.cuts[cut_name(path)] for path in paths}
        self.written = sorted(filter(is_written, paths), key=self._cuts.__getitem__)
        if by_head:
            self._check_heads(operation)
        roles = (*(HEADS[:3] if by_head else ("attention_output",)), *_POINTWISE)
        read = [path for path in paths if role_of(path) in roles]
        heads = {p.path: p.shape[2] for p in places(self._model) if role_of(p.path) in HEADS}
        self.readers = [
            Reader(path, self._cuts[path][1], heads.get(path))
            for path in sorted(read, key=self._cuts.__getitem__)
        ]
        self.readers.append(Reader(LOGITS, self._stages.outputs, None))
        self._held = {n for path, (_, n) in self._cuts.items() if not is_stream(path)}
        self._held.add(self._stages.outputs)
        self._mlps = {n for path, (_, n) in self._cuts.items() if role_of(path) in _POINTWISE}

    def whole(self, inputs: dict[str, Any]) -> Values:
        """Run a text, one row."""
        own = self._model.with_defaults(inputs)
        return self._go_on({n: own[name] for name, n in self._stages.inputs.items()}, 0)

    def at(self, values: Values, path: str) -> np.ndarray:
        """Return what stands at a site, float[rows, tokens, ...]."""
        return values[self._cuts[path][1]]

    def logits(self, values: Values) -> np.ndarray:
        """Return the logits after the last token, float[rows, vocabulary]."""
        return values[self._stages.outputs]

    def heads_written(self, base: Values, path: str, heads: np.ndarray) -> np.ndarray:
        """Return what attention writes of other heads, float[rows, tokens, hidden_dim].

        Args:
            base: the run.
            path: of what is written, `blocks.0.attention_output`.
            heads: the others, float[rows, tokens, heads, head_dim].
        """
        stage, number = self._cuts[heads_of(path)]
        written = self._cuts[path][1]
        return self._run(stage, (written,), ChainMap({number: heads}, base))[written]

    def number(self, path: str) -> int:
        """Return the number of what stands at a site."""
        return self._cuts[path][1]

    def spread(
        self, base: Values, changed: Mapping[int, np.ndarray], hold_mlps: bool = True
    ) -> dict[int, np.ndarray]:
        """Let changes of what is written, or of heads, go on; all else of that kind stays.

        Args:
            base: the run.
            changed: what stands there instead, by number float[rows, tokens, ...].
            hold_mlps: whether what MLPs write stays, too, and what else is made of a token alone.

        Returns:
            The same, and what becomes of all else.
        """
        known = dict(changed)
        held = self._held if hold_mlps else self._held - self._mlps
        for i, stage in enumerate(self._stages.stages):
            numbers = tuple(n for n in stage.reached(known) if n not in held)
            if numbers:
                known.update(self._run(i, numbers, ChainMap(known, base)))
        return known

    def read(self, number: int, base: Values, changed: dict[int, np.ndarray]) -> np.ndarray | None:
        """Return what is made of what changed, float[rows, ...]; `None` if none of it is read."""
        i = self._stages.maker(number)
        if number not in self._stages.stages[i].reached(changed):
            return None
        return self._run(i, (number,), ChainMap(changed, base))[number]

    def after(self, base: Values, path: str, others: np.ndarray) -> Values:
        """Run from a site on, with something else there, float[rows, tokens, ...]."""
        stage, number = self._cuts[path]
        others = np.asarray(others, base[number].dtype)
        return self._go_on(ChainMap({number: others}, base), stage)

    def gradients(self, values: Values, gradient: np.ndarray) -> dict[str, np.ndarray]:
        """Take a gradient with respect to the logits back to what each reader makes.

        Args:
            values: the run.
            gradient: float[1, vocabulary].

        Returns:
            By path float32[rows, ...], by head in row i zero but for head i.
        """
        known = {r.number: np.zeros_like(values[r.number], "float32") for r in self.readers}
        known |= self._pulls.back(values, {self._stages.outputs: gradient})
        return {r.path: by_row(known[r.number][0], r.heads) for r in self.readers}

    def pulled(self, values: Values, reader: Reader, gradient: Any) -> dict[str, np.ndarray]:
        """Take a gradient with respect to what a reader makes back to all that it reads.

        Args:
            values: the run.
            reader: the reader.
            gradient: float[rows, ...].

        Returns:
            `{path: float32[rows, tokens, hidden_dim]}`, the gradients with respect to what is
            written. What is read by no way has none.
        """
        known = self._pulls.of(reader.number, values, gradient)
        known = self._pulls.back(values, known, self._held)
        numbers = {path: self._cuts[path][1] for path in self.written}
        return {path: known[n] for path, n in numbers.items() if n in known}

    def fed(self, reader: Reader) -> list[str]:
        """Return the paths at which what a reader makes is written, or read by the heads there."""
        if reader.heads is None:
            same = (p for p in self.written if self.number(p) == reader.number)
            return [path for path in same if not self.has_heads(path)]
        reached: set[int] = set()
        for stage in self._stages.stages[self._stages.maker(reader.number) :]:
            reached.update(stage.reached({reader.number} | (reached - self._held)))
        paths = filter(self.has_heads, self.written)
        return [path for path in paths if self.number(heads_of(path)) in reached]

    def has_heads(self, path: str) -> bool:
        """Tell whether what is written at a path is taken head by head."""
        return self.by_head and role_of(path) == "attention_output"

    def _go_on(self, values: Values, first: int) -> Values:
        """Run the stages from one on."""
        for i, stage in enumerate(self._stages.stages[first:], first):
            values.update(self._run(i, stage.makes, values))
        return values

    def _run(self, index: int, numbers: tuple[int, ...], values: Any) -> dict[int, Any]:
        """Run what of a stage makes some numbers."""
        stage = self._stages.part(index, numbers)
        made = predict(stage, [values[n] for n in stage.takes], self._pulls.programs)
        return dict(zip(stage.makes, made, strict=True))

    def _check_heads(self, operation: str) -> None:
        """Refuse blocks whose heads are not read, or written, as those of a family are."""
        roles = (*HEADS, "attention_output")
        blocks = dict.fromkeys(p.rpartition(".")[0] for p in self._cuts if role_of(p) in roles)
        for block in blocks or ["blocks.*"]:
            found = [role for role in roles if f"{block}.{role}" in self._cuts]
            if self._are_heads(block, found):
                continue
            raise SurgeryError(
                f"{operation} with by_head=True: expected blocks with sites {', '.join(roles)}, "
                f"the last made of the one before. Received '{block}' with {shown(found)}. Leave "
                "`by_head` out."
            )

    def _are_heads(self, block: str, found: list[str]) -> bool:
        """Tell whether a block with some sites has heads; keys may be those of another block."""
        if not {"query", "head_outputs", "attention_output"} <= {*found}:
            return False
        stages = self._stages.stages
        heads, written = (self._cuts[f"{block}.{role}"] for role in found[-2:])
        makers = {self._stages.maker(n) for n in stages[self._stages.maker(heads[1])].takes}
        shared = {i for p, (i, _) in self._cuts.items() if role_of(p) in ("key", "value")}
        has_both = {"key", "value"} <= {*found} or ("key" not in found and makers & shared)
        return bool(has_both) and written[1] in stages[heads[0]].makes


def by_row(gradient: np.ndarray, heads: int | None) -> np.ndarray:
    """Give each head a row of its own.

    Args:
        gradient: float[tokens, heads, head_dim], or as a whole float[...].
        heads: how many heads there are.

    Returns:
        float[heads, tokens, heads, head_dim], in row i zero but for head i; or one row.
    """
    if heads is None:
        return gradient[None]
    return gradient[None] * np.eye(heads, dtype=gradient.dtype)[:, None, :, None]


def exchange(base: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Exchange one head at a time for another.

    Args:
        base: float[1, tokens, heads, head_dim].
        others: float[rows, tokens, heads, head_dim].

    Returns:
        float[rows * heads, tokens, heads, head_dim], all heads of a row one after the other.
    """
    rows, _, heads, _ = others.shape
    exchanged = np.tile(base, (rows * heads, 1, 1, 1))
    for i, (row, head) in enumerate(np.ndindex(rows, heads)):
        exchanged[i, :, head] = others[row, :, head]
    return exchanged


def names_of(path: str, heads: int | None) -> list[str]:
    """Return what to call the heads of a site, or the site itself."""
    return [path] if heads is None else [f"{path}[{head}]" for head in range(heads)]


def role_of(path: str) -> str:
    """Return the last part of a path."""
    return path.rpartition(".")[2]


def heads_of(path: str) -> str:
    """Return the site of the heads whose outputs make what attention writes."""
    return path.replace("attention_output", "head_outputs")


class Head(keras.layers.Layer):
    """Make logits of the last token, as `Logits` does, with weights that are known as its own.

    Args:
        embedding: the token embedding.

    Call arguments:
        hidden_states: float[rows, tokens, hidden_dim].
        padding_mask: int[rows, tokens].

    Returns:
        float[rows, vocabulary].
    """

    def __init__(self, embedding: Any) -> None:
        super().__init__(dtype=embedding.compute_dtype, name="head")
        self.embedding = embedding
        self.built = True

    def call(self, hidden_states, padding_mask):
        """Take the last token, and make its logits."""
        return logits_of(self.embedding, last_of(hidden_states, padding_mask))

    def compute_output_spec(self, hidden_states, padding_mask):
        """Return what the embedding says of itself."""
        return self.embedding.compute_output_spec(hidden_states[:, 0], reverse=True)


def _staged(model: EditedBackbone) -> graph.Stages:
    states = model.hidden_states(model.output)
    head = Head(model.token_embedding)
    return graph.Stages(model, head(states, model.input["padding_mask"]), Cut)
