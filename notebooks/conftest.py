"""Notebooks run as their readers run them: compiled with optimisation, unlike the tests."""

import os

import pytest

FIRST = "01_rewire_and_generate.ipynb"
"""It runs by default, the others with the slow tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark all notebooks but the first as slow."""
    for item in items:
        if item.path.suffix == ".ipynb" and item.path.name != FIRST:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup():
    """Let the kernel start without the flags that the tests set."""
    os.environ.pop("XLA_FLAGS", None)
