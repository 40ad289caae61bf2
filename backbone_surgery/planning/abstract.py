"""The programs of a generation for a chip that may not be there, over arrays that have no values.

They are traced and lowered as always, by `Programs`, and handed on as `jax.export` writes them.
"""

import contextlib
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from backbone_surgery import graph, target
from backbone_surgery.caching.model import BackboneWithCache
from backbone_surgery.caching.packing import Packing
from backbone_surgery.generation.loop import State
from backbone_surgery.generation.programs import Programs
from backbone_surgery.generation.run_batch import Batch, filled_up, make_arguments
from backbone_surgery.generation.samplers import Strategy
from backbone_surgery.generation.stopping import Stops
from backbone_surgery.kernels import gpu, tpu
from backbone_surgery.meshes.layout_map import Split
from backbone_surgery.opening.placement import Placement

# What is exported is compiled at once, by the same JAX.
_CHECKS = [
    export.DisabledSafetyCheck.custom_call(name)
    for name in ("LayoutConstraint", *gpu.CALL_TARGETS, tpu.CALL_TARGET)
]


class Sizes(NamedTuple):
    """The sizes of a generation.

    Attributes:
        rows: of the batch.
        prompt: tokens of each prompt.
        length: slots of the cache.
    """

    rows: int
    prompt: int
    length: int


class Traced(NamedTuple):
    """A program, as it is handed to a compiler.

    Attributes:
        program: what `jax.export` wrote.
        axes: for each array that goes in, the axis of the mesh for each of its dimensions.
        orders: for each of them, the order of its axes in memory; `None` for that they are in.
        donated: which arguments it takes over.
    """

    program: bytes
    axes: list[list[Any]]
    orders: list[tuple[int, ...] | None]
    donated: tuple[int, ...]


def sizes_of_run(asked: Sizes, platform: str, placement: Placement | None) -> Sizes:
    """Return the sizes that a generation is run with: what is asked for, filled up."""
    new = asked.length - asked.prompt
    rows, prompt, length = filled_up(asked.rows, asked.prompt, new, platform)
    return Sizes(rows if placement is None else placement.padded(rows), prompt, length)


def abstract_placement(sizes: dict[str, int], splits: dict[str, Split]) -> Placement | None:
    """Return where arrays lie on a mesh of these sizes; `None` if that is one device.

    Args:
        sizes: of the axes, by name.
        splits: of the weights, by path.
    """
    # As the meshes that Keras makes: the compiler lays out what is not pinned.
    types = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    shared = {p: split.axis for p, split in splits.items() if split.units % sizes["model"] == 0}
    return Placement(mesh, "batch", shared) if mesh.size > 1 else None


@target.planned()
def trace(programs: Programs, strategy: Strategy, sizes: Sizes, count: int) -> dict[str, Traced]:
    """Trace prefill and decode.

    Args:
        programs: over a model whose weights may have no values.
        strategy: how tokens are chosen.
        sizes: of the generation.
        count: how many of its rows are prompts. The others fill it up.

    Returns:
        The programs by name.
    """
    model, placement = programs.model, programs.placement
    weights = [_weight(variable, placement) for variable in graph.variables_of(model)]
    arguments = jax.tree.map(_everywhere(placement), _arguments(model, strategy, sizes))
    cache = _cache(programs.packing, sizes)
    captures = "captures" in model.output
    prefill, donated = programs.prefill_program(strategy, sizes.length, captures)
    state = jax.eval_shape(prefill, weights, cache, arguments)
    # Beams are rows of their own.
    beams = sizes._replace(rows=sizes.rows * strategy.width)
    state = {**_by_rows(state, placement), "cache": _cache(programs.packing, beams)}
    decode, taken = programs.decode_program(strategy, programs.one_of(count, sizes.rows))
    until = _everywhere(placement)(np.int32(0))
    platform = {"gpu": "cuda"}.get(programs.platform, programs.platform)

    def handed_on(run: Any, args: tuple, donate: tuple[int, ...]) -> Traced:
        jitted = jax.jit(run, donate_argnums=donate)
        with gpu.on_paper() if platform == "cuda" else contextlib.nullcontext():
            program = export.export(jitted, platforms=[platform], disabled_checks=_CHECKS)(*args)
        leaves = jax.tree.leaves(args)
        axes = [list(x.sharding.spec) if x.sharding else [] for x in leaves]
        orders = programs.orders(weights) + [None] * (len(leaves) - len(weights))
        return Traced(bytes(program.serialize()), axes, orders, donate)

    return {
        "prefill": handed_on(prefill, (weights, cache, arguments), donated),
        "decode": handed_on(decode, (weights, state, arguments, until), taken),
    }


def _arguments(model: BackboneWithCache, strategy: Strategy, sizes: Sizes) -> State:
    rows = sizes.rows
    batch = Batch(
        rows=[np.ones(sizes.prompt, np.int32)] * rows,
        budget=np.full(rows, sizes.length - sizes.prompt, np.int32),
        seeds=np.zeros((rows, 2), np.uint32),
        controls={
            name: np.broadcast_to(value, (rows, *np.shape(value)))
            for name, value in model.defaults.items()
        },
        stops=Stops([]),
    )
    return make_arguments(strategy, batch, rows, sizes.prompt)


def _struct(x: Any, placement: Placement | None, *axes: Any) -> jax.ShapeDtypeStruct:
    sharding = placement and NamedSharding(placement.mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding)


def _everywhere(placement: Placement | None) -> Any:
    return lambda x: _struct(np.asarray(x) if not hasattr(x, "dtype") else x, placement)


def _weight(variable: Any, placement: Placement | None) -> jax.ShapeDtypeStruct:
    shape, dtype = tuple(variable.shape), jax.numpy.dtype(variable.dtype)
    value = jax.ShapeDtypeStruct(shape, dtype)
    shared = None if placement is None else placement.axis_of(variable)
    axes = [] if shared is None else [None] * shared + ["model"]
    return _struct(value, placement, *axes)


def _cache(packing: Packing, sizes: Sizes) -> Any:
    """Return the packed cache, laid out as `Placement.of_state` has it."""
    packed = jax.eval_shape(lambda: packing.new_cache(sizes.rows, sizes.length))
    placement = packing.placement

    def laid_out(spec: Any, x: Any) -> Any:
        if placement is None:
            return _struct(x, None)
        axes = list(placement.of_state(spec, sizes.rows).spec)
        axes += [None] * (len(spec.shape) - len(axes))
        return _struct(x, placement, *(axes[i] for i in packing.axes(spec, sizes.rows)))

    return [
        {name: laid_out(specs[name], x) for name, x in entry.items()}
        for specs, entry in zip(packing.model.states, packed, strict=True)
    ]


def _by_rows(state: State, placement: Placement | None) -> State:
    def laid_out(x: Any) -> Any:
        shared = placement and x.ndim and x.shape[0] % placement.mesh.shape["batch"] == 0
        return _struct(x, placement, *(["batch"] if shared else []))

    return jax.tree.map(laid_out, {k: x for k, x in state.items() if k != "cache"})
