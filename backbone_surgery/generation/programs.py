"""The compiled programs: prefill over the prompts, and decode, one while-loop over tokens.

Weights go in as arguments and through the loop's state, never as constants, so that training,
LoRA and another checkpoint are seen at once and nothing is stored twice. The state of a
generation, caches included, is donated from call to call, so it exists once.
"""

import contextlib
import functools
import itertools
import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental.layout import Format, Layout

from backbone_surgery import graph, hosts, target
from backbone_surgery.caching.experts import ChosenExperts
from backbone_surgery.caching.laying import layers_to_lay, weights_to_lay
from backbone_surgery.generation import loop
from backbone_surgery.generation.host_arrays import bundle
from backbone_surgery.generation.loop import Forward, State
from backbone_surgery.generation.samplers import Strategy
from backbone_surgery.opening.model import weights_taken
from backbone_surgery.opening.once import lora_settings
from backbone_surgery.opening.placement import check_stayed

_READ = ("tokens", "slot", "done")
"""What of the state is read between two calls, and some of what the strategy keeps."""

_GRAPHS = "xla_gpu_enable_command_buffer"
_LOOP_AS_GRAPH = {
    _GRAPHS: "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,  # the loop alone is one
}
"""Options of XLA's compiler for a GPU of NVIDIA."""

_STRATEGIES = 16
"""How many strategies keep their programs: a sampler that was changed does not run its old ones."""


@contextlib.contextmanager
def _weights_in_place() -> Iterator[None]:
    """Say in words that the array of a weight is gone."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not re.search("has been deleted|deleted or donated", str(error)):
            raise
        raise weights_taken() from error


class Programs(Forward):
    """Compiles each program once for each strategy and shape of its arguments, and runs it.

    The programs of the strategies that were used last are kept, and those of others let go.

    Attributes:
        compilations: how many programs of each kind were compiled, `{"prefill": n, "decode": n}`,
            and those of an `Engine`. Those that copy a cache into a longer one are not counted.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compilations = {"prefill": 0, "decode": 0}
        self._compiled: OrderedDict[Hashable, dict[tuple, Any]] = OrderedDict()
        self._compiling, self._sorting = threading.RLock(), threading.Lock()
        self._checked: list[weakref.ref] = []  # weak: weights that are replaced are not kept

    @functools.cached_property
    def outline(self) -> list[str]:
        """What runs in the graph, in order, with shapes: to tell one edit from another."""
        return [
            f"{type(node.operation).__name__} {[tuple(x.shape) for x in node.outputs]}"
            for node in graph.all_nodes(self.model)
        ]

    @functools.cached_property
    def _to_lay(self) -> list[keras.Layer]:
        return layers_to_lay(self.model, self.platform)

    @functools.cached_property
    def _chooses_experts(self) -> bool:
        nodes = graph.all_nodes(self.model)
        return any(isinstance(node.operation, ChosenExperts) for node in nodes)

    def orders(self, weights: Iterable[Any]) -> list[tuple[int, ...] | None]:
        """For each variable, the order of axes in which its value lies; `None` as it comes.

        Args:
            weights: the values, or what stands for them.
        """
        variables = graph.variables_of(self.model)
        arrays = {id(v): x for v, x in zip(variables, weights, strict=True)}
        laid = weights_to_lay(self._to_lay, lambda v: arrays[id(v)])
        orders = {id(variable): order for variable, order in laid}
        return [orders.get(id(variable)) for variable in variables]

    def weights(self) -> list[jax.Array]:
        """Return the values of all variables, as they are now.

        Those that the chip wants in another order are laid so first: in the variable itself, so
        that there is one copy. Its value stays the same.

        Raises:
            SurgeryError: they lie on another mesh than when the programs were made, or are gone.
        """
        variables = graph.variables_of(self.model)
        values = [graph.array_of(v) for v in variables]
        if self._are_checked(values):
            return values
        if any(x is None for x in values):
            raise weights_taken()
        for variable, order in weights_to_lay(self._to_lay, lambda v: v.value):
            _lay(variable, order)
        values = [graph.array_of(v) for v in variables]
        check_stayed(self.placement, values)
        self._checked = [weakref.ref(x) for x in values]
        return values

    def _are_checked(self, values: list[Any]) -> bool:
        """Tell whether these are the very arrays that `weights` returned before."""
        pairs = itertools.zip_longest(self._checked, values)
        return all(ref is not None and x is not None and ref() is x for ref, x in pairs)

    def prefill(
        self, strategy: Strategy, cache: Any, arguments: State, length: int, captures: bool = False
    ) -> State:
        """Run the prompts, and choose the first token of each row.

        Args:
            strategy: how to choose.
            cache: an empty packed cache of more slots than the prompts are long. It is donated.
            arguments: `token_ids` int32[batch, prompt], `mask` bool[batch, prompt], `controls`,
                `settings` and `draws` of the strategy, `stop_ids` int32[n], `budget` int32[batch].
            length: number of slots of the cache.
            captures: whether to keep what the graph captures.

        Returns:
            The state for `decode`; `tokens` int32[rows, length] holds the prompt and what follows.
            With `captures` it has a buffer for each capture, with an entry for each slot, which
            `decode` fills in place.
        """
        run, donate = self.prefill_program(strategy, length, captures)
        args = (self.weights(), cache, arguments)
        return self.run("prefill", strategy, run, args, donate, length, captures)

    def prefill_program(
        self, strategy: Strategy, length: int, captures: bool
    ) -> tuple[Callable[..., State], tuple[int, ...]]:
        """Return what `prefill` compiles, of weights, cache and arguments; and what it donates."""

        def run(weights: list[jax.Array], cache: Any, arguments: State) -> State:
            return loop.prefill(self, weights, strategy, cache, arguments, length, captures)

        return run, (1,) if strategy.width == 1 else ()  # beams make the cache larger than it came

    def decode(
        self,
        strategy: Strategy,
        state: State,
        arguments: State,
        until: int,
        one_of: int = 1,
        weights: list[jax.Array] | None = None,
    ) -> tuple[State, State]:
        """Go on until a slot, or until every row is done. Takes the state over: it is donated.

        Args:
            strategy: how to choose.
            state: before.
            arguments: see `prefill`.
            until: the slot.
            one_of: see `one_of`.
            weights: what `weights` returned; as they are now, by default.

        Returns:
            The state to go on from, and copies of what is read of it, which outlive it.
        """
        run, donate = self.decode_program(strategy, one_of)
        weights = self.weights() if weights is None else weights
        args = (weights, state, arguments, np.int32(until))
        return self.run("decode", strategy, run, args, donate, one_of)

    def one_of(self, count: int, rows: int) -> int:
        """Return how many rows there are, if the first alone is of use and a program gains by that.

        Else it is 1. Only a program with a mixture gains.

        Args:
            count: how many prompts there are.
            rows: how many rows are run.
        """
        together = self.placement is None or self.placement.padded(1) == 1
        return rows if count == 1 and together and self._chooses_experts else 1

    def decode_program(
        self, strategy: Strategy, one_of: int = 1
    ) -> tuple[Callable[..., tuple[State, State]], tuple[int, ...]]:
        """Return what `decode` compiles, of its arguments and weights; and what it donates."""
        placement = self.placement

        def run(
            weights: list[jax.Array], state: State, arguments: State, until: Any
        ) -> tuple[State, State]:
            with target.one_row_of(one_of):
                state = loop.decode(self, weights, strategy, state, arguments, until)
            # Else what comes after a loop may lie elsewhere, and its next run be another program.
            state = self.pin_state(state)
            read = {name: state[name] for name in _READ}
            read["draws"] = {name: state["draws"][name] for name in strategy.read}
            copies = jax.tree.map(jnp.copy, read)
            return state, copies if placement is None else placement.pin_everywhere(copies)

        return run, (1,)

    def grow(self, state: State, length: int) -> State:
        """Give the state a longer cache; array by array, so that only one exists twice at a time.

        Args:
            state: from `prefill` or `decode`. It is taken over.
            length: number of slots.
        """
        state["tokens"] = _grow(state["tokens"], length, 0, 1)
        state["cache_mask"] = _grow(state["cache_mask"], length, True, 1)
        rows = state["tokens"].shape[0]
        for specs, arrays in zip(self.model.states, state["cache"], strict=True):
            for name, spec in specs.items():
                axis = self.packing.slot_axis(spec, rows)
                if axis is not None:
                    arrays[name] = _grow(arrays.pop(name), length, spec.initial, axis)
        return state

    def compiled(self, kind: str) -> list[Any]:
        """Return the programs of a kind that are kept, the latest last."""
        items = [item for programs in self._compiled.values() for item in programs.items()]
        return [program for key, program in items if key[0] == kind]

    @_weights_in_place()
    def run(
        self,
        kind: str,
        strategy: Strategy,
        run: Callable,
        args: tuple,
        donate: tuple[int, ...],
        *static: int,
    ) -> Any:
        """Run a function, compiled once for each strategy and shape of its arguments.

        Args:
            kind: of the program, as it is counted.
            strategy: how tokens are chosen in it.
            run: the function.
            args: its arguments, trees of arrays.
            donate: which of them it takes over.
            *static: whatever else the program depends on.
        """
        lora = lora_settings(self.model)
        given = functools.partial(run), args, donate  # JAX would trace `run` itself once only
        if self.placement is not None:
            args = self.placement.put(args)
        bundled = None
        if self.placement is None and self.platform != "cpu":
            bundled, args = bundle(args)
            run, donate = bundled.opened(run), tuple(i + 1 for i in donate)
        leaves, structure = jax.tree.flatten(args)
        places = _on_device(leaves) if self.placement is None else map(_on_mesh, leaves)
        precision = self.precision or target.precision_of_jax()
        settings = *static, precision, lora
        key = (kind, settings, structure, bundled, *places)
        programs = self._programs_of(strategy)
        program = programs.get(key)
        if program is None:
            with self._compiling:
                program = programs.get(key)
                if program is None:
                    lowered = jax.jit(run, donate_argnums=donate).lower(*args)
                    if lora_settings(self.model) != lora:  # another thread has changed them
                        return self.run(kind, strategy, *given, *static)
                    if hosts.span(self.model):
                        hosts.agree(self.model, kind, {"edit and sampler": lowered.as_text()})
                    program = lowered.compile(_compiler_options(kind, leaves))
                    self.compilations[kind] = self.compilations.get(kind, 0) + 1
                    programs[key] = program
        return program(*args)

    def _programs_of(self, strategy: Strategy) -> dict[tuple, Any]:
        """Return the programs of a strategy, and let go of those that were not used for longest."""
        with self._sorting:
            programs = self._compiled.setdefault(strategy.key, {})
            self._compiled.move_to_end(strategy.key)
            while len(self._compiled) > _STRATEGIES:
                self._compiled.popitem(last=False)
        return programs


def _on_device(leaves: list[Any]) -> list[Hashable]:
    """Return of each array what it is and where. Those of NumPy go to the others, in the call."""
    device = next(x.sharding for x in leaves if isinstance(x, jax.Array))
    return [
        (x.aval, x.sharding) if isinstance(x, jax.Array) else (jax.typeof(x), device)
        for x in leaves
    ]


def _on_mesh(x: jax.Array) -> Hashable:
    """Return what an array is and where, alike for shardings that are written in different ways."""
    sharding: Any = x.sharding
    sizes = sharding.mesh.shape
    axes = [_of_several(axis, sizes) for axis in sharding.spec]
    while axes and axes[-1] is None:
        axes.pop()
    return (x.aval, sharding.mesh, *axes)


def _of_several(axes: Any, sizes: Mapping[str, int]) -> Hashable:
    """Return those axes of a mesh, of the ones that share an axis of an array, that are not 1."""
    listed = axes if isinstance(axes, tuple) else (axes,)
    several = tuple(axis for axis in listed if axis is not None and sizes[axis] > 1)
    return several or None


def _lay(variable: keras.Variable, order: tuple[int, ...]) -> None:
    value = variable.value
    if value.format.layout.major_to_minor != order:
        laid = Format(Layout(order), value.sharding)
        graph.put_array(variable, jax.device_put(value, laid))


def _compiler_options(kind: str, leaves: list[Any]) -> dict[str, Any]:
    """Have a GPU of NVIDIA run the whole loop as one CUDA graph: else it waits for the host.

    Unless the user said by XLA_FLAGS what becomes a graph.
    """
    devices = next(x for x in leaves if hasattr(x, "devices")).devices()
    is_alone = kind == "decode" and len(devices) == 1
    is_chosen = _GRAPHS in os.environ.get("XLA_FLAGS", "")
    return _LOOP_AS_GRAPH if is_alone and all(map(_is_cuda, devices)) and not is_chosen else {}


def _is_cuda(device: jax.Device) -> bool:
    return "cuda" in device.client.platform_version


_grow = jax.jit(loop.pad, static_argnums=(1, 2, 3))
