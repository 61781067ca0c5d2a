"""The published schema is kept: what it allows is served, what it forbids is refused."""

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from schemathesis import engine as schema_tester

from tests.server.clients import call
from tests.server.conftest import OPTIONS
from tests.server.engines import MODEL, TOKEN, ScriptedRollout, byte_tokenizer, saying
from verl.server import RunningServer, serve

TEXT = 'héllo 😀 <tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def talking() -> Iterator[RunningServer]:
    engine = ScriptedRollout(saying(TEXT), per_delta=1000)
    # Whatever the schema allows must fit into the model.
    options = dataclasses.replace(OPTIONS, max_model_len=1 << 16)
    with serve([engine], byte_tokenizer(), options) as server:
        yield server
        end = time.monotonic() + 60  # the last answers may still be on their way out
        while server.service.admission.num_running and time.monotonic() < end:
            time.sleep(0.05)
        assert not engine.running
        assert server.service.admission.num_running == 0


def faults_and_cases(
    server: RunningServer, max_examples: int, *, with_boundary_cases: bool = True
) -> tuple[list[str], int]:
    """What schemathesis finds with its boundary cases and so many random ones for each route."""
    settings = {
        "headers": {"Authorization": f"Bearer {TOKEN}"},
        "generation": {"max-examples": max_examples, "deterministic": True, "database": "none"},
        "phases": {
            "stateful": {"enabled": False},
            "coverage": {"enabled": with_boundary_cases},
        },
        "request-timeout": 20.0,
    }
    config = schemathesis.Config.from_dict(settings)
    address = f"{server.url}/openapi.json"
    schema = schemathesis.openapi.from_url(
        address, config=config, headers=settings["headers"], wait_for_schema=5
    )
    faults, num_cases = [], 0
    for event in schema_tester.from_schema(schema).execute():
        if isinstance(event, schema_tester.events.ScenarioFinished):
            num_cases += len(event.recorder.cases)
            for checks in event.recorder.checks.values():
                faults += [fault_text(check) for check in checks if check.failure_info]
        elif isinstance(
            event, schema_tester.events.NonFatalError | schema_tester.events.FatalError
        ):
            faults.append(str(event))
    return faults, num_cases


def fault_text(check: Any) -> str:
    found = check.failure_info
    return f"{check.name}: {found.failure.message}; {found.code_sample}"


def test_forty_requests_find_no_violation(talking):
    faults, num_cases = faults_and_cases(talking, max_examples=12, with_boundary_cases=False)
    assert not faults, "\n\n".join(faults)
    assert num_cases >= 30  # how many exactly depends on what hypothesis skips


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_few_hundred_requests_find_no_violation(talking):
    faults, num_cases = faults_and_cases(talking, max_examples=12)
    assert not faults, "\n\n".join(faults)
    assert num_cases > 400


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_requests_find_no_violation(talking):
    """Those at the boundaries are among the few hundred. SCHEMA_REQUESTS=20000 takes long."""
    num_requests = int(os.environ.get("SCHEMA_REQUESTS", "2000"))
    faults, num_cases = faults_and_cases(
        talking, max_examples=round(0.55 * num_requests), with_boundary_cases=False
    )
    assert not faults, "\n\n".join(faults[:20])
    assert num_cases >= num_requests


def test_the_schema_says_what_this_server_takes(talking):
    schema = json.loads(call(talking, "/openapi.json")[2])
    fields = schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["model"]["enum"] == [MODEL]
    assert '"maximum": 260' in json.dumps(fields["prompt"])
    assert "image" not in json.dumps(schema["components"])
    assert schema["paths"]["/livez"]["get"]["security"] == []
    assert schema["paths"]["/v1/completions"]["post"]["security"] == [{"token": []}]
