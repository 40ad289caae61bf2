"""Products on a CPU: have weights read as they lie, and once.

XLA's CPU compiler widens a whole matrix in memory, at each step, for a product of bfloat16 that
gives bfloat16, and for one of a single row, of int8 too. A product of two rows that adds up in
float32, or in int32, reads the narrow numbers themselves. So the products of a traced function are
made such ones. Those of float32 and few rows are made by `kernels`, where that can be had. See
docs/performance.md for what both save.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from backbone_surgery.kernels import calls

_SUMS = {"bfloat16": "float32", "float16": "float32", "int8": "int32"}
"""The numbers that are widened, and what their products add up in."""

_CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
"""The primitives that run a function as it is, and the parameter that holds it."""

_EACH_TIME_ANEW = ("rng_uniform", "pure_callback")
"""Primitives without effects whose second result may be another one."""


def with_fast_products(
    function: Callable[..., Any], model: keras.Model, platform: str
) -> Callable[..., Any]:
    """Return a function of arrays whose products, for a CPU, read weights as they lie.

    Args:
        function: to be traced by JAX, inside a program that no gradients are taken of. It may take
            gradients itself: the products are exchanged in what is traced.
        model: what it runs. Where nothing in it is narrow, and there are no kernels, the function
            comes back as it is.
        platform: what the program is for, see `target`.
    """
    dtypes = {model.compute_dtype, *(v.dtype for v in model.variables)}
    if platform != "cpu" or (dtypes.isdisjoint(_SUMS) and not calls.available()):
        return function
    import jax

    def run(*args: Any) -> Any:
        with calls.in_use():
            traced, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        met = _Met({id(x): x for x in traced.consts})
        outputs = _run(traced.jaxpr, traced.consts, jax.tree.leaves(args), met)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return run


@dataclass
class _Met:
    """What was met while a function runs.

    Attributes:
        weights: `{id: array}`, what the function closes over.
        turned: `{id of a matrix: (matrix, what it is the transpose of)}`.
        computed: `{what was computed of which arrays: (these arrays, what came out)}`.
    """

    weights: dict[int, Any]
    turned: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    computed: dict[Any, tuple[Any, Any]] = field(default_factory=dict)


def _run(jaxpr: Any, consts: Iterable[Any], args: Iterable[Any], met: _Met) -> list[Any]:
    """Run a traced function with other products.

    Source: https://docs.jax.dev/en/latest/notebooks/Writing_custom_interpreters_in_Jax.html

    Args:
        jaxpr: the function.
        consts: its constants.
        args: its arguments.
        met: so far.
    """
    from jax.extend.core import Literal

    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs, name = [read(atom) for atom in equation.invars], equation.primitive.name
        key = _key(equation, inputs)
        if key in met.computed:  # by another block, such as the turns of positions
            _, outputs = met.computed[key]
        elif name == "dot_general":
            x, y = inputs
            _, stored = met.turned.get(id(y), (None, None))
            # Of several matrices only weights lie in memory as they are multiplied.
            several = any(equation.params["dimension_numbers"][1])
            lies = not several or bool({id(x), id(y)} & set(met.weights))
            outputs = [_of_matrix(x, y, stored, as_stored=lies, **equation.params)]
        elif name == "gather":
            outputs = [_look_up(equation.primitive, *inputs, **equation.params)]
        elif name in _CALLS:
            inner = equation.params[_CALLS[name]]
            outputs = _run(inner.jaxpr, inner.consts, inputs, met)
        else:
            params = equation.primitive.get_bind_params(equation.params)
            outputs = equation.primitive.bind(*inputs, **params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        if key is not None:
            met.computed[key] = inputs, outputs
        if name == "transpose" and equation.params["permutation"] == (1, 0):
            met.turned[id(outputs[0])] = outputs[0], inputs[0]
        values |= zip(equation.outvars, outputs, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _key(equation: Any, inputs: Sequence[Any]) -> Any | None:
    """Return what an equation computes, and of which arrays; `None` where that can't be told."""
    from jax.extend.core import Literal

    name = equation.primitive.name
    if equation.effects or name in (*_CALLS, *_EACH_TIME_ANEW):
        return None
    of = tuple(
        (atom.aval, np.asarray(atom.val).tobytes()) if isinstance(atom, Literal) else id(x)
        for atom, x in zip(equation.invars, inputs, strict=True)
    )
    key = name, of, tuple(sorted(equation.params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def product(
    x: Any, y: Any, dimension_numbers: Any, *, as_stored: bool = True, **params: Any
) -> Any:
    """Compute `jax.lax.dot_general`: of narrow numbers in wide sums, and of two rows for one.

    Args:
        x: one factor, of any dtype.
        y: the other.
        dimension_numbers: the axes that are summed over, and those of the batch, of both.
        as_stored: whether both lie in memory in the order of their axes, as kernels need them.
        **params: others of `jax.lax.dot_general`.
    """
    import jax
    import jax.numpy as jnp

    sums = _SUMS.get(x.dtype.name) if x.dtype == y.dtype else None
    own = calls.product(x, y, dimension_numbers) if as_stored else None
    if own is not None:
        return own.astype(params["preferred_element_type"] or x.dtype)
    if sums is None:
        return jax.lax.dot_general(x, y, dimension_numbers, **params)
    dtype = params.pop("preferred_element_type") or x.dtype
    contracted, batch = dimension_numbers
    rows = _own_axes(x, contracted[0], batch[0])
    columns = _own_axes(y, contracted[1], batch[1])
    axis = None
    if rows and math.prod(x.shape[a] for a in rows) == 1:
        x, axis = jnp.concatenate([x, x], rows[0]), len(batch[0])
    elif columns and math.prod(y.shape[a] for a in columns) == 1:
        y, axis = jnp.concatenate([y, y], columns[0]), len(batch[0]) + len(rows)
    z = jax.lax.dot_general(x, y, dimension_numbers, preferred_element_type=sums, **params)
    if axis is not None:  # without the barrier XLA would take the second row away again
        z = jax.lax.slice_in_dim(jax.lax.optimization_barrier(z), 0, 1, axis=axis)
    return z.astype(dtype)


def _of_matrix(x: Any, y: Any, stored: Any, dimension_numbers: Any, **params: Any) -> Any:
    """Compute a product by a matrix as it is `stored`, where y is that matrix turned."""
    import jax

    (own, contracted), batch = dimension_numbers
    if stored is None or len(contracted) != 1 or any(batch):
        return product(x, y, dimension_numbers, **params)
    turned = ((own, (1 - contracted[0],)), batch)
    if x.dtype == y.dtype and y.dtype.name in _SUMS:  # else XLA turns it at no cost
        x, stored = jax.lax.optimization_barrier((x, stored))
        return product(x, stored, turned, **params)
    own = calls.product(x, stored, turned)
    return product(x, y, dimension_numbers, **params) if own is None else own


def _look_up(primitive: Any, table: Any, places: Any, **params: Any) -> Any:
    """Look entries of a table up: those of half floats by their bits, or XLA would widen them all.

    What is outside of the table has all bits set, which is a NaN, as it is of floats.
    """
    import jax

    fills = params["fill_value"] is None or np.isnan(params["fill_value"])
    if table.dtype.name not in ("bfloat16", "float16") or not fills:
        return primitive.bind(table, places, **params)
    table, places = jax.lax.optimization_barrier((table, places))
    bits = jax.lax.bitcast_convert_type(table, "uint16")
    found = primitive.bind(bits, places, **{**params, "fill_value": 0xFFFF})
    return jax.lax.bitcast_convert_type(found, table.dtype)


def _own_axes(factor: Any, contracted: Sequence[int], batch: Sequence[int]) -> list[int]:
    """Return the axes of a factor that the product has from it alone."""
    return [axis for axis in range(factor.ndim) if axis not in (*contracted, *batch)]
