"""The code interpreter in the real sandbox, and through a Sandbox Fusion service."""

import json

import pytest

from tests.utils.reward_score.fusion_server import running_server
from verl.protocol.trajectory import InfraFault
from verl.tools.leases import ToolSet
from verl.tools.parsers import FunctionCall
from verl.tools.sandbox_fusion_tools import SandboxFusionTool


@pytest.fixture(params=["own sandbox", "Sandbox Fusion"])
def config(request):
    if request.param == "own sandbox":
        yield {"num_workers": 4}
        return
    with running_server() as server:
        yield {"num_workers": 4, "sandbox_fusion_url": server.address}


async def run(config, code, **parameters):
    tool = SandboxFusionTool(config)
    response, reward, metrics = await tool.execute("id", {"code": code, **parameters})
    assert reward == 0.0
    return response.text, metrics["status"]


@pytest.mark.parametrize(
    ("code", "told", "status"),
    [
        ("print(6 * 7)", "42", "finished"),
        ("```python\nprint('fenced')\n```", "fenced", "finished"),
        ("x = 1", "The program printed nothing.", "finished"),
        ("print('a')\n1 / 0", "ZeroDivisionError: division by zero", "failed"),
        ("print(", "SyntaxError", "failed"),
    ],
)
async def test_the_model_reads_what_its_program_printed(config, code, told, status):
    text, ended = await run(config, code)
    assert told in text
    assert ended == status


async def test_a_program_that_does_not_end_is_told_and_no_fault_of_the_world(config):
    text, status = await run(config, "print('begun', flush=True)\nwhile True: pass", timeout=0.5)
    assert status == "timeout"
    assert text.endswith("The program was stopped after 0.5 s.")


async def test_a_program_that_prints_without_end_is_stopped():
    text, status = await run({}, "while True: print('x' * 1000)")
    assert status == "output_limit"
    assert "it printed over 65536 B" in text
    assert len(text) < 70_000


async def test_a_call_may_shorten_the_time_but_not_lengthen_it():
    text, _ = await run({"default_timeout": 0.5}, "while True: pass", timeout=1e9)
    assert "stopped after 0.5 s" in text


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({}, "'code' must be the text of a program"),
        ({"code": ""}, "'code' must be the text of a program"),
        ({"code": ["print(1)"]}, "'code' must be the text of a program"),
        ({"code": "1", "language": "cobol"}, "programs in 'cobol' cannot be run"),
    ],
)
async def test_a_call_with_bad_arguments_is_refused(parameters, told):
    tools = ToolSet([SandboxFusionTool({})])
    async with tools.lease("row") as lease:
        call = FunctionCall(name="code_interpreter", arguments=json.dumps(parameters))
        outcome = await lease.call(call)
    tools.close()
    assert outcome.kind == "refused"
    assert told in outcome.response.text


@pytest.mark.parametrize("fault", [500, b"no json", b'{"status": "SandboxError"}'])
async def test_a_service_that_fails_is_infra_and_says_nothing_about_the_program(fault):
    with running_server() as server:
        server.faults.append(fault)
        tools = ToolSet([SandboxFusionTool({"sandbox_fusion_url": server.url})])
        async with tools.lease("row") as lease:
            call = FunctionCall(name="code_interpreter", arguments='{"code": "print(1)"}')
            assert (await lease.call(call)).kind == "infra"
            assert (await lease.call(call)).response.text == "1"
        tools.close()
    with pytest.raises(InfraFault, match="did not run a program"):
        await run({"sandbox_fusion_url": server.url}, "print(1)")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rate_limit": 0}, "must be positive"),
        ({"default_timeout": 0}, "must be positive"),
        ({"default_language": "cpp"}, "our own sandbox runs Python only"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        SandboxFusionTool(config)
