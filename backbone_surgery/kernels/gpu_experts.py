"""Products with chosen experts as one kernel for a GPU, which reads these experts as they lie.

XLA makes a product of a gathered kernel out of a copy of it, and a sum of products read number by
number. Here the inputs of an expert are shared out among several programs, and what these find is
added up.
"""

from typing import Any

from backbone_surgery.kernels import gpu
from backbone_surgery.kernels.calls import added_up

_INPUTS, _OUTPUTS = 32, 128
"""Of an expert, that a program reads at once."""

_PROGRAMS, _MOST_PARTS = 800, 16
"""Programs that keep a GPU busy, and parts of the inputs of an expert."""


def product_of_chosen(x: Any, bank: Any, index: Any) -> Any:
    """Multiply vectors, each by the kernel of the expert that was chosen for it.

    Args:
        x: float[chosen, inputs].
        bank: float[experts, inputs, outputs].
        index: int[chosen], which experts they are.

    Returns:
        float32[chosen, outputs].
    """
    import jax
    from jax.experimental import pallas as pl

    chosen, inputs = x.shape
    experts, _, outputs = bank.shape
    pieces, columns = -(-inputs // _INPUTS), -(-outputs // _OUTPUTS)
    wanted = gpu.parts_of(chosen * columns, _PROGRAMS, min(pieces, _MOST_PARTS))
    parts = next(n for n in range(wanted, 0, -1) if pieces % n == 0)
    made = jax.ShapeDtypeStruct((parts, chosen, outputs), "float32")
    (sums,) = gpu.call(
        _product_of_chosen,
        [
            (index.astype("int32"), pl.BlockSpec((chosen,), lambda i, n, j: (0,))),
            (x, pl.BlockSpec((None, pieces * _INPUTS), lambda i, n, j: (i, 0))),
            (bank, pl.BlockSpec((experts, pieces * _INPUTS, _OUTPUTS), lambda i, n, j: (0, 0, n))),
        ],
        [(made, pl.BlockSpec((None, None, _OUTPUTS), lambda i, n, j: (j, i, n)))],
        (chosen, columns, parts),
        steps=pieces // parts,
        inputs=inputs,
        outputs=outputs,
    )
    return added_up(sums)


def _product_of_chosen(
    index_ref: Any,
    x_ref: Any,
    bank_ref: Any,
    sum_ref: Any,
    *,
    steps: int,
    inputs: int,
    outputs: int,
) -> None:
    """Multiply a part of the inputs of one vector by those of some outputs of its expert."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    expert, part = index_ref[pl.program_id(0)], pl.program_id(2)
    is_column = pl.program_id(1) * _OUTPUTS + jnp.arange(_OUTPUTS) < outputs

    def is_number(is_input: Any) -> Any:
        is_whole = inputs % _INPUTS == outputs % _OUTPUTS == 0
        return None if is_whole else is_input[:, None] & is_column[None]

    def add(i: Any, total: Any) -> Any:
        first = (part * steps + i) * _INPUTS
        here, is_input = pl.ds(first, _INPUTS), first + jnp.arange(_INPUTS) < inputs
        kernel = gpu.load(bank_ref.at[expert, here, :], is_number(is_input))
        one = gpu.load(x_ref.at[here], is_input if inputs % _INPUTS else None)
        return total + one.astype("float32")[:, None] * kernel.astype("float32")

    total = jax.lax.fori_loop(0, steps, add, jnp.zeros((_INPUTS, _OUTPUTS), "float32"))
    gpu.store(sum_ref, jnp.sum(total, axis=0), is_column)
