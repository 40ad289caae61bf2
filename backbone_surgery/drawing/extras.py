"""The packages that only pictures need: the extra `plot` has them."""

import importlib
from typing import Any

from backbone_surgery.errors import SurgeryError


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
        package = module.partition(".")[0]
        raise SurgeryError(
            f"{operation}: expected the package {package}. Received a system without it. Run `pip "
            f"install {package}`. {otherwise}".strip()
        ) from error
