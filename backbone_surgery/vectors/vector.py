"""`ControlVector`: a direction for each block, with arithmetic, training, and files."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

from backbone_surgery.errors import SelectorError, SurgeryError, shown
from backbone_surgery.files import as_path
from backbone_surgery.numbers import check_count, is_int, read_number
from backbone_surgery.opening import site
from backbone_surgery.presets import find_vector
from backbone_surgery.rewriting.directions import orthonormal_basis, read_directions
from backbone_surgery.vectors import files
from backbone_surgery.vectors.activations import (
    TokenStates,
    check_task,
    measure,
    read_texts,
)
from backbone_surgery.vectors.directions import check_method, find_direction
from backbone_surgery.vectors.norms import residual_norms
from backbone_surgery.vectors.pairs import check_pairs
from backbone_surgery.weights.tree import weights_digest

_FURTHEST = 2**31 - 1


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True, eq=False)
class ControlVector:
    """A control vector: what to add to the residual stream after each block.

    Immutable. Sums, also by `sum`, differences and multiples are control vectors too. If one of two
    summands lacks a block, it counts as zero there.

    Attributes:
        directions: `{block: float[hidden_dim]}`; kept as float32, read-only, in block order.
        info: facts about it, as text: `method`, `family`, `model_hint` (the type of its model, as
            Hugging Face and llama.cpp call it), `num_blocks`, `normalization`, `source_digest`.
            Saved with it. What another program wrote into a GGUF file is kept too, such as
            `general.name`.

    Examples:
        >>> import backbone_surgery as bs, numpy as np
        >>> vector = bs.ControlVector({1: np.ones(4), 2: np.arange(4)})
        >>> (2 * vector - vector).directions[2].tolist()
        [0.0, 1.0, 2.0, 3.0]
    """

    directions: Mapping[int, np.ndarray]
    info: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        directions = read_directions(self.directions, "ControlVector")
        info = files.check_info(self.info)
        for direction in directions.values():
            direction.setflags(write=False)
        object.__setattr__(self, "directions", MappingProxyType(directions))
        object.__setattr__(self, "info", MappingProxyType(info))

    @classmethod
    def train(
        cls,
        lm: Any,
        pairs: Iterable[tuple[Any, Any]],
        method: str = "pca_diff",
        batch_size: int = 32,
        token: int = -1,
        verbose: int = 1,
        *,
        at: str = "blocks.*",
        controls: Mapping[str, Any] | None = None,
    ) -> ControlVector:
        """Find the direction that tells the two texts of each pair apart, at every block.

        It is found from the outputs of the blocks at one token of each text. They are measured in
        the graph that generates, other rewrites included.

        Args:
            lm: a `CachedCausalLM`.
            pairs: `[(positive text, negative text), ...]`; sequences of token ids for a model
                without a preprocessor.
            method: how to find the direction of a block:

                * `"pca_diff"`: the first principal component of the centred differences, of unit
                  norm;
                * `"pca_center"`: that of the activations, each less the midpoint of its pair;
                * `"mean_diff"`: the mean of the differences, not normalised;
                * `"logistic"`: the normal of the plane that separates the sides, by scikit-learn's
                  logistic regression, of unit norm.
            batch_size: how many texts to run at once. The result does not depend on it.
            token: which token of each text is measured, as an index into its tokens, start token
                included; -1 is the last.
            verbose: 1 shows a progress bar.
            at: site selector, one site in each block, where the vector is to be used.
            controls: values for the controls of the model, as of `generate`.

        Returns:
            The vector, with a direction for each block.

        Raises:
            SurgeryError: bad pairs, an unknown method, or a text without such a token; before
                anything is compiled.
        """
        check_method(method)
        check_count("train", "batch_size", batch_size, "texts")
        if not is_int(token) or abs(token) > _FURTHEST:
            raise SurgeryError(
                "train at 'token': expected an integer, an index into the tokens of a text. "
                f"Received {shown(token)}. -1 is the last."
            )
        if not isinstance(verbose, int | np.integer | np.bool_):
            raise SurgeryError(
                f"train at 'verbose': expected 0 or 1. Received {shown(verbose)}. Pass one of them."
            )
        listed = check_pairs(pairs)
        rows = read_texts(lm, [text for pair in listed for text in pair], "train")
        states = measure(
            lm,
            rows,
            TokenStates,
            "train",
            at=at,
            tokens=_token_positions(rows, int(token)),
            batch_size=batch_size,
            controls=controls,
            verbose=verbose,
        )
        directions = {
            block: find_direction(method, values[::2], values[1::2])
            for block, values in _by_block(states, at).items()
        }
        normalization = "none" if method == "mean_diff" else "unit"
        info = describe(lm, at, method=method, normalization=normalization)
        return cls(directions, info)

    @classmethod
    def load(cls, path: str | Path, shift: int = 0, lm: Any = None) -> ControlVector:
        """Load a vector from a `.gguf` or `.safetensors` file.

        Args:
            path: the file.
            shift: added to the number of each block. llama.cpp's generator measures one block
                early: load its vectors with `shift=-1`.
            lm: the model to check the vector against. A `.safetensors` file for another model is
                refused, with the field that differs; a `.gguf` file for another type of model
                gives a warning.

        Returns:
            The vector, with float32 directions.

        Raises:
            SurgeryError: the file is damaged, or holds something else.
        """
        path = as_path(path, "load")
        if not is_int(shift) or abs(shift) > _FURTHEST:
            raise SurgeryError(
                f"load at '{path}': expected `shift` to be an integer. Received {shown(shift)}. "
                "Pass what is added to the number of each block."
            )
        directions, info = files.read(path)
        directions = {block + int(shift): d for block, d in directions.items()}
        if lm is not None:
            check_task(lm, f"load at '{path}'")
            strict = path.suffix == ".safetensors"
            types = lm.opened.family.model_types_of(lm.opened.owner)
            try:
                model = describe(lm, info.get("at", "blocks.*"))
            except SelectorError:  # a site of another model
                model = describe(lm)
            files.check_made_for(path, info, model, types, directions, strict)
        return cls(directions, info)

    @classmethod
    def from_preset(cls, preset: str, name: str) -> ControlVector:
        """Load the vector of this name that comes with a model.

        Args:
            preset: `tiny_gpt2`, `tiny_gemma`, or a folder.
            name: such as `mood`: of a file in the folder's `vectors`.

        Raises:
            SurgeryError: there is no such model or vector.
        """
        return cls.load(find_vector(preset, name))

    def save(self, path: str | Path) -> None:
        """Save to a `.gguf` or `.safetensors` file, by the ending. Writing is atomic.

        A link is followed: the file that it points to is replaced. GGUF files have no place
        for block 0: its direction is left out, with a warning.

        Raises:
            SurgeryError: another ending, or a place that cannot be written.
        """
        files.write(as_path(path, "save"), dict(self.directions), dict(self.info))

    def get_config(self) -> dict[str, Any]:
        """Return the directions and what is known of them: what a recipe keeps."""
        return {"directions": dict(self.directions), "info": dict(self.info)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ControlVector:
        """Make a vector of what `get_config` returned."""
        return cls(**config)

    @property
    def hidden_dim(self) -> int:
        """Size of the directions."""
        return len(next(iter(self.directions.values())))

    @property
    def model_hint(self) -> str | None:
        """Type of its model, if that is known."""
        return self.info.get("model_hint")

    def normalized(self) -> ControlVector:
        """Return the vector with a direction of norm 1 at each block.

        Raises:
            SurgeryError: a direction is zero.
        """
        norms = {block: np.linalg.norm(d) for block, d in self.directions.items()}
        zero = [block for block, norm in norms.items() if norm == 0]
        if zero:
            raise SurgeryError(
                f"normalized: expected directions other than zero. Received zeros for blocks {zero}"
                ". Leave these blocks out."
            )
        scaled = {block: d / norms[block] for block, d in self.directions.items()}
        return ControlVector(scaled, {**self.info, "normalization": "unit"})

    def orthogonal_to(self, *others: ControlVector) -> ControlVector:
        """Return the part at right angles to other vectors, block by block.

        Args:
            *others: vectors of one size with this, with a direction for each of its blocks.

        Raises:
            SurgeryError: a vector does not fit, or nothing is left of a direction.
        """
        directions = {}
        for block, own in self.directions.items():
            fits = [
                isinstance(other, ControlVector)
                and block in other.directions
                and other.hidden_dim == self.hidden_dim
                for other in others
            ]
            if not all(fits):
                raise SurgeryError(
                    f"orthogonal_to: expected control vectors of size {self.hidden_dim} with a "
                    f"direction for block {block}. Received {shown(others[fits.index(False)])}. "
                    "Train them all on one model, at the same blocks."
                )
            shared = np.array([other.directions[block] for other in others])
            basis = orthonormal_basis(shared.reshape(-1, self.hidden_dim))
            left = own - basis.T @ (basis @ own)
            if np.linalg.norm(left) <= 1e-6 * np.linalg.norm(own):
                raise SurgeryError(
                    f"orthogonal_to at block {block}: expected a direction that the others do not "
                    "span. Received one of which nothing is left. Leave one of the others out."
                )
            directions[block] = left
        return ControlVector(directions, {**self.info, "normalization": "none"})

    def relative_to(
        self, lm: Any, texts: Iterable[Any] | None = None, batch_size: int = 32
    ) -> ControlVector:
        """Return the vector in units of the residual norm of each block.

        Strength 1 then adds, at each block, a direction as long as the average hidden state there.
        So useful strengths are similar for all models and blocks.

        Args:
            lm: the model to measure.
            texts: what to measure on; a few neutral sentences, or random tokens for a model
                without a preprocessor, by default.
            batch_size: how many texts to run at once.

        Returns:
            A new vector, with float32 directions.

        Raises:
            SurgeryError: the vector does not fit the model, or a text is too short.
        """
        check_task(lm, "relative_to")
        check_fits(lm, self, "relative_to")
        sizes = residual_norms(lm, texts, batch_size)
        unit = self.normalized()
        scaled = {block: sizes[block] * d for block, d in unit.directions.items()}
        return ControlVector(scaled, {**self.info, "normalization": "residual norm"})

    def __add__(self, other: ControlVector) -> ControlVector:
        return self._combined(other, operator.add)

    def __radd__(self, other: float) -> ControlVector:
        # Python's `sum` begins with 0.
        return self if _is_factor(other) and other == 0 else NotImplemented

    def __sub__(self, other: ControlVector) -> ControlVector:
        return self._combined(other, operator.sub)

    def __mul__(self, factor: float) -> ControlVector:
        if not _is_factor(factor):
            return NotImplemented
        if read_number(factor) is None:
            raise SurgeryError(
                f"ControlVector: expected a finite factor. Received {shown(factor)}. Pass a number "
                "that float32 can hold."
            )
        with np.errstate(over="ignore"):  # An infinite product is refused below.
            scaled = {block: np.float32(factor) * d for block, d in self.directions.items()}
        return ControlVector(scaled, {**self.info, "normalization": "none"})

    __rmul__ = __mul__
    # So that a number of NumPy leaves the product to this class.
    __array_ufunc__ = None

    def __truediv__(self, divisor: float) -> ControlVector:
        if not _is_factor(divisor):
            return NotImplemented
        if not read_number(divisor):
            raise SurgeryError(
                "ControlVector: expected a finite divisor other than 0. Received "
                f"{shown(divisor)}. Pass a number that float32 can hold."
            )
        return self * (1 / divisor)

    def __reduce__(self) -> tuple[Any, ...]:
        return ControlVector, (dict(self.directions), dict(self.info))

    def __neg__(self) -> ControlVector:
        return ControlVector({block: -d for block, d in self.directions.items()}, self.info)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ControlVector):
            return NotImplemented
        own, others = self.directions, other.directions
        return set(own) == set(others) and all(np.array_equal(own[k], others[k]) for k in own)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        blocks = ", ".join(map(str, self.directions))
        return f"ControlVector(blocks {blocks}; size {self.hidden_dim}; {dict(self.info)})"

    def _combined(self, other: ControlVector, function: Any) -> ControlVector:
        if not isinstance(other, ControlVector):
            return NotImplemented
        if other.hidden_dim != self.hidden_dim:
            raise SurgeryError(
                f"ControlVector: expected two vectors of one size. Received {self.hidden_dim} and "
                f"{other.hidden_dim}. Combine vectors of one model."
            )
        zero = np.zeros(self.hidden_dim, "float32")
        blocks = set(self.directions) | set(other.directions)
        combined = {
            block: function(self.directions.get(block, zero), other.directions.get(block, zero))
            for block in blocks
        }
        shared = {k: v for k, v in self.info.items() if other.info.get(k) == v}
        return ControlVector(combined, {**shared, "normalization": "none"})


def check_fits(lm: Any, vector: ControlVector, operation: str) -> None:
    """Refuse a vector that has not the size or the blocks of a model; the error names both."""
    blocks = len({place.block for place in site.places(lm.opened)} - {None})
    size = lm.opened.token_embedding.output_dim
    if vector.hidden_dim != size or not set(vector.directions) <= set(range(blocks)):
        raise SurgeryError(
            f"{operation}: expected a vector of size {size} for blocks 0 to {blocks - 1}. "
            f"Received one of size {vector.hidden_dim} for blocks {list(vector.directions)}. Use "
            "the model that it was made for."
        )


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def describe(lm: Any, at: str = "blocks.*", **facts: str) -> dict[str, str]:
    """Say what model a vector is for; and at which sites, if not at the outputs of blocks."""
    opened = lm.opened
    places = {place.path: place for place in site.places(opened)}
    blocks = {place.block for place in places.values()} - {None}
    first = places[site.select(at, list(places))[0]]
    is_output = first.path == f"blocks.{first.block}"
    return {
        **({} if is_output else {"at": at}),
        **facts,
        "family": opened.family.name,
        "model_hint": opened.family.model_types_of(opened.owner)[0],
        "hidden_dim": str(math.prod(first.tensor.shape[2:])),
        "num_blocks": str(len(blocks)),
        "source_digest": weights_digest(opened.owner),
    }


def _by_block(values: Mapping[str, np.ndarray], at: str) -> dict[int, np.ndarray]:
    blocks = {path: b for path in values if (b := site.block_of(path)) is not None}
    if len(blocks) < len(values) or len(set(blocks.values())) < len(blocks):
        raise SurgeryError(
            f"train at '{at}': expected one site in each block. Received {list(values)}. Select "
            "one kind of site, such as 'blocks.*'."
        )
    return {blocks[path]: array for path, array in values.items()}


def _token_positions(rows: list[np.ndarray], token: int) -> np.ndarray:
    lengths = np.array([len(row) for row in rows], np.int64)
    positions = lengths + token if token < 0 else np.full_like(lengths, token)
    outside = (positions < 0) | (positions >= lengths)
    if outside.any():
        index = int(outside.argmax())
        raise SurgeryError(
            f"train at token={token}: expected texts with such a token. Received text "
            f"{index % 2} of pair {index // 2}, of {lengths[index]} tokens. Choose another token, "
            "or longer texts."
        )
    return positions.astype(np.int32)
