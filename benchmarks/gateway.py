"""What a call costs that goes through the gateway instead of straight to the engine.

    python benchmarks/gateway.py [--games 40] [--turns 16]

An engine that answers at once plays conversations with tool calls. Each call is made three times:
`AsyncLLMServerManager.generate` with the same ids, as agent loops call the engine; over one kept
connection, without a client library; and with the official `openai` client. The overhead is the
difference of the first to the others, call by call: HTTP, JSON, finding the history in the
session's tree, encoding the new messages, reading tool calls. The client and the server share one
interpreter, so the client's own work is in the numbers too. Beside the wall time stands the CPU
time of the process, which other programs on the machine change less.
"""

import argparse
import asyncio
import http.client
import json
import os
import platform
import statistics
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.server.gateways import PARAMS, TOOL, GatewayBench, call_text

RESULTS = Path(__file__).parent / "results" / "gateway.json"
SYSTEM = {"role": "system", "content": "You guess numbers. " * 20}
USER = {"role": "user", "content": "Guess a number from 1 to 16."}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", type=int, default=40)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"direct": [], "connection": [], "openai": []}
    cpu = dict.fromkeys(seconds, 0.0)
    lengths = {"prompt_length": 2048, "response_length": 16384}
    with GatewayBench(lambda prompt: call_text(len(prompt) % 16), **lengths) as bench:
        for game in range(options.games + 1):
            for kind in ("openai", "connection", "direct"):
                requests = list(bench.engine.requests)
                bench.engine.requests.clear()
                if kind == "direct":
                    play_game = [partial(generate, bench, request) for request in requests]
                    start = time.process_time()
                    found = [call() for call in play_game]
                    used = time.process_time() - start
                else:
                    found, used = play(bench, kind, options.turns)
                if game:  # the first one warms up
                    seconds[kind] += found
                    cpu[kind] += used
    overhead = {
        kind: [1e3 * (a - b) for a, b in zip(seconds[kind], seconds["direct"], strict=True)]
        for kind in ("connection", "openai")
    }
    record = {
        "command": " ".join(["python", *sys.argv]),
        "machine": platform.platform(),
        "turns": options.turns,
        "games": options.games,
        "direct_ms": spread([1e3 * value for value in seconds["direct"]]),
        "overhead_ms": {kind: spread(values) for kind, values in overhead.items()},
        "cpu_ms_per_call": {
            kind: round(1e3 * used / (options.games * options.turns), 3)
            for kind, used in cpu.items()
        },
        "load": os.getloadavg()[0],
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(json.dumps(record, indent=1) + "\n")


def spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"p50": round(cuts[49], 3), "p90": round(cuts[89], 3), "p99": round(cuts[98], 3)}


def generate(bench: GatewayBench, request: Any) -> float:
    """Seconds of a direct call, on the event loop of the gateway."""

    async def measure() -> float:
        start = time.perf_counter()
        await bench.gateway.manager.generate(
            request.request_id, prompt_ids=request.prompt_ids, sampling_params=PARAMS
        )
        await asyncio.sleep(0)
        return time.perf_counter() - start

    return bench.run(measure())


def play(bench: GatewayBench, kind: str, turns: int) -> tuple[list[float], float]:
    """Seconds of each call of a conversation, and CPU seconds of all of them."""
    session = bench.open()
    connection = http.client.HTTPConnection("127.0.0.1", bench.gateway.port, timeout=60)
    connection.connect()
    client = import_module("openai").OpenAI(base_url=f"{session.url}/v1", api_key=session.key)
    path = f"/s/{session.name}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {session.key}", "Content-Type": "application/json"}
    messages: list[Any] = [SYSTEM, USER]
    seconds: list[float] = []
    cpu_start = time.process_time()
    for _ in range(turns):
        start = time.perf_counter()
        if kind == "openai":
            answer = client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
            said = answer.choices[0].message.to_dict()
        else:
            body = json.dumps({"model": "m", "messages": messages, "tools": [TOOL]})
            connection.request("POST", path, body, headers)
            said = json.loads(connection.getresponse().read())["choices"][0]["message"]
        seconds.append(time.perf_counter() - start)
        call = said["tool_calls"][0]["id"]
        messages += [said, {"role": "tool", "tool_call_id": call, "content": "low"}]
    used = time.process_time() - cpu_start
    connection.close()
    client.close()
    rows = bench.end(session)
    if len(rows) != 1:
        raise RuntimeError(f"a conversation became {len(rows)} rows: {session.tree.forks}")
    return seconds, used


if __name__ == "__main__":
    main()
