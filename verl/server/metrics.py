"""What the server counts, in the form that Prometheus reads.

Each server has a registry of its own, so that several may live in one process. Labels come from
small fixed sets (routes, statuses, numbers of engines), never from what clients send.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class ServerMetrics:
    """Counters that the parts of a server write to."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Answers, by route and status", "route", "status")
        self.seconds = self._histogram("request_seconds", "Time until an answer ended", "route")
        self.first_token_seconds = self._histogram(
            "first_token_seconds", "Time until an engine gave the first token of a prompt"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests begun")
        self.generated_tokens = self._counter("generated_tokens", "Tokens that engines generated")
        self.given_up = self._counter("given_up", "Requests whose client went away")
        self.running = self._gauge("running_requests", "Requests that engines work on")
        self.waiting = self._gauge("waiting_requests", "Requests that wait for their turn")
        self.engine_tokens = self._gauge(
            "engine_outstanding_tokens", "Tokens that an engine may still have to compute", "engine"
        )
        self.engine_requests = self._counter(
            "engine_requests", "Prompts given to an engine", "engine"
        )
        self.engine_alive = self._gauge("engine_alive", "1 if an engine answers", "engine")
        self.engine_lost = self._counter("engine_lost", "Times an engine was lost", "engine")
        self.redispatched = self._counter("redispatched", "Prompts given to a second engine")

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"verl_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"verl_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"verl_{name}", text, labels, registry=self.registry, buckets=SECONDS)
