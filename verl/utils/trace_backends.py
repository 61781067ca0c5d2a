"""Where the spans of `verl.utils.rollout_trace` go: a file, or a service whose package is imported
when it is chosen.

`file` writes what Perfetto (ui.perfetto.dev) and chrome://tracing open, without any service: a line
per span, so a run that is killed leaves all that had ended (both open a list without an end). A
trajectory has a lane of its own while it lasts; what belongs to none (grades, weight updates) has
the lane of its thread.
"""

import heapq
import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from verl.utils.environment import mlflow_tracking_uri
from verl.utils.import_utils import require
from verl.utils.rollout_trace import RolloutTraceConfig, TraceBackend
from verl.utils.tracking_backends import end_trackio_run, trackio_run

MAX_CHARACTERS = 2000
THREAD_LANES = 1_000_000
"""Lanes from here on are of threads, those below of trajectories."""

_lane: ContextVar[int] = ContextVar("trace_lane")
_spans: ContextVar[list[dict[str, Any]]] = ContextVar("trace_spans")


class FileBackend(TraceBackend):
    """`trace.json` in the folder that `RolloutTraceConfig.init` was given."""

    def __init__(self, project_name: str, experiment_name: str) -> None:
        super().__init__(project_name, experiment_name)
        folder = RolloutTraceConfig.get_instance().folder
        if folder is None:
            raise ValueError("rollout.trace.backend is 'file': init needs the folder of the run")
        folder.mkdir(parents=True, exist_ok=True)
        self.path = self.client = free_path(folder)
        self._lock = threading.Lock()
        self._file: TextIO = self.path.open("w", buffering=1)
        self._file.write("[")
        self._num_spans = 0
        self._free_lanes: list[int] = []
        self._num_lanes = 0
        self._thread_lanes: dict[int, int] = {}

    @contextmanager
    def trajectory(self, name: str, attributes: Mapping[str, Any]) -> Iterator[None]:
        with self._lock:
            if self._free_lanes:
                lane = heapq.heappop(self._free_lanes)
            else:
                self._num_lanes += 1
                lane = self._num_lanes
        token = _lane.set(lane)
        try:
            with self.span(name, attributes):
                yield
        finally:
            _lane.reset(token)
            with self._lock:
                heapq.heappush(self._free_lanes, lane)

    @contextmanager
    def span(self, name: str, inputs: Mapping[str, Any]) -> Iterator[Callable[[Any], None]]:
        outputs: list[Any] = []
        start = time.time_ns()
        error: str | None = None
        try:
            yield outputs.append
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            arguments = {key: brief(value) for key, value in inputs.items()}
            if outputs:
                arguments["output"] = brief(outputs[-1])
            if error is not None:
                arguments["error"] = brief(error)
            self._write(name, start, arguments)

    def _write(self, name: str, start: int, arguments: dict[str, Any]) -> None:
        lane = _lane.get(None)
        with self._lock:
            if lane is None:
                thread = threading.get_ident()
                lane = self._thread_lanes.setdefault(thread, THREAD_LANES + len(self._thread_lanes))
            event = {
                "name": name,
                "ph": "X",
                "pid": 1,
                "tid": lane,
                "ts": start / 1000,
                "dur": (time.time_ns() - start) / 1000,
                "args": arguments,
            }
            separator = "\n" if self._num_spans == 0 else ",\n"
            self._num_spans += 1
            self._file.write(f"{separator}{json.dumps(event)}")  # flushed, for it has a newline

    def close(self) -> None:
        self._file.write("\n]\n")
        self._file.close()


def free_path(folder: Path) -> Path:
    """`trace.json`, or with a number if an earlier attempt has that."""
    number, path = 0, folder / "trace.json"
    while path.exists():
        number += 1
        path = folder / f"trace-{number}.json"
    return path


@runtime_checkable
class _Sampled(Protocol):
    token_ids: Any
    stop_reason: Any


def brief(value: Any) -> Any:
    """Plain JSON of bounded size: long texts are cut, token ids become their number."""
    if isinstance(value, _Sampled):
        return {"num_tokens": len(value.token_ids), "stop_reason": str(value.stop_reason)}
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): brief(entry) for key, entry in list(value.items())[:50]}
    if isinstance(value, list | tuple) and len(value) <= 8:
        return [brief(entry) for entry in value]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{len(value)} entries"
    return str(value)[:MAX_CHARACTERS]


class OpenTelemetryBackend(TraceBackend):
    """Spans of the provider that your program has set; else exported over OTLP to where the
    variables of OpenTelemetry say (`OTEL_EXPORTER_OTLP_ENDPOINT`)."""

    def __init__(self, project_name: str, experiment_name: str, provider: Any = None) -> None:
        super().__init__(project_name, experiment_name)
        self._trace = _package("opentelemetry.trace", "trace")
        self._provider = provider or self._own_provider()
        self.client = self._provider.get_tracer("verl")

    def _own_provider(self) -> Any:
        current = self._trace.get_tracer_provider()
        if not isinstance(current, self._trace.ProxyTracerProvider):
            return current
        sdk = _package("opentelemetry.sdk.trace", "trace")
        export = _package("opentelemetry.sdk.trace.export", "trace")
        otlp = _package("opentelemetry.exporter.otlp.proto.http.trace_exporter", "trace")
        resources = _package("opentelemetry.sdk.resources", "trace")
        names = {"service.name": self.project_name, "service.instance.id": self.experiment_name}
        provider = sdk.TracerProvider(resource=resources.Resource.create(names))
        provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
        return provider

    @contextmanager
    def trajectory(self, name: str, attributes: Mapping[str, Any]) -> Iterator[None]:
        with self.client.start_as_current_span(name, attributes=plain(attributes)):
            yield

    @contextmanager
    def span(self, name: str, inputs: Mapping[str, Any]) -> Iterator[Callable[[Any], None]]:
        with self.client.start_as_current_span(name, attributes=plain(inputs)) as span:
            yield lambda output: span.set_attribute("output", json.dumps(brief(output)))

    def close(self) -> None:
        if "force_flush" in dir(self._provider):
            self._provider.force_flush()


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as OpenTelemetry takes them: numbers, texts; everything else as JSON."""
    shown = {key: brief(value) for key, value in values.items() if value is not None}
    return {
        key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
        for key, value in shown.items()
    }


class TrackioBackend(TraceBackend):
    """A `trackio.Trace` per trajectory, logged when it ends; in the run of the metrics, if these go
    to Trackio, too."""

    def __init__(self, project_name: str, experiment_name: str) -> None:
        super().__init__(project_name, experiment_name)
        self._trackio = self.client = _package("trackio", "track")
        self._lock = threading.Lock()
        self._run: Any = None  # opened with the first trace: the metrics know the configuration

    @contextmanager
    def trajectory(self, name: str, attributes: Mapping[str, Any]) -> Iterator[None]:
        spans: list[dict[str, Any]] = []
        token = _spans.set(spans)
        try:
            with self.span(name, attributes):
                yield
        finally:
            _spans.reset(token)
            self._log(spans, attributes)

    @contextmanager
    def span(self, name: str, inputs: Mapping[str, Any]) -> Iterator[Callable[[Any], None]]:
        start, outputs, status = utc_now(), [], "error"
        try:
            yield outputs.append
            status = "success"
        finally:
            entry = {
                "id": uuid.uuid4().hex,
                "name": name,
                "kind": "span",
                "start_time": start,
                "end_time": utc_now(),
                "status": status,
                "input": brief(inputs),
                "output": brief(outputs[-1]) if outputs else None,
            }
            spans = _spans.get(None)
            if spans is None:
                self._log([entry], inputs)
            else:
                spans.append(entry)

    def _log(self, spans: list[dict[str, Any]], metadata: Mapping[str, Any]) -> None:
        trace = self._trackio.Trace(messages=[], spans=spans, metadata=brief(metadata))
        with self._lock:  # samples end on several threads
            if self._run is None:
                self._run = trackio_run(self._trackio, self.project_name, self.experiment_name)
            self._run.log({"trace": trace}, step=metadata.get("step"))

    def close(self) -> None:
        if self._run is not None:
            end_trackio_run(self.project_name, self.experiment_name)


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat()


class WeaveBackend(TraceBackend):
    def __init__(self, project_name: str, experiment_name: str) -> None:
        super().__init__(project_name, experiment_name)
        self._weave = _package("weave")
        self.client = self._weave.init(project_name)

    @contextmanager
    def trajectory(self, name: str, attributes: Mapping[str, Any]) -> Iterator[None]:
        with self._weave.attributes(dict(attributes)):
            yield

    @contextmanager
    def span(self, name: str, inputs: Mapping[str, Any]) -> Iterator[Callable[[Any], None]]:
        call = self.client.create_call(op=name, inputs=dict(inputs))
        outputs: list[Any] = []
        try:
            yield outputs.append
        except BaseException as error:
            self.client.finish_call(call, exception=error)
            raise
        self.client.finish_call(call, output=outputs[-1] if outputs else None)


class MlflowBackend(TraceBackend):
    def __init__(self, project_name: str, experiment_name: str) -> None:
        super().__init__(project_name, experiment_name)
        self._mlflow = self.client = _package("mlflow", extra="track")
        self._mlflow.set_tracking_uri(mlflow_tracking_uri())
        self._mlflow.set_experiment(project_name)

    @contextmanager
    def trajectory(self, name: str, attributes: Mapping[str, Any]) -> Iterator[None]:
        with self._mlflow.start_span(name=name) as span:
            tags = {key: str(value) for key, value in attributes.items()}
            self._mlflow.update_current_trace(tags=tags)
            span.set_attributes(dict(attributes))
            yield

    @contextmanager
    def span(self, name: str, inputs: Mapping[str, Any]) -> Iterator[Callable[[Any], None]]:
        with self._mlflow.start_span(name=name) as span:  # records and raises an error by itself
            span.set_inputs(dict(inputs))
            yield span.set_outputs


def _package(name: str, extra: str | None = None) -> Any:
    try:
        return require(name, extra)
    except ImportError as error:
        raise ImportError(f"rollout.trace.backend is {name!r}: {error}") from error
