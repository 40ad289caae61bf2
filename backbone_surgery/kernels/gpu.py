"""What the kernels for a GPU share. They are written in Pallas, and compiled by Triton.

https://docs.jax.dev/en/latest/pallas/gpu/index.html
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from backbone_surgery import target

CALL_TARGETS = ("__gpu$xla.gpu.triton", "triton_kernel_call_ffi")
"""What versions of JAX name the call of a kernel."""

_LEAST_CAPABILITY = 8.0
"""Of a GPU that Triton compiles for: that of an A100."""


def available() -> bool:
    """Tell whether what is being made is a generation on a GPU that runs them.

    They have no gradients. A program for a GPU that is run on a CPU, as tests do, has them
    interpreted. XLA does not share a kernel out among the devices of a mesh: each would gather all
    that it reads, a whole bank of experts too. What runs on each device by itself may have them.
    """
    if target.program_of() != "gpu" or keras.config.backend() != "jax":
        return False
    if target.on_mesh() or not _has_triton():
        return False
    gpu = None if target.is_planned() else _gpu()
    if gpu is None:
        return True
    capability = str(getattr(gpu, "compute_capability", ""))
    # That of a GPU of AMD is no number.
    return capability.replace(".", "").isdigit() and float(capability) >= _LEAST_CAPABILITY


def _has_triton() -> bool:
    """Tell whether Pallas has Triton, which JAX 0.12 says that a later version will not have."""
    try:
        import jax.experimental.pallas.triton  # noqa: F401
    except ImportError:
        return False
    return True


def _gpu() -> Any | None:
    """Return a GPU of this machine; `None` where there is none."""
    import jax

    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        return None


def is_interpreted() -> bool:
    """Tell whether kernels are not compiled but interpreted, since there is no GPU."""
    return _gpu() is None and not target.is_planned()


@contextlib.contextmanager
def on_paper() -> Iterator[None]:
    """Have kernels be lowered where there is no GPU: JAX 0.12 wants to be told of one."""
    import jax

    device = jax.sharding.AbstractDevice("NVIDIA H100", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def call(
    kernel: Callable[..., None],
    operands: Sequence[tuple[Any, Any]],
    made: Sequence[tuple[Any, Any]],
    grid: tuple[int, ...],
    aliases: Mapping[int, int] | None = None,
    warps: int = 4,
    stages: int = 2,
    **settings: Any,
) -> list[Any]:
    """Run a kernel once for each point of a grid.

    Args:
        kernel: of references to what it reads and writes.
        operands: arrays, and the `pallas.BlockSpec` of each.
        made: shapes and dtypes of what it makes, and the `pallas.BlockSpec` of each.
        grid: of the programs that run.
        aliases: by operand that is changed in place which of what is made it is.
        warps: of 32 threads each, in a program.
        stages: of the pipeline in which loops read; with 1 they read into registers at once.
        **settings: of the kernel.
    """
    import jax
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    arrays, specs = zip(*operands, strict=True)
    shapes, out_specs = zip(*made, strict=True)
    with jax.enable_x64(False):  # numbers in kernels are of 32 bits, whatever JAX is set to
        return pallas.pallas_call(
            partial(kernel, **settings),
            grid=grid,
            in_specs=specs,
            out_specs=out_specs,
            out_shape=shapes,
            input_output_aliases=dict(aliases or {}),
            compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
            interpret=is_interpreted(),
            name=kernel.__name__.lstrip("_"),
        )(*arrays)


def load(ref: Any, mask: Any) -> Any:
    """Read, inside a kernel, what a reference is to; zeros where a mask says so."""
    from jax.experimental.pallas import triton

    if mask is None:
        return triton.load(ref)
    return triton.load(ref, mask=mask, other=np.zeros((), ref.dtype)[()])


def store(ref: Any, x: Any, mask: Any) -> None:
    """Write, inside a kernel, to what a reference is to, where a mask says so."""
    from jax.experimental.pallas import triton

    triton.store(ref, x, mask=mask)


def dot(x: Any, y: Any) -> Any:
    """Multiply two matrices inside a kernel, to float32."""
    from jax.experimental.pallas import triton

    return triton.dot(x, y)


def assembly(code: str, x: Any, dtype: Any, at_once: int) -> Any:
    """Change the elements of an array inside a kernel by instructions of NVIDIA's PTX.

    Args:
        code: of which `$0` and on are the registers of what is made, and the last one that of
            `at_once` elements. A register has 32 bits.
        x: the array, of which `at_once` elements have 32 bits.
        dtype: of what is made.
        at_once: how many elements the code takes.
    """
    import jax
    from jax.experimental.pallas import triton

    made = jax.ShapeDtypeStruct(x.shape, dtype)
    registers = at_once * made.dtype.itemsize // 4
    constraints = ",".join(["=r"] * registers + ["r"])
    (y,) = triton.elementwise_inline_asm(
        code, args=[x], constraints=constraints, pack=at_once, result_shape_dtypes=[made]
    )
    return y


def parts_of(works: int, wanted: int, most: int) -> int:
    """Return among how many programs to share out each of several works.

    Args:
        works: how many there are.
        wanted: programs that keep a GPU busy.
        most: parts of a work.

    Examples:
        >>> parts_of(96, 512, 8), parts_of(16, 512, 8), parts_of(768, 512, 8)
        (6, 8, 1)
    """
    return max(min(-(-wanted // works), most), 1)
