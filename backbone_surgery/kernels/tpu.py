"""Kernels for a TPU: programs in Pallas that run for parts of what is made, compiled by Mosaic.

https://docs.jax.dev/en/latest/pallas/tpu/index.html
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras

from backbone_surgery import target

CALL_TARGET = "tpu_custom_call"
"""What JAX names the call of a kernel."""


def available() -> bool:
    """Tell whether what is being made is a generation on a TPU, which runs them.

    They have no gradients. A program for a TPU that is run on a CPU, as tests do, has them
    interpreted. On a mesh what runs on each device by itself may have them.
    """
    is_for_one = target.program_of() == "tpu" and not target.on_mesh()
    return is_for_one and keras.config.backend() == "jax"


def _is_interpreted() -> bool:
    import jax

    return not target.is_planned() and jax.default_backend() != "tpu"


def call(
    kernel: Callable[..., None],
    operands: Sequence[tuple[Any, Any]],
    made: Sequence[tuple[Any, Any]],
    grid: tuple[int, ...],
    known: Sequence[Any] = (),
    scratch: Sequence[Any] = (),
    shared: int | None = None,
    **settings: Any,
) -> list[Any]:
    """Run a kernel once for each point of a grid, the last axis innermost, in order.

    Args:
        kernel: of references to what is known before, what it reads, what it writes, and scratch.
        operands: arrays, and the `pallas.BlockSpec` of each.
        made: shapes and dtypes of what it makes, and the `pallas.BlockSpec` of each.
        grid: of the programs that run.
        known: int32 arrays that tell which blocks to read: each index map gets them too.
        scratch: memory on the chip that the programs share.
        shared: the axis of the grid that chips of two cores share out, as v4 and v5p have them.
            Programs along it do not wait for each other; each core has scratch of its own.
        **settings: of the kernel.
    """
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    arrays, specs = zip(*operands, strict=True)
    shapes, out_specs = zip(*made, strict=True)
    return pallas.pallas_call(
        partial(kernel, **settings),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(known),
            grid=grid,
            in_specs=specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=shapes,
        compiler_params=tpu.CompilerParams(
            dimension_semantics=[
                "parallel" if axis == shared else "arbitrary" for axis in range(len(grid))
            ]
        ),
        interpret=_is_interpreted(),
        name=kernel.__name__.lstrip("_"),
    )(*known, *arrays)
