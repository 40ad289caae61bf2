"""Startup of the command line: choose the backend before Keras is imported.

Keras reads its backend once, when it is imported, and the console script imports this package
before any code of `cli` runs. So the package looks here first. Nothing happens when it is imported
as a library: then Keras is configured by whoever imports it.
"""

import os
import sys
from pathlib import Path


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


prepare_command_line(sys.argv)
