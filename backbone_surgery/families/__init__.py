"""The families: one file for each architecture that can be opened.

Every module of this package that defines a `FAMILY` is found by itself, so supporting another
architecture is adding one file.
"""

import importlib
import pkgutil

from backbone_surgery.families.family import Family

_modules = [
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
]
FAMILIES: tuple[Family, ...] = tuple(m.FAMILY for m in _modules if hasattr(m, "FAMILY"))
