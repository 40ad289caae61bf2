"""Packages that some functions need and an installation may lack."""

import importlib
from typing import Any

from backbone_surgery.errors import SurgeryError

_PACKAGES = {"outlines_core": "outlines-core", "sklearn": "scikit-learn"}
"""Packages by the modules that they bring, where these have other names."""

_LIBRARIES = {"pygraphviz": "libglib2.0-0 libxext6 libxrender1"}
"""Debian's packages of the libraries that the wheels of a package leave to the system."""


def import_extra(operation: str, module: str, otherwise: str = "") -> Any:
    """Import a module of a package that may be missing.

    Args:
        operation: what needs it.
        module: its name.
        otherwise: a sentence that says what does without it.

    Raises:
        SurgeryError: it is missing, with how to get it; or it cannot be loaded, with why.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        package = _PACKAGES.get(name, name)
        missing = isinstance(error, ModuleNotFoundError) and error.name in (name, module)
        why = _not_there(package) if missing else _not_loaded(package, error)
        raise SurgeryError(
            f"{operation}: expected the package {package}. Received {why} {otherwise}".strip()
        ) from error


def _not_there(package: str) -> str:
    return f"a system without it. Run `pip install {package}`."


def _not_loaded(package: str, error: ImportError) -> str:
    """Say why a package that is installed cannot be loaded: often for want of a system library."""
    libraries = _LIBRARIES.get(package)
    if libraries is None:
        advice = f"Run `pip install --upgrade {package}`, and see that what it needs is installed."
    else:
        advice = f"Install that library; on Debian or Ubuntu run `apt-get install {libraries}`."
    return f"one that is installed and cannot be loaded: {error}. {advice}"
