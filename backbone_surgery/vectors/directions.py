"""Directions: from the activations of pairs to the one direction that tells their sides apart.

Everything is exact and in float64, so the same activations give the same direction, sign included.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, closest, shown
from backbone_surgery.extras import import_extra

Method = Callable[[np.ndarray, np.ndarray], np.ndarray]


def find_direction(method: str, positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Find a direction from the negative to the positive side.

    Args:
        method: `"pca_diff"`: first principal component of positive - negative, after centring, of
            unit norm (repeng's default); `"pca_center"`: the same of all activations, each less
            the midpoint of its pair, which equals the uncentred component of the differences
            (steering-vectors' PCA), up to sign; `"mean_diff"`: mean of positive - negative, not
            normalised (steering-vectors' default); `"logistic"`: normal of the separating plane
            through the origin of midpoint-centred activations, by scikit-learn's logistic
            regression with its standard penalty, of unit norm.
        positive: float32[pairs, hidden_dim].
        negative: float32[pairs, hidden_dim].

    Returns:
        float32[hidden_dim].

    Raises:
        SurgeryError: an unknown method, or activations that define no direction.
    """
    check_method(method)
    direction = METHODS[method](positive.astype(np.float64), negative.astype(np.float64))
    return direction.astype(np.float32)


def check_method(method: str) -> None:
    """Raise unless there is a method of this name and what it needs is installed."""
    if not isinstance(method, str) or method not in METHODS:
        raise SurgeryError(
            f"train at method={shown(method)}: expected the name of a method. "
            f"{closest(method if isinstance(method, str) else '', METHODS)} Choose one of these."
        )
    if method == "logistic":
        _linear_models()


def _pca_diff(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    differences = positive - negative
    centred = differences - differences.mean(axis=0)
    return _oriented(_first_component(centred), differences)


def _pca_center(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    differences = positive - negative
    return _oriented(_first_component(np.concatenate([differences, -differences]) / 2), differences)


def _mean_diff(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    mean = (positive - negative).mean(axis=0)
    _unit(mean)  # refuses zeros
    return mean


def _logistic(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    halves = (positive - negative) / 2
    labels = np.repeat([1, 0], len(halves))
    regression = _linear_models().LogisticRegression(fit_intercept=False, max_iter=10_000, tol=1e-8)
    normal = regression.fit(np.concatenate([halves, -halves]), labels).coef_[0]
    return _unit(normal)


METHODS: dict[str, Method] = {
    "pca_diff": _pca_diff,
    "pca_center": _pca_center,
    "mean_diff": _mean_diff,
    "logistic": _logistic,
}


def _first_component(rows: np.ndarray) -> np.ndarray:
    """Return the unit vector along which rows, taken from the origin, spread most."""
    # Thin, so the work is that of the smaller side.
    _, sizes, components = np.linalg.svd(rows, full_matrices=False)
    if sizes[0] <= 1e-9 * max(1.0, np.abs(rows).max()) * np.sqrt(rows.size) or sizes[0] == 0:
        raise SurgeryError(
            f"train: expected differences between the sides that vary. Received {len(rows)} that "
            "are all the same, which leaves no principal component. Add pairs that differ from "
            "one another, or use method='mean_diff'."
        )
    return components[0]


def _oriented(direction: np.ndarray, differences: np.ndarray) -> np.ndarray:
    """Turn a direction so that more pairs have their positive side further along it."""
    projections = differences @ direction
    votes = np.sign(projections).sum()
    return -direction if (votes or projections.sum()) < 0 else direction


def _unit(vector: np.ndarray) -> np.ndarray:
    norm = np.linalg.norm(vector)
    if norm == 0:
        raise SurgeryError(
            "train: expected activations that differ between the sides. Received two sides that "
            "are the same at one of the blocks. Change the pairs, or `token`."
        )
    return vector / norm


def _linear_models() -> Any:
    return import_extra("train at method='logistic'", "sklearn.linear_model")
