"""Finding a subspace: the directions along which one text can be exchanged for another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery import hosts
from backbone_surgery.analysis.question import head_of, read_token
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.controls import bind_controls
from backbone_surgery.numbers import check_count, read_int32, read_number
from backbone_surgery.opening.once import made_once
from backbone_surgery.opening.predict import predict
from backbone_surgery.opening.site import places, select
from backbone_surgery.rewriting import Patch
from backbone_surgery.rewriting.operate import operate
from backbone_surgery.rewriting.reft import OrthonormalRows
from backbone_surgery.rewriting.rewrite import Surgery
from backbone_surgery.tuning.checks import check_seed
from backbone_surgery.tuning.learning import (
    RATE,
    draw,
    fit,
    losses_of,
    mean_over_rows,
    new_layers,
    pack_texts,
    texts_of_step,
    width_of,
)
from backbone_surgery.vectors.activations import TokenStates, check_task, measure, read_texts

_OPERATION = "find_subspace"
_NAME = "patch_of_find_subspace"
_VALUE = f"{_NAME}_value_0"
_HELD_OUT = 4
"""One of so many examples is kept aside."""


@dataclass(frozen=True, eq=False)
class FoundSubspace:
    """What `find_subspace` found.

    Attributes:
        at: the site.
        directions: float32[rank, size], orthonormal.
        accuracy: the share of the examples kept aside whose label is the likeliest next token of
            the base, patched along the directions: the interchange intervention accuracy.
        whole: the same where all that stands at the site is patched.
        unpatched: the same where nothing is.
    """

    at: str
    directions: np.ndarray = field(repr=False)
    accuracy: float
    whole: float
    unpatched: float

    def patch(self, positions: str | tuple[int, ...] = "control", name: str = "patch") -> Patch:
        """Return a `Patch` along the directions."""
        return Patch(self.at, positions, name, self.directions)


def find_subspace(
    lm: CachedCausalLM,
    examples: Sequence[tuple[Any, Any, Any]],
    at: str,
    rank: int = 1,
    positions: Any = -1,
    steps: int = 200,
    learning_rate: float = RATE,
    batch_size: int = 32,
    seed: int = 0,
    controls: Mapping[str, Any] | None = None,
) -> FoundSubspace:
    """Find the directions at a site that carry what a source text has and a base text has not.

    At one token the base gets what the source has along the directions. They are learned so that
    the label becomes the likeliest next token. A quarter of the examples is kept aside to measure
    by.

    Source: distributed alignment search, Geiger et al. 2023, https://arxiv.org/abs/2303.02536. The
    rows are kept orthonormal by a QR decomposition after each step of Adam.

    Args:
        lm: the model, edited or not.
        examples: `[(base text, source text, label), ...]`, at least four. A label is a token, as an
            id or a text of exactly one: what the model should say of the base if what is sought
            were as in the source. Include labels that the base has already.
        at: selector of one site of hidden states, such as `"blocks.5"`.
        rank: how many directions, fewer than the site has numbers.
        positions: the token that is patched, from 0 on, a start token counted, or from the end: an
            int, one for each example, or int[examples, 2] for those of base and source.
        steps: how many steps to take, of 16 examples, or a few more on a mesh.
        learning_rate: at first; it falls by a cosine.
        batch_size: how many texts to run at once where nothing is learned.
        seed: of what is kept aside, of the order, and of the directions at first.
        controls: for the controls of `lm`'s own rewrites, with a row for each example.

    Returns:
        A `FoundSubspace`.

    Raises:
        SurgeryError: bad input, positions that a text does not have, more or fewer sites than one,
            or a rank too large for it.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> examples = [([1, 2, i], [1, 3, i], 7) for i in range(4, 8)]
        >>> found = bs.find_subspace(lm, examples, "blocks.0", positions=1, steps=2)
        >>> found.directions.shape
        (1, 8)
    """
    check_task(lm, _OPERATION)
    check_count(_OPERATION, "rank", rank, "directions")
    check_count(_OPERATION, "steps", steps, "steps")
    check_count(_OPERATION, "batch_size", batch_size, "texts")
    check_seed(_OPERATION, seed)
    rate = read_number(learning_rate)
    if rate is None or rate <= 0:
        raise SurgeryError(
            f"{_OPERATION} at 'learning_rate': expected a number above 0. Received "
            f"{shown(learning_rate)}. Pass {RATE}, say."
        )
    site = _site(lm, at, int(rank))
    task = _Task(lm, site, examples, positions, int(batch_size), controls)
    order = np.random.default_rng(seed).permutation(len(task.labels))
    aside, seen = np.split(order, [len(order) // _HELD_OUT])
    directions = task.learn(seen, int(rank), int(steps), rate, seed)
    change = task.there - task.here
    along = task.accuracy(aside, task.here + change @ directions.T @ directions)
    whole, neither = (task.accuracy(aside, values) for values in (task.there, task.here))
    return FoundSubspace(site, directions, along, whole, neither)


@dataclass(frozen=True, eq=False)
class _Learned(Patch):
    """A `Patch` along directions that `fit` learns."""

    rank: int = 1
    seed: int = 0

    @property
    def takes_whole(self) -> bool:
        """The directions are those that are learned."""
        return False

    def basis(self, value: keras.KerasTensor, surgery: Surgery) -> keras.KerasTensor:
        """Return the directions of the layer that is trained."""
        layer = _Directions(self.rank, self.seed, name="directions")
        surgery.train(layer)
        return layer(value)


class _Directions(keras.layers.Layer):
    """Orthonormal directions as weights.

    Call arguments:
        value: float32[batch, n, size], for the number of rows.

    Returns:
        float32[batch, rank, size], the same for every row.
    """

    def __init__(self, rank: int, seed: int, **kwargs: Any) -> None:
        super().__init__(autocast=False, dtype="float32", **kwargs)
        self.rank, self.seed = rank, seed

    def build(self, value_shape):
        """Create them, random at first."""
        self.along = self.add_weight(
            shape=(self.rank, value_shape[-1]),
            initializer=keras.initializers.Orthogonal(seed=self.seed),
            constraint=OrthonormalRows(),
            name="along",
        )

    def call(self, value):
        """Repeat them for each row."""
        return ops.broadcast_to(self.along, (ops.shape(value)[0], *self.along.shape))

    def compute_output_spec(self, value):
        """Directions for each row."""
        return keras.KerasTensor((value.shape[0], self.rank, value.shape[-1]), "float32")


class _Task:
    """Examples as a model reads them.

    Attributes:
        labels: int32[examples].
        here: what the bases have at the site, float32[examples, size].
        there: what the sources have.
    """

    def __init__(
        self,
        lm: CachedCausalLM,
        site: str,
        examples: Any,
        positions: Any,
        batch_size: int,
        controls: Any,
    ) -> None:
        self.lm, self.site, self._size = lm, site, batch_size
        triples = _triples(examples)
        bases, sources = (
            read_texts(lm, [triple[i] for triple in triples], _OPERATION) for i in (0, 1)
        )
        self.labels = np.array(
            [read_token(lm, label, f"{_OPERATION} at 'examples'") for *_, label in triples], "int32"
        )
        where = _positions(positions, [bases, sources])
        options = {"at": site, "batch_size": batch_size, "controls": controls}
        self.here, self.there = (
            measure(lm, rows, TokenStates, _OPERATION, tokens=where[:, i], **options)[site]
            for i, rows in enumerate((bases, sources))
        )
        self._lengths = np.array([len(row) for row in bases])
        given = bind_controls(lm.opened, controls, self._lengths, _OPERATION, self._lengths)
        self._given = {**given, f"{_NAME}_positions": where[:, :1, None]}
        rows = [np.append(row, label) for row, label in zip(bases, self.labels, strict=True)]
        self._packed = pack_texts(rows, max(width_of(lm, rows), *map(len, rows)))

    def learn(
        self, chosen: np.ndarray, rank: int, steps: int, learning_rate: float, seed: int
    ) -> np.ndarray:
        """Learn directions from some of the examples: orthonormal float32[rank, size]."""
        rewrite = _Learned(self.site, name=_NAME, rank=rank, seed=seed)
        edited = operate(self.lm.opened, [rewrite])
        layers = new_layers(edited, self.lm)
        given = {**self._given, _VALUE: self.there[:, None]}
        model = losses_of(edited, [*given], layers)
        rows = chosen[draw(len(chosen), steps * texts_of_step(self.lm), seed)]
        counted = np.zeros(self._packed["targets"].shape, "float32")
        counted[np.arange(len(counted)), self._lengths - 1] = 1
        x = {name: _rows(value, rows) for name, value in {**self._packed, **given}.items()}
        fit(model, x, counted[rows], mean_over_rows, steps, learning_rate)
        return np.asarray(hosts.to_numpy(layers[0].along), "float32")

    def accuracy(self, chosen: np.ndarray, values: np.ndarray) -> float:
        """Return of how many of some examples the label is the likeliest next token.

        Args:
            chosen: which examples.
            values: what their bases get at the site, float32[examples, size].
        """
        opened, patch = self.lm.opened, Patch(self.site, name=_NAME)
        model = made_once(opened, (_OPERATION, self.site), lambda: operate(opened, [patch]))
        inputs = {**self._packed, **self._given, _VALUE: values[:, None]}
        del inputs["targets"]
        right: list[bool] = []
        for start in range(0, len(chosen), self._size):
            rows = np.resize(chosen[start : start + self._size], min(self._size, len(chosen)))
            outputs = predict(model, {name: value[rows] for name, value in inputs.items()})
            states = model.hidden_states(outputs)[np.arange(len(rows)), self._lengths[rows] - 1]
            answers = predict(head_of(self.lm), states).argmax(axis=-1)
            right.extend((answers == self.labels[rows])[: len(chosen) - start])
        return float(np.mean(right))


def _rows(value: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Take rows; what is the same in all of them is not copied."""
    if (value == value[:1]).all():
        return np.broadcast_to(value[:1], (len(rows), *value.shape[1:]))
    return value[rows]


def _triples(examples: Any) -> list[tuple[Any, Any, Any]]:
    """Read examples."""
    listed = [*examples] if np.iterable(examples) and not isinstance(examples, str) else []
    fit_in = [len(x) == 3 if isinstance(x, tuple | list) else False for x in listed]
    if len(listed) < _HELD_OUT or not all(fit_in):
        raise SurgeryError(
            f"{_OPERATION} at 'examples': expected at least {_HELD_OUT} of (base text, source "
            f"text, label). Received {shown(examples)}. Pass them as a list of tuples."
        )
    return listed


def _site(lm: CachedCausalLM, at: Any, rank: int) -> str:
    """Return the path of the site, if it is one that has more numbers than the rank."""
    shapes = {place.path: place.shape[2:] for place in places(lm.opened)}
    picked = select(at, [*shapes]) if isinstance(at, str) else []
    if len(picked) != 1 or len(shapes[picked[0]]) != 1 or rank >= (shapes[picked[0]][0] or 0):
        found = {path: list(shapes[path]) for path in picked}
        raise SurgeryError(
            f"{_OPERATION} at 'at': expected one site with more than {rank} numbers for each "
            f"token, the rank. Received {shown(at)}, which picks {shown(found)}. Pass 'blocks.3', "
            "say."
        )
    return picked[0]


def _positions(value: Any, texts: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Read the positions in base and source, int32[examples, 2], counted from 0 on."""
    lengths = np.array([[len(row) for row in rows] for rows in texts]).T
    count = len(lengths)
    array = read_int32(value, -(2**31))
    if array is not None and array.ndim == 1:
        array = array[:, None]
    known = array is not None and array.shape in ((), (count, 1), (count, 2))
    array = np.broadcast_to(2**31 - 1 if array is None or not known else array, lengths.shape)
    if not ((-lengths <= array) & (array < lengths)).all():
        raise SurgeryError(
            f"{_OPERATION} at 'positions': expected positions of tokens that the texts have: an "
            f"int, int[{count}] or int[{count}, 2]. Received {shown(value)}. Count from 0 on, or "
            "from the end by negative numbers."
        )
    return np.where(array < 0, array + lengths, array).astype("int32")
