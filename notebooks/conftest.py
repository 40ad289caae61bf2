"""Notebooks run as their readers run them: compiled with optimisation, unlike the tests."""

import os


def pytest_runtest_setup():
    """Let the kernel start without the flags that the tests set."""
    os.environ.pop("XLA_FLAGS", None)
