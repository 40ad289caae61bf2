"""The target: what kind of chip a program is made for.

What is cheap differs between a CPU, a GPU and a TPU, so some layers compute the same in another way
for each. They ask here. Whoever makes a program says what it is for: that on which the weights lie,
or the chip that a plan is made for. So the program that a laptop compiles for a chip that is not
there is the one that the chip would run.
"""

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import keras

from backbone_surgery.contexts import setting
from backbone_surgery.errors import SurgeryError, shown

PLATFORMS = ("cpu", "gpu", "tpu")
PRECISIONS = ("default", "high", "highest")

_TOKENS_AT_ONCE = {"gpu": 2048, "tpu": 1024}
"""Of all rows: enough to keep a chip busy."""

_SHORTEST_PIECE, _MOST_PIECES = 256, 8
"""Of the queries of a prompt that attend at once on a CPU."""

_LANES = 128
"""How many numbers a TPU reads at once."""

_chosen: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)
_placement: contextvars.ContextVar[Any] = contextvars.ContextVar("placement", default=None)
_one_of: contextvars.ContextVar[int] = contextvars.ContextVar("one_of", default=1)
_whole_prompts: contextvars.ContextVar[bool] = contextvars.ContextVar("whole", default=False)
_on_paper: contextvars.ContextVar[bool] = contextvars.ContextVar("on_paper", default=False)


def platform() -> str:
    """Return what the program that is being made is for: "cpu", "gpu" or "tpu"."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    if keras.config.backend() != "jax":
        return "cpu"
    import jax

    return _known(jax.default_backend())


def program_of() -> str | None:
    """Return what the program of a generation that is being made is for; `None` outside of one."""
    return _chosen.get()


def made_for(
    chosen: str, placement: Any = None, whole_prompts: bool = False
) -> AbstractContextManager[None]:
    """Have what is made inside be for a platform.

    Args:
        chosen: the platform.
        placement: where arrays lie on a mesh of devices; `None` for one device.
        whole_prompts: whether the tokens that run are the first of their rows, from slot 0 on.
    """
    return setting({_chosen: chosen, _placement: placement, _whole_prompts: whole_prompts})


@contextlib.contextmanager
def planned() -> Iterator[None]:
    """Make programs inside on paper: for a chip that may not be there, whatever chips are here."""
    with setting({_on_paper: True}):
        yield


def is_planned() -> bool:
    """Tell whether the program that is being made is a plan, which can't hold calls of cuDNN."""
    return _on_paper.get()


def platform_of(variables: Iterable[keras.Variable]) -> str:
    """Return where the values of variables lie; what is being made, if they have none."""
    if keras.config.backend() == "jax":
        for variable in variables:
            devices = getattr(variable.value, "devices", None)
            if devices is not None:
                return _known(next(iter(devices())).platform)
    return platform()


def _known(name: str) -> str:
    """Take a platform that nothing is known of for a CPU."""
    return name if name in PLATFORMS else "cpu"


def least_rows(chosen: str) -> int:
    """Return how many rows a program has at least.

    A product of one row is a slow sum on a GPU and a TPU: their compilers make it one of vectors.
    An empty second row has them make a product of matrices, see docs/accelerators.md.
    """
    return 1 if chosen == "cpu" else 2


def one_row_of(rows: int) -> AbstractContextManager[None]:
    """Make programs inside for a batch of so many rows, of which the first alone is of use."""
    return setting({_one_of: rows})


def rows_of_use(rows: int) -> int:
    """Return how many rows are of use as far as is known, the first ones. Beams are rows too.

    Examples:
        >>> with one_row_of(2):
        ...     rows_of_use(2), rows_of_use(8)
        (1, 4)
    """
    return rows // _one_of.get()


def prefill_chunk(chosen: str, rows: int, prompt: int) -> int:
    """Return how many tokens of each prompt to run at once; it divides the length of the prompt.

    Attention needs memory for each pair of a token that runs and one that it may see: in pieces,
    that grows with the prompt, and not with its square.

    Examples:
        >>> [prefill_chunk("gpu", rows, 4096) for rows in (1, 2, 8)], prefill_chunk("tpu", 8, 384)
        ([2048, 1024, 256], 128)
    """
    if chosen == "cpu":
        return prompt
    most = min(max(_TOKENS_AT_ONCE[chosen] // rows, 1), prompt)
    return next(n for n in range(most, 0, -1) if prompt % n == 0)


def orders_weights(chosen: str) -> bool:
    """Return whether the chip may want weights in another order of axes than they come in."""
    return chosen == "tpu"


def order_of_weight(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return in which order of axes a TPU is to have a kernel [inputs, heads, head_dim] or a table.

    It multiplies by the inputs of one head after the other, and turns a kernel that comes in
    another order: a second copy of it, at each call. It takes narrow heads as they come. It stores
    a table [tokens, hidden_dim] with the axis last that leaves fewer lanes empty. If that is the
    axis of the tokens, it reorders the whole table to look a token up.

    Returns:
        The axes from the outermost to the innermost in memory; `None` for the order they are in.

    Examples:
        >>> shapes = (4096, 32, 128), (768, 12, 64), (201088, 2880), (256000, 2304)
        >>> [order_of_weight(shape) for shape in shapes]
        [(1, 0, 2), None, (0, 1), None]
    """
    is_multiple = shape[-1] % _LANES == 0
    if len(shape) == 2:
        return None if is_multiple else (0, 1)
    return (1, 0, 2) if is_multiple else None


def order_of_kernel(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return in which order of axes a TPU is to have a kernel [inputs, outputs] of an expert.

    It reads 128 numbers of the last axis at once: of the one that leaves fewer of them empty.

    Examples:
        >>> [order_of_kernel(shape) for shape in ((2816, 704), (704, 2816), (2880, 5760))]
        [(1, 0), (0, 1), (0, 1)]
    """
    inputs, outputs = (-(-size // _LANES) * _LANES / size for size in shape)
    return (1, 0) if outputs > inputs else (0, 1)


def pieces_of_prompt(queries: Any) -> list[tuple[int, int]]:
    """Return from where to where queries attend at once; all of them, where that is as good.

    A token sees none after it. So of a whole prompt a piece is spared the keys that come later,
    which for many pieces is nearly half of all products.

    Examples:
        >>> with made_for("cpu", whole_prompts=True):
        ...     pieces_of_prompt(600), len(pieces_of_prompt(4096))
        ([(0, 256), (256, 512), (512, 600)], 8)
    """
    if platform() != "cpu" or not _whole_prompts.get() or not isinstance(queries, int):
        return [(0, queries)]
    size = max(_SHORTEST_PIECE, -(-queries // _MOST_PIECES))
    return [(start, min(start + size, queries)) for start in range(0, queries, size)]


def check_precision(name: Any) -> None:
    """Refuse what `precision` does not know."""
    if name not in (None, *PRECISIONS):
        raise SurgeryError(
            f"precision: expected {', '.join(map(repr, PRECISIONS))} or None. Received "
            f"{shown(name)}. Take 'highest' for products in whole float32."
        )


@contextlib.contextmanager
def precision(name: str | None) -> Iterator[None]:
    """Have the products of float32 that are made inside be as precise as that.

    By default a GPU rounds what goes into them to TF32, of 10 bits, and a TPU to bfloat16, of 7;
    a CPU does not. https://docs.jax.dev/en/latest/_autosummary/jax.lax.Precision.html

    Args:
        name: "default", "high" or "highest"; `None` for what JAX is set to.

    Raises:
        SurgeryError: it is none of these.
    """
    check_precision(name)
    if name is None or keras.config.backend() != "jax":
        yield
        return
    import jax

    with jax.default_matmul_precision(name):
        yield


def precision_of_jax() -> Any:
    """Return how precise JAX is set to make products of float32; `None` if it was not set."""
    import jax

    return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]


def on_mesh() -> bool:
    """Tell whether the program that is being made is for a mesh of devices."""
    return _placement.get() is not None


def placement() -> Any:
    """Return where arrays lie on the mesh that the program is made for; `None` on one device."""
    return _placement.get()


def on_each_device() -> AbstractContextManager[None]:
    """Have what is made inside run on each device of a mesh by itself."""
    return setting({_placement: None})


def has_orders() -> bool:
    """Tell whether `in_order` changes anything in the program that is being made."""
    return platform() != "cpu" and not on_mesh() and keras.config.backend() == "jax"


def apart(x: Any) -> Any:
    """Have a GPU compute what an array comes from and what is made of it in different kernels."""
    if platform() != "gpu" or keras.config.backend() != "jax":
        return x
    import jax

    return jax.lax.optimization_barrier(x)


def in_order(x: Any, slots: int | None = None, whole: bool = False) -> Any:
    """Have an array lie as a GPU or a TPU lays what comes into a program; inside a program.

    Else their compilers choose an order for each array of a loop, and copy what comes in another.
    It is the order of the axes. But a TPU reads 128 numbers of the last axis at once, and does not
    leave lanes empty: where entries are narrower, their slots come last.

    Not on a mesh: XLA would gather on GPUs what has an order that was asked for, and a TPU pads an
    array of few heads. But it has all narrow heads of a cache that devices do not share.

    Args:
        x: the array.
        slots: the axis that counts slots, of a cache.
        whole: whether each device of a mesh has all heads of its rows.
    """
    is_narrow = platform() == "tpu" and x.shape[-1] % _LANES > 0
    if not has_orders() and not (whole and is_narrow):
        return x
    from jax.experimental.layout import Layout, with_layout_constraint

    order = list(range(x.ndim))
    if is_narrow and slots is not None:
        order.append(order.pop(slots))
    return with_layout_constraint(x, Layout(major_to_minor=tuple(order)))
