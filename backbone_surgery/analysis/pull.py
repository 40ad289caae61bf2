"""Gradients, taken back through the stages of a model, one after the other."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.analysis.runs import Cut
from backbone_surgery.opening.predict import SharedPrograms, predict
from backbone_surgery.opening.site import BesideInput, BlockInput, Site

_SUMS = {Cut, Site, BlockInput, BesideInput, keras.layers.Add, keras.layers.Dropout}
"""Layers that, out of training, hand on the sum of what they take."""


class Pull(keras.Model):
    """Take gradients back through a stage.

    Args:
        stage: the stage.
        wrt: which of the things that it takes they are taken back to.

    Call arguments:
        values: what the stage takes, of one row, then for each thing that it makes the gradient,
            float[rows, ...].

    Returns:
        The gradients with respect to what `wrt` lists, float[rows, ...].
    """

    def __init__(self, stage: graph.Stage, wrt: Sequence[int]) -> None:
        super().__init__(autocast=False, dtype=stage.dtype_policy, name=f"pull_{stage.name}")
        self.stage, self.wrt = stage, tuple(wrt)
        self.built = True

    def call(self, values, training=None):
        """Differentiate the stage, once for each row of the gradients."""
        import jax

        taken, gradients = values[: len(self.stage.takes)], values[len(self.stage.takes) :]
        rows = ops.shape(gradients[0])[0]

        def run(*moved: Any) -> Any:
            given = dict(zip(self.wrt, moved, strict=True))
            own = [given.get(i, x) for i, x in enumerate(taken)]
            return self.stage(own, training=training)

        made, pull = jax.vjp(run, *(ops.repeat(taken[i], rows, axis=0) for i in self.wrt))
        return pull([ops.cast(g, x.dtype) for g, x in zip(gradients, made, strict=True)])


class Pulls:
    """Gradients back through the stages of a model, for runs of one row.

    Args:
        stages: of the model.

    Attributes:
        stages: the same.
        programs: compiled programs of the stages and of these.
    """

    def __init__(self, stages: graph.Stages) -> None:
        self.stages, self.programs = stages, SharedPrograms()
        self._cut = {number for _, number in stages.cuts.values()}
        self._known: dict[tuple[int, ...], tuple[list[int], Pull | None]] = {}

    def of(self, number: int, values: Mapping[int, Any], gradient: Any) -> dict[int, np.ndarray]:
        """Take a gradient back through the one stage that makes what it is of.

        Args:
            number: of what it is of.
            values: the run.
            gradient: float[rows, ...].

        Returns:
            By number float32[rows, ...], of what the stage takes, but for what no cut reaches.
        """
        return self._through(self.stages.maker(number), (number,), values, [gradient])

    def back(
        self,
        values: Mapping[int, Any],
        gradients: Mapping[int, Any],
        held: Collection[int] = (),
    ) -> dict[int, Any]:
        """Take gradients back through all stages.

        Args:
            values: the run.
            gradients: by number float[rows, ...].
            held: numbers of what is taken as given: gradients go back to it, and no further.

        Returns:
            The same, and those of all that they are made of.
        """
        known = dict(gradients)
        for i in reversed(range(1, len(self.stages.stages))):
            makes = self.stages.stages[i].makes
            numbers = tuple(n for n in makes if n in known and n not in held)
            if numbers:
                made = self._through(i, numbers, values, [known[n] for n in numbers])
                known.update({n: known.get(n, 0) + gradient for n, gradient in made.items()})
        return known

    def _through(
        self, index: int, numbers: tuple[int, ...], values: Mapping[int, Any], gradients: list[Any]
    ) -> dict[int, np.ndarray]:
        stage = self.stages.part(index, numbers)
        if numbers not in self._known:
            moved = [i for i, n in enumerate(stage.takes) if self._moves(n, values[n])]
            self._known[numbers] = moved, None if _is_sum(stage) else Pull(stage, moved)
        moved, pull = self._known[numbers]
        if not moved:
            return {}
        if pull is None:
            known = _through_sum(stage, dict(zip(numbers, gradients, strict=True)))
            return {stage.takes[i]: known[stage.takes[i]] for i in moved}
        taken = [values[n] for n in stage.takes]
        made = predict(pull, [*taken, *gradients], self.programs)
        return {stage.takes[i]: np.asarray(x, "float32") for i, x in zip(moved, made, strict=True)}

    def _moves(self, number: int, value: Any) -> bool:
        """Tell whether something is made of what a cut hands on, and has gradients."""
        is_float = keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype))
        return is_float and (number in self._cut or self.stages.maker(number) > 0)


def _is_sum(stage: graph.Stage) -> bool:
    """Tell whether a stage only adds arrays of one shape: gradients go through as they are."""
    nodes = [call.node for call in stage.calls]
    shapes = [{x.shape for x in (*node.input_tensors, *node.outputs)} for node in nodes]
    return {*map(type, stage.parts)} <= _SUMS and all(len(each) == 1 for each in shapes)


def _through_sum(stage: graph.Stage, gradients: dict[int, Any]) -> dict[int, Any]:
    """Return gradients, and those of all that a stage adds, by number."""
    known = dict(gradients)
    for call in reversed(stage.calls):
        gradient = known[call.makes[0]]
        for n in call.takes:
            known[n] = known[n] + gradient if n in known else gradient
    return known
