"""Digest: one line that tells whether two models hold the same weights, bit for bit."""

import hashlib
from collections.abc import Mapping
from typing import Any

from backbone_surgery.weights.arrays import Array, as_bytes
from backbone_surgery.weights.paths import variable_paths
from backbone_surgery.weights.tree import of_variable


def weights_digest(model: Any) -> str:
    """Return a digest of the paths, shapes, dtypes and bits of a model's weights.

    Args:
        model: whatever `weight_tree` takes.

    Returns:
        `"sha256:"` and 64 hexadecimal digits.
    """
    return digest({path: of_variable(v) for path, v in variable_paths(model).items()})


def digest(arrays: Mapping[str, Array]) -> str:
    """Return the digest of arrays by path, reading one at a time."""
    total = hashlib.sha256()
    for path, array in sorted(arrays.items()):
        total.update(f"{path} {array}\n".encode())
        total.update(as_bytes(array.read()))
    return f"sha256:{total.hexdigest()}"
