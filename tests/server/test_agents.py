"""Agents of other frameworks, unmodified, in a Python of their own (`make test-agents`)."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.server.gateways import GatewayBench, bisecting

PYTHON = os.environ.get("VERL_AGENTS_PYTHON")
AGENTS = Path(__file__).parent / "agents"
SECONDS = 300.0
GAMES = {
    "langgraph": ("langgraph_game.py", {}),
    "openai-agents over responses": ("openai_agents_game.py", {"api": "responses"}),
    "openai-agents over chat": ("openai_agents_game.py", {"api": "chat_completions"}),
    "smolagents": ("smolagents_game.py", {}),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="VERL_AGENTS_PYTHON names no Python with agents"),
]


def playing(prompt: str) -> str:
    """Halves what is left; agents that end by a tool are ended by it."""
    text = bisecting(prompt.rpartition("Guess a number from 1 to 16.")[2])
    if text.startswith("The number") and "final_answer" in prompt:
        call = {"name": "final_answer", "arguments": {"answer": text}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return text


@pytest.mark.parametrize("name", GAMES)
def test_an_unmodified_agent_is_one_row_of_the_engines_ids(name):
    file, row = GAMES[name]
    with GatewayBench(playing, prompt_length=30_000, response_length=20_000) as bench:
        session = bench.open()
        ended = subprocess.run(
            [str(PYTHON), str(AGENTS / file)],
            input=json.dumps({"target": 11, **row}),
            env={"PATH": os.environ["PATH"], **session.environment()},
            text=True,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
        assert "The number is 11." in ended.stdout, ended.stderr[-2000:]
        rows = bench.end(session)
        assert dict(session.tree.forks) == {}
        assert len(rows) == 1
        assert len(bench.engine.requests) == 5
        bench.check_rows(rows)
