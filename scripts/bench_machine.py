"""What the machine can do: read bandwidth, arithmetic, and memory used by a call."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_CPU_BYTES = 256 * 2**20
_ACCELERATOR_BYTES = 4 * 2**30


def describe() -> dict[str, Any]:
    """Return what ran the benchmark."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "backend": jax.default_backend(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_average": os.getloadavg()[0],
        "jax": jax.__version__,
    }


def read_bandwidth(repeats: int = 5) -> float:
    """Return the highest bytes per second seen: all cores summing, or the accelerator copying."""
    if jax.default_backend() == "cpu":
        return _cpu_bandwidth(repeats)
    x = jnp.ones(_ACCELERATOR_BYTES // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    seconds = min(_seconds(lambda: copy(x).block_until_ready()) for _ in range(repeats + 1))
    return 2 * _ACCELERATOR_BYTES / seconds


def _cpu_bandwidth(repeats: int) -> float:
    cores = os.cpu_count() or 1
    parts = np.array_split(np.ones(_CPU_BYTES // 4, np.float32), cores)
    with ThreadPoolExecutor(cores) as pool:

        def run() -> None:
            list(pool.map(np.sum, parts))

        return _CPU_BYTES / min(_seconds(run) for _ in range(repeats))


def arithmetic(repeats: int = 5) -> float:
    """Return the highest operations per second seen, of a product of large float32 matrices."""
    size = 2048 if jax.default_backend() == "cpu" else 8192
    x = jnp.ones((size, size), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    seconds = min(_seconds(lambda: product(x).block_until_ready()) for _ in range(repeats + 1))
    return 2 * size**3 / seconds


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def peak_extra_bytes(function: Callable[[], Any], on_jax: bool) -> int | None:
    """Run a function, and return by how much the process outgrew its resting size meanwhile.

    On an accelerator this is the highest use of its memory by JAX since the process began, which
    no program can reset; `None` for what does not run `on_jax` there, or where the system does not
    tell.
    """
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        function()
        return int(jax.devices()[0].memory_stats()["peak_bytes_in_use"]) if on_jax else None
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        function()
        return None
    before = _status("VmRSS")
    function()
    return max(_status("VmHWM") - before, 0)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(name))
    return int(line.split()[1]) * 1024
