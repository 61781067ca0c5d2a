"""What the server counts, in the form that Prometheus reads.

Each server has a registry of its own, so that several may live in one process. Labels come from
small fixed sets (routes, statuses, numbers of engines), never from what clients send.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from verl.workers.rollout.fleet import Fleet

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class ServerMetrics:
    """Counters that the parts of a server write to."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(FleetCollector(fleet))
        self.requests = self._counter("requests", "Answers, by route and status", "route", "status")
        self.seconds = self._histogram("request_seconds", "Time until an answer ended", "route")
        self.first_token_seconds = self._histogram(
            "first_token_seconds", "Time until the first token of a streamed prompt"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests begun")
        self.generated_tokens = self._counter("generated_tokens", "Tokens that engines generated")
        self.given_up = self._counter("given_up", "Requests whose client went away")
        self.running = self._gauge("running_requests", "Requests that engines work on")
        self.waiting = self._gauge("waiting_requests", "Requests that wait for their turn")

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"verl_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"verl_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"verl_{name}", text, labels, registry=self.registry, buckets=SECONDS)


class FleetCollector(Collector):
    """The fleet's own counts, read when somebody asks for them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        for family in self._fleet.families():
            name = family.name.removesuffix("_total")
            metric = Metric(name, family.meaning, family.kind)
            for suffix, labels, value in family.samples:
                metric.add_sample(family.name + suffix, dict(labels), value)
            yield metric
