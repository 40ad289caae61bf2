"""The cache: the state of each stateful node of a rewired graph, as the nodes declare it."""

from collections.abc import Callable
from typing import Any

import keras

from backbone_surgery.caching.model import BackboneWithCache
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.numbers import check_count
from backbone_surgery.opening.placement import Placement, placement_of
from backbone_surgery.opening.state import StateSpec

Cache = list[dict[str, Any]]


def new_cache(backbone_with_cache: keras.Model, batch_size: int, length: int) -> Cache:
    """Make an empty cache for a rewired backbone.

    Args:
        backbone_with_cache: what `rewire` returned.
        batch_size: number of rows.
        length: number of slots, the most tokens that a row can ever have, padding included.

    Returns:
        A list with a dict of arrays for each node that keeps state, in the order in which they run.
        That of attention is `{"key", "value"}`, float[batch_size, length, num_key_value_heads,
        head_dim], zeros of the dtype that the graph computes in; `rewire` lists the others. If the
        weights lie on a mesh of devices, rows are split over its batch axis where they divide by
        it, and heads over the others where they do. Heads that are fewer than those devices come
        several times, so that each device has one, where the numbers allow it.

    Raises:
        SurgeryError: the model has no cache inputs, or a size is not positive.
    """
    check_count("new_cache", "batch_size", batch_size, "rows")
    check_count("new_cache", "length", length, "slots")
    states = states_of(backbone_with_cache)
    placement = placement_of(backbone_with_cache.variables)
    return [
        {name: new_array(spec, batch_size, length, placement) for name, spec in specs.items()}
        for specs in states
    ]


def new_array(spec: StateSpec, rows: int, slots: int, placement: Placement | None) -> Any:
    """Make one array of an empty cache; on a mesh each shard on its device."""
    if placement is None:
        return spec.initial_array(rows, slots)
    import jax

    sharding = placement.of_state(spec, rows)
    return jax.jit(lambda: spec.initial_array(rows, slots), out_shardings=sharding)()


def map_cache(
    function: Callable[..., Any], cache: Cache, backbone_with_cache: keras.Model
) -> Cache:
    """Return `function(spec, array)` for each array of a cache, in the structure of the cache."""
    states = states_of(backbone_with_cache)
    return [
        {name: function(spec, entry[name]) for name, spec in specs.items()}
        for specs, entry in zip(states, cache, strict=True)
    ]


def states_of(backbone_with_cache: keras.Model) -> tuple[dict[str, StateSpec], ...]:
    """Return, for each entry of the cache of a rewired backbone, the specs of its arrays."""
    if not isinstance(backbone_with_cache, BackboneWithCache):
        received = shown(getattr(backbone_with_cache, "name", backbone_with_cache))
        raise SurgeryError(
            f"cache: expected a backbone_with_cache. Received {received}, which has no cache "
            "inputs. Call `backbone_surgery.rewire` first."
        )
    return backbone_with_cache.states


def bytes_per_token(backbone_with_cache: keras.Model) -> int:
    """Return how many bytes of cache one token of one row takes."""
    specs = [spec for entry in states_of(backbone_with_cache) for spec in entry.values()]
    return sum(spec.nbytes(1, 1) for spec in specs if spec.slot_axis is not None)
