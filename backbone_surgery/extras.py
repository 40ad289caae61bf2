"""Packages that some functions need and an installation may lack."""

import importlib
from typing import Any

from backbone_surgery.errors import SurgeryError

_PACKAGES = {"sklearn": "scikit-learn"}
"""Packages by the modules that they bring, where these have other names."""


def import_extra(operation: str, module: str, otherwise: str = "") -> Any:
    """Import a module of a package that may be missing.

    Args:
        operation: what needs it.
        module: its name.
        otherwise: a sentence that says what does without it.

    Raises:
        SurgeryError: it is missing, with how to get it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        package = _PACKAGES.get(name, name)
        raise SurgeryError(
            f"{operation}: expected the package {package}. Received a system without it. Run `pip "
            f"install {package}`. {otherwise}".strip()
        ) from error
