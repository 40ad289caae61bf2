"""Runs of a text from a site and a token on: what lies before is known from the text itself."""

from collections import ChainMap
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import tree

from backbone_surgery import graph, hosts
from backbone_surgery.analysis.question import Text, bind_row, derived, rewired
from backbone_surgery.caching.cache import new_cache
from backbone_surgery.caching.model import BackboneWithCache
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.opening.once import made_once
from backbone_surgery.opening.predict import SharedPrograms, predict
from backbone_surgery.opening.site import Identity, Place, places
from backbone_surgery.rewriting import Surgery
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.patch import for_each_token
from backbone_surgery.rewriting.rewrite import SiteRewrite, beside_blocks

_PIECES, _LEAST_PIECE = 4, 8
"""Rows begin at so many tokens at most: for each of them programs are compiled."""

Values = MutableMapping[int, Any]
"""What a run gave: arrays by their numbers in `graph.Stages`."""

Cell = tuple[int, int]
"""The index of a site, and that of a token or of a head."""


class Cut(Identity):
    """Where the graph is cut: what goes in can be replaced, by what another text has there.

    Attributes:
        keeps_zeros: true, since of another text no more experts have a weight.
    """

    keeps_zeros = True


@dataclass(frozen=True)
class CutAt(SiteRewrite):
    """Put a `Cut` at some sites."""

    at: str

    def __post_init__(self) -> None:
        Fields(self).selector()

    def choose(self, surgery: Surgery) -> list[Place]:
        """Return the sites, with what goes beside whole blocks; refuse what cannot be patched."""
        chosen = for_each_token(super().choose(surgery), "patch_grid")
        return [*chosen, *beside_blocks(chosen, surgery)]

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put it there."""
        return Cut(name=cut_name(place.path))(x)


class Runs:
    """Runs of texts of one length, with padding at the end, by a graph that is cut at some sites.

    Args:
        lm: the model.
        at: site selector.
        text: one of the texts, for its length.
        controls: for the controls of the model's own rewrites.
        prompt_length: how many tokens are the prompt.

    Attributes:
        sites: paths of the sites.
        shapes: what stands at each of them for one token.
        beside: for each of them the number of what goes beside it, if it is a block with other
            streams: these are patched along.
    """

    def __init__(
        self, lm: CachedCausalLM, at: str, text: Text, controls: Any, prompt_length: Any
    ) -> None:
        self.length, self.width = len(text.token_ids), text.width
        self.controls = bind_row(lm, controls, text, "patch_grid", prompt_length)
        cut = derived(lm, CutAt(at))
        sites = list(cut.report[-1].sites)
        beside = {f"{path}.{cut.family.beside}" for path in sites}
        self.sites = [path for path in sites if path not in beside]
        shapes = {place.path: place.shape[2:] for place in places(cut)}
        self.shapes = [shapes[path] for path in self.sites]
        self.model = rewired(cut)
        self.stages, self.programs = _staged(self.model)
        cuts = {path: self.stages.cuts[cut_name(path)] for path in sites}
        self.cuts = [cuts[path] for path in self.sites]
        others = [cuts.get(f"{path}.{cut.family.beside}") for path in self.sites]
        self.beside = [[] if other is None else [other[1]] for other in others]

    def whole(self, text: Text) -> Values:
        """Run a text, one row."""
        return self._text(text, 0, self.width, self._new_cache())

    def activations(self, values: Values) -> list[np.ndarray]:
        """Return what stands at each site in the first row, float[tokens, ...]."""
        return [values[number][0, : self.length] for _, number in self.cuts]

    def differ(self, some: Values, others: Values, cell: Cell, axis: int) -> bool:
        """Tell whether two runs have different activations at a token, or of a head (axis 1)."""
        site, index = cell
        numbers = self.cuts[site][1], *self.beside[site]
        pairs = (
            (x[n][0, : self.length].take(index, axis) for x in (some, others)) for n in numbers
        )
        return not all(np.array_equal(*pair) for pair in pairs)

    def last(self, values: Values, start: int = 0) -> np.ndarray:
        """Return the hidden states of the last token of rows from some token on, float[rows, n]."""
        return values[self.stages.outputs["hidden_states"]][:, self.length - 1 - start]

    def patched(
        self,
        text: Text,
        whole: Values,
        other: Values,
        cells: list[Cell],
        batch_size: int,
    ) -> Iterator[tuple[Cell, np.ndarray]]:
        """Run a text with one activation of another, for each cell.

        Args:
            text: the text.
            whole: the run of it.
            other: the run of the other text.
            cells: what to patch.
            batch_size: how many rows to run at once, at most.

        Yields:
            A cell, and the hidden states of the last token, float[hidden_dim].
        """
        piece = max(-(-self.width // _PIECES), _LEAST_PIECE)
        rows = min(batch_size, piece, self.width)
        cache = self._new_cache()
        for start in range(0, self.length, piece):
            stop = min(start + piece, self.length)
            base = self._text(text, start, self.width, cache) if start else whole
            for site in range(len(self.sites)):
                tokens = [t for s, t in cells if s == site and start <= t < stop]
                for part, padded in batches(tokens, rows):
                    values = self._from_site(base, site, padded, start, other)
                    last = self.last(values, start)
                    yield from zip([(site, t) for t in part], last, strict=False)
            if stop < self.length:
                before = self._text(text, start, stop, cache)
                cache = tree.map_structure(before.get, self.stages.outputs["cache"])

    def patched_heads(
        self, whole: Values, other: Values, cells: list[Cell], batch_size: int
    ) -> Iterator[tuple[Cell, np.ndarray]]:
        """Run a text with one head of another at all tokens, for each cell; see `patched`."""
        rows = min(batch_size, max((head for _, head in cells), default=0) + 1)
        for site, own in enumerate(self.activations(other)):
            stage, number = self.cuts[site]
            heads = [head for s, head in cells if s == site]
            for part, padded in batches(heads, rows):
                patched = np.repeat(whole[number], len(padded), axis=0)
                for row, head in enumerate(padded):
                    patched[row, : self.length, head] = own[:, head]
                values = self._go_on(ChainMap({number: patched}, whole), stage)
                yield from zip([(site, head) for head in part], self.last(values), strict=False)

    def _new_cache(self) -> Any:
        return tree.map_structure(hosts.to_numpy, new_cache(self.model, 1, self.width))

    def _text(self, text: Text, start: int, stop: int, cache: Any) -> Values:
        """Run some tokens of a text, one row."""
        inputs = {
            **self.controls,
            "token_ids": text.inputs()["token_ids"][:, start:stop],
            "positions": np.arange(start, stop, dtype="int32")[None],
            "cache": cache,
            "cache_update_index": np.int32(start),
            "cache_mask": np.arange(self.width)[None] < self.length,
        }
        numbers = tree.flatten(self.stages.inputs)
        return self._go_on(dict(zip(numbers, tree.flatten(inputs), strict=True)), 0)

    def _from_site(
        self, base: Values, site: int, tokens: np.ndarray, start: int, other: Values
    ) -> Values:
        """Run rows from a site on, each with the activation of another run at one of its tokens.

        Those of `base` begin at the token `start`.
        """
        (stage, number), patched = self.cuts[site], {}
        for n in (number, *self.beside[site]):
            patched[n] = np.repeat(base[n], len(tokens), axis=0)
            patched[n][np.arange(len(tokens)), tokens - start] = other[n][0, tokens]
        return self._go_on(ChainMap(patched, base), stage)

    def _go_on(self, values: Values, first: int) -> Values:
        """Run the stages from one on."""
        for stage in self.stages.stages[first:]:
            made = predict(stage, [values[n] for n in stage.takes], self.programs)
            values.update(zip(stage.makes, made, strict=True))
        return values


def batches(items: Sequence[Any], size: int) -> Iterator[tuple[list[Any], np.ndarray]]:
    """Cut a list in parts, and yield each as it is, and filled up to the size by its last one."""
    for first in range(0, len(items), size):
        part = list(items[first : first + size])
        yield part, np.array(part + [part[-1]] * (size - len(part)))


def cut_name(path: str) -> str:
    """Return the name of the `Cut` at a site."""
    return f"cut_{path.replace('.', '_')}"


def _staged(model: BackboneWithCache) -> tuple[graph.Stages, SharedPrograms]:
    """Return the stages of a model and their programs, made once."""
    wanted = {name: model.output[name] for name in ("hidden_states", "cache")}
    return made_once(model, "staged", lambda: (graph.Stages(model, wanted, Cut), SharedPrograms()))
