"""The families that come with the package: a module here with a `FAMILY` is an architecture.

The module `unsupported` says why some others are not opened.
"""

import importlib
import pkgutil

from backbone_surgery.opening.family import register_family

for module in pkgutil.iter_modules(__path__, f"{__name__}."):
    family = getattr(importlib.import_module(module.name), "FAMILY", None)
    if family is not None:
        register_family(family)
