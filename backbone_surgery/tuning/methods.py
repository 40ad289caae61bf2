"""Methods: from the name of each to the candidates of it, which all have one form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.tuning.candidates import Adapters, Interventions, Steering
from backbone_surgery.tuning.features import Autoencoder, feature_vector
from backbone_surgery.tuning.learned import LEARNED, learned_vector
from backbone_surgery.tuning.reft_r1 import reft_r1_vector
from backbone_surgery.vectors.directions import METHODS
from backbone_surgery.vectors.vector import ControlVector, describe

TRAINED: dict[str, Callable[..., Any]] = {"reft": Interventions, "lora": Adapters}
"""Methods that train a rewrite of their own; all others find directions."""

STEERING = (*METHODS, *LEARNED, "reft_r1", "sae")
NAMES = (*STEERING, *TRAINED)


@dataclass(frozen=True)
class Methods:
    """What methods need to make candidates.

    Attributes:
        lm: the model to edit.
        name: of the control.
        pairs: `[(positive text, negative text), ...]`.
        rank: of the rewrites that have one.
        steering: the candidates that are directions.
        learning: `steps` and `seed`.
        given: directions of the user's own, by name.
        apart_from: vectors that directions are made orthogonal to.
        autoencoders: by block.
    """

    lm: CachedCausalLM
    name: str
    pairs: Sequence[tuple[Any, Any]]
    rank: int
    steering: Steering
    learning: Mapping[str, int]
    given: Mapping[str, ControlVector]
    apart_from: Sequence[ControlVector]
    autoencoders: Mapping[int, Autoencoder]

    def prepare(self, method: str) -> Steering | Interventions | Adapters:
        """Find or train what a method needs, and return its candidates."""
        if method in TRAINED:
            return TRAINED[method](self.lm, self.name, self.rank, self.pairs, self.learning)
        vector = self.vector(method)
        if self.apart_from:
            vector = vector.orthogonal_to(*self.apart_from)
        self.steering.add(method, vector)
        return self.steering

    def vector(self, method: str) -> ControlVector:
        """Find the directions of a method."""
        if method in self.given:
            return self.given[method]
        if method in METHODS:
            return ControlVector.train(self.lm, self.pairs, method=method, verbose=0)
        size = self.steering.size
        if method in LEARNED:
            found = learned_vector(method, self.lm, self.pairs, size, self.learning)
        elif method == "reft_r1":
            found = reft_r1_vector(self.lm, self.pairs, size, self.learning)
        else:
            found = feature_vector(self.lm, self.pairs, self.autoencoders)
        return ControlVector(found.directions, {**describe(self.lm), **found.info})
