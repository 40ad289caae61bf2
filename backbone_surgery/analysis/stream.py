"""The residual stream of one text, cut at all that writes to it and at all that reads it.

With everything that is written held fast but for one thing, what a change of that one thing brings
to each reader is an edge of the graph of the model: the direct way from the one to the other.
"""

from collections import ChainMap
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.analysis.question import derived
from backbone_surgery.analysis.runs import Cut, CutAt, cut_name
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.opening.model import made_once
from backbone_surgery.opening.predict import SharedPrograms, predict
from backbone_surgery.opening.site import Identity, Place, is_stream, is_written, places
from backbone_surgery.rewriting import Surgery

HEADS = ("query", "key", "value", "head_outputs")

Values = MutableMapping[int, Any]
"""Arrays by their numbers in `graph.Stages`; those of one row stand for any number of rows."""


@dataclass(frozen=True)
class CutStream(CutAt):
    """Put a `Cut` at all that is written to the stream, at the stream, and by head around heads."""

    by_head: bool = False

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
    """What reads the stream and makes what stands at a site, by a single stage.

    Attributes:
        path: of the site.
        stage: the stage that makes it.
        index: which of the things that the stage makes it is.
        cut: where the graph goes on from it: the stage that begins at the site, and the number of
            what goes in.
        takes: numbers of what the stage takes of the stream.
        heads: how many heads it has; `None` where it is taken as a whole.
    """

    path: str
    stage: int
    index: int
    cut: tuple[int, int]
    takes: tuple[int, ...]
    heads: int | None


class Streams:
    """Runs of texts of one length, by a graph that is cut along the residual stream.

    Args:
        lm: the model.
        operation: what asks, for errors.
        by_head: whether attention is taken head by head.

    Attributes:
        written: paths of what is written to the stream, in order.
        readers: what reads it, in order, but for the head of the model.
        last: path of the stream after the last block, which the head of the model reads.
    """

    def __init__(self, lm: CachedCausalLM, operation: str, by_head: bool) -> None:
        self.by_head = by_head
        self.model = derived(lm, CutStream("embeddings", by_head))
        paths = list(self.model.report[-1].sites)
        self._stages, self._programs, self._pulls = made_once(
            self.model, "streams", lambda: (_staged(self.model), SharedPrograms(), {})
        )
        self._cuts = {path: self._stages.cuts[cut_name(path)] for path in paths}
        self._along = sorted(
            (path for path in paths if role_of(path) not in HEADS), key=self._cuts.__getitem__
        )
        self._streams = {self._cuts[path][1] for path in paths if is_stream(path)}
        self._held = {n for _, n in self._cuts.values() if n not in self._streams}
        self.written = [path for path in self._along if is_written(path)]
        self._check_stream(operation)
        if by_head:
            self._check_heads(operation)
        self.last = [path for path in self._along if is_stream(path)][-1]
        self.readers = self._readers(operation)

    def whole(self, inputs: dict[str, Any]) -> Values:
        """Run a text, one row."""
        own = self.model.with_defaults(inputs)
        return self._go_on({n: own[name] for name, n in self._stages.inputs.items()}, 0)

    def at(self, values: Values, path: str) -> np.ndarray:
        """Return what stands at a site, float[rows, tokens, ...]."""
        return values[self._cuts[path][1]]

    def number_at(self, path: str) -> int:
        """Return the number of what goes into a site."""
        return self._cuts[path][1]

    def outputs(self, values: Values) -> np.ndarray:
        """Return the hidden states of the last token, float[rows, hidden_dim]."""
        return values[self._stages.outputs][:, -1]

    def heads_written(self, base: Values, path: str, heads: np.ndarray) -> np.ndarray:
        """Return what attention writes with each head exchanged for another, one at a time.

        Args:
            base: the run.
            path: of what is written, `blocks.0.attention_output`.
            heads: the others, float[tokens, heads, head_dim].

        Returns:
            float[heads, tokens, hidden_dim].
        """
        stage, number = self._cuts[heads_of(path)]
        exchanged = exchange(base[number], heads[None])
        return self._run(stage, ChainMap({number: exchanged}, base))[self._cuts[path][1]]

    def spread(self, base: Values, path: str, written: np.ndarray) -> dict[int, np.ndarray]:
        """Carry a change of what is written along the stream; all else that is written stays.

        Args:
            base: the run.
            path: of what is written.
            written: what is written instead, float[rows, tokens, hidden_dim].

        Returns:
            What becomes of the stream, by number.
        """
        changed = {self._cuts[path][1]: written}
        for at in self._along[self._along.index(path) :]:
            stage, number = self._cuts[at]
            if is_stream(at) and number in changed:
                changed.update(dict.fromkeys(self._copies(at), changed[number]))
            if any(n in changed for n in self._stages.stages[stage].takes) and self._passed(at):
                made = self._run(stage, ChainMap(changed, base))
                changed.update({n: made[n] for n in self._passed(at)})
        return changed

    def read(self, reader: Reader, base: Values, changed: dict[int, np.ndarray]) -> np.ndarray:
        """Return what a reader makes of a changed stream, float[rows, tokens, ...]."""
        return self._run(reader.stage, ChainMap(changed, base))[reader.cut[1]]

    def pull(self, reader: Reader, base: Values, gradient: np.ndarray) -> dict[int, np.ndarray]:
        """Take a gradient with respect to a site back to the stream that its reader takes.

        Args:
            reader: of the site.
            base: the run.
            gradient: float[rows, tokens, ...].

        Returns:
            `{number: float32[rows, tokens, hidden_dim]}`.
        """
        stage = self._stages.stages[reader.stage]
        key = reader.path
        if key not in self._pulls:
            wrt = tuple(stage.takes.index(n) for n in reader.takes)
            self._pulls[key] = Pull(stage, reader.index, wrt)
        values = [*(base[n] for n in stage.takes), gradient]
        made = predict(self._pulls[key], values, self._programs)
        return {n: np.asarray(x, "float32") for n, x in zip(reader.takes, made, strict=True)}

    def after(self, base: Values, path: str, others: np.ndarray) -> Values:
        """Run from a site on, with something else there, float[rows, tokens, ...]."""
        stage, number = self._cuts[path]
        others = np.asarray(others, base[number].dtype)
        return self._go_on(ChainMap({number: others}, base), stage)

    def _go_on(self, values: Values, first: int) -> Values:
        """Run the stages from one on."""
        for stage in range(first, len(self._stages.stages)):
            values.update(self._run(stage, values))
        return values

    def _run(self, index: int, values: Any) -> dict[int, Any]:
        stage = self._stages.stages[index]
        made = predict(stage, [values[n] for n in stage.takes], self._programs)
        return dict(zip(stage.makes, made, strict=True))

    def _copies(self, path: str) -> list[int]:
        """Return the numbers that the stream has once it was handed on as it is."""
        stage, number = self._cuts[path]
        copies = [number]
        for call in self._stages.stages[stage].calls:
            if isinstance(call.node.operation, Identity) and call.takes[0] in copies:
                copies += call.makes
        return copies

    def _readers(self, operation: str) -> list[Reader]:
        makers = {n: i for i, stage in enumerate(self._stages.stages) for n in stage.makes}
        carried = {n for path in self._along for n in (self._cuts[path][1], *self._passed(path))}
        carried |= {n for path in self._along if is_stream(path) for n in self._copies(path)}
        for path in self._along:
            self._check_takes(operation, path, self._cuts[path][0], carried)
        roles = HEADS[:3] if self.by_head else ("attention_output",)
        readers = []
        for path, (cut, number) in self._cuts.items():
            if role_of(path) not in (*roles, "mlp_output", "per_layer_output"):
                continue
            stage = self._stages.stages[makers[number]]
            takes = tuple(n for n in stage.takes if n in carried)
            self._check_takes(operation, path, makers[number], carried)
            heads = self._heads(path) if role_of(path) in HEADS else None
            index = stage.makes.index(number)
            readers.append(Reader(path, makers[number], index, (cut, number), takes, heads))
        return sorted(readers, key=lambda reader: reader.cut)

    def _check_takes(self, operation: str, path: str, stage: int, carried: set[int]) -> None:
        """Refuse a stage that knows the stream by what is not carried along it."""
        stages = self._stages.stages
        taken = {*stages[stage].takes}
        others = taken.intersection(n for s in stages[1:] for n in s.makes) - carried
        if others or not taken & carried:
            raise SurgeryError(
                f"{operation} at '{path}': expected what depends on the residual stream alone. "
                "Received what also depends on something that was made of it before, as with a "
                "`Condition`, or with keys and values that blocks share. Take `patch_grid`, or "
                "`attribution`."
            )

    def _check_stream(self, operation: str) -> None:
        """Refuse a model where a change takes another way beside the stream, as around a `Wrap`."""
        stages = self._stages.stages
        taken = {n for path in self._along for n in stages[self._cuts[path][0]].takes}
        for path in filter(is_stream, self._along):
            beside = taken.intersection(stages[self._cuts[path][0]].makes)
            if beside - self._held - self._streams - {*self._copies(path)}:
                raise SurgeryError(
                    f"{operation} at '{path}': expected a stream that goes on as it is, to which "
                    "blocks add. Received one from which something else is taken along, as with a "
                    "`Wrap` of a block, a `Condition`, or keys and values that blocks share. Take "
                    "`patch_grid`, or `attribution`."
                )

    def _check_heads(self, operation: str) -> None:
        """Refuse blocks whose heads are not read, or written, as those of a family are."""
        roles = (*HEADS, "attention_output")
        blocks = dict.fromkeys(p.rpartition(".")[0] for p in self._cuts if role_of(p) in roles)
        for block in blocks or ["blocks.*"]:
            found = [role for role in roles if f"{block}.{role}" in self._cuts]
            if found == [*roles]:
                stage, written = (self._cuts[f"{block}.{role}"] for role in roles[-2:])
                if written[1] in self._stages.stages[stage[0]].makes:
                    continue
            raise SurgeryError(
                f"{operation} with by_head=True: expected blocks with sites {', '.join(roles)}, "
                f"the last made of the one before. Received '{block}' with {shown(found)}. Leave "
                "`by_head` out."
            )

    def _passed(self, path: str) -> list[int]:
        """Return the numbers of what the stage at a site adds up, or passes on of the stream.

        After a write that is all it makes. After the stream it is nothing, but where the site after
        it is that of a block of another kind, which is one layer.
        """
        stage, _ = self._cuts[path]
        made = self._stages.stages[stage].makes
        if is_stream(path):
            return [n for n in made if n in self._streams and n not in self._copies(path)]
        ranks = {
            n: len(t.shape)
            for call in self._stages.stages[stage].calls
            for n, t in zip(call.makes, call.node.outputs, strict=True)
        }
        return [n for n in made if n not in self._held and ranks[n] == 3]

    def _heads(self, path: str) -> int:
        return next(p.shape[2] for p in places(self.model) if p.path == path)


class Pull(keras.Model):
    """Take gradients back through a stage.

    Args:
        stage: the stage.
        index: which of the things that it makes has the gradient.
        wrt: which of the things that it takes it is taken back to.

    Call arguments:
        values: what the stage takes, of one row, then the gradient, float[rows, tokens, ...].

    Returns:
        The gradients with respect to what `wrt` lists.
    """

    def __init__(self, stage: graph.Stage, index: int, wrt: tuple[int, ...]) -> None:
        super().__init__(autocast=False, dtype=stage.dtype_policy, name=f"pull_{stage.name}")
        self.stage, self.index, self.wrt = stage, index, wrt
        self.built = True

    def call(self, values, training=None):
        """Differentiate the stage, once for each row of the gradient."""
        import jax

        *taken, gradient = values
        rows = ops.shape(gradient)[0]

        def run(*moved: Any) -> Any:
            given = dict(zip(self.wrt, moved, strict=True))
            own = [given.get(i, x) for i, x in enumerate(taken)]
            return self.stage(own, training=training)[self.index]

        moved = [ops.repeat(taken[i], rows, axis=0) for i in self.wrt]
        made, pull = jax.vjp(run, *moved)
        return list(pull(ops.cast(gradient, made.dtype)))


def by_row(gradient: np.ndarray, heads: int | None) -> np.ndarray:
    """Give each head a row of its own.

    Args:
        gradient: float[tokens, heads, head_dim], or as a whole float[tokens, ...].
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


def role_of(path: str) -> str:
    """Return the last part of a path."""
    return path.rpartition(".")[2]


def heads_of(path: str) -> str:
    """Return the site of the heads whose outputs make what attention writes."""
    return path.replace("attention_output", "head_outputs")


def _staged(model: keras.Model) -> graph.Stages:
    return graph.Stages(model, model.hidden_states(model.output), Cut)
