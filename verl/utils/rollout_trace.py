"""A trace of each trajectory: which methods ran for it, with what, and what they returned.

`RolloutTraceConfig.init(...)` turns tracing on for this process. Methods marked with
`@rollout_trace_op` then become spans, and the `with rollout_trace_attr(...)` around a trajectory
names the sample they belong to. Without a back-end a marked method is called directly: the cost is
one attribute read.

A `TraceBackend` turns trajectories and calls into the spans of a file or a service
(`verl.utils.trace_backends`).
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from verl.utils.registry import Registry

Function = TypeVar("Function", bound=Callable[..., Any])
_is_traced: ContextVar[bool] = ContextVar("rollout_is_traced")  # unset means yes


class RolloutTraceConfig:
    """What is traced in this process, and where it goes. There is one, made by `init`."""

    _instance: ClassVar["RolloutTraceConfig | None"] = None

    def __init__(self) -> None:
        self.project_name: str = ""
        self.experiment_name: str = ""
        self.backend: str | None = None
        self.tracer: TraceBackend | None = None
        self.token2text: bool = False
        self.max_samples_per_step_per_worker: int | None = None
        self.folder: Path | None = None

    @classmethod
    def get_instance(cls) -> "RolloutTraceConfig":
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    @classmethod
    def init(
        cls,
        project_name: str,
        experiment_name: str,
        backend: str | None,
        token2text: bool = False,
        max_samples_per_step_per_worker: int | None = None,
        folder: str | Path | None = None,
    ) -> None:
        """Begin to trace; the first call counts, later ones change nothing until `reset`.

        `token2text` adds the decoded text to results that hold token ids.
        `max_samples_per_step_per_worker` is how many samples of a step a worker traces; whoever
        runs the samples asks for it and passes `trace=False` for the others. `folder` is where the
        back-end `file` writes.
        """
        config = cls.get_instance()
        if config.tracer is not None:
            return
        config.project_name = project_name
        config.experiment_name = experiment_name
        config.token2text = token2text
        config.max_samples_per_step_per_worker = max_samples_per_step_per_worker
        config.folder = None if folder is None else Path(folder)
        if backend is not None:
            config.tracer = trace_backends[backend](project_name, experiment_name)
            config.backend = backend

    @classmethod
    def get_backend(cls) -> str | None:
        return cls.get_instance().backend

    @classmethod
    def get_client(cls) -> Any:
        """The service's own object: weave's client, the mlflow module; None without a back-end."""
        tracer = cls.get_instance().tracer
        return None if tracer is None else tracer.client

    @classmethod
    def enable_token2text(cls) -> bool:
        return cls.get_instance().token2text

    @classmethod
    def reset(cls) -> None:
        """Forget everything; the next `init` starts anew."""
        if cls._instance is not None and cls._instance.tracer is not None:
            cls._instance.tracer.close()
        cls._instance = None


@contextmanager
def rollout_trace_attr(
    sample_index: int | None = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "rollout_trace",
    validate: bool = False,
    trace: bool = True,
) -> Iterator[None]:
    """Say which sample the spans inside belong to. With `trace=False` there are none inside."""
    config = RolloutTraceConfig.get_instance()
    if config.tracer is None:
        yield
        return
    token = _is_traced.set(trace)
    try:
        if not trace:
            yield
            return
        attributes = {
            "sample_index": sample_index,
            "step": step,
            "rollout_n": rollout_n,
            "validate": validate,
            "experiment_name": config.experiment_name,
        }
        known = {key: value for key, value in attributes.items() if value is not None}
        with config.tracer.trajectory(name, known):
            yield
    finally:
        _is_traced.reset(token)


@contextmanager
def rollout_trace_span(
    name: str, inputs: Mapping[str, Any]
) -> Iterator[Callable[[Any], None] | None]:
    """A block as a span; what it yields records the output. None while nothing is traced."""
    tracer = RolloutTraceConfig.get_instance().tracer
    if tracer is None or not _is_traced.get(True):
        yield None
        return
    span: AbstractContextManager[Callable[[Any], None]] = tracer.span(name, inputs)
    with span as record:
        yield record


def rollout_trace_op(function: Function) -> Function:
    """Decorator: each call of this method, plain or async, is a span with its qualified name."""

    @wraps(function)
    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = RolloutTraceConfig.get_instance().tracer
        if tracer is None or not _is_traced.get(True):
            return function(self, *args, **kwargs)
        with _span(tracer, function, self, args, kwargs) as finish:
            return finish(function(self, *args, **kwargs))

    @wraps(function)
    async def traced_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = RolloutTraceConfig.get_instance().tracer
        if tracer is None or not _is_traced.get(True):
            return await function(self, *args, **kwargs)
        with _span(tracer, function, self, args, kwargs) as finish:
            return finish(await function(self, *args, **kwargs))

    is_async = inspect.iscoroutinefunction(function)
    return traced_async if is_async else traced  # pyright: ignore[reportReturnType]


class TraceBackend(ABC):
    """A connection to one service. Both contexts may be entered by many asyncio tasks at once."""

    def __init__(self, project_name: str, experiment_name: str) -> None:
        self.project_name = project_name
        self.experiment_name = experiment_name
        self.client: Any = None  # the service's own object, for users' code

    @abstractmethod
    def trajectory(self, name: str, attributes: Mapping[str, Any]) -> AbstractContextManager[None]:
        """What every span inside belongs to."""

    @abstractmethod
    def span(
        self, name: str, inputs: Mapping[str, Any]
    ) -> AbstractContextManager[Callable[[Any], None]]:
        """One call. Yields a function that records its output; an error is recorded and raised."""

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Write what waits; nothing is traced afterwards."""


@contextmanager
def _span(
    tracer: TraceBackend,
    function: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Iterator[Callable[[Any], Any]]:
    """Open the span of one call; the function it yields records the result and passes it on."""
    bound = inspect.signature(function).bind(instance, *args, **kwargs)
    bound.apply_defaults()
    inputs = dict(list(bound.arguments.items())[1:])  # all but self
    span: AbstractContextManager[Callable[[Any], None]] = tracer.span(function.__qualname__, inputs)
    with span as record:

        def finish(output: Any) -> Any:
            record(_with_text(instance, output))
            return output

        yield finish


@runtime_checkable
class _HasTokens(Protocol):
    prompt_ids: Any
    response_ids: Any


@runtime_checkable
class _HasTokenizer(Protocol):
    tokenizer: Any


def _with_text(instance: Any, output: Any) -> Any:
    """What the span shows: the result and, with `token2text`, the text its token ids stand for."""
    if not RolloutTraceConfig.enable_token2text():
        return output
    if not isinstance(output, _HasTokens) or not isinstance(instance, _HasTokenizer):
        return output
    decode = instance.tokenizer.decode
    return {
        **vars(output),
        "prompt_text": decode(output.prompt_ids),
        "response_text": decode(output.response_ids),
    }


trace_backends = Registry[Callable[[str, str], TraceBackend]](
    "trace backend",
    file="verl.utils.trace_backends:FileBackend",
    opentelemetry="verl.utils.trace_backends:OpenTelemetryBackend",
    mlflow="verl.utils.trace_backends:MlflowBackend",
    weave="verl.utils.trace_backends:WeaveBackend",
    trackio="verl.utils.trace_backends:TrackioBackend",
)
