"""Startup of the command line: what Keras and JAX read when they begin, and nothing unused.

Keras reads its backend once, when it is imported. The console script imports this package before
any code of `cli` runs, so the package looks here first. Nothing happens when it is imported as a
library: then both are configured by whoever imports it, and KerasHub imports TensorFlow where it is
installed. That cannot wait until it is used: KerasHub derives a class from it and makes tables for
each tokenizer with it. Who uses none of it sets `BACKBONE_SURGERY_LEAN=1`, to import what the
command line imports.
"""

import os
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from backbone_surgery.bundled import bundled_models

_FOR_OTHERS = ("sklearn", "pandas", "matplotlib", "IPython", "rouge_score")
"""Keras and KerasHub import these, where they are, for what no command uses."""
_LEAN = "BACKBONE_SURGERY_LEAN"
_PROGRAMS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30),
}


def prepare_command_line(arguments: list[str]) -> None:
    """Choose JAX, unless the user chose, where this process is the console script."""
    if not arguments or Path(arguments[0]).stem != "backbone-surgery":
        if os.environ.get(_LEAN) == "1":
            os.environ.setdefault("KERAS_BACKEND", "jax")
            import_keras()
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends imports at once, and quietly
    os.environ.setdefault("KERAS_BACKEND", "jax")
    if arguments[1:2] == ["plan"]:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # compilers that are installed look for chips
    else:
        keep_programs()
    import_keras(() if _may_download(arguments) else ("kagglehub",))


def _may_download(arguments: list[str]) -> bool:
    """Tell whether a command names a model that is neither bundled nor a folder."""
    models = [after for before, after in pairwise(arguments) if before in ("--model", "-m")]
    joined = [x for x in arguments if x.startswith(("--model=", "-m")) and x != "-m"]
    if joined or arguments[1:2] == ["plan"]:  # which names its model without an option
        return True
    known = bundled_models()
    return not all(name in known or Path(name).is_dir() for name in models)


def import_keras(unused: Sequence[str] = ()) -> None:
    """Import KerasHub without the libraries that it loads for what no command uses.

    TensorFlow, which takes seconds and writes to the screen, is kept out for good, unless it is the
    backend. Others are only kept from Keras: what imports them later gets them.

    Args:
        unused: more libraries to keep from Keras.
    """
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        for name in ("tensorflow", "tensorflow_text"):
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    hidden = [name for name in (*_FOR_OTHERS, *unused) if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    import keras_hub  # noqa: F401

    for name in hidden:
        del sys.modules[name]


def keep_programs() -> None:
    """Have JAX keep what it compiles in the user's cache, so that the next run need not compile.

    JAX tells programs apart by code, versions and kind of machine. It runs what it finds there, so
    the folder is the user's alone. Does nothing where the user said where programs are kept.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = caches / "backbone-surgery" / "programs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # there is no home to write to: each run compiles
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    for name, value in _PROGRAMS.items():
        os.environ.setdefault(name, value)


prepare_command_line(sys.argv)
