"""What JAX compiles meanwhile."""

import contextlib

import jax


@contextlib.contextmanager
def counted():
    """Yield a list that grows by one entry with each program that is compiled."""
    seconds = []

    def count(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
