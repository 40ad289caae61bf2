"""The compile cache: compiled programs kept on disk, for the next process."""

import os
from pathlib import Path

import jax
import keras
from jax.experimental.compilation_cache import compilation_cache

from backbone_surgery.errors import SurgeryError


def compile_cache(folder: str | os.PathLike[str]) -> None:
    """Keep every program that JAX compiles from now on in a folder, and take it from there.

    A process that runs a model of the same graph, shapes and sampler on the same kind of machine
    then compiles nothing. Weights and prompts are no part of a program. JAX runs what it finds in
    the folder: use one that nobody else can write to.

    Args:
        folder: made if it is not there.

    Raises:
        SurgeryError: the folder cannot be written to, or the backend is not JAX.

    Example:
        Call it before the first text is generated::

            bs.compile_cache("~/.cache/backbone_surgery")
    """
    if keras.config.backend() != "jax":
        raise SurgeryError(
            "compile_cache: expected the JAX backend of Keras. Received "
            f"'{keras.config.backend()}'. Set KERAS_BACKEND=jax."
        )
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise SurgeryError(
            f"compile_cache at '{folder}': expected a folder that can be written to. Received a "
            "path that cannot be one. Choose another."
        )
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX looks at these settings once, when it first compiles
