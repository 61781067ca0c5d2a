"""A GRPO step of TRL on the same work: the step one gets without an inference server.

    PYTHONPATH=folder-with-trl python -m benchmarks.gpu.trl_step --out trl.json [--shape 0.5B]

The same shape, prompts, lengths and reward; responses come from transformers' `generate`. Weights
are bf16, there is no reference model, activations are kept, rows go through the model 32 at a time
as fast as TRL lets them. The first step warms up and does not count. In TRL old log-probs are those
of the update itself here too (one optimizer step per batch).
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.gpu.measuring import environment, peak_gib, synchronize, write
from benchmarks.gpu.shapes import model_config, number_format
from benchmarks.gpu.workload import (
    Workload,
    hf_tokenizer,
    prompt_texts,
    reward,
    vocabulary_of,
    workload_parser,
)


class Stopwatch(TrainerCallback):
    """When each step began, had its responses, had its rewards, and ended."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.moments: list[dict[str, float]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.moments.append({"begin": self._now()})

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.moments[-1]["end"] = self._now()

    def rewards(self, completions: list[str], **columns: Any) -> list[float]:
        self.moments[-1]["responses"] = self._now()
        values = [reward(text) for text in completions]
        self.moments[-1]["rewards"] = self._now()
        return values

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def seconds(self) -> list[dict[str, float]]:
        """By step. `update` holds everything after the rewards."""
        return [
            {
                "generate": moment["responses"] - moment["begin"],
                "reward": moment["rewards"] - moment["responses"],
                "update": moment["end"] - moment["rewards"],
                "step": moment["end"] - moment["begin"],
            }
            for moment in self.moments
        ]


def build_model(options: argparse.Namespace) -> Qwen2ForCausalLM:
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        return Qwen2ForCausalLM._from_config(
            model_config(options.shape), dtype=number_format(options.device)
        )


def build_prompts(work: Workload, vocabulary: int, options: argparse.Namespace) -> Dataset:
    """One batch of prompts per step."""
    batches = [prompt_texts(work, vocabulary, options.seed + n) for n in range(options.steps)]
    return Dataset.from_dict({"prompt": [text for batch in batches for text in batch]})


def build_config(work: Workload, options: argparse.Namespace, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=options.micro_rows,
        gradient_accumulation_steps=work.sequences // options.micro_rows,
        num_generations=work.samples,
        max_completion_length=work.new_tokens,
        generation_kwargs={"min_new_tokens": work.new_tokens},
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        max_steps=options.steps,
        bf16=options.device != "cpu",
        use_cpu=options.device == "cpu",
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        seed=options.seed,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = workload_parser(__doc__.partition("\n")[0])
    parser.add_argument("--micro-rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3, help="the first does not count")
    options = parser.parse_args(arguments)
    work, vocabulary = Workload.of(options), vocabulary_of(options.shape)
    stopwatch = Stopwatch(options.device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=build_model(options),
            reward_funcs=stopwatch.rewards,
            args=build_config(work, options, folder),
            train_dataset=build_prompts(work, vocabulary, options),
            processing_class=hf_tokenizer(vocabulary),
            callbacks=[stopwatch],
        )
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    lengths = [entry["completions/mean_length"] for entry in logs]
    samples = stopwatch.seconds()
    write(
        options.out,
        {
            "shape": options.shape,
            "workload": dataclasses.asdict(work),
            "micro_rows": options.micro_rows,
            "warm_up_seconds": samples[0],
            "samples": samples[1:],
            "median_seconds": {
                name: statistics.median(sample[name] for sample in samples[1:])
                for name in samples[0]
            },
            "mean_response_tokens": lengths,
            "gradient_norms": [entry["grad_norm"] for entry in logs],
            "peak_gib": peak_gib(options.device),
            "environment": environment(options.device, options.seed),
        },
    )


if __name__ == "__main__":
    main()
