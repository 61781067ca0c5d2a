"""What waiting for tools costs: many conversations on one engine, with and without slow tools.

    python -m benchmarks.gpu.agents --out agents.json [--shape 0.5B] [--sessions 64 512]
    python -m benchmarks.gpu.agents --out agents.json --ways instant single --profile --kernels

Every conversation has the same number of turns and of tokens per turn; between two turns a reply of
a tool is appended. A batch runs in three ways, in turns:

    tools     each reply takes `--tool-seconds`
    instant   the same replies, at once
    single    as many sampled tokens in one turn, without replies

With `--oversubscribed F`, F times as many conversations are open as the engine has slots: those
that wait for a tool leave their slot to others, and their keys and values are kept for their next
turn.
`prefilled / new` compares the tokens that the engine computed as prompts with those that were new
to it; 1.0 is perfect. `--profile` runs one batch more of each of `--ways` but `single` while
another thread samples the stack of the engine's thread, and tells where it was, as shares of
the samples: inclusive, and for the innermost line of this repository. `--kernels` runs yet another
under torch.profiler and tells which kernels the device was busy with.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu.measuring import back_and_forth, environment, timed, write
from benchmarks.gpu.shapes import model_config, random_model
from verl.agent_loop.server_manager import AsyncLLMServerManager
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine

WAYS = ("tools", "instant", "single")
ROOT = str(Path(__file__).parents[2])
SAMPLE_SECONDS = 0.002
NUM_SHOWN = 30


@dataclass(frozen=True)
class Talk:
    """What one conversation brings; drawn before the clock starts."""

    prompt_ids: list[int]
    replies: list[list[int]]
    seeds: list[int]


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
            multi_turn=SimpleNamespace(enable=True),
        )
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
        self.servers = AsyncLLMServerManager(config, [self.engine])

    def run(self, way: str, seed: int) -> dict[str, float]:
        before = self.engine.core.num_prefilled_tokens
        talks = [self._drawn(random.Random(f"{seed}/{n}")) for n in range(self.num_sessions)]
        seconds, new = timed(lambda: asyncio.run(self._batch(way, talks)), self.options.device)
        sampled = self.num_sessions * self.options.turns * self.options.turn_tokens
        return {
            "seconds": seconds,
            "tokens_per_second": sampled / seconds,
            "prefilled_per_new": (self.engine.core.num_prefilled_tokens - before) / new,
        }

    def _drawn(self, rng: random.Random) -> Talk:
        options, ids = self.options, range(self.vocabulary)
        return Talk(
            rng.choices(ids, k=options.prompt_tokens),
            [rng.choices(ids, k=options.reply_tokens) for _ in range(options.turns)],
            [rng.getrandbits(40) for _ in range(options.turns)],
        )

    async def _batch(self, way: str, talks: list[Talk]) -> int:
        return sum(await asyncio.gather(*(self._talk(way, talk) for talk in talks)))

    async def _talk(self, way: str, talk: Talk) -> int:
        """One conversation; the number of tokens that were new to the engine."""
        options = self.options
        turns = 1 if way == "single" else options.turns
        max_tokens = options.turns * options.turn_tokens // turns
        ids, session, new = list(talk.prompt_ids), uuid.uuid4().hex, len(talk.prompt_ids)
        for turn in range(turns):
            params = {"max_tokens": max_tokens, "seed": talk.seeds[turn], "ignore_eos": True}
            output = await self.servers.generate(session, prompt_ids=ids, sampling_params=params)
            ids = ids + output.token_ids
            if turn + 1 < turns:
                if way == "tools":
                    await asyncio.sleep(options.tool_seconds)
                ids += talk.replies[turn]
                new += len(talk.replies[turn]) + 1  # the last sampled token is yet to be computed
        self.servers.close_session(session)
        return new


class StackSamples:
    """Where a thread is, every few milliseconds."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.inclusive: Counter[str] = Counter()
        self.innermost: Counter[str] = Counter()

    @contextmanager
    def of(self, thread: threading.Thread) -> Iterator[None]:
        is_over = threading.Event()

        def sample() -> None:
            while not is_over.wait(SAMPLE_SECONDS):
                assert thread.ident is not None
                self._add(sys._current_frames().get(thread.ident))

        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        try:
            yield
        finally:
            is_over.set()
            sampler.join(timeout=5)

    def _add(self, frame: Any) -> None:
        self.num_samples += 1
        names: list[str] = []
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(ROOT) and "site-packages" not in path:
                if not names:
                    self.innermost[f"{Path(path).name}:{frame.f_lineno}"] += 1
                names.append(f"{Path(path).stem}.{frame.f_code.co_name}")
            frame = frame.f_back
        self.inclusive.update(set(names))

    def report(self, title: str) -> dict[str, dict[str, float]]:
        """Printed, and as shares of all samples."""
        shares = {
            name: {what: count / self.num_samples for what, count in counts.most_common(NUM_SHOWN)}
            for name, counts in (("inclusive", self.inclusive), ("innermost", self.innermost))
        }
        print(f"--- {title}: the engine's thread, {self.num_samples} samples")
        for name, of in shares.items():
            print(f"{name}:", ", ".join(f"{what} {share:.1%}" for what, share in of.items()))
        return shares


def profiled(contestant: Contestant, way: str) -> dict[str, Any]:
    """One batch with the stack of the engine's thread sampled."""
    samples, thread = StackSamples(), contestant.engine._thread._thread
    assert thread is not None, "it has run before"
    with samples.of(thread):
        run = contestant.run(way, seed=-2)
    shares = samples.report(f"{contestant.num_sessions} sessions, {way}, {run['seconds']:.2f} s")
    return run | shares


def kernels(contestant: Contestant, way: str) -> dict[str, Any]:
    """Seconds and calls of the kernels that took longest in one batch."""
    kind = torch.profiler.ProfilerActivity
    activity = kind.CPU if contestant.options.device == "cpu" else kind.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        run = contestant.run(way, seed=-3)
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    table = {
        row.key[:60]: {"seconds": row.self_device_time_total / 1e6, "calls": row.count}
        for row in rows[:NUM_SHOWN]
    }
    busy = sum(row.self_device_time_total for row in rows) / 1e6
    print(
        f"--- {contestant.num_sessions} sessions, {way}, {run['seconds']:.2f} s, busy {busy:.2f} s"
    )
    for name, row in table.items():
        print(f"{row['seconds']:.3f} s {row['calls']:7d} x {name}")
    return {"seconds": run["seconds"], "busy_seconds": busy, "kernels": table}


def measure(options: argparse.Namespace, num_sessions: int) -> dict[str, Any]:
    contestant = Contestant(options, num_sessions)
    ways = options.ways
    for way in ("instant", "single"):
        if way in ways or way == "instant":
            contestant.run(way, seed=-1)
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number, way in enumerate(back_and_forth(ways, options.rounds)):
        runs[way].append(contestant.run(way, seed=number // len(ways)))
    medians = {
        way: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for way, found in runs.items()
    }
    rates = {way: found["tokens_per_second"] for way, found in medians.items()}
    result = {
        "sessions": num_sessions,
        "slots": contestant.engine.core.limits.max_num_seqs,
        "medians": medians,
        "against": {f"{a}/{b}": rates[a] / rates[b] for a, b in itertools.combinations(ways, 2)},
    }
    print(result, flush=True)
    turned = [way for way in ways if way != "single"]
    if options.profile:
        result["stacks"] = {way: profiled(contestant, way) for way in turned}
    if options.kernels:
        result["kernels"] = {way: kernels(contestant, way) for way in turned}
    contestant.engine.close()
    return result


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
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    results = [measure(options, count) for count in options.sessions]
    write(
        options.out,
        {"environment": environment(options.device, 0), "options": vars(options), "runs": results},
    )


if __name__ == "__main__":
    main()
