"""Plays guess the number with the official OpenAI client; knows nothing of training.

The address and the key are in the environment, as for any program that uses this client. The row of
the dataset comes on standard input.
"""

import json
import sys

from openai import OpenAI

MAX_GUESSES = 6
TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "description": "Your guess."}},
            "required": ["n"],
        },
    },
}


def play(row):
    """How one game went."""
    target = int(row["reward_model"]["ground_truth"])
    client = OpenAI()
    messages = list(row["raw_prompt"])
    num_guesses, has_won = 0, False
    while num_guesses < MAX_GUESSES and not has_won:
        answer = client.chat.completions.create(model="gpt-4o", messages=messages, tools=[TOOL])
        said = answer.choices[0].message
        messages.append(said)
        if not said.tool_calls:
            break
        for call in said.tool_calls:
            n = int(json.loads(call.function.arguments).get("n", 0))
            num_guesses += 1
            has_won = has_won or n == target
            reply = "win" if n == target else "low" if n < target else "high"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": reply})
    return f"{'found' if has_won else 'did not find'} {target} with {num_guesses} guesses"


if __name__ == "__main__":
    print(play(json.load(sys.stdin)))
