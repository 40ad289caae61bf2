"""Metrics of a server, in the format of Prometheus."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from backbone_surgery.serving.engine import Engine

_NAME = "backbone_surgery"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """What a server counts, besides what its engine does.

    Args:
        engine: whose stats are shown too.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.requests = Counter(
            f"{_NAME}_requests", "Requests by how they ended.", ["reason"], registry=self.registry
        )
        self.first_token = Histogram(
            f"{_NAME}_time_to_first_token_seconds",
            "From a request to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def collect(self) -> Iterator[Any]:
        """Yield what the engine does, and has done."""
        stats = self.engine.stats
        gauges = {
            "waiting_requests": ("Requests that wait for a row.", stats.waiting),
            "running_requests": ("Requests that have a row.", stats.running),
            "prefix_cache_bytes": ("Bytes of prefilled chunks.", stats.prefix_cache_bytes),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"{_NAME}_{name}", text, value)
        counters = {
            "prompt_tokens": ("Tokens of prompts, run or reused.", stats.prompt_tokens),
            "reused_tokens": ("Tokens of prompts out of the prefix cache.", stats.reused_tokens),
            "new_tokens": ("Tokens that were generated.", stats.new_tokens),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"{_NAME}_{name}", text, value)
        compiled = CounterMetricFamily(
            f"{_NAME}_compilations", "Programs that were compiled.", labels=["kind"]
        )
        for kind, count in stats.compilations.items():
            compiled.add_metric([kind], count)
        yield compiled

    def ended(self, request: Any) -> None:
        """Count a request that has ended."""
        self.requests.labels(request.finish_reason or "cancelled").inc()
        if request.seconds_to_first_token is not None:
            self.first_token.observe(request.seconds_to_first_token)

    def text(self) -> bytes:
        """Return all of it, as Prometheus reads it."""
        return generate_latest(self.registry)
