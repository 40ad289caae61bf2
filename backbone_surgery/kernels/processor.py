"""The processor at hand: compile handlers for it by llvmlite, and register them with JAX."""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import jax
from llvmlite import binding, ir

from backbone_surgery.kernels.handler import Body, write_handler

_NAME = "handler"
_lock = threading.Lock()
_engines: dict[str, Any] = {}


def floats_of_vector() -> int:
    """Return how many floats a vector of this processor has; 0 where there are no wide ones."""
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 16
    return 8 if features.get("avx2") and features.get("fma") else 0


def register(name: str, write: Callable[[ir.Module, int], Body]) -> str:
    """Compile a handler and register it with JAX, once in a process.

    Args:
        name: of the handler.
        write: adds to a module what the handler calls, given the floats of a vector, and returns
            what writes a part of a call.

    Returns:
        The name of the target for `jax.ffi.ffi_call`.
    """
    width = floats_of_vector()
    target = f"backbone_surgery.{name}_{width}"
    with _lock:
        if target not in _engines:
            module = ir.Module(name)
            write_handler(module, width, _NAME, write(module, width))
            engine = _compiled(module)
            address = ctypes.c_void_p(engine.get_function_address(_NAME))
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(address), platform="cpu")
            _engines[target] = engine
    return target


def _compiled(module: ir.Module) -> Any:
    """Compile a module for this processor, with vectors as wide as they come."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features()
    flags = features.flatten() + (",-prefer-256-bit" if features.get("avx512f") else "")
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=flags, opt=3
    )
    module.triple = machine.triple
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    engine = binding.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine
