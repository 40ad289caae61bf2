"""Pass 3, rewire: give each layer of a graph that keeps state a cache of its own."""

import warnings
from collections.abc import Iterable
from typing import Any

import keras
from keras import tree

from backbone_surgery import graph
from backbone_surgery.caching.experts import ChosenExperts, choice_of
from backbone_surgery.caching.model import BackboneWithCache
from backbone_surgery.caching.narrow import NarrowProjection, is_narrow
from backbone_surgery.caching.norms import WholeNorm, is_layer_norm
from backbone_surgery.caching.packed import PackedEmbedding, PackedProjection, is_packed_table
from backbone_surgery.caching.packed_matrix import is_packed
from backbone_surgery.caching.probe import Probe
from backbone_surgery.caching.projection import HeadProjection, projects_heads
from backbone_surgery.caching.repeated_heads import over_repeated_heads, repeat_heads
from backbone_surgery.caching.stateful import WithState, is_own
from backbone_surgery.errors import SurgeryError
from backbone_surgery.graph.emission import emit
from backbone_surgery.opening.experts import BalancedLoad, MixedExperts
from backbone_surgery.opening.layers import ChunkMask, TokenPositions
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.open import open_backbone
from backbone_surgery.opening.placement import placement_of
from backbone_surgery.opening.site import BesideInput, BlockInput, Site
from backbone_surgery.opening.state import Stateful, StateSpec, specs_by_name, wanted_inputs


@graph.building()
def rewire(backbone: keras.Model, trust: Iterable[Any] = ()) -> BackboneWithCache:
    """Derive from a backbone's graph the same graph with cache inputs and outputs.

    The cached graph is a clone of the one it was derived from, edits included, over the same
    variables. Every node whose layer keeps state (`Stateful`) takes its state from an input and
    gives it to an output. So state is counted in the graph as it is: a block that runs twice has
    two. The tokens can be run in chunks of any sizes; the hidden states are the same.

    Args:
        backbone: a backbone, a Functional model cloned from one, or an edited backbone.
        trust: layers, or names of layers, to use without a probe: you promise that they work on
            each token alone. Any other layer that is not known to is run by itself, once, on
            random input, to find out.

    Returns:
        A Functional `keras.Model` named `backbone_with_cache`. Its inputs are a dict of

        * `token_ids` int32[batch, time];
        * `cache`, a list with the state of each such node, in the order in which they run;
        * `cache_update_index` int32[], the slot of the first token;
        * `positions` int32[batch, time], the number of each token within its row;
        * `cache_mask` bool[batch, length], false where a slot holds padding;
        * the controls.

        Its outputs are `{"hidden_states", "cache"}`, and `captures` where there are any.

        The state of attention is `{"key", "value"}`, each float[batch, length,
        num_key_value_heads, head_dim]. Where a rewrite touches the attention pattern, it is
        `{"key"}` and then `{"value"}`. If the weights lie on a mesh, heads may come several times,
        see `new_cache`. That of a `Condition` is `{"is_met"}`, bool[batch, length].

    Raises:
        SurgeryError: the graph cannot be opened, or holds no attention; or a layer in it mixes
            tokens or rows and keeps no state.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> len(bs.rewire(backbone).output["cache"])
        2
    """
    return rewire_for(backbone, trust)


def rewire_for(
    backbone: keras.Model, trust: Iterable[Any] = (), devices: int | None = None
) -> BackboneWithCache:
    """Derive the cached graph of a backbone, as `rewire` does.

    Args:
        backbone: see `rewire`.
        trust: see `rewire`.
        devices: how many share the heads; by default those on which the weights lie.
    """
    opened = open_backbone(backbone)
    used = {id(t) for node in graph.graph_nodes(opened) for t in node.input_tensors}
    for name in (name for name, signal in opened.signals.items() if id(signal) not in used):
        warnings.warn(
            f"rewire at '{opened.name}': the condition '{name}' changes nothing. Put a "
            f"`Steer(..., when='{name}')` after it.",
            stacklevel=4,
        )
    probe = Probe(opened.family, trust)
    model = derive(opened, probe, devices)
    probe.finish()
    return model


def derive(
    opened: EditedBackbone, probe: Probe | None = None, devices: int | None = None
) -> BackboneWithCache:
    """Derive the cached graph of an opened one; without a probe, whatever its layers do."""
    if devices is None:
        placement = placement_of(opened.variables)
        devices = 1 if placement is None else placement.shares_of_heads
    rewirer = _Rewirer(opened.compute_dtype, probe, devices)
    inputs = rewirer.inputs
    controls = opened.control_inputs
    values = {"token_ids": inputs["token_ids"], "padding_mask": rewirer.chunk_mask, **controls}
    mapping = {id(t): values[t.name] for t in tree.flatten(opened.input)}
    outputs, emitted = graph.replay(opened.output, mapping, rewirer.visit, per_use=True)
    if not rewirer.states:
        raise SurgeryError(
            f"rewire at '{opened.name}': expected a graph with attention in it, or with another "
            "layer that keeps state. Received one without any. Keep at least one decoder block."
        )
    updated = [{k: emitted[t.name][0] for k, t in cache.items()} for cache in rewirer.caches]
    return BackboneWithCache(
        {**inputs, **controls, "cache": rewirer.caches},
        {
            **(outputs if isinstance(outputs, dict) else {"hidden_states": outputs}),
            "cache": updated,
        },
        source=opened,
        states=rewirer.states,
    )


class _Rewirer:
    """The callback of the rewiring pass.

    Attributes:
        inputs: the run-time inputs, by name.
        chunk_mask: int32[batch, time], the padding mask of the tokens being run.
        states: for each stateful node that was visited, the specs of its state by name.
        caches: for each of them, the inputs that take its state in.
    """

    def __init__(self, compute_dtype: str, probe: Probe | None, devices: int) -> None:
        self.compute_dtype, self.probe, self.devices = compute_dtype, probe, devices
        self.instead: dict[tuple[int, ...], keras.layers.Layer] = {}
        self.twins: dict[int, WithState] = {}
        self.inputs = {
            "token_ids": keras.Input((None,), dtype="int32", name="token_ids"),
            "positions": keras.Input((None,), dtype="int32", name="positions"),
            "cache_mask": keras.Input((None,), dtype="bool", name="cache_mask"),
            "cache_update_index": keras.Input(
                batch_shape=(), dtype="int32", name="cache_update_index"
            ),
        }
        self.chunk_mask = ChunkMask(name="chunk_mask")(
            self.inputs["token_ids"], self.inputs["cache_mask"], self.inputs["cache_update_index"]
        )
        self.states: list[dict[str, StateSpec]] = []
        self.caches: list[dict[str, keras.KerasTensor]] = []

    def visit(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if type(layer) in (Site, BlockInput, BesideInput):
            return graph.KEEP
        if isinstance(layer, TokenPositions):
            return self.inputs["positions"]
        times, given = repeat_heads(layer, args, kwargs, self.devices)
        if times > 1:
            layer, args, kwargs = self._once(over_repeated_heads, layer, times), (), given
        if isinstance(layer, Stateful):
            return self._with_state(layer, args, kwargs)
        if isinstance(layer, BalancedLoad):  # for training alone
            return args[0]
        if type(layer) is MixedExperts:
            choice = choice_of(args[1], layer.compute_dtype)
            if choice is not None:
                settings = choice.top_k, choice.chooser, self.devices
                chosen = self._once(ChosenExperts, layer, *settings)
                return chosen(args[0], choice.given)
        if self.probe is not None:
            self.probe.check(layer, args, kwargs)
        if projects_heads(layer, self.compute_dtype):
            return self._instead(HeadProjection, layer, args, kwargs)
        if is_narrow(layer):
            return self._instead(NarrowProjection, layer, args, kwargs)
        if is_packed(layer):
            return self._instead(PackedProjection, layer, args, kwargs)
        if is_packed_table(layer) and len(args) == 1 and not kwargs:
            return self._instead(PackedEmbedding, layer, args, kwargs)
        if is_layer_norm(layer):
            return self._instead(WholeNorm, layer, args, kwargs)
        return graph.KEEP

    def _instead(self, kind: Any, layer: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a layer of another kind in place of one, over its weights."""
        node = graph.visited_node()[-1]
        return graph.repeat(node, args, kwargs, self._once(kind, layer))

    def _once(self, kind: Any, layer: Any, *settings: Any) -> Any:
        """Return the layer that runs another one here: one, however often that one runs."""
        key = (id(layer), *settings)
        if key not in self.instead:
            self.instead[key] = kind(layer, *settings)
        return self.instead[key]

    def _with_state(self, layer: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a stateful layer on its state, an input, and emit what it becomes."""
        runtime = {**self.inputs, "padding_mask": self.chunk_mask}
        inputs = wanted_inputs(layer, args, kwargs, runtime)
        specs = specs_by_name(layer, args, kwargs)
        index = len(self.caches)
        cache = {
            name: graph.new_input(
                (None, *spec.shape[1:]), dtype=spec.dtype, name=f"cache_{index}_{name}"
            )
            for name, spec in specs.items()
        }
        if id(layer) not in self.twins:
            self.twins[id(layer)] = WithState(layer, name=f"cached_{layer.name}")
        twin = self.twins[id(layer)]
        twin.expected = layer.compute_output_spec(*args, **kwargs)
        inputs["state"] = cache
        if not is_own(layer):
            twin.check(inputs)
        outputs, updated = graph.connect(twin, inputs)
        for name, tensor in cache.items():
            emit(tensor.name, updated[name])
        if cache:
            self.states.append(specs)
            self.caches.append(cache)
        return outputs
