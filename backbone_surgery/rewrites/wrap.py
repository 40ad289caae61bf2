"""Wrap: put a layer around whole decoder blocks, with the block still open, and cached, inside.

A wrapper is a Keras layer whose `call` runs the block somewhere in the middle. Called as a layer it
would hide the block from every later pass, rewiring included. So its `call` is traced, on symbolic
tensors, into the graph: what it computes before and after the block become nodes of their own, and
the block's insides stay where they are. The wrapper itself is held by the node at the block's
input, so that its variables are variables of the graph.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.rewrites.depth import select_blocks
from backbone_surgery.rewrites.rewrite import Rewrite, Surgery
from backbone_surgery.site import BLOCK, BlockInput, Identity, Site, is_block, stream_index


class Block:
    """A decoder block as its wrapper sees it: call it, once, on hidden states.

    Attributes:
        path: such as `blocks.3`.
        name: of the block's layer in the backbone.
    """

    def __init__(self, path: str, nested: keras.Model, inputs: tuple[Any, ...]) -> None:
        self.path, self.name = path, nested.name
        self._nested, self._inputs = nested, inputs
        self.outputs: list[list[keras.KerasTensor]] = []

    def __call__(self, hidden_states: keras.KerasTensor) -> keras.KerasTensor:
        """Run the block on float[batch, time, hidden_dim], with the masks that it always has."""
        nested, stream = self._nested, stream_index(self._nested)
        given = enumerate(zip(nested.inputs, self._inputs, strict=True))
        # The product of a tensor and a number counts as sparse in Keras; behind a node it does not.
        x = Identity()(hidden_states)
        mapping = {id(old): x if i == stream else new for i, (old, new) in given}
        outputs, _ = graph.replay(nested.outputs, mapping, _inside)
        self.outputs.append(outputs)
        return outputs[0]


@dataclass(frozen=True, eq=False)
class Wrap(Rewrite):
    """Wrap whole decoder blocks in layers, as in keras-hub pull request 1598.

    `make_layer(block)` makes a new layer for each block. Its `call(hidden_states)` may use
    `keras.ops`, layers and weights of its own, and calls `block(hidden_states)` exactly once. It is
    traced once, symbolically: no Python branches on values. Where it has trainable weights, `fit`
    trains them and leaves the backbone alone.

    The sites stay: `blocks.3` is the wrapped block's output, and `blocks.3.query` is inside.

    Attributes:
        at: selector of whole blocks.
        make_layer: `(block) -> keras.layers.Layer`.

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
        """Trace a wrapper around one block; returns the outputs of the new block."""
        stream = stream_index(nested)
        if stream is None:
            raise self._refuse(path, "a block that does not use its input")
        block = Block(path, nested, inputs)
        wrapper = self.make_layer(block)
        if not isinstance(wrapper, keras.layers.Layer):
            raise self._refuse(path, f"{wrapper!r} of type {type(wrapper).__name__}")
        x = BlockInput(owner=wrapper, name=f"{wrapper.name}_input")(inputs[stream])
        made = self._trace(path, wrapper, x)
        if len(block.outputs) != 1:
            raise self._refuse(path, f"a layer that calls it {len(block.outputs)} times")
        if not isinstance(made, keras.KerasTensor) or made.shape[1:] != x.shape[1:]:
            raise self._refuse(path, f"a layer that gives {made!r} for {x!r}")
        surgery.train(wrapper)
        made = ops.cast(made, x.dtype) if made.dtype != x.dtype else made
        return [Site(BLOCK)(made), *block.outputs[0][1:]]

    def _trace(self, path: str, wrapper: keras.layers.Layer, x: keras.KerasTensor) -> Any:
        try:
            if not wrapper.built:
                wrapper.build(x.shape)
            return wrapper.call(x)
        except (TypeError, ValueError, AttributeError) as error:
            if isinstance(error, SurgeryError):
                raise
            message = f"a layer whose `call` cannot be traced: {error}"
            raise self._refuse(path, message) from error

    def _refuse(self, path: str, received: str) -> SurgeryError:
        return SurgeryError(
            f"Wrap at '{path}': expected `make_layer(block)` to give a Keras layer whose "
            f"`call(hidden_states)` calls the block once and keeps the shape. Received {received}. "
            "Use `keras.ops` and layers in `call`."
        )


def _inside(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave out the marks of the block that is now inside another."""
    if isinstance(layer, BlockInput) and layer.owner is None:
        return args[0]
    if isinstance(layer, Site) and layer.role == BLOCK:
        return args[0]
    return graph.KEEP
