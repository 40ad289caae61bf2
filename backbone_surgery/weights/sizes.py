"""Sizes: what a recipe makes is compared with what it has arrays for, before it takes memory."""

import math
from collections.abc import Iterable, Mapping

import keras

from backbone_surgery.errors import RecipeError
from backbone_surgery.weights.arrays import Array
from backbone_surgery.weights.tree import of_variable

_SPARE = 2**20


class Bounded(list):
    """Variables that are made while a recipe is loaded, none larger than its largest array.

    Args:
        arrays: of the recipe, by name.
        at: what the names of those that count begin with.
    """

    def __init__(self, arrays: Mapping[str, Array], at: str) -> None:
        super().__init__()
        sizes = (math.prod(a.shape) for name, a in arrays.items() if name.startswith(at))
        self.most = max([1024, *sizes])

    def append(self, variable: keras.Variable) -> None:
        """Take a variable, or refuse it before anything is computed with it."""
        if math.prod(variable.shape) > self.most:
            raise RecipeError(
                f"load_recipe at '{variable.path[:80]}': expected weights of at most {self.most} "
                "numbers each, as the largest array of the recipe. Received some of shape "
                f"{tuple(variable.shape)}. The recipe is damaged; get it again."
            )
        super().append(variable)

    def check_spare(self, kept: Iterable[keras.Variable]) -> None:
        """Refuse layers that bring weights which the graph does not use, all but small states."""
        known = {id(v) for v in kept}
        spare = sum(of_variable(v).nbytes for v in self if id(v) not in known)
        if spare > _SPARE:  # the states of random generators and of metrics are much smaller
            raise RecipeError(
                f"load_recipe at 'layers': expected at most {_SPARE} bytes of weights that the "
                f"recipe has no arrays for. Received {spare}. The recipe is damaged; get it again."
            )


def check_arrays(
    variables: Mapping[str, keras.Variable], arrays: Mapping[str, Array], at: str
) -> None:
    """Check that there is an array of the path, shape and dtype of each variable, and no other."""
    found = {n.removeprefix(at): a for n, a in arrays.items() if n.startswith(at)}
    shown = {path: str(array) for path, array in found.items()}
    wanted = {path: str(of_variable(v)) for path, v in variables.items()}
    if shown != wanted:
        wrong = sorted(p for p in shown.keys() | wanted.keys() if shown.get(p) != wanted.get(p))
        first = wrong[0]
        raise RecipeError(
            f"load_recipe at '{at}{first}': expected {wanted.get(first, 'no such array')}. "
            f"Received {shown.get(first, 'none')}. The recipe was made on "
            "another model, or is damaged."
        )
