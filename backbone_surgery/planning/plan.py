"""`plan`: what a model takes on each device of a mesh, and what bounds a token."""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np

from backbone_surgery import graph, target
from backbone_surgery.caching.model import BackboneWithCache
from backbone_surgery.caching.packed import PackedEmbedding, reads_packed
from backbone_surgery.caching.rewire import rewire_for
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.files import FLOATS, as_path, read_json, reading
from backbone_surgery.generation.programs import Programs
from backbone_surgery.generation.samplers import get_sampler, make_strategy
from backbone_surgery.meshes.layout_map import Split, splits
from backbone_surgery.numbers import check_count, is_int
from backbone_surgery.opening.int4 import policy_of
from backbone_surgery.opening.packed_axes import PACKED
from backbone_surgery.opening.placement import Placement
from backbone_surgery.opening.recurrence import CausalConvolution
from backbone_surgery.opening.state import Stateful
from backbone_surgery.planning.abstract import Sizes, abstract_placement, sizes_of_run, trace
from backbone_surgery.planning.compilers import check_compiler, compile_programs
from backbone_surgery.planning.devices import Devices, find_devices
from backbone_surgery.planning.result import Plan
from backbone_surgery.presets import dtypes_of_layers, load_backbone
from backbone_surgery.rewriting.operate import operate

AXES = ("batch", "model")
_OF_FOUR_BITS = ("int4", "gptq", "awq")
_KNOWN_OF_GROUPS = ("_scale", "_scales", "_zero", "zero_point", "g_idx")
_LENGTH = 2048
_MOST = 2**24
"""Bytes of a config."""


def plan(
    preset_or_backbone: Any,
    mesh: Any = None,
    batch: int = 1,
    length: int | None = None,
    device: str = "H100",
    dtype: str | None = None,
    prompt: int | None = None,
    edits: Iterable[Any] = (),
    sampler: Any = "greedy",
    compile: bool = False,
    verbose: int = 1,
) -> Plan:
    """Tell what a model takes on each device of a mesh, without taking memory for it.

    Weights lie as `layout_map` lays them out, rows and caches as generation does, which fills both
    up to sizes that programs are made for. The bound is that of reading: a device cannot make
    tokens faster than it reads its weights and what is used of its cache.

    With `compile=True` XLA's own compiler for the device makes the programs that would run there,
    on this machine, without weights. Nothing runs: counts and bytes are read off the programs, and
    seconds are the compiler's estimate.

    Args:
        preset_or_backbone: the name of a preset or a folder, of which `config.json` is enough; the
            path of such a file, or what is in it as a dict; or a backbone, edited or not. Of a
            folder the edit is not looked at: pass it as `edits`.
        mesh: `{"batch": n, "model": n}`, or a `keras.distribution.DeviceMesh` of these axes; one
            device by default, or all that `device` names, along `model`.
        batch: rows that run at once.
        length: tokens of each row, prompt and new ones; by default 2,048, or as many as the model
            has positions for, if these are fewer.
        device: A100, H100, H200, L4, v4, v5e, v5p or v6e; or several, such as `h100:8`, two hosts
            of eight, `h100:2x8`, or a TPU slice, `v5e:4x4`, `v5p:2x2x4`.
        dtype: of the weights and the cache of a preset, a float; by default bfloat16. A backbone
            has its own, and so has a preset that was saved quantised. For int8 or int4 quantise a
            backbone, and pass it.
        prompt: tokens of each prompt; by default half of `length`.
        edits: rewrites to make first, as for `operate`.
        sampler: how tokens are chosen, as for `compile` of a task.
        compile: whether to compile the programs, for which the extra `plan-tpu` or `plan-gpu` is
            needed.
        verbose: 0 shows no progress bar.

    Returns:
        A `Plan`: its figures are attributes, and it is shown as a table.

    Raises:
        SurgeryError: an argument does not fit, or the compiler is not installed.

    Examples:
        >>> import backbone_surgery as bs
        >>> bs.plan("tiny_gpt2", {"batch": 1, "model": 2}, batch=8, length=256).fits
        True
    """
    devices = find_devices(device)
    platform = devices.device.platform
    mesh_sizes = _read_mesh(mesh, devices)
    check_count("plan", "batch", batch, "rows")
    for name, value in {"length": length, "prompt": prompt}.items():
        if value is not None:
            check_count("plan", name, value, "tokens")
    strategy = make_strategy(get_sampler(sampler))
    if compile:
        _check_compilable(devices, mesh_sizes)
    with graph.without_values():
        backbone = _load(preset_or_backbone, dtype)
        edited = _edited(backbone, edits)
        held = {v.path for v in edited.variables}
        found = splits(edited, mesh_sizes["model"])
        shared = {split.variable.path: split for split in found if split.variable.path in held}
        cached = rewire_for(edited, devices=mesh_sizes["model"])
        asked = _asked(batch, prompt, length, cached.source.max_positions)
        placement = abstract_placement(mesh_sizes, shared)
        run = sizes_of_run(asked, platform, placement)
        programs = {}
        if compile:
            made = Programs(cached, cached.source.token_embedding, platform, placement)
            programs = trace(made, strategy, run, asked.rows)
    rows = [math.ceil(n / mesh_sizes["batch"]) * strategy.width for n in (asked.rows, run.rows)]
    weights = edited.weights
    shares = mesh_sizes["model"]
    return Plan(
        name=preset_or_backbone if isinstance(preset_or_backbone, str) else backbone.name,
        device=devices.device,
        mesh=mesh_sizes,
        batch=asked.rows,
        length=asked.length,
        rows=run.rows * strategy.width,
        slots=run.length,
        parameters=_parameters(edited),
        weight_bytes=sum(_bytes_of(v, shared, shares) for v in weights),
        looked_up_bytes=sum(_bytes_of(v, shared, shares) for v in _looked_up(edited)),
        cache_bytes=_cache_bytes(cached, rows[1], run.length, shares),
        used_cache_bytes=_cache_bytes(cached, rows[0], asked.length, shares),
        **_collectives(cached, shared, mesh_sizes, rows[1]),
        **_unpacked(cached, platform, placement, rows[1]),
        programs=compile_programs(programs, devices, mesh_sizes, verbose) if programs else {},
    )


def _asked(batch: int, prompt: int | None, length: int | None, most: int | None) -> Sizes:
    """Return the sizes of a generation, by default as long as the model can be run, up to 2,048."""
    if length is None:
        length = min(_LENGTH, most or _LENGTH)
    if most is not None and length > most:
        raise SurgeryError(
            f"plan at 'length': expected at most {most} tokens in a row, as many positions as the "
            f"model has learned. Received {length}. Pass fewer."
        )
    prompt = max(length // 2, 1) if prompt is None else prompt
    if prompt >= length:
        raise SurgeryError(
            f"plan at 'prompt': expected fewer tokens than the {length} of `length`. Received "
            f"{prompt}. Leave room for new ones."
        )
    return Sizes(batch, prompt, length)


def _edited(backbone: keras.Model, edits: Any) -> keras.Model:
    edits = [*edits] if isinstance(edits, Iterable) else edits
    return operate(backbone, edits) if edits != [] else backbone


def _load(model: Any, dtype: str | None) -> keras.Model:
    """Load a backbone without weights: a preset, a folder, or a config, in a file or as a dict."""
    if dtype is not None and str(dtype).removeprefix("mixed_") not in map(str, FLOATS):
        raise SurgeryError(
            f"plan at 'dtype': expected a float, such as bfloat16. Received {shown(dtype)}. For "
            "int8 or int4 quantise a backbone, and pass that."
        )
    if isinstance(model, keras.Model):
        own = getattr(model, "owner", model).dtype_policy
        if dtype is not None and own != keras.dtype_policies.get(dtype):
            raise SurgeryError(
                f"plan at 'dtype': expected that of the model, which has its weights already, "
                f"{own.name}. Received {dtype}. Leave it out, or pass a preset or a config."
            )
        return model
    if not isinstance(model, Mapping):
        path = as_path(model, "plan")
        if path.name != "config.json":
            return _load_preset(model, dtype)
        with reading(path, "plan", "a config in JSON"):
            model = dict(read_json(path, _MOST))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(model)))
        if "registered_name" in model:  # it is KerasHub's, and not of Hugging Face
            metadata = {"keras_version": keras.__version__}
            (Path(folder) / "metadata.json").write_text(json.dumps(metadata))
        try:
            return _load_preset(folder, dtype)
        except SurgeryError as error:
            raise SurgeryError(str(error).replace(folder, "the config")) from error


def _load_preset(preset: Any, dtype: str | None) -> keras.Model:
    """Load a backbone without weights, in a dtype, or as it was saved if that is quantised."""
    own = dtypes_of_layers(preset)
    if own is not None and dtype is not None:
        raise SurgeryError(
            f"plan at 'dtype': expected none for a preset that was saved quantised. Received "
            f"{dtype}. Leave it out."
        )
    try:
        return load_backbone(preset, load_weights=False, dtype=own or dtype or "bfloat16")
    except SurgeryError:
        raise
    except ValueError as error:
        raise SurgeryError(
            f"plan at '{preset}': expected a config that KerasHub makes a backbone of. Received "
            f"one that it refuses: {error} Take the `config.json` of a model."
        ) from error


def _check_compilable(devices: Devices, sizes: Mapping[str, int]) -> None:
    """Refuse what can't be compiled, before anything is made."""
    if keras.config.backend() != "jax":
        raise SurgeryError(
            "plan with `compile=True`: expected the JAX backend of Keras. Received "
            f"'{keras.config.backend()}'. Set KERAS_BACKEND=jax before Keras is imported."
        )
    check_compiler(devices.device)
    count = math.prod(sizes.values())
    if count > 1 and not devices.shape and devices.device.platform == "tpu":
        raise SurgeryError(
            f"plan at 'device': expected a slice of {count} chips. Received "
            f"'{devices.device.name}'. Say how they are connected, such as v5e:4x4 for 16."
        )


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


def _parameters(model: keras.Model) -> int:
    """Count the numbers that a model learned, also where they are packed, and not their scales."""
    layers = [x for x in graph.layers_within(model) if x.quantization_mode is not None]
    quantised = {id(v): x.quantization_mode for x in layers for v in graph.own_weights(x)}
    bits = {id(v): _weight_bits(x) for x in layers for v in graph.own_weights(x)}
    total = 0
    for variable in model.weights:
        mode, count = quantised.get(id(variable)), math.prod(variable.shape)
        if mode in _OF_FOUR_BITS and variable.name in PACKED and bits[id(variable)] == 4:
            count *= 2
        elif mode and variable.name.endswith(_KNOWN_OF_GROUPS):
            count = 0
        total += count
    return total


def _weight_bits(layer: keras.layers.Layer) -> int:
    """Return in how many bits a weight is kept: Keras packs those of four, and no others."""
    return getattr(policy_of(layer), "weight_bits", 4)


def _bytes_of(variable: keras.Variable, shared: Mapping[str, Split], shares: int) -> int:
    dtype = np.dtype(keras.backend.standardize_dtype(variable.dtype))
    count = math.prod(variable.shape) * dtype.itemsize
    split = shared.get(variable.path)
    return count // shares if split and split.units % shares == 0 else count


def _cache_bytes(cached: BackboneWithCache, rows: int, length: int, shares: int) -> int:
    def bytes_of(state: Any) -> int:
        count = state.nbytes(rows, length)
        heads = state.head_axis and state.sizes(rows, length)[state.head_axis]
        return count // shares if heads and heads % shares == 0 else count

    return sum(bytes_of(state) for entry in cached.states for state in entry.values())


def _collectives(
    cached: BackboneWithCache, shared: Mapping[str, Split], sizes: Mapping[str, int], rows: int
) -> dict[str, Any]:
    """Count what is exchanged for each token, as it was counted in compiled programs."""
    model = sizes["model"]
    split = [s for s in shared.values() if model > 1 and s.units % model == 0]
    uses, scaled = _uses(cached.source), _scaled(cached.source)
    width = cached.output["hidden_states"].shape[-1]
    summed = {id(s.variable): s.width or width for s in split if s.summed}
    sums = sum(uses[variable] for variable in summed)
    numbers = sum(uses[variable] * width for variable, width in summed.items())
    # What goes into a sum in int8 is scaled by its largest value over all shares; what is looked up
    # has a scale on one of them.
    scales = sum(uses[variable] for variable in {*summed} & scaled)
    # The likeliest token: its logit, and its number, over the shares of the vocabulary.
    choices = 2 if any(s.vocabulary for s in split) else 0
    test = 1 if sizes["batch"] > 1 else 0
    shared_out = [x for x in _convolved(cached.source) if model > 1 and x.shape[-1] % model == 0]
    within = sum(n for x, n in _summed_within(cached.source) if model > 1 and x % model == 0)
    count = sums + scales + choices + test + within
    gathered = [_bytes_of_token(x) for x in shared_out]
    scale = np.dtype(cached.output["hidden_states"].dtype).itemsize
    each = (numbers + scales) * scale + (choices + within) * 4 + sum(gathered)
    counts = {"all-reduce": count, "all-gather": len(gathered)}
    return {
        "collectives": {kind: n for kind, n in counts.items() if n},
        "collective_bytes": each * rows + test,
    }


def _convolved(model: keras.Model) -> list[keras.KerasTensor]:
    """Return what convolutions give: their channels are shared, and then gathered for the heads."""
    nodes = graph.all_nodes(model)
    return [x.outputs[0] for x in nodes if isinstance(x.operation, CausalConvolution)]


def _summed_within(model: keras.Model) -> Iterator[tuple[int, int]]:
    """Yield for each activation that adds up over all units these, and how often."""
    for node in graph.all_nodes(model):
        sums = getattr(getattr(node.operation, "activation", None), "sums", 0)
        if sums:
            yield node.outputs[0].shape[-1], sums


def _bytes_of_token(x: keras.KerasTensor) -> int:
    return x.shape[-1] * np.dtype(x.dtype).itemsize


def _uses(model: keras.Model) -> Counter[int]:
    """Count how often layers run with each weight, by its `id`: a block that is repeated, twice."""
    layers = [node.operation for node in graph.all_nodes(model)]
    # Attention that has sinks holds the layer that owns them, and its projections with it.
    inner = [x for x in layers if graph.as_functional(x) is None and not isinstance(x, Stateful)]
    return Counter(v for x in inner for v in {id(v) for v in getattr(x, "variables", ())})


def _scaled(model: keras.Model) -> set[int]:
    """Return the `id`s of the int8 weights that are looked up, or multiplied with int8."""
    kinds = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding)
    layers = [x for x in graph.layers_within(model) if isinstance(x, kinds)]
    narrow = [x for x in layers if x.quantization_mode == "int8"]
    scaled = [x for x in narrow if getattr(x, "inputs_quantizer", True)]
    return {id(v) for x in scaled for v in graph.own_weights(x)}


def _looked_up(model: keras.Model) -> list[keras.Variable]:
    """Return the tables that a token takes an entry of; not those that logits are made with too."""
    tables = (keras.layers.Embedding, keras_hub.layers.PositionEmbedding)
    layers = [x for x in graph.layers_within(model) if isinstance(x, tables)]
    own = [v for x in layers if not getattr(x, "tie_weights", False) for v in graph.own_weights(x)]
    return [v for v in own if v.name in ("embeddings", "position_embeddings")]


def _unpacked(
    model: keras.Model, platform: str, placement: Placement | None, rows: int
) -> dict[str, Any]:
    """Return how weights are quantised that the programs cannot read packed, and their share.

    Args:
        model: with a cache.
        platform: that the programs are for.
        placement: on a mesh.
        rows: that each device runs, each with one token.
    """
    within = graph.layers_within(model)
    layers = [x for x in within if x.quantization_mode in _OF_FOUR_BITS]
    tables = [x.layer for x in within if type(x) is PackedEmbedding and not x.layer.lora_enabled]
    looked_up = {id(x) for x in tables if type(x) is keras.layers.Embedding}
    with target.made_for(platform, placement), target.planned():
        left = [x for x in layers if id(x) not in looked_up and not reads_packed(x, rows)]
    if not left:
        return {"unpacked": None}
    weights = ([v for x in some for v in graph.own_weights(x)] for some in (left, layers))
    part, whole = (sum(_bytes_of(v, {}, 1) for v in some) for some in weights)
    return {"unpacked": left[0].quantization_mode, "unpacked_share": part / whole}
