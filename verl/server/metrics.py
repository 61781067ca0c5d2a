"""What the server counts, in the form that Prometheus reads.

Each server has a registry of its own, so that several may live in one process. Labels come from
small fixed sets (routes, statuses, numbers of engines), never from what clients send.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from verl.workers.rollout.fleet import Fleet

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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
        tokens = GaugeMetricFamily(
            "verl_engine_outstanding_tokens",
            "Tokens that an engine may still have to compute",
            labels=["engine"],
        )
        alive = GaugeMetricFamily(
            "verl_engine_alive", "1 if an engine is in service", labels=["engine"]
        )
        requests = CounterMetricFamily(
            "verl_engine_requests", "Prompts given to an engine", labels=["engine"]
        )
        lost = CounterMetricFamily(
            "verl_engine_lost", "Times an engine was lost", labels=["engine"]
        )
        for slot in self._fleet.slots:
            name = [str(slot.index)]
            tokens.add_metric(name, slot.outstanding)
            alive.add_metric(name, int(not slot.is_lost))
            requests.add_metric(name, slot.num_requests)
            lost.add_metric(name, slot.num_losses)
        yield from (tokens, alive, requests, lost)
        text = "Samples given to a second engine"
        yield CounterMetricFamily("verl_redispatched", text, self._fleet.num_redispatched)
