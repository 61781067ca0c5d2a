"""Guess the number with smolagents, whose agents end by calling `final_answer`."""

import json
import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool

TARGET = json.load(sys.stdin)["target"]


@tool
def guess(n: int) -> str:
    """Guess the number.

    Args:
        n: The guess.
    """
    return "win" if n == TARGET else "low" if n < TARGET else "high"


model = OpenAIModel(
    "gpt-9", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[guess], model=model, verbosity_level=0)
print(agent.run("Guess a number from 1 to 16."))
