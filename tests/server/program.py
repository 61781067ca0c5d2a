"""An agent program of the tests, with the standard library only: plays guess the number as its row
says, and misbehaves as its row says."""

import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path


def ask(messages, **fields):
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "any", "messages": messages, **fields}).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]


def play(row, system="You guess."):
    tools = [{"type": "function", "function": {"name": "guess"}}]
    messages = [{"role": "system", "content": system}, *row["raw_prompt"]]
    turn = 0
    while turn < 6:
        turn += 1
        said = ask(messages, tools=tools)
        messages.append(said)
        if not said.get("tool_calls"):
            break
        call = said["tool_calls"][0]
        n = json.loads(call["function"]["arguments"])["n"]
        target = row["target"]
        reply = "win" if n == target else "low" if n < target else "high"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": reply})
    return {"reward": 1 / turn, "turns": turn}


def surroundings(row):
    """What the program can see and reach beside the gateway."""
    reached = []
    for host, port in (("127.0.0.1", row["port"]), ("192.0.2.1", 80)):
        with socket.socket() as one:
            one.settimeout(2)
            if one.connect_ex((host, port)) == 0:
                reached.append(host)
    seen = [path for path in row["paths"] if os.path.exists(path)]
    return {"reached": reached, "seen": seen, "user": os.getuid(), "folder": os.getcwd()}


def main(row):
    """What a row asks for; called as a function too."""
    mode = row["mode"]
    if mode == "silent":
        return None
    reward = play(row)
    if mode == "two":
        play(row, system="You guess again.")
    if mode == "looks":
        return {"reward": 1.0, **surroundings(row["looks"])}
    if mode == "fails":
        print("x" * 100_000)
        sys.exit("it went wrong")
    if mode == "hangs":
        # A descendant in a session of its own, too: it must not outlive the program.
        daemon = "import os, time; os.setsid(); time.sleep(3600)"
        child = subprocess.Popen([sys.executable, "-c", daemon, row["mark"]])
        child.wait()
    if mode == "ungraded":
        return None
    return reward


async def awaited(row):
    return main(row)["reward"]


if __name__ == "__main__":
    given = main(json.load(sys.stdin))
    if given is not None:
        Path(os.environ["VERL_REWARD_FILE"]).write_text(json.dumps(given))
