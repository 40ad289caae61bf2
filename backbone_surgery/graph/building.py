"""Building: one thread at a time adds nodes to the layers that graphs share.

Keras finds the node of a tensor by its number among the nodes of its layer, and takes that number
from the length of a list. Two threads that call one layer at the same time give a tensor the node
of the other. So whatever builds a graph does it inside `building`. Finished models run without it.
"""

import contextlib
import contextvars
import gc
import threading
from collections.abc import Iterator

_LOCK = threading.RLock()
_inside = contextvars.ContextVar("inside", default=False)


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Keep other threads from building graphs, until exit. Also used as a decorator.

    May be entered again by the thread that is inside. No garbage is collected meanwhile: a graph is
    many small objects, and Python would look at all of them again and again.
    """
    with _LOCK:
        token = _inside.set(True)
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            _inside.reset(token)
            if collects:
                gc.enable()


def is_building() -> bool:
    """Tell whether this thread is inside `building`."""
    return _inside.get()
