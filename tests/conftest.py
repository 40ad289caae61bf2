"""How the tests run: the Keras backend, a cache of compiled programs, and what is slow."""

import ctypes
import gc
import os
import re
import sys
import time
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from zlib import crc32

import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Nearly all time goes into compiling, and nearly no test is about speed.
FLAGS = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):  # another release may not know it, and would not start
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
    # Else XLA splits each small program into up to 32 parts, to compile them side by side.
    FLAGS.append("--xla_cpu_parallel_codegen_split_count=1")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # What was compiled once is not compiled again, by any process or the next run.
    programs = Path(__file__).resolve().parents[1] / ".pytest_cache" / "compiled"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

_tests_run = 0
"""How many tests this process has run."""

_maps_counted = 0.0
"""When it last counted its memory maps."""

MAPS = Path("/proc/self/maps")
MANY_MAPS = 20_000
MEMORY = Path("/proc/self/statm")
MUCH_MEMORY = 3e9
"""Bytes; a process is to take no more than 5 GB."""

HARNESS = ("test_families.py", "test_family_table.py")


def pytest_addoption(parser):
    """Add the option by which CI runs a part of the slow tests."""
    parser.addoption("--part", help="run one in 64 of the tests; this text says which")


def pytest_configure(config):
    """Load the fixtures, and Keras with them, only in the processes that run tests."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses"):
        gc.disable()  # until `pytest_collection_finish`: what is imported stays
        config.pluginmanager.register(import_module("tests.helpers"))


def pytest_collection_finish():
    """Spare what was imported from garbage collection, which else looks at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Let go of what earlier tests left, now and then.

    Keras collects garbage at every layer that it quantises, so what is there is spared from that.
    """
    global _tests_run
    _tests_run += 1
    if (_tests_run % 20 == 0 and much_memory()) or too_many_maps():
        gc.unfreeze()
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
        gc.collect()
        gc.freeze()
        # Else what is free stays with the process: gigabytes, where 0.2 GB are in use.
        with suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)
    elif _tests_run % 20 == 0:
        gc.collect()
        gc.freeze()


def much_memory():
    """Tell whether this process takes much memory; where the system does not say, by the tests."""
    if not MEMORY.exists():
        return _tests_run % 100 == 0
    _, resident, *_ = MEMORY.read_text().split()
    return int(resident) * os.sysconf("SC_PAGE_SIZE") > MUCH_MEMORY


def too_many_maps():
    """Count the memory maps that compiled programs take; a process of more than 65,530 crashes."""
    global _maps_counted
    if not MAPS.exists() or time.monotonic() - _maps_counted < 2:
        return False
    with MAPS.open("rb") as lines:
        count = sum(1 for _ in lines)
    _maps_counted = time.monotonic()
    return count > MANY_MAPS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark as slow what runs on another family than the first, outside of the harness.

    The harness runs several families by default, each opened, and some cached and generating.
    Everything else is shown on one family at most, and on the others with the slow tests.
    """
    from tests.families import ROWS

    # What one family needs, one process makes, once.
    families = list(ROWS)
    items.sort(key=lambda item: _family_of(item, families))
    _, *others = families
    other = re.compile(rf"(?<![a-z0-9])({'|'.join(others)})(?![a-z0-9])")
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        # Such as `gemma`, the bundled `tiny_gemma`, and the function `make_gemma`.
        names = [p if isinstance(p, str) else getattr(p, "__name__", "") for p in parameters]
        if item.path.name not in HARNESS and any(other.search(name) for name in names):
            item.add_marker(pytest.mark.slow)
    mark_all_but_some(items)
    part = config.getoption("part")
    if part is not None:
        items[:] = [x for x in items if crc32(f"{part} {x.nodeid}".encode()) % 64 == 0]


def mark_all_but_some(items):
    """Mark as slow what `by_default(n)` leaves out: all cases of a test but the first and some.

    These are chosen by their names, not counted off: each second case may have the same value.
    """
    cases = {}
    for item in items:
        marker = item.get_closest_marker("by_default")
        if marker and not item.get_closest_marker("slow"):
            cases.setdefault((item.function, *marker.args), []).append(item)
    for (_, wanted), (_, *others) in cases.items():
        for item in sorted(others, key=lambda x: crc32(x.nodeid.encode()))[wanted - 1 :]:
            item.add_marker(pytest.mark.slow)


def _family_of(item, families):
    """Return where a test of the harness comes among the others; the rest stays where it is."""
    if item.path.name not in HARNESS or not hasattr(item, "callspec"):
        return -1
    parameters = item.callspec.params
    name = parameters.get("name") if "name" in parameters else parameters.get("family")
    return families.index(name) if name in families else -1
