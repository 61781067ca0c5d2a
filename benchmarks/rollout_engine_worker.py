"""Holds one rollout engine for `rollout.py` and answers one line of JSON with another.

{"requests": 16}    generate for so many at once
{"update": true}    send all weights anew, where the engine has its own
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.rollout_workloads import SHAPE
from verl.config.rollout import RolloutConfig
from verl.models.loading import load_causal_lm
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import GenerationRequest, Rollout, SamplingParams
from verl.workers.rollout.factory import (
    ModuleEngineSpec,
    engine_spec,
    has_own_process,
    rollout_engines,
)
from verl.workers.rollout.process.client import EngineProcess

PROMPT_TOKENS, RESPONSE_TOKENS = 64, 32
MAX_REQUESTS = 64


def start(name: str, model: str, python: str | None) -> tuple[Rollout, str]:
    """The engine and its version."""
    rollout = RolloutConfig(
        name=name,
        python=python,
        prompt_length=PROMPT_TOKENS,
        response_length=RESPONSE_TOKENS,
        max_num_seqs=MAX_REQUESTS,
    )
    if has_own_process(name):
        spec = engine_spec(rollout, model, device="cpu", has_weights=True)
        process = EngineProcess(spec)
        return process, process.start().version
    module = load_causal_lm(model)
    order = ModuleEngineSpec(
        module=module, rollout=rollout, tokenizer=hf_tokenizer(model), version=lambda: 0
    )
    return rollout_engines[name].build(order), ""


def requests(count: int) -> list[GenerationRequest]:
    rng = random.Random(count)
    params = SamplingParams(max_tokens=RESPONSE_TOKENS, ignore_eos=True)
    return [
        GenerationRequest(
            request_id=str(number),
            prompt_ids=[rng.randrange(3, SHAPE["vocab_size"]) for _ in range(PROMPT_TOKENS)],
            params=params,
            seeds=(number,),
        )
        for number in range(count)
    ]


def family() -> list[psutil.Process]:
    """This process and all below it."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def cpu_seconds() -> float:
    return sum(sum(one.cpu_times()[:2]) for one in family())


def peak_bytes(engine: Rollout) -> int:
    """The most that was resident in each of the processes that the engine runs in, summed."""
    processes = family()[1:] if isinstance(engine, EngineProcess) else family()
    return sum(peak_of(one.pid) for one in processes)


def peak_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def generate(engine: Rollout, count: int) -> dict[str, Any]:
    asked = requests(count)
    begin, cpu_begin = time.perf_counter(), cpu_seconds()
    outputs = engine.generate_batch(asked)
    seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu_begin
    tokens = sum(len(sample.token_ids) for samples in outputs for sample in samples)
    if tokens != count * RESPONSE_TOKENS:
        raise RuntimeError(f"{tokens} tokens came instead of {count * RESPONSE_TOKENS}")
    return {
        "tokens": tokens,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_bytes": peak_bytes(engine),
    }


def update(engine: Rollout, module: torch.nn.Module, number: int) -> dict[str, Any]:
    if not isinstance(engine, EngineProcess):
        return {"seconds": None}
    begin = time.perf_counter()
    engine.update_weights(module.state_dict().items(), number)
    return {"seconds": time.perf_counter() - begin}


def answer(**result: Any) -> None:
    print("RESULT " + json.dumps(result), flush=True)


def main() -> None:
    name, model, python = (*sys.argv[1:], None)[:3]
    assert name is not None
    assert model is not None
    begin = time.perf_counter()
    engine, version = start(name, model, python)
    answer(version=version, start_seconds=time.perf_counter() - begin)
    trained = load_causal_lm(model) if isinstance(engine, EngineProcess) else torch.nn.Identity()
    num_updates = 0
    for line in sys.stdin:
        question = json.loads(line)
        if "requests" in question:
            answer(**generate(engine, question["requests"]))
        else:
            num_updates += 1
            answer(**update(engine, trained, num_updates))
    if isinstance(engine, EngineProcess):
        engine.close()


if __name__ == "__main__":
    main()
