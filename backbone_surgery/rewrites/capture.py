"""Capture: hand out what stands at some sites, without changing anything."""

from dataclasses import dataclass
from typing import ClassVar

import keras

from backbone_surgery.emission import emit
from backbone_surgery.errors import SurgeryError
from backbone_surgery.rewrites.rewrite import SiteRewrite, Surgery
from backbone_surgery.site import Identity, Place


@dataclass(frozen=True, init=False)
class Capture(SiteRewrite):
    """Capture the activations at some sites.

    The edited model then returns `{"hidden_states": ..., "captures": {site path: tensor}}`, and so
    does its `backbone_with_cache`. Captured is what stands at the site when the rewrites listed so
    far are applied: a `Steer` before the `Capture` is seen, one after it is not. Nothing else
    changes; the hidden states stay as they are.

    A tensor has a row for each row and, at every site but `attention_pattern`, an entry for each
    token: float[batch, time, ...]. A pattern is float[batch, heads, time, keys], where the keys are
    the tokens of the pass, or the slots of the cache. In generation, use
    `lm.generate(..., return_captures=True)`.

    Args:
        *selectors: site selectors.
        at: more of them, as a tuple.
        name: `None`, or a prefix for the names of the captures, `name/path`, so that one site can
            be captured twice, before and after another rewrite.

    Example:
        >>> import backbone_surgery as bs, keras_hub, numpy as np
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.Capture("blocks.*", "blocks.0.attention_pattern")])
        >>> out = edited({"token_ids": np.ones((1, 4), int), "padding_mask": np.ones((1, 4), int)})
        >>> {path: tuple(x.shape) for path, x in sorted(out["captures"].items())}
        {'blocks.0': (1, 4, 8), 'blocks.0.attention_pattern': (1, 2, 4, 4), 'blocks.1': (1, 4, 8)}
    """

    at: tuple[str, ...]  # type: ignore[assignment]
    name: str | None

    captures: ClassVar[bool] = True

    def __init__(self, *selectors: str, at: tuple[str, ...] = (), name: str | None = None) -> None:
        given = (*((at,) if isinstance(at, str) else tuple(at)), *selectors)
        if not given or not (name is None or (isinstance(name, str) and name.isidentifier())):
            raise SurgeryError(
                "Capture: expected at least one site selector, and a name of letters, digits and "
                f"underscores or none. Received {given!r} and name {name!r}. Pass "
                "`Capture('blocks.*')`, say."
            )
        object.__setattr__(self, "at", given)
        object.__setattr__(self, "name", name)

    def choose(self, surgery: Surgery) -> list[Place]:
        """Return the sites that any of the selectors picks."""
        paths = {place.path for selector in self.at for place in surgery.select(selector)}
        return [place for place in surgery.places if place.path in paths]

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Hand the tensor out, and leave it where it is."""
        name = f"{self.name}/{place.path}" if self.name else place.path
        if name in surgery.model.captures:
            raise SurgeryError(
                f"Capture at '{place.path}': expected captures under names of their own. Received "
                f"a second one named '{name}'. Give it a name: `Capture(..., name='before')`."
            )
        emit(name, Tap(name=f"capture_{name.replace('/', '_')}")(x))
        return x


class Tap(Identity):
    """A node of its own for what is captured, so that a graph has one output for each capture."""
