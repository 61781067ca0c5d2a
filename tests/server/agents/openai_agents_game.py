"""Guess the number with the OpenAI Agents SDK; the row names the API that it speaks."""

import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

ROW = json.load(sys.stdin)
TARGET = ROW["target"]
set_tracing_disabled(True)
set_default_openai_api(ROW["api"])


@function_tool
def guess(n: int) -> str:
    """Guess the number."""
    return "win" if n == TARGET else "low" if n < TARGET else "high"


agent = Agent(name="guesser", instructions="You guess.", tools=[guess], model="gpt-9")
print(Runner.run_sync(agent, "Guess a number from 1 to 16.").final_output)
