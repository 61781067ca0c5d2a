"""What computing a prompt once for all its responses saves in training on a CPU.

python benchmarks/prefix_sharing.py
"""

import time

import torch
from tensordict import TensorDict
from transformers import Qwen2Config

from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.loading import random_causal_lm
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.schedule import MicroBatching

SMALL = Qwen2Config(
    vocab_size=32, hidden_size=128, intermediate_size=512, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4,
)  # fmt: skip
LARGER = Qwen2Config(
    vocab_size=5000, hidden_size=512, intermediate_size=1408, num_hidden_layers=6,
    num_attention_heads=8, num_key_value_heads=2,
)  # fmt: skip


def rows(config: Qwen2Config, prompts: int, samples: int, prompt_tokens: int, new_tokens: int):
    prompt = torch.randint(config.vocab_size, (prompts, prompt_tokens))
    response = torch.randint(config.vocab_size, (prompts * samples, new_tokens))
    ids = torch.cat([prompt.repeat_interleave(samples, 0), response], 1)
    return TensorDict(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(ids.shape[1]).expand_as(ids).contiguous(),
            "responses": response,
        },
        batch_size=len(ids),
    )


def cpu_seconds(config: Qwen2Config, data: TensorDict, repeats: int = 3) -> dict[bool, float]:
    """Of one optimizer step, best of several; without and with sharing take turns."""
    engines = {}
    for is_shared in (False, True):
        engines[is_shared] = OneDeviceEngine(
            lambda: random_causal_lm(config, dtype=torch.float32),
            FSDPOptimizerConfig(lr=1e-6),
            prefix_sharing=is_shared,
        )
        engines[is_shared].initialize()
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
        for is_shared, engine in engines.items():
            start = time.process_time()
            engine.train_batch(
                data,
                lambda columns, _: (columns["log_probs"].mean(), {}),
                micro_batching=MicroBatching(rows=64),
            )
            found[is_shared].append(time.process_time() - start)
    return {is_shared: min(times) for is_shared, times in found.items()}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for config, work in ((SMALL, (16, 16, 9, 8)), (LARGER, (8, 8, 60, 40))):
        seconds = cpu_seconds(config, rows(config, *work))
        print(
            f"{work[0]} prompts x {work[1]} samples, {work[2]} + {work[3]} tokens, width "
            f"{config.hidden_size}: {seconds[False]:.2f} s per row, {seconds[True]:.2f} s shared, "
            f"{seconds[False] / seconds[True]:.2f}x"
        )


if __name__ == "__main__":
    main()
