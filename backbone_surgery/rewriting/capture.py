"""Capture: hand out what stands at some sites, without changing anything."""

from dataclasses import dataclass
from typing import ClassVar

import keras

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.graph.emission import emit
from backbone_surgery.opening.site import Identity, Place
from backbone_surgery.rewriting.rewrite import SiteRewrite, Surgery


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True, init=False)
class Capture(SiteRewrite):
    """Capture the activations at some sites.

    The edited model then returns `{"hidden_states": ..., "captures": {site path: tensor}}`, and so
    does its `backbone_with_cache`. A capture holds what stands at the site after the rewrites of
    that site that come before it in the list, and not after those that come later. What is done at
    sites that run earlier, such as at earlier blocks, has its effect on it wherever it stands in
    the list. The hidden states stay as they are.

    A tensor is float[batch, time, ...], except at `attention_pattern`: a pattern is float[batch,
    heads, time, keys], where the keys are the tokens of the pass, or the slots of the cache. In
    generation, use `lm.generate(..., return_captures=True)`.

    Args:
        *selectors: site selectors.
        at: more of them, as a tuple.
        name: `None`, or a prefix: the captures are then called `name/path`. So one site can be
            captured twice, before and after another rewrite.

    Examples:
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
        listed = at if isinstance(at, list | tuple) else (at,)
        paths = (*listed, *selectors)
        named = name is None or (isinstance(name, str) and name.isidentifier())
        if not paths or not named or not all(isinstance(path, str) for path in paths):
            raise SurgeryError(
                "Capture: expected at least one site selector, and a name of letters, digits and "
                f"underscores or none. Received {shown(paths)} and name {shown(name)}. Pass "
                "`Capture('blocks.*')`, say."
            )
        object.__setattr__(self, "at", paths)
        object.__setattr__(self, "name", name)

    def choose(self, surgery: Surgery) -> list[Place]:
        """Return the sites that any of the selectors picks."""
        paths = {place.path for selector in self.at for place in surgery.select(selector)}
        return [place for place in surgery.places if place.path in paths]

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Emit the tensor, and leave it where it is."""
        name = f"{self.name}/{place.path}" if self.name else place.path
        if name in surgery.model.captures:
            raise SurgeryError(
                f"Capture at '{place.path}': expected captures under names of their own. Received "
                f"a second one named '{name}'. Give it a name: `Capture(..., name='before')`."
            )
        emit(name, Tap(name=f"capture_{name.replace('/', '_')}")(x))
        return x


class Tap(Identity):
    """A node for one capture, so that two captures of one tensor are two outputs of the graph."""
