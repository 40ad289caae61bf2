"""Private Keras of quantisation: which layers are chosen, and what calibration sees."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.quantizers import awq_core, gptq_core
from keras.src.quantizers.utils import should_quantize_layer

_STREAMS = ((gptq_core, "stream_hessians"), (awq_core, "stream_activations"))


def is_chosen(layer: keras.Layer, filters: Any) -> bool:
    """Tell whether the filters of `quantize` choose a layer; raises what a bad one runs into."""
    if not (filters is None or isinstance(filters, str | list | tuple) or callable(filters)):
        raise TypeError(f"it is a {type(filters).__name__}")
    return bool(should_quantize_layer(layer, filters))


@contextlib.contextmanager
def calibrating() -> Iterator[None]:
    """Have texts that Keras calibrates with inside count.

    To measure what a layer receives, Keras 3.15 wraps its `call`. But a layer that is about to be
    calibrated runs `quantized_call`, so nothing is measured, and weights are rounded to nearest.
    """
    before = [getattr(module, name) for module, name in _STREAMS]
    for (module, name), stream in zip(_STREAMS, before, strict=True):
        setattr(module, name, _measuring(stream))
    try:
        yield
    finally:
        for (module, name), stream in zip(_STREAMS, before, strict=True):
            setattr(module, name, stream)


def _measuring(stream: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def streaming(layers: dict[str, keras.Layer], measures: Any) -> Iterator[None]:
        with stream(layers, measures):
            for layer in layers.values():
                layer.quantized_call = layer.call
            try:
                yield
            finally:
                for layer in layers.values():
                    del layer.quantized_call

    return streaming
