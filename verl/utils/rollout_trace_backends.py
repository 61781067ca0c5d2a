"""Where rollout traces go. A back-end turns trajectories and calls into its service's own spans."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from verl.utils.environment import mlflow_tracking_uri
from verl.utils.import_utils import require
from verl.utils.registry import Registry


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
