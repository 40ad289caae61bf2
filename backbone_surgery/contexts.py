"""Context variables: set for what runs inside, in this thread, and given back after it."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any


@contextlib.contextmanager
def setting(values: dict[ContextVar[Any], Any]) -> Iterator[None]:
    """Set some context variables inside. Also used as a decorator."""
    tokens = [(variable, variable.set(value)) for variable, value in values.items()]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)
