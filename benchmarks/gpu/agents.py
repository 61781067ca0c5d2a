"""What waiting for tools costs: many conversations on one engine, with and without slow tools.

    python -m benchmarks.gpu.agents --out agents.json [--shape 0.5B] [--sessions 64 512]

Every conversation has the same number of turns and of tokens per turn; between two turns a reply of
a tool is appended. A batch runs in three ways, in turns:

    tools     each reply takes `--tool-seconds`
    instant   the same replies, at once
    single    as many sampled tokens in one turn, without replies

More conversations are open than the engine has slots (`--oversubscribed` times): those that wait
for a tool leave their slot to others, and their keys and values are kept for their next turn.
`prefilled / new` compares the tokens that the engine computed as prompts with those that were new
to it; 1.0 is perfect.
"""

import argparse
import asyncio
import random
import statistics
import uuid
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.measuring import back_and_forth, environment, timed, write
from benchmarks.gpu.shapes import model_config, random_model
from verl.agent_loop.server_manager import AsyncLLMServerManager
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine

WAYS = ("tools", "instant", "single")


class Contestant:
    """An engine with `slots` sequences at once, and conversations on it."""

    def __init__(self, options: argparse.Namespace, num_sessions: int) -> None:
        self.options = options
        self.num_sessions = num_sessions
        self.response_tokens = options.turns * options.turn_tokens
        self.response_tokens += (options.turns - 1) * options.reply_tokens
        self.vocabulary = model_config(options.shape).vocab_size
        slots = max(1, round(num_sessions / options.oversubscribed))
        self.engine = NativeEngine(
            random_model(options.shape, options.device),
            EngineLimits(
                max_num_seqs=slots,
                max_prompt_tokens=options.prompt_tokens + self.response_tokens,
                max_response_tokens=self.response_tokens,
                max_prefill_tokens=16384,
                max_cache_bytes=options.cache_gib << 30,
                max_session_bytes=options.cache_gib << 30,
            ),
            eos_token_ids=[],
        )
        rollout = SimpleNamespace(
            response_length=self.response_tokens,
            max_num_seqs=slots,
            server=SimpleNamespace(max_attempts=1),
        )
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
        self.servers = AsyncLLMServerManager(config, [self.engine])

    def run(self, way: str, seed: int) -> dict[str, float]:
        before = self.engine.core.num_prefilled_tokens
        seconds, new = timed(lambda: asyncio.run(self._batch(way, seed)), self.options.device)
        sampled = self.num_sessions * self.options.turns * self.options.turn_tokens
        return {
            "seconds": seconds,
            "tokens_per_second": sampled / seconds,
            "prefilled_per_new": (self.engine.core.num_prefilled_tokens - before) / new,
        }

    async def _batch(self, way: str, seed: int) -> int:
        talks = (self._talk(way, random.Random(f"{seed}/{n}")) for n in range(self.num_sessions))
        return sum(await asyncio.gather(*talks))

    async def _talk(self, way: str, rng: random.Random) -> int:
        """One conversation; the number of tokens that were new to the engine."""
        options = self.options
        turns = 1 if way == "single" else options.turns
        max_tokens = options.turns * options.turn_tokens // turns
        ids = [rng.randrange(self.vocabulary) for _ in range(options.prompt_tokens)]
        session, new = uuid.uuid4().hex, len(ids)
        for turn in range(turns):
            params = {"max_tokens": max_tokens, "seed": rng.getrandbits(40), "ignore_eos": True}
            output = await self.servers.generate(session, prompt_ids=ids, sampling_params=params)
            ids += output.token_ids
            if turn + 1 < turns:
                if way == "tools":
                    await asyncio.sleep(options.tool_seconds)
                reply = [rng.randrange(self.vocabulary) for _ in range(options.reply_tokens)]
                ids += reply
                new += len(reply) + 1  # the last sampled token has not been computed yet
        self.servers.close_session(session)
        return new


def measure(options: argparse.Namespace, num_sessions: int) -> dict[str, Any]:
    contestant = Contestant(options, num_sessions)
    for way in ("instant", "single"):
        contestant.run(way, seed=-1)
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number, way in enumerate(back_and_forth(WAYS, options.rounds)):
        runs[way].append(contestant.run(way, seed=number // len(WAYS)))
    medians = {
        way: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for way, found in runs.items()
    }
    rates = {way: found["tokens_per_second"] for way, found in medians.items()}
    contestant.engine.close()
    return {
        "sessions": num_sessions,
        "slots": contestant.engine.core.limits.max_num_seqs,
        "medians": medians,
        "tools_against_instant": rates["tools"] / rates["instant"],
        "tools_against_single": rates["tools"] / rates["single"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--shape", default="0.5B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sessions", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--oversubscribed", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=256)
    parser.add_argument("--reply-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tool-seconds", type=float, default=1.0)
    parser.add_argument("--cache-gib", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results = [measure(options, count) for count in options.sessions]
    for result in results:
        print(result)
    write(
        options.out,
        {"environment": environment(options.device, 0), "options": vars(options), "runs": results},
    )


if __name__ == "__main__":
    main()
