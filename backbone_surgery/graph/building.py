"""Building: one thread at a time adds nodes to the layers that graphs share.

Keras finds the node of a tensor by its number among the nodes of its layer, and takes that number
from the length of a list. Two threads that call one layer at the same time give a tensor the node
of the other. So whatever builds a graph does it inside `building`. Finished models run without it.
"""

import contextlib
import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

_LOCK = threading.RLock()
_made: contextvars.ContextVar[dict[Any, Any] | None] = contextvars.ContextVar("made", default=None)


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Keep other threads from building graphs, until exit. Also used as a decorator.

    May be entered again by the thread that is inside. No garbage is collected meanwhile: a graph is
    many small objects, and Python would look at all of them again and again.
    """
    with _LOCK:
        token = _made.set(_made.get() if is_building() else {})
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            _made.reset(token)
            if collects:
                gc.enable()


def is_building() -> bool:
    """Tell whether this thread is inside `building`."""
    return _made.get() is not None


def once(key: Any, make: Callable[[], Any]) -> Any:
    """Make something, or return what was made for this key while the same graph is being built."""
    made = _made.get()
    if made is None:
        return make()
    return made[key] if key in made else made.setdefault(key, make())
