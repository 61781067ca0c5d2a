"""Guess the number with a LangGraph agent; the address is in the environment."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

TARGET = json.load(sys.stdin)["target"]


@tool
def guess(n: int) -> str:
    """Guess the number."""
    return "win" if n == TARGET else "low" if n < TARGET else "high"


agent = create_react_agent(ChatOpenAI(model="gpt-9", max_retries=0), [guess], prompt="You guess.")
question = {"role": "user", "content": "Guess a number from 1 to 16."}
print(agent.invoke({"messages": [question]})["messages"][-1].content)
