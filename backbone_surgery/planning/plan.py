"""`plan`: what a model takes on each device of a mesh, and what bounds a token."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import keras_hub
import ml_dtypes
import numpy as np

from backbone_surgery import graph
from backbone_surgery.caching.model import BackboneWithCache
from backbone_surgery.caching.rewire import rewire
from backbone_surgery.errors import SurgeryError, closest, shown
from backbone_surgery.generation.buckets import bucket
from backbone_surgery.generation.engine import SHORTEST_PROMPT
from backbone_surgery.generation.programs import Programs
from backbone_surgery.generation.samplers import make_strategy
from backbone_surgery.meshes.layout_map import Split, splits
from backbone_surgery.numbers import is_int
from backbone_surgery.planning.abstract import Sizes, abstract_placement, trace
from backbone_surgery.planning.compilers import CompiledProgram, check_compiler, compile_programs
from backbone_surgery.planning.devices import Device, Devices, find_devices
from backbone_surgery.presets import load_backbone
from backbone_surgery.rewriting.operate import operate
from backbone_surgery.target import least_rows

AXES = ("batch", "model")
_UNPACKED = "each token unpacks the {} weights first, and moves more than bfloat16; int8 does not"


@dataclass(frozen=True)
class Plan:
    """What one device of a mesh holds and does; print it for a table.

    What was compiled is found by the name of the program, `plan["prefill"]` and `plan["decode"]`.

    Attributes:
        name: of the model.
        device: what each device is.
        mesh: `{axis: devices}`.
        batch: rows of the whole mesh.
        length: tokens of a row.
        parameters: of the whole model.
        weight_bytes: of the weights that a device holds.
        looked_up_bytes: of them, of tables of which a token reads one entry.
        cache_bytes: of the cache that a device holds, at that length.
        collectives: `{kind: how many for each token}`.
        collective_bytes: that a device hands over for each token, at least.
        unpacked: how weights are quantised that each token unpacks first, such as "int4".
        programs: `{name: CompiledProgram}`, if they were compiled.
    """

    name: str
    device: Device
    mesh: Mapping[str, int]
    batch: int
    length: int
    parameters: int
    weight_bytes: int
    looked_up_bytes: int
    cache_bytes: int
    collectives: Mapping[str, int]
    collective_bytes: int
    unpacked: str | None = None
    programs: Mapping[str, CompiledProgram] = field(default_factory=dict)

    def __getitem__(self, name: str) -> CompiledProgram:
        if name not in self.programs:
            raise SurgeryError(
                f"plan: expected a compiled program, {', '.join(self.programs) or 'none'}. "
                f"Received {shown(name)}. {closest(str(name), self.programs)} Pass `compile=True`."
            )
        return self.programs[name]

    def __post_init__(self) -> None:
        programs = dict(self.programs)
        if "decode" in programs:
            programs["decode"] = replace(programs["decode"], least_bytes=self.least_bytes)
        object.__setattr__(self, "programs", programs)

    @property
    def least_bytes(self) -> int:
        """What a token reads at least: weights and cache of a device, once, but no whole table."""
        return self.weight_bytes - self.looked_up_bytes + self.cache_bytes

    @property
    def device_bytes(self) -> int:
        """What a device holds: weights and cache, or the most that a compiled program takes."""
        held = self.weight_bytes + self.cache_bytes
        return max([held, *(p.peak_bytes for p in self.programs.values())])

    @property
    def fits(self) -> bool:
        """Whether that is less than the device's memory; on paper, than nine tenths of it."""
        if any(program.error for program in self.programs.values()):
            return False
        return self.device_bytes <= (1.0 if self.programs else 0.9) * self.device.memory

    @property
    def tokens_per_second(self) -> float:
        """A bound, of all rows: each token reads the weights and the cache of a device once."""
        return self.batch * self.device.bandwidth / self.least_bytes

    def __str__(self) -> str:
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        count = math.prod(self.mesh.values())
        room = self.device.memory / 2**30
        collectives = ", ".join(f"{n} {kind}" for kind, n in self.collectives.items()) or "none"
        rows = {
            "parameters": f"{self.parameters:,}",
            "devices": f"{count} x {self.device.name}, {room:.0f} GiB each ({mesh})",
            "weights on a device": _size(self.weight_bytes),
            "cache on a device": f"{_size(self.cache_bytes)} ({self.batch} x {self.length} tokens)",
            "fits": "yes" if self.fits else f"no: {_size(self.device_bytes)} of {room:.0f} GiB",
            "collectives a token": f"{collectives}; {self.collective_bytes:,} bytes",
            "bound by memory": f"{self.tokens_per_second:,.0f} tokens/s, all rows together",
            **({"beware": _UNPACKED.format(self.unpacked)} if self.unpacked else {}),
            **{f"compiled {name}": _shown(p) for name, p in self.programs.items()},
        }
        width = max(map(len, rows))
        return "\n".join([self.name, *(f"  {k:{width}}  {v}" for k, v in rows.items())])


def plan(
    preset_or_backbone: Any,
    mesh: Any = None,
    batch: int = 1,
    length: int = 2048,
    device: str = "H100",
    dtype: str = "bfloat16",
    prompt: int | None = None,
    edits: Iterable[Any] = (),
    sampler: Any = "greedy",
    compile: bool = False,
    verbose: int = 1,
) -> Plan:
    """Tell what a model takes on each device of a mesh, without taking memory for it.

    Weights lie as `layout_map` lays them out, rows and caches as generation does. The bound is that
    of reading: a device cannot make tokens faster than it reads its weights and cache.

    With `compile=True` XLA's own compiler for the device makes the programs that would run there,
    on this machine, without weights. Nothing runs: counts and bytes are read off the programs, and
    seconds are the compiler's estimate.

    Args:
        preset_or_backbone: the name of a preset or a folder, of which `config.json` is enough; or a
            backbone, edited or not.
        mesh: `{"batch": n, "model": n}`, or a `keras.distribution.DeviceMesh` of these axes; one
            device by default, or all that `device` names, along `model`.
        batch: rows that run at once.
        length: tokens of each row, prompt and new ones.
        device: A100, H100, H200, L4, v4, v5e, v5p or v6e; or several, such as `h100:8`, two hosts
            of eight, `h100:2x8`, or a TPU slice, `v5e:4x4`, `v5p:2x2x4`.
        dtype: of the weights and the cache of a preset; a backbone has its own.
        prompt: tokens of each prompt, for the programs; by default half of `length`.
        edits: rewrites to make first, as for `operate`.
        sampler: how tokens are chosen, as for `compile` of a task.
        compile: whether to compile the programs, for which the extra `plan-tpu` or `plan-gpu` is
            needed.
        verbose: 0 shows no progress bar.

    Raises:
        SurgeryError: an argument does not fit, or the compiler is not installed.

    Examples:
        >>> import backbone_surgery as bs
        >>> bs.plan("tiny_gpt2", {"batch": 1, "model": 2}, batch=8, length=256).fits
        True
    """
    devices = find_devices(device)
    sizes = _read_mesh(mesh, devices)
    for name, value in (
        ("batch", batch),
        ("length", length),
        ("prompt", 1 if prompt is None else prompt),
    ):
        if not is_int(value) or value < 1:
            raise SurgeryError(
                f"plan at '{name}': expected a positive int. Received {shown(value)}. Pass one."
            )
    prompt = max(length // 2, 1) if prompt is None else prompt
    if compile:
        _check_compilable(devices, sizes, prompt, length)
    with graph.without_values():
        backbone = preset_or_backbone
        if not isinstance(backbone, keras.Model):
            backbone = load_backbone(preset_or_backbone, load_weights=False, dtype=dtype)
        edits = list(edits)
        edited = operate(backbone, edits) if edits else backbone
        shared = {split.variable.path: split for split in splits(edited)}
        cached = rewire(edited)
        states = [state for entry in cached.states for state in entry.values()]
        programs = {}
        if compile:
            programs = _trace(cached, shared, devices, sizes, Sizes(batch, prompt, length), sampler)
    rows = math.ceil(batch / sizes["batch"])
    return Plan(
        name=preset_or_backbone if isinstance(preset_or_backbone, str) else backbone.name,
        device=devices.device,
        mesh=sizes,
        batch=batch,
        length=length,
        parameters=sum(math.prod(v.shape) for v in edited.variables),
        weight_bytes=sum(_bytes_of(v, shared, sizes["model"]) for v in edited.variables),
        looked_up_bytes=sum(_bytes_of(v, shared, sizes["model"]) for v in _looked_up(edited)),
        cache_bytes=sum(_state_bytes(state, rows, length, sizes["model"]) for state in states),
        **_collectives(cached, shared, sizes, rows),
        unpacked=_unpacked(edited),
        programs=compile_programs(programs, devices, sizes, verbose) if programs else {},
    )


def _check_compilable(devices: Devices, sizes: Mapping[str, int], prompt: int, length: int) -> None:
    """Refuse what can't be compiled, before anything is made."""
    if keras.config.backend() != "jax":
        raise SurgeryError(
            "plan with `compile=True`: expected the JAX backend of Keras. Received "
            f"'{keras.config.backend()}'. Set KERAS_BACKEND=jax before Keras is imported."
        )
    check_compiler(devices.device)
    count = math.prod(sizes.values())
    if prompt >= length:
        raise SurgeryError(
            f"plan at 'prompt': expected fewer tokens than the {length} of `length`. Received "
            f"{prompt}. Leave room for new ones."
        )
    if count > 1 and not devices.shape and devices.device.platform == "tpu":
        raise SurgeryError(
            f"plan at 'device': expected a slice of {count} chips. Received "
            f"'{devices.device.name}'. Say how they are connected, such as v5e:4x4 for 16."
        )


def _trace(
    cached: BackboneWithCache,
    shared: dict[str, Split],
    devices: Devices,
    mesh: dict[str, int],
    sizes: Sizes,
    sampler: Any,
) -> dict[str, Any]:
    """Trace the programs that a generation of these sizes would run."""
    platform = devices.device.platform
    programs = Programs(cached, cached.source.token_embedding, platform, abstract_placement(mesh))
    rows = programs.padded(bucket(sizes.rows, least_rows(platform)))
    prompt = bucket(sizes.prompt, SHORTEST_PROMPT)
    length = bucket(prompt + sizes.length - sizes.prompt, 2 * SHORTEST_PROMPT)
    strategy = make_strategy(keras_hub.samplers.get(sampler))
    return trace(programs, strategy, shared, Sizes(rows, prompt, length), sizes.rows)


def _shown(program: CompiledProgram) -> str:
    """Write what a compiler says of a program on a line."""
    if program.error:
        return f"does not compile: {program.error.strip().splitlines()[0]}"
    collectives = ", ".join(f"{n} {kind}" for kind, n in program.collectives.items())
    transfers = f" and {program.transfers} transfers" if program.transfers else ""
    parts = [
        f"{_size(program.argument_bytes)} in, {_size(program.temporary_bytes)} temporary",
        f"{program.kernels} kernels{transfers} move {_size(program.step_bytes)}",
        collectives,
    ]
    if program.estimated_seconds is not None:
        parts.append(f"estimated {program.estimated_seconds * 1e6:,.0f} us")
    return "; ".join(part for part in parts if part)


def _read_mesh(mesh: Any, devices: Devices) -> dict[str, int]:
    if isinstance(mesh, keras.distribution.DeviceMesh):
        mesh = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    mesh = {"model": devices.count} if mesh is None else mesh
    if not isinstance(mesh, Mapping) or not all(
        axis in AXES and is_int(size) and size >= 1 for axis, size in mesh.items()
    ):
        raise SurgeryError(
            "plan at 'mesh': expected numbers of devices for the axes `batch` and `model`. "
            f'Received {shown(mesh)}. Pass {{"batch": 1, "model": 4}}, say.'
        )
    sizes = {axis: int(mesh.get(axis, 1)) for axis in AXES}
    if devices.shape and math.prod(sizes.values()) != devices.count:
        raise SurgeryError(
            f"plan at 'mesh': expected the {devices.count} devices of `device`. Received "
            f"{math.prod(sizes.values())}. Have `batch` times `model` be {devices.count}."
        )
    return sizes


def _bytes_of(variable: keras.Variable, shared: Mapping[str, Split], shares: int) -> int:
    count = math.prod(variable.shape) * _itemsize(keras.backend.standardize_dtype(variable.dtype))
    split = shared.get(variable.path)
    return count // shares if split and split.units % shares == 0 else count


def _state_bytes(state: Any, rows: int, length: int, shares: int) -> int:
    count = state.nbytes(rows, length)
    heads = state.head_axis and state.sizes(rows, length)[state.head_axis]
    return count // shares if heads and heads % shares == 0 else count


def _collectives(
    cached: BackboneWithCache, shared: Mapping[str, Split], sizes: Mapping[str, int], rows: int
) -> dict[str, Any]:
    """Count what is exchanged for each token, as it was counted in compiled programs."""
    model = sizes["model"]
    split = [s for s in shared.values() if model > 1 and s.units % model == 0]
    sums = sum(s.summed for s in split)
    # The likeliest token: its logit, and its number, over the shares of the vocabulary.
    choices = 2 if any(s.vocabulary for s in split) else 0
    test = 1 if sizes["batch"] > 1 else 0
    count = sums + choices + test
    states = cached.output["hidden_states"]
    size = states.shape[-1] * _itemsize(states.dtype)
    return {
        "collectives": {"all-reduce": count} if count else {},
        "collective_bytes": sums * rows * size + choices * rows * 4 + test,
    }


def _looked_up(model: keras.Model) -> list[keras.Variable]:
    """Return the tables that a token takes an entry of; not those that logits are made with too."""
    tables = (keras.layers.Embedding, keras_hub.layers.PositionEmbedding)
    layers = [x for x in graph.layers_within(model) if isinstance(x, tables)]
    own = [v for x in layers if not getattr(x, "tie_weights", False) for v in graph.own_weights(x)]
    return [v for v in own if v.name in ("embeddings", "position_embeddings")]


def _unpacked(model: keras.Model) -> str | None:
    modes = {layer.quantization_mode for layer in graph.layers_within(model)}
    return next((mode for mode in ("int4", "gptq", "awq") if mode in modes), None)


def _itemsize(dtype: str) -> int:
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


def _size(count: int) -> str:
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    return f"{count / unit:,.2f} {name}"
