"""What needs a package that is missing says which, and how to get it."""

import sys

import pytest

import backbone_surgery as bs
from backbone_surgery.generation.sweep import Sweep, SweepRow
from backbone_surgery.vectors.directions import check_method

SWEEP = Sweep("mood", (1.0,), (SweepRow("x", 1.0, "y", {"words": 2.0}),), ("words",))


def logistic():
    check_method("logistic")


@pytest.mark.parametrize(
    ("module", "package", "call", "operation"),
    [
        ("matplotlib.pyplot", "matplotlib", SWEEP.plot, "plot of a sweep"),
        ("sklearn.linear_model", "scikit-learn", logistic, "train at method='logistic'"),
    ],
)
def test_a_missing_package_says_how_to_get_it(monkeypatch, module, package, call, operation):
    monkeypatch.setitem(sys.modules, module, None)
    words = f"{operation}: expected the package {package}.*Run `pip install {package}`"
    with pytest.raises(bs.SurgeryError, match=words):
        call()
