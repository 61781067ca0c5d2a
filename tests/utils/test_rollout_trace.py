import asyncio
import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from verl.agent_loop.journal import journalled
from verl.utils.rollout_trace import (
    RolloutTraceConfig,
    TraceBackend,
    rollout_trace_attr,
    rollout_trace_op,
    trace_backends,
)
from verl.utils.trace_backends import OpenTelemetryBackend


class MemoryBackend(TraceBackend):
    """Keeps every span as [name, inputs, output]."""

    def __init__(self, project_name, experiment_name):
        super().__init__(project_name, experiment_name)
        self.spans, self.trajectories = [], []
        self.client = self

    @contextmanager
    def trajectory(self, name, attributes):
        self.trajectories.append((name, dict(attributes)))
        yield

    @contextmanager
    def span(self, name, inputs):
        entry = [name, inputs, None]
        self.spans.append(entry)
        try:
            yield lambda output: entry.__setitem__(2, output)
        except ValueError as error:
            entry[2] = error
            raise


trace_backends.register("memory")(MemoryBackend)


@pytest.fixture(autouse=True)
def _fresh():
    RolloutTraceConfig.reset()
    yield
    RolloutTraceConfig.reset()


class Agent:
    def __init__(self):
        self.tokenizer = SimpleNamespace(decode=lambda ids: " ".join(f"t{i}" for i in ids))

    @rollout_trace_op
    async def generate(self, prompt, *, temperature=1.0):
        await asyncio.sleep(0)
        return prompt.upper()

    @rollout_trace_op
    def score(self, text):
        if not text:
            raise ValueError("nothing to score")
        return len(text)

    @rollout_trace_op
    def respond(self):
        return SimpleNamespace(prompt_ids=[1, 2], response_ids=[3])


def client(**options):
    RolloutTraceConfig.init("project", "run", "memory", **options)
    return RolloutTraceConfig.get_client()


def test_without_a_backend_methods_just_run():
    RolloutTraceConfig.init("project", "run", None)
    with rollout_trace_attr(sample_index=0):
        assert asyncio.run(Agent().generate("hi")) == "HI"
        assert Agent().score("abc") == 3
    assert RolloutTraceConfig.get_backend() is None
    assert RolloutTraceConfig.get_client() is None


def test_plain_and_async_methods_become_spans_with_inputs_and_outputs():
    memory = client()
    agent = Agent()
    with rollout_trace_attr(sample_index=3, step=7, rollout_n=1, validate=True):
        assert asyncio.run(agent.generate("hi")) == "HI"
        assert agent.score("abc") == 3
    assert memory.spans == [
        ["Agent.generate", {"prompt": "hi", "temperature": 1.0}, "HI"],
        ["Agent.score", {"text": "abc"}, 3],
    ]
    assert memory.trajectories == [
        (
            "rollout_trace",
            {
                "sample_index": 3,
                "step": 7,
                "rollout_n": 1,
                "validate": True,
                "experiment_name": "run",
            },
        )
    ]


def test_a_sample_that_is_not_traced_leaves_no_span_and_the_next_one_does():
    memory = client(max_samples_per_step_per_worker=1)
    for sample in range(2):
        with rollout_trace_attr(sample_index=sample, trace=sample < 1):
            Agent().score("abc")
    assert len(memory.spans) == 1
    assert RolloutTraceConfig.get_instance().max_samples_per_step_per_worker == 1


def test_concurrent_samples_do_not_switch_each_other_off():
    memory = client()

    async def sample(index):
        with rollout_trace_attr(sample_index=index, trace=index % 2 == 0):
            await Agent().generate(str(index))

    async def step():
        await asyncio.gather(*map(sample, range(6)))

    asyncio.run(step())
    assert sorted(span[2] for span in memory.spans) == ["0", "2", "4"]


def test_an_error_is_recorded_and_raised():
    memory = client()
    with pytest.raises(ValueError, match="nothing to score"):
        Agent().score("")
    assert isinstance(memory.spans[0][2], ValueError)


def test_token2text_shows_the_text_in_the_trace_and_returns_the_result_unchanged():
    memory = client(token2text=True)
    result = Agent().respond()
    assert vars(result) == {"prompt_ids": [1, 2], "response_ids": [3]}
    assert memory.spans[0][2] == {
        "prompt_ids": [1, 2],
        "response_ids": [3],
        "prompt_text": "t1 t2",
        "response_text": "t3",
    }


def test_the_first_init_counts_until_reset():
    memory = client()
    RolloutTraceConfig.init("other", "other", "memory", token2text=True)
    assert RolloutTraceConfig.get_client() is memory
    assert not RolloutTraceConfig.enable_token2text()
    RolloutTraceConfig.reset()
    assert RolloutTraceConfig.get_client() is None


@pytest.mark.parametrize("backend", ["weave", "mlflow"])
def test_a_missing_package_is_named_with_the_way_out(backend):
    with pytest.raises(ImportError, match=f"rollout.trace.backend is '{backend}'.*pip install"):
        RolloutTraceConfig.init("project", "run", backend)


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown trace backend 'wave'\. Did you mean 'weave'"):
        RolloutTraceConfig.init("project", "run", "wave")


STAND_IN = """
from contextlib import contextmanager
calls = []
class Span:
    def set_inputs(self, inputs): calls.append(("inputs", inputs))
    def set_outputs(self, outputs): calls.append(("outputs", outputs))
    def set_attributes(self, attributes): calls.append(("attributes", attributes))
@contextmanager
def start_span(name):
    calls.append(("start", name))
    yield Span()
    calls.append(("end", name))
def set_tracking_uri(uri): pass
def set_experiment(name): calls.append(("experiment", name))
def update_current_trace(tags): calls.append(("tags", tags))

def init(project): return Client()
@contextmanager
def attributes(values):
    calls.append(("attributes", values))
    yield
class Client:
    def create_call(self, op, inputs): calls.append(("create", op, inputs)); return "call"
    def finish_call(self, call, output=None, exception=None):
        calls.append(("finish", call, output, exception))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    import importlib
    import sys

    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(name):
        (tmp_path / f"{name}.py").write_text(STAND_IN)
        made.append(name)
        return importlib.import_module(name).calls

    yield make
    for name in made:
        del sys.modules[name]


def test_mlflow_gets_nested_spans_and_string_tags(stand_in):
    calls = stand_in("mlflow")
    RolloutTraceConfig.init("project", "run", "mlflow")
    with rollout_trace_attr(step=2):
        Agent().score("abc")
    assert calls == [
        ("experiment", "project"),
        ("start", "rollout_trace"),
        ("tags", {"step": "2", "validate": "False", "experiment_name": "run"}),
        ("attributes", {"step": 2, "validate": False, "experiment_name": "run"}),
        ("start", "Agent.score"),
        ("inputs", {"text": "abc"}),
        ("outputs", 3),
        ("end", "Agent.score"),
        ("end", "rollout_trace"),
    ]


def test_weave_calls_are_finished_with_the_output_or_the_error(stand_in):
    calls = stand_in("weave")
    RolloutTraceConfig.init("project", "run", "weave")
    with rollout_trace_attr(step=2):
        Agent().score("abc")
        with pytest.raises(ValueError, match="nothing") as raised:
            Agent().score("")
    assert calls[1:] == [
        ("create", "Agent.score", {"text": "abc"}),
        ("finish", "call", 3, None),
        ("create", "Agent.score", {"text": ""}),
        ("finish", "call", None, raised.value),
    ]


def test_a_file_opens_in_perfetto_and_nests_spans_in_the_lane_of_their_trajectory(tmp_path):
    RolloutTraceConfig.init("project", "run", "file", folder=tmp_path)

    async def sample(number):
        with rollout_trace_attr(sample_index=number, step=7):
            await Agent().generate("hi")
            await journalled("tool", {"name": "search", "limit": float("inf")}, reply)

    async def reply():
        return {"text": "found"}

    async def both():
        await asyncio.gather(sample(0), sample(1))

    asyncio.run(both())
    with pytest.raises(ValueError, match="nothing"):
        Agent().score("")
    path = tmp_path / "trace.json"
    events = json.loads(path.read_text() + "]")  # as viewers read the file of a killed run
    RolloutTraceConfig.reset()
    assert json.loads(path.read_text()) == events
    lanes = {}
    for event in events:
        lanes.setdefault(event["tid"], []).append(event)
    of_trajectories = [lane for tid, lane in lanes.items() if tid < 1_000_000]
    assert len(of_trajectories) == 2
    for generate, tool, whole in of_trajectories:
        names = [generate["name"], tool["name"], whole["name"]]
        assert names == ["Agent.generate", "tool", "rollout_trace"]
        assert tool["args"] == {"name": "search", "limit": "inf", "output": {"text": "found"}}
        assert whole["ts"] <= generate["ts"] <= tool["ts"]
        assert tool["ts"] + tool["dur"] <= whole["ts"] + whole["dur"] + 1
    (failed,) = [event for event in events if event["name"] == "Agent.score"]
    assert failed["args"]["error"] == "ValueError: nothing to score"


def test_opentelemetry_gets_nested_spans():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    RolloutTraceConfig.get_instance().tracer = OpenTelemetryBackend("p", "run", provider)
    with rollout_trace_attr(step=2):
        Agent().score("abc")
        with pytest.raises(ValueError, match="nothing"):
            Agent().score("")
    good, bad, whole = exporter.get_finished_spans()
    assert dict(good.attributes) == {"text": "abc", "output": "3"}
    assert not bad.status.is_ok
    assert good.parent.span_id == bad.parent.span_id == whole.context.span_id
    assert whole.attributes["step"] == 2
