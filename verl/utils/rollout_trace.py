"""A trace of each trajectory: which methods ran for it, with what, and what they returned.

`RolloutTraceConfig.init(...)` turns tracing on for this process. Methods marked with
`@rollout_trace_op` then become spans, and the `with rollout_trace_attr(...)` around a trajectory
names the sample they belong to. Without a back-end a marked method is called directly: the cost is
one attribute read.

A `TraceBackend` turns trajectories and calls into the spans of one service; `weave` and `mlflow`
are built in and imported on first use.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from verl.utils.environment import mlflow_tracking_uri
from verl.utils.import_utils import require
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
    ) -> None:
        """Begin to trace; the first call counts, later ones change nothing until `reset`.

        `token2text` adds the decoded text to results that hold token ids.
        `max_samples_per_step_per_worker` is how many samples of a step a worker traces; whoever
        runs the samples asks for it and passes `trace=False` for the others.
        """
        config = cls.get_instance()
        if config.tracer is not None:
            return
        config.project_name = project_name
        config.experiment_name = experiment_name
        config.token2text = token2text
        config.max_samples_per_step_per_worker = max_samples_per_step_per_worker
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


trace_backends = Registry[Callable[[str, str], TraceBackend]](
    "trace backend", weave=WeaveBackend, mlflow=MlflowBackend
)


def _package(name: str, extra: str | None = None) -> Any:
    try:
        return require(name, extra)
    except ImportError as error:
        raise ImportError(f"rollout.trace.backend is {name!r}: {error}") from error
