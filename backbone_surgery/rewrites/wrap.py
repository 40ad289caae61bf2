"""Wrap: put a layer around whole decoder blocks, with the block still open, and cached, inside.

A wrapper is a Keras layer whose `call` runs the block somewhere in the middle. Run as one layer it
would hide the block from every later pass, rewiring included. So it is run twice, as two nodes with
the open block between them. `BeforeBlock` runs the wrapper's `call` with a stand-in for the block,
and keeps what the stand-in was given; `AfterBlock` runs it again with a stand-in that answers with
the block's output. What the two have in common, a compiler merges; what `BeforeBlock` computes for
nothing, it drops. What the first run does to states, random ones included, and to losses is dropped
too, so that both runs draw the same numbers and each update happens once.
"""

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.rewrites.depth import select_blocks
from backbone_surgery.rewrites.rewrite import Rewrite, Surgery
from backbone_surgery.site import BLOCK, BlockInput, Site, is_block, stream_index


class Block:
    """A decoder block as its wrapper sees it: call it, once, inside the wrapper's `call`.

    Attributes:
        path: such as `blocks.3`.
        name: of the block's layer in the backbone.
        counts: how often it was called, for each time that the wrapper was traced before it.
    """

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name
        self.counts: list[int] = []

    def __call__(self, hidden_states: Any) -> Any:
        """Run the block on float[batch, time, hidden_dim], with the masks that it always has."""
        block, given, answer = _running.get((None, [], None))
        if block is not self:
            raise SurgeryError(
                f"Wrap at '{self.path}': expected the block to be called inside its wrapper's "
                "`call`. Received a call outside of it. Call it there."
            )
        given.append(hidden_states)
        return hidden_states if answer is None else answer

    @contextlib.contextmanager
    def answering(self, answer: Any) -> Iterator[list[Any]]:
        """Stand in for the block, and collect what it is given."""
        given: list[Any] = []
        token = _running.set((self, given, answer))
        try:
            yield given
        finally:
            _running.reset(token)


_running: contextvars.ContextVar[tuple[Any, list[Any], Any]] = contextvars.ContextVar("wrapper")


class _Half(keras.layers.Layer):
    """What both nodes of a wrapper share: the wrapper, whose variables are theirs."""

    def __init__(self, wrapper: keras.layers.Layer, block: Block, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.wrapper, self.block = wrapper, block

    def build(self, *shapes):
        """Build nothing: the wrapper builds itself when it is called."""


class BeforeBlock(_Half):
    """Give the block's input, from the wrapper's: float[batch, time, hidden_dim]."""

    def call(self, x):
        """Run the wrapper, and keep what it gives the block and nothing else."""
        now = [(v, v.value) for v in self.wrapper.variables]
        with keras.StatelessScope(state_mapping=now), self.block.answering(None) as given:
            self.wrapper(x)
        self.block.counts.append(len(given))
        return ops.cast(given[0], x.dtype) if given else x


class AfterBlock(_Half):
    """Give the wrapper's output, from its input and the block's output."""

    def call(self, x, made):
        """Run the wrapper with the block's output."""
        with self.block.answering(made):
            return ops.cast(self.wrapper(x), x.dtype)


@dataclass(frozen=True, eq=False)
class Wrap(Rewrite):
    """Wrap whole decoder blocks in layers, as in keras-hub pull request 1598.

    `make_layer(block)` makes a new layer for each block. Its `call(hidden_states)` may do anything
    that a layer can on each token alone, and calls `block(hidden_states)` exactly once. Where the
    layer has trainable weights, `fit` trains them and leaves the backbone alone.

    The sites stay: `blocks.3` is the wrapped block's output, and `blocks.3.query` is inside.

    Attributes:
        at: selector of whole blocks.
        make_layer: `(block) -> keras.layers.Layer`. Registered by
            `keras.saving.register_keras_serializable`, it can be in a recipe.

    Example:
        >>> import backbone_surgery as bs, keras, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> class Scaled(keras.layers.Layer):
        ...     def __init__(self, block):
        ...         super().__init__()
        ...         self.block = block
        ...         self.scale = self.add_weight(shape=(), initializer="ones")
        ...     def call(self, x):
        ...         return x + self.scale * self.block(x)
        >>> edited = bs.operate(backbone, [bs.Wrap("blocks.*", Scaled)])
        >>> len(bs.rewire(edited).output["cache"]), len(edited.trainable_variables)
        (2, 2)
    """

    at: str
    make_layer: Callable[[Block], keras.layers.Layer]

    whole_blocks: ClassVar[bool] = True

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Rebuild the chosen blocks with their wrapper in them."""
        chosen = {place.path for place in select_blocks(surgery, self.at, "Wrap")}
        numbers = itertools.count()

        def visit(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_block(layer):
                return graph.KEEP
            path = f"blocks.{next(numbers)}"
            if path not in chosen:
                return graph.KEEP
            surgery.fired.append(path)

            def build(*inputs: keras.KerasTensor) -> list[keras.KerasTensor]:
                return self._wrap(path, layer, inputs, surgery)

            return graph.nest(layer.name, build, *graph.in_order(layer, args[0]))

        return visit

    def _wrap(
        self, path: str, nested: keras.Model, inputs: tuple[Any, ...], surgery: Surgery
    ) -> list[keras.KerasTensor]:
        """Put a wrapper around one block; returns the outputs of the new block."""
        stream = stream_index(nested)
        if stream is None:
            raise self._refuse(path, "a block that does not use its input")
        block = Block(path, nested.name)
        wrapper = self.make_layer(block)
        if not isinstance(wrapper, keras.layers.Layer):
            raise self._refuse(path, f"{wrapper!r} of type {type(wrapper).__name__}")
        x = BlockInput()(inputs[stream])
        try:
            with block.answering(None):
                wrapper(x)  # builds it
            before = BeforeBlock(wrapper, block, name=f"{wrapper.name}_before")(x)
            outputs = _inline(nested, [*inputs[:stream], before, *inputs[stream + 1 :]])
            made = AfterBlock(wrapper, block, name=f"{wrapper.name}_after")(x, outputs[0])
        except (TypeError, ValueError, AttributeError) as error:
            raise self._refuse(path, f"'{wrapper.name}', which fails with: {error}") from error
        if set(block.counts) != {1}:
            raise self._refuse(path, f"one that calls it {block.counts[-1]} times")
        if made.shape[1:] != x.shape[1:]:
            raise self._refuse(path, f"one that makes {made.shape} of {x.shape}")
        surgery.train(wrapper)
        return [Site(BLOCK)(made), *outputs[1:]]

    def _refuse(self, path: str, received: str) -> SurgeryError:
        return SurgeryError(
            f"Wrap at '{path}': expected `make_layer(block)` to give a Keras layer whose "
            f"`call(hidden_states)` calls the block once and keeps the shape. Received {received}. "
            "Write it as `x + self.scale * self.block(x)`, say."
        )


def _inline(nested: keras.Model, inputs: list[keras.KerasTensor]) -> list[keras.KerasTensor]:
    """Run the inside of a block, without the marks of where it begins and ends."""

    def visit(layer: Any, *args: Any, **kwargs: Any) -> Any:
        ends = isinstance(layer, Site) and layer.role == BLOCK
        return args[0] if ends or isinstance(layer, BlockInput) else graph.KEEP

    mapping = {id(old): new for old, new in zip(nested.inputs, inputs, strict=True)}
    return graph.replay(nested.outputs, mapping, visit)[0]
