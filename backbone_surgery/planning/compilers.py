"""The compilers of chips that are not there: XLA's for TPUs and for GPUs, in a child process."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from backbone_surgery.errors import SurgeryError
from backbone_surgery.planning.abstract import Traced
from backbone_surgery.planning.devices import Device, Devices
from backbone_surgery.planning.hlo import Step, read_step


class _Gpu(NamedTuple):
    """What XLA's compiler asks of a GPU, beside what `Device` knows; as XLA's own files have it."""

    capability: tuple[int, int]
    cores: int
    units: int
    threads: int
    shared: int
    shared_by_choice: int
    cache: int


_GPUS = {
    "A100": _Gpu((8, 0), 108, 64, 2048, 167936, 166912, 41943040),
    "H100": _Gpu((9, 0), 132, 128, 2048, 233472, 232448, 52428800),
    "H200": _Gpu((9, 0), 132, 128, 2048, 233472, 232448, 52428800),
    "L4": _Gpu((8, 9), 58, 128, 1536, 102400, 101376, 50331648),
}

_PACKAGES = {"tpu": ("libtpu", "plan-tpu"), "gpu": ("jax_plugins.xla_cuda12", "plan-gpu")}

# Kernels are not tried out, for want of a GPU. Each instruction says what it would take, where XLA
# has tables of costs: from Hopper on.
_GPU_FLAGS = "--xla_gpu_autotune_level=0"
_GPU_COSTS = " --xla_gpu_collect_cost_model_stats=true"

# Memory that is free again goes back at once: a program of 80 blocks then needs a fifth less.
# https://sourceware.org/glibc/manual/latest/html_node/Memory-Allocation-Tunables.html
_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_MMAP_THRESHOLD_": "131072",
}


@dataclass(frozen=True)
class CompiledProgram:
    """What a compiler says of a program, for each chip; zeros if it could not compile it.

    Attributes:
        argument_bytes: of what goes in: weights, cache and the rest.
        temporary_bytes: that it needs besides while it runs.
        peak_bytes: of both, and of what comes out anew.
        collectives: `{kind: how many}` in the loop over tokens; of prefill, in all.
        kernels: that run for each token; of prefill, in all.
        transfers: how often a TPU brings something onto the chip, or back, while kernels run.
        instructions: both by kind and by what they write, `{"fusion bf16[8,768]": how many}`.
        step_bytes: that a token reads from and writes to memory; of prefill, in all.
        least_bytes: that a token reads at least, see `Plan`; `None` of prefill.
        copied_bytes: of what is read and written, of arrays that are only copied.
        estimated_seconds: of a token, or of prefill, by the compiler's own model of costs; `None`
            where it does not say. On a TPU it leaves out waiting for memory. It knows nothing of
            kernels of this library on a GPU: for these it is the time that memory takes.
        hlo: the optimised text.
        seconds: that compiling took.
        error: why there is no program; `None` if there is one.
    """

    argument_bytes: int = 0
    temporary_bytes: int = 0
    peak_bytes: int = 0
    collectives: Mapping[str, int] = field(default_factory=dict)
    kernels: int = 0
    transfers: int = 0
    instructions: Mapping[str, int] = field(default_factory=dict, repr=False)
    step_bytes: int = 0
    least_bytes: int | None = None
    copied_bytes: int = 0
    estimated_seconds: float | None = None
    hlo: str = field(default="", repr=False)
    seconds: float = 0.0
    error: str | None = None


def check_compiler(device: Device) -> None:
    """Refuse a device whose compiler is not installed.

    Raises:
        SurgeryError: it is not, with the extra that brings it.
    """
    module, extra = _PACKAGES[device.platform]
    try:
        there = find_spec(module) is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        raise SurgeryError(
            f"plan with `compile=True`: expected XLA's compiler for {device.name}. Received a "
            f"system without it. Run `pip install 'backbone-surgery[{extra}]'`."
        )


def compile_programs(
    programs: Mapping[str, Traced], devices: Devices, mesh: Mapping[str, int], verbose: int
) -> dict[str, CompiledProgram]:
    """Compile programs, each in a process of its own.

    Args:
        programs: by name.
        devices: what they are compiled for.
        mesh: `{axis: devices}`.
        verbose: whether to show a progress bar.
    """
    compiled = {}
    with Progress(disable=not verbose) as progress:
        task = progress.add_task("Compiling", total=len(programs))
        for name, program in programs.items():
            progress.update(task, description=f"Compiling {name} for {devices.device.name}")
            compiled[name] = _compile(name, program, devices, mesh)
            progress.advance(task)
    return compiled


def _compile(
    name: str, program: Traced, devices: Devices, mesh: Mapping[str, int]
) -> CompiledProgram:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        request = {
            "platform": devices.device.platform,
            "topology": _topology(devices, mesh),
            "mesh": list(mesh.values()),
            "axes": program.axes,
            "orders": program.orders,
            "donated": program.donated,
        }
        (folder / "request.json").write_text(json.dumps(request))
        (folder / "program.bin").write_bytes(program.program)
        script = Path(__file__).with_name("compile_there.py")
        with (
            (folder / "log").open("w") as log,
            subprocess.Popen(
                [sys.executable, "-W", "ignore", str(script), path],
                env=_environment(devices.device),
                stdout=log,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            try:
                process.wait()
            except BaseException:  # also when it is interrupted
                process.kill()
                raise
        if not (folder / "answer.json").exists():
            lines = (folder / "log").read_text(errors="replace").strip().splitlines()
            raise SurgeryError(
                f"plan with `compile=True` for {devices.device.name}: expected a compiler that "
                f"runs. Received from it: {lines[-1] if lines else 'nothing'}. See that libtpu or "
                "the CUDA plugin is of the version that goes with JAX."
            )
        answer = json.loads((folder / "answer.json").read_text())
        if answer["error"]:
            return CompiledProgram(seconds=answer["seconds"], error=answer["error"])
        hlo = (folder / "program.hlo").read_text()
        return _read(answer, hlo, read_step(hlo, in_loop=name == "decode"), devices.device)


def _read(answer: dict[str, Any], hlo: str, step: Step, device: Device) -> CompiledProgram:
    estimate = step.seconds if step.cycles is None else step.cycles / device.clock
    if estimate is not None:
        estimate += step.own_bytes / device.bandwidth
    return CompiledProgram(
        argument_bytes=answer["argument_bytes"],
        temporary_bytes=answer["temporary_bytes"],
        peak_bytes=sum(answer[f"{k}_bytes"] for k in ("argument", "temporary", "new")),
        collectives=dict(step.exchanges),
        kernels=step.kernels.total(),
        transfers=step.transfers,
        instructions=dict(step.instructions),
        step_bytes=step.bytes,
        copied_bytes=step.copied_bytes,
        estimated_seconds=estimate,
        hlo=hlo,
        seconds=answer["seconds"],
    )


def _topology(devices: Devices, mesh: Mapping[str, int]) -> dict[str, Any]:
    """Return how JAX is asked for devices that are not there."""
    device, shape = devices.device, devices.shape
    count = devices.count if shape else mesh["batch"] * mesh["model"]
    if device.platform == "gpu":
        hosts, each = shape if len(shape) == 2 else (1, count)
        return {
            "platform": "cuda",
            "topology_name": device.name,
            "topology": f"1x{hosts}x{each}",
            "target_config": _target_config(device),
        }
    if count == 1:
        one = [1] * (2 if device.name in ("v5e", "v6e") else 3)
        name = "x".join(map(str, one))
        chip = {"topology_name": f"{device.name}:{name}", "chips_per_host_bounds": [1, 1, 1]}
        return {"platform": "tpu", **chip}
    return {"platform": "tpu", "topology_name": f"{device.name}:{'x'.join(map(str, shape))}"}


def _target_config(device: Device) -> str:
    """Describe a GPU to XLA, as a `stream_executor.GpuTargetConfigProto`."""
    gpu = _GPUS[device.name]
    major, minor = gpu.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {gpu.threads}
  shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared}
  shared_memory_per_block_optin: {gpu.shared_by_choice}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {gpu.cores} fpus_per_core: {gpu.units} clock_rate_ghz: {device.clock / 1e9}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {int(device.bandwidth)} device_memory_size: {device.memory}
  l2_cache_size: {gpu.cache} cuda_compute_capability {{ major: {major} minor: {minor} }}
  driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }} device_description_str: "NVIDIA {device.name}"
"""


def _environment(device: Device) -> dict[str, str]:
    """Return the environment of the child: a CPU to run on, and nothing that looks for a chip."""
    flags = _GPU_FLAGS if device.platform == "gpu" else ""
    if flags and _GPUS[device.name].capability >= (9, 0):
        flags += _GPU_COSTS
    return {
        **os.environ,
        **_MALLOC,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_MIN_LOG_LEVEL": "3",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nobody holds a chip: several may compile at once
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
