"""Processor time that the record of a run takes of the training process, without training.

    python -m benchmarks.board_handover [--sizes 512x50 1024x512] [--steps 12] [--out FILE]

Records steps of random tokens: SAMPLESxTOKENS, eight samples of each prompt, with the columns of a
GRPO run. `trainer_ms` is the processor time of all threads of this process from handing over the
second step until the last one is written, per step; `writer_ms` that of the process that writes,
its start included. `left_out` counts steps whose samples the writer could not follow.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measuring import environment
from benchmarks.gpu.workload import hf_tokenizer
from verl.board.reader import StoreReader
from verl.board.recorder import Recorder
from verl.protocol import DataProto

VOCABULARY = 32000
COLUMNS = ("rollout_log_probs", "old_log_probs", "advantages", "returns", "token_level_rewards")
METRICS = {f"section/metric_{number}": float(number) for number in range(120)}
SAMPLES_OF_A_PROMPT = 8


def random_batch(num_samples: int, num_tokens: int, seed: int) -> DataProto:
    """Prompts and responses of that many tokens; every tenth response ends in the middle."""
    generator = torch.Generator().manual_seed(seed)
    size = (num_samples, num_tokens)
    lengths = torch.full((num_samples,), num_tokens)
    lengths[::10] //= 2
    mask = (torch.arange(num_tokens) < lengths[:, None]).long()
    prompts = torch.randint(VOCABULARY, (num_samples // SAMPLES_OF_A_PROMPT, num_tokens))
    prompts = prompts.repeat_interleave(SAMPLES_OF_A_PROMPT, dim=0)
    responses = torch.randint(VOCABULARY, size, generator=generator) * mask
    attention = torch.cat([torch.ones(size, dtype=torch.long), mask], dim=1)
    uids = [f"{seed}-{row // SAMPLES_OF_A_PROMPT}" for row in range(num_samples)]
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": attention.cumsum(-1),
            "response_mask": mask,
            "token_level_scores": torch.rand(size, generator=generator) * mask,
            **{name: torch.randn(size, generator=generator) * mask for name in COLUMNS},
        },
        non_tensors={
            "uid": uids,
            "data_source": ["digits"] * num_samples,
            "reward_model": [{"ground_truth": "42"}] * num_samples,
            "acc": [True] * num_samples,
        },
        meta_info={"reward_extra_keys": ["acc"]},
    )


def measure(num_samples: int, num_tokens: int, num_steps: int) -> dict[str, Any]:
    batches = [random_batch(num_samples, num_tokens, seed) for seed in range(num_steps)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(
            Path(folder), hf_tokenizer(VOCABULARY), facts={}, max_bytes=16 << 30, first_step=0
        )
        start = 0.0
        for number, batch in enumerate(batches, start=1):
            if number == 2:
                start = time.process_time()
            begin = time.perf_counter()
            recorder.add_step(number, METRICS, {"gen": 1.0, "other": 0.5}, batch=batch)
            seconds.append(time.perf_counter() - begin)
            time.sleep(num_samples * num_tokens * 2e-6)  # a step lasts
        recorder.close()
        trainer = (time.process_time() - start) / (num_steps - 1)
        reader = StoreReader(recorder.path)
        megabytes = recorder.path.stat().st_size / 1e6 / num_steps
        left_out = sum(event["kind"] == "left out" for event in reader.events())
        assert len(reader.steps()) == num_steps
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    writer = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "trainer_ms": trainer * 1e3,
        "median_wall_ms": statistics.median(seconds[1:]) * 1e3,
        "writer_ms": writer / num_steps * 1e3,
        "megabytes_per_step": megabytes,
        "left_out": left_out,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["512x50", "1024x512"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for size in options.sizes:
        num_samples, _, num_tokens = size.partition("x")
        found[size] = measure(int(num_samples), int(num_tokens), options.steps)
    found["environment"] = environment("cpu", 0)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
