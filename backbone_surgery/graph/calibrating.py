"""Private Keras of quantisation: which layers are chosen, what calibration sees and rounds to."""

import contextlib
import functools
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops
from keras.src.quantizers import awq, awq_core, gptq_core, quantizers
from keras.src.quantizers.utils import should_quantize_layer

_MENDING = threading.Lock()
"""Two threads that calibrate take turns."""

_STREAMS = ((gptq_core, "stream_hessians"), (awq_core, "stream_activations"))


def is_chosen(layer: keras.Layer, filters: Any) -> bool:
    """Tell whether the filters of `quantize` choose a layer; raises what a bad one runs into."""
    if not (filters is None or isinstance(filters, str | list | tuple) or callable(filters)):
        raise TypeError(f"it is a {type(filters).__name__}")
    return bool(should_quantize_layer(layer, filters))


@contextlib.contextmanager
def calibrating() -> Iterator[None]:
    """Mend what Keras 3.15 does inside by GPTQ and AWQ.

    * To measure what a layer receives, it wraps its `call`. But a layer that is about to be
      calibrated runs `quantized_call`, so nothing is measured, and weights are rounded to nearest.
    * Where the weights of a group have one sign, their zero point lies outside of uint8. On JAX it
      is cut, on torch it comes round the other end, and the group is wrong altogether.
    * Where in the texts it begins depends on `hash` of a string, which Python salts anew for each
      process: no two processes gave the same weights.
    """
    mended: list[tuple[Any, str, Callable[..., Any]]] = [
        *((module, name, _measuring) for module, name in _STREAMS),
        *(
            (module, "compute_quantization_parameters", _around_zero)
            for module in (awq, quantizers)
        ),
    ]
    with _MENDING:
        before = [getattr(module, name) for module, name, _ in mended]
        for (module, name, mend), function in zip(mended, before, strict=True):
            setattr(module, name, mend(function))
        gptq_core.hash = lambda key: zlib.crc32(repr(key).encode())
        try:
            yield
        finally:
            del gptq_core.hash
            for (module, name, _), function in zip(mended, before, strict=True):
                setattr(module, name, function)


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


def _around_zero(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Have the range of each group hold zero, or if symmetric be so whatever the signs."""

    @functools.wraps(compute)
    def parameters(x: Any, *, per_channel: bool = False, group_size: int = -1, **rest: Any) -> Any:
        rows, columns = x.shape
        size = group_size if per_channel and group_size > 0 else columns
        groups = -(-columns // size)
        x = ops.pad(x, [[0, 0], [0, groups * size - columns]])
        x = ops.reshape(x, (rows, groups, size))
        end = ops.zeros_like(x[..., :1])
        if rest.get("symmetric"):
            end = -ops.max(ops.abs(x), axis=-1, keepdims=True)
        x = ops.reshape(ops.concatenate([x, end], axis=-1), (rows, groups * (size + 1)))
        return compute(x, per_channel=per_channel, group_size=size + 1, **rest)

    return parameters
