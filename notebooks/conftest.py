"""Notebooks run as their readers run them: compiled with optimisation, unlike the tests."""

import os

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark notebooks as slow."""
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup():
    """Let the kernel start without the flags that the tests set."""
    os.environ.pop("XLA_FLAGS", None)
