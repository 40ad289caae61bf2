"""Candidates: the edits that a search tries, as the controls of one graph for each kind of edit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.opening.site import places
from backbone_surgery.rewriting import Control, LowRank, Reft, Rewrite, Steer
from backbone_surgery.rewriting.operate import operate
from backbone_surgery.tuning.learning import learn
from backbone_surgery.vectors.vector import ControlVector

_SHARES = (0.1, 0.17, 0.28, 0.45, 0.7)
_FACTORS = (0.5, 0.75, 1.0, 1.4, 2.0)


@dataclass(frozen=True)
class Candidate:
    """One edit that is tried.

    Attributes:
        method: how it was found.
        blocks: the blocks that it acts on.
        strength: at each of them: in units of the residual norm for a direction, and of what was
            trained for `"reft"`.
    """

    method: str
    blocks: tuple[int, ...]
    strength: float


UNEDITED = Candidate("none", (), 0.0)
"""The model as it is."""


def block_sets(count: int) -> list[tuple[int, ...]]:
    """Return the sets of blocks to try: each one, and runs of a quarter and of half of them.

    Examples:
        >>> block_sets(4)
        [(0,), (1,), (2,), (3,), (0, 1), (1, 2), (2, 3)]
    """
    sets: list[tuple[int, ...]] = [(i,) for i in range(count)]
    for size in sorted({max(round(count / 4), 2), max(round(count / 2), 2)}):
        step = max(size // 2, 1)
        sets += [tuple(range(i, i + size)) for i in range(0, count - size + 1, step)]
    return sets


class Steering:
    """Candidates that add a direction: the graph that runs them, and the edit that one is.

    Args:
        lm: the model to edit.
        name: of the control.
        size: how long the hidden states of each block are, `{block: norm}`.
    """

    def __init__(self, lm: CachedCausalLM, name: str, size: Mapping[int, float]) -> None:
        self.name, self.size = name, dict(size)
        any_vector = {b: np.ones(lm.opened.token_embedding.output_dim) for b in size}
        self.vectors = {UNEDITED.method: ControlVector(any_vector)}
        self.lm = _edited(lm, [Steer(name, any_vector, strength=0.0)])

    def add(self, method: str, vector: ControlVector) -> None:
        """Add the directions of a method, each as long as the hidden states of its block."""
        unit = vector.normalized().directions
        self.vectors[method] = ControlVector(
            {block: self.size[block] * d for block, d in unit.items()}, vector.info
        )

    def candidates(self, method: str) -> list[Candidate]:
        """Return what to try of a method: of the blocks that it has directions for."""
        own = set(self.vectors[method].directions)
        return [
            Candidate(method, blocks, share / len(blocks) ** 0.5)
            for blocks in block_sets(len(self.size))
            if own.issuperset(blocks)
            for share in _SHARES
        ]

    def controls(self, rows: Sequence[tuple[Candidate, int]]) -> dict[str, Any]:
        """Return the controls of rows, each of a candidate and a sign."""
        order = list(self.size)
        strengths = np.zeros((len(rows), len(order)), "float32")
        for i, (candidate, sign) in enumerate(rows):
            strengths[i, [order.index(b) for b in candidate.blocks]] = sign * candidate.strength
        nothing = self.vectors[UNEDITED.method].directions
        whole = {m: ControlVector({**nothing, **v.directions}) for m, v in self.vectors.items()}
        vectors = [whole[candidate.method] for candidate, _ in rows]
        return {self.name: Control(strength=strengths, directions=vectors)}

    def edit(self, candidate: Candidate) -> Rewrite:
        """Return the rewrite that a candidate is, at strength 1."""
        vector = self.vectors[candidate.method]
        directions = {b: candidate.strength * vector.directions[b] for b in candidate.blocks}
        info = {**vector.info, "method": candidate.method, "normalization": "none"}
        return Steer(self.name, ControlVector(directions, info))


class Interventions:
    """Candidates that are a `Reft` of one block: the graph that runs them, trained.

    Args:
        lm: the model to edit.
        name: of the control.
        rank: of each.
        pairs: to learn.
        options: for `learn`.
    """

    def __init__(
        self, lm: CachedCausalLM, name: str, rank: int, pairs: Any, options: Mapping[str, Any]
    ) -> None:
        self.name, self.blocks = name, blocks_of(lm)
        names = {b: f"{name}_{b}" for b in self.blocks}
        seed = int(options["seed"])
        refts = [Reft(n, rank, f"blocks.{b}", strength=0.0, seed=seed) for b, n in names.items()]
        self.lm = _edited(lm, refts)
        apart = np.eye(len(names), dtype="float32")
        strengths = {f"{n}_strength": apart[:, i] for i, n in enumerate(names.values())}
        learn(lm, self.lm.opened, pairs, strengths, **options)

    def candidates(self, method: str) -> list[Candidate]:
        """Return what to try."""
        return [Candidate(method, (b,), factor) for b in self.blocks for factor in _FACTORS]

    def controls(self, rows: Sequence[tuple[Candidate, int]]) -> dict[str, Any]:
        """Return the controls of rows, each of a candidate and a sign."""
        return {
            f"{self.name}_{b}": [c.strength * sign if b in c.blocks else 0.0 for c, sign in rows]
            for b in self.blocks
        }

    def edit(self, candidate: Candidate) -> Rewrite:
        """Return the rewrite that a candidate is, at the strength that was found by default."""
        (block,) = candidate.blocks
        name = f"{self.name}_{block}"
        own = [r for r in self.lm.opened.rewrites if isinstance(r, Reft)]
        trained = next(r for r in own if r.name == name)
        return replace(trained, name=self.name, strength=candidate.strength)


def blocks_of(lm: CachedCausalLM) -> list[int]:
    """Return the numbers of the blocks of a model."""
    return sorted({p.block for p in places(lm.opened) if p.block is not None})


def _edited(lm: CachedCausalLM, rewrites: Sequence[Rewrite]) -> CachedCausalLM:
    trust, precision = lm.rewired_by
    graph = operate(lm.backbone, rewrites)
    edited = CachedCausalLM(graph, lm.preprocessor, trust=trust, precision=precision)
    edited.compile(sampler=lm.sampler)
    return edited


class Adapters:
    """Candidates that are a `LowRank` at the values of all blocks: the graph that runs it, trained.

    Args:
        lm: the model to edit.
        name: of the control.
        rank: of each map.
        pairs: to learn.
        options: for `learn`.
    """

    def __init__(
        self, lm: CachedCausalLM, name: str, rank: int, pairs: Any, options: Mapping[str, Any]
    ) -> None:
        self.name, self.blocks = name, tuple(blocks_of(lm))
        self.lm = _edited(lm, [LowRank("blocks.*.value", rank, name=name, strength=0.0)])
        rng = np.random.default_rng(options["seed"])
        for adapter in self.trained.adapters.values():
            shape = adapter.down.shape
            adapter.down.assign(rng.normal(0, shape[0] ** -0.5, shape))
        learn(lm, self.lm.opened, pairs, {f"{name}_strength": np.ones(1, "float32")}, **options)

    @property
    def trained(self) -> LowRank:
        """The rewrite with its adapters."""
        own = [r for r in self.lm.opened.rewrites if isinstance(r, LowRank)]
        return next(r for r in own if r.name == self.name)

    def candidates(self, method: str) -> list[Candidate]:
        """Return what to try."""
        return [Candidate(method, self.blocks, factor) for factor in _FACTORS]

    def controls(self, rows: Sequence[tuple[Candidate, int]]) -> dict[str, Any]:
        """Return the controls of rows, each of a candidate and a sign."""
        return {self.name: [c.strength * sign for c, sign in rows]}

    def edit(self, candidate: Candidate) -> Rewrite:
        """Return the rewrite that a candidate is, at the strength that was found by default."""
        return replace(self.trained, strength=candidate.strength)
