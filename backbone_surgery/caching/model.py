"""The model of a cached graph."""

from collections.abc import Mapping
from typing import Any

from backbone_surgery.caching.chunk import check_chunk
from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening.model import EditedBackbone, WithControls, remember
from backbone_surgery.opening.state import StateSpec


class BackboneWithCache(WithControls):
    """A backbone's graph with the state of its layers among inputs and outputs, see `rewire`.

    Attributes:
        source: the `EditedBackbone` that it was derived from.
        states: for each entry of the cache, `{name: StateSpec}`.
        defaults: `{input name: default of one row}` of the controls.
    """

    def __init__(self, inputs: Any, outputs: Any, *, source: EditedBackbone, states: list) -> None:
        super().__init__(inputs=inputs, outputs=outputs, name="backbone_with_cache")
        remember(self, source=source, states=tuple(states), defaults=source.defaults)
        self.dtype_policy = source.dtype_policy

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the next tokens of each row.

        Raises:
            SurgeryError: an input has another shape than the cache and the tokens ask for, or the
                cache has no room for the tokens. Inside a compiled function `cache_update_index`
                has no value, so it is not checked there.
        """
        self._check(inputs)
        return super().__call__(inputs, *args, **kwargs)

    def predict_on_batch(self, x: Any) -> Any:
        """Run the next tokens of each row, compiled; see `__call__`."""
        self._check(x)
        return super().predict_on_batch(x)

    def _check(self, inputs: Any) -> None:
        needed = ("token_ids", "cache", "cache_update_index", "positions", "cache_mask")
        missing = [n for n in needed if not isinstance(inputs, Mapping) or n not in inputs]
        if missing:
            raise SurgeryError(
                f"call of '{self.name}': expected a dict of inputs with {', '.join(needed)}. "
                f"Received none of the name {', '.join(missing)}. Pass them all."
            )
        check_chunk(f"call of '{self.name}'", self.states, inputs)

    source: EditedBackbone
    states: tuple[dict[str, StateSpec], ...]
