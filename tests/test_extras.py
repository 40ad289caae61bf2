"""What needs a package that is missing, or cannot be loaded, says which, and what to do."""

import sys

import pytest

import backbone_surgery as bs
from backbone_surgery.extras import import_extra
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


LIBRARY = "libgobject-2.0.so.0: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("package", "source", "words"),
    [
        (
            "pygraphviz",
            f"raise ImportError({LIBRARY!r})",
            rf"{LIBRARY}\. Install that library; on Debian or Ubuntu run `apt-get install "
            r"libglib2\.0-0 libxext6 libxrender1`\. Or draw\.$",
        ),
        (
            "matplotlib",
            "import no_such_package",
            "No module named 'no_such_package'. Run `pip install --upgrade matplotlib`, and see ",
        ),
    ],
)
def test_a_package_that_cannot_be_loaded_says_why(monkeypatch, tmp_path, package, source, words):
    (tmp_path / f"{package}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package, raising=False)
    received = "Received one that is installed and cannot be loaded"
    words = f"^plot: expected the package {package}. {received}: {words}"
    with pytest.raises(bs.SurgeryError, match=words):
        import_extra("plot", package, "Or draw.")
