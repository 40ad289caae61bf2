"""Startup of the command line: choose the backend before Keras is imported, and XLA's flags.

Keras reads its backend once, when it is imported, and XLA its flags when it begins. The console
script imports this package before any code of `cli` runs, so the package looks here first. Nothing
happens when it is imported as a library: then both are configured by whoever imports it.
"""

import os
import sys
from pathlib import Path

_GPU = Path("/dev/nvidia0")
_COMMAND_BUFFER = "xla_gpu_enable_command_buffer"


def prepare_command_line(arguments: list[str]) -> None:
    """Choose JAX, unless the user chose, where this process is the console script.

    TensorFlow, which KerasHub imports where it is installed, is kept out: it takes seconds to
    import and writes to the screen, and is not needed.
    """
    if not arguments or Path(arguments[0]).stem != "backbone-surgery":
        return
    if os.environ.setdefault("KERAS_BACKEND", "jax") != "tensorflow":
        for name in ("tensorflow", "tensorflow_text"):
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    if arguments[1:2] == ["plan"]:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # compilers that are installed look for chips
    run_loops_as_graphs()


def run_loops_as_graphs() -> None:
    """Have XLA run a loop over tokens as one CUDA graph, where there is a GPU of NVIDIA.

    Else the host launches each step. Does nothing where the user said what XLA should do.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _GPU.exists() and _COMMAND_BUFFER not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_COMMAND_BUFFER}=+WHILE".strip()


prepare_command_line(sys.argv)
