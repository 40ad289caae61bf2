"""Wrap: put a layer around whole decoder blocks, with the block still open, and cached, inside.

A wrapper is a Keras layer whose `call` runs the block somewhere in the middle. As one layer it
would hide the block from every later pass, rewiring included. So it runs twice, as two nodes with
the open block between them. `BeforeBlock` runs the wrapper's `call` with a stand-in for the block,
and returns the stand-in's input. `AfterBlock` runs it again, with a stand-in that returns the
block's output. The compiler merges what both compute, and drops what nothing uses. The first run
changes no states, random ones included, and adds no losses: both runs draw the same numbers, and
each update happens once.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, plain, shown
from backbone_surgery.opening.site import BLOCK, BlockInput, Site, stream_index
from backbone_surgery.rewriting.depth import select_blocks
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.rewrite import Rewrite, Surgery


class Block:
    """A decoder block as its wrapper sees it: call it, once, inside the wrapper's `call`.

    Attributes:
        path: such as `blocks.3`.
        name: of the block's layer in the backbone.
        counts: how often it was called in each trace of `BeforeBlock`.
    """

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name
        self.counts: list[int] = []

    def __call__(self, hidden_states: Any) -> Any:
        """Run the block on float[batch, time, hidden_dim], with the masks that it always has."""
        block, inputs, answer = _running.get((None, [], None))
        if block is not self:
            raise SurgeryError(
                f"Wrap at '{self.path}': expected the block to be called inside its wrapper's "
                "`call`. Received a call outside of it. Call it there."
            )
        inputs.append(hidden_states)
        return hidden_states if answer is None else answer

    @contextlib.contextmanager
    def answering(self, answer: Any) -> Iterator[list[Any]]:
        """Stand in for the block, and collect its inputs."""
        inputs: list[Any] = []
        token = _running.set((self, inputs, answer))
        try:
            yield inputs
        finally:
            _running.reset(token)


_running: contextvars.ContextVar[tuple[Any, list[Any], Any]] = contextvars.ContextVar("wrapper")


class _Half(keras.layers.Layer):
    """What both nodes of a wrapper share: the wrapper and its variables."""

    def __init__(self, wrapper: keras.layers.Layer, block: Block, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.wrapper, self.block = wrapper, block

    def build(self, *shapes):
        """Build nothing: the wrapper builds itself when it is called."""


class BeforeBlock(_Half):
    """Compute the block's input from the wrapper's, float[batch, time, hidden_dim]."""

    def call(self, x):
        """Run the wrapper, and return what it calls the block on."""
        now = [(v, v.value) for v in self.wrapper.variables]
        with keras.StatelessScope(state_mapping=now), self.block.answering(None) as inputs:
            self.wrapper(x)
        self.block.counts.append(len(inputs))
        return ops.cast(inputs[0], x.dtype) if inputs else x


class AfterBlock(_Half):
    """Compute the wrapper's output from its input and the block's output."""

    def call(self, x, after_block):
        """Run the wrapper with the block's output."""
        with self.block.answering(after_block):
            return ops.cast(self.wrapper(x), x.dtype)


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True, eq=False)
class Wrap(Rewrite):
    """Wrap whole decoder blocks in layers, as in keras-hub pull request 1598.

    `make_layer(block)` returns a new layer for each block. Its `call(hidden_states)` works on each
    token alone, and calls `block(hidden_states)` exactly once. If the layer has trainable weights,
    `fit` trains these and leaves the backbone alone.

    The sites stay: `blocks.3` is the output of the wrapped block, and `blocks.3.query` is inside.

    Attributes:
        at: selector of whole blocks.
        make_layer: `(block) -> keras.layers.Layer`. Registered by
            `keras.saving.register_keras_serializable`, it can be in a recipe.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
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

    def __post_init__(self) -> None:
        fields = Fields(self)
        fields.selector()
        if not callable(self.make_layer):
            advice = "Pass the class of a layer, or a function."
            raise fields.refuse("`make_layer` to be a function of a block", self.make_layer, advice)

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Rebuild the chosen blocks with their wrapper in them."""
        places = select_blocks(surgery, self.at, "Wrap")
        paths = {place.nodes[:-1]: place.path for place in places}  # the node of the whole block

        def visit(layer: Any, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(graph.visited_node())
            if path is None:
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
        try:
            wrapper = self.make_layer(block)
        except Exception as error:  # whatever the user's code runs into
            raise self._refuse(path, f"a function that fails with: {error}") from error
        if not isinstance(wrapper, keras.layers.Layer):
            raise self._refuse(path, f"{shown(wrapper)} of type {type(wrapper).__name__}")
        x = BlockInput()(inputs[stream])
        try:
            with block.answering(None):
                wrapper(x)  # builds it
            before = BeforeBlock(wrapper, block, name=f"{wrapper.name}_before")(x)
            outputs = _inline(nested, [*inputs[:stream], before, *inputs[stream + 1 :]])
            after = AfterBlock(wrapper, block, name=f"{wrapper.name}_after")(x, outputs[0])
        except Exception as error:
            raise self._refuse(
                path, f"'{wrapper.name}', which fails with: {plain(error)}"
            ) from error
        if set(block.counts) != {1}:
            raise self._refuse(path, f"one that calls it {block.counts[-1]} times")
        if after.shape[1:] != x.shape[1:]:
            raise self._refuse(path, f"one that makes {after.shape} of {x.shape}")
        surgery.train(wrapper)
        return [Site(BLOCK)(after), *outputs[1:]]

    def _refuse(self, path: str, received: str) -> SurgeryError:
        return SurgeryError(
            f"Wrap at '{path}': expected `make_layer(block)` to return a Keras layer whose "
            f"`call(hidden_states)` calls the block once and keeps the shape. Received {received}. "
            "Write it as `x + self.scale * self.block(x)`, say."
        )


def _inline(nested: keras.Model, inputs: list[keras.KerasTensor]) -> list[keras.KerasTensor]:
    """Run the inside of a block, without the marks of its beginning and end."""

    def visit(layer: Any, *args: Any, **kwargs: Any) -> Any:
        ends = isinstance(layer, Site) and layer.role == BLOCK
        return args[0] if ends or isinstance(layer, BlockInput) else graph.KEEP

    mapping = {id(old): new for old, new in zip(nested.inputs, inputs, strict=True)}
    return graph.replay(nested.outputs, mapping, visit)[0]
