"""Our contestant: one set of weights that generates, scores and learns, with a clock in it.

A step is the training loop's work without its bookkeeping: generate, reward each text by a rule,
compare within groups, make one optimizer step on all rows. What ends up in `Phases`:

    generate (of it prefill, decode)   rows   reward   [old_log_probs]   update (of it optimizer)
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.gpu.measuring import GIB, Phases
from benchmarks.gpu.shapes import random_model
from benchmarks.gpu.workload import Workload, requests, reward, word_tokenizer
from verl.algos.advantages.group_relative import compute_grpo_outcome_advantage
from verl.config.actor import FSDPActorConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.exact import make_exact
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.rollout.base import GenerationRequest, TokenOutput
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine


def build_engine(options: argparse.Namespace, *, capacity: int | None = None) -> OneDeviceEngine:
    """A model of random weights under training; exact for sequences up to `capacity`, if given."""

    def build() -> Any:
        model = random_model(options.shape, options.device, options.seed)
        return model if capacity is None else make_exact(model, capacity)

    engine = OneDeviceEngine(build, FSDPOptimizerConfig(lr=1e-6))
    engine.initialize()
    return engine


def share_prefixes(engine: OneDeviceEngine, is_shared: bool) -> None:
    """Compute a prompt once per group or once per row from now on."""
    engine.prefix_sharing = is_shared  # an option of its constructor; here both take turns


def whole_groups(work: Workload, micro_tokens: int) -> list[list[int]]:
    """Passes of whole groups, each within the budget: both ways of sharing get the same rows."""
    group_tokens = work.samples * (work.prompt_tokens + work.new_tokens)
    size = work.samples * max(1, micro_tokens // group_tokens)
    rows = range(work.sequences)
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


class Policy:
    """The engine, its actor and the rollout that shares its weights."""

    def __init__(self, options: argparse.Namespace, work: Workload, *, is_exact: bool) -> None:
        self.work, self.device = work, options.device
        capacity = work.prompt_tokens + work.new_tokens if is_exact else None
        self.engine = build_engine(options, capacity=capacity)
        self.vocabulary = int(self.engine.module.config.vocab_size)
        self.micro_tokens = options.micro_tokens
        self.actor = DataParallelPPOActor(
            FSDPActorConfig(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=options.micro_tokens),
            self.engine,
        )
        self.rollout = NativeEngine(
            self.engine.module,
            EngineLimits(
                max_num_seqs=work.sequences,
                max_prompt_tokens=work.prompt_tokens,
                max_response_tokens=work.new_tokens,
                max_prefill_tokens=16384,
                max_cache_bytes=60 << 30,
                tokens_per_step=options.tokens_per_step,
            ),
            eos_token_ids=[0],
            version=lambda: self.engine.policy_version,
        )
        self.tokenizer = word_tokenizer(self.vocabulary)
        self.phases = Phases(self.device)
        self._clock(self.rollout.core.batch, "prefill")
        self._clock(self.engine.optimizer, "step", name="optimizer")

    @property
    def cache_gib(self) -> float:
        """Keys and values while generating; they are not in torch's allocator."""
        cache = self.rollout.core.cache
        return cache.shape.bytes_per_sequence * cache.max_slots / GIB

    def step(self, work: Workload, seed: int, *, with_old_log_probs: bool) -> dict[str, Any]:
        """Seconds, memory and what the update reported."""
        phases = self.phases = Phases(self.device)
        batch = requests(work, self.vocabulary, seed)
        with phases.phase("generate"):
            outputs = self.rollout.generate_batch(batch)
            self.rollout.sleep()
        with phases.phase("rows"):
            rows = as_rows(batch, outputs)
        with phases.phase("reward"):
            rows["advantages"] = self._advantages(rows, outputs)
        sample: dict[str, Any] = {}
        if with_old_log_probs:
            with phases.phase("old_log_probs"):
                passes = whole_groups(work, self.micro_tokens)
                columns = self.actor.compute_log_prob(rows, micro_batching=passes, temperature=1.0)
            log_probs = columns["log_probs"].cpu()
            difference = (log_probs - rows["old_log_probs"]).abs()
            sample["difference_from_rollout"] = {
                "mean": float(difference.mean()),
                "max": float(difference.max()),
            }
            rows["old_log_probs"] = log_probs
        with phases.phase("update"):
            metrics = self._update(rows)
        sample["metrics"] = {name: float(value) for name, value in metrics.items()}
        return sample | self._measured(phases)

    def _advantages(self, rows: TensorDict, outputs: list[list[TokenOutput]]) -> torch.Tensor:
        texts = self.tokenizer.decode_batch([o.token_ids for group in outputs for o in group])
        rewards = torch.zeros_like(rows["old_log_probs"])
        rewards[:, -1] = torch.tensor([reward(text) for text in texts])
        groups = np.repeat(np.arange(len(outputs)), len(outputs[0]))
        advantages, _ = compute_grpo_outcome_advantage(rewards, rows["response_mask"], groups)
        assert bool(advantages.any()), "equal rewards: nothing to learn, nothing to measure"
        return advantages

    def _update(self, rows: TensorDict) -> dict[str, Any]:
        return self.actor.update_policy(
            rows,
            rows_per_step=len(rows),
            temperature=1.0,
            old_policy_version=self.engine.policy_version,
        )

    def _measured(self, phases: Phases) -> dict[str, Any]:
        seconds, peak = phases.seconds, phases.peak_gib
        whole = ("generate", "rows", "reward", "old_log_probs", "update")
        seconds["step"] = sum(seconds[name] for name in whole if name in seconds)
        # Decoding overlaps with reading, so nothing waits inside it to be clocked.
        seconds["decode"] = seconds["generate"] - seconds["prefill"]
        seconds["forward_backward"] = seconds["update"] - seconds["optimizer"]
        peak["generate"] += self.cache_gib if self.device != "cpu" else 0.0
        return {"seconds": seconds, "peak_gib": {**peak, "step": max(peak.values())}}

    def _clock(self, owner: Any, method: str, name: str | None = None) -> None:
        """Let every call of the method count in the phases of the current step."""
        own: Callable[..., Any] = getattr(owner, method)

        def clocked(*args: Any, **kwargs: Any) -> Any:
            return self.phases.inside(name or method, own)(*args, **kwargs)

        setattr(owner, method, clocked)


def as_rows(batch: list[GenerationRequest], outputs: list[list[TokenOutput]]) -> TensorDict:
    """The columns that an update reads; all lengths are equal, so there is no padding."""
    flat = [output for group in outputs for output in group]
    prompts = as_tensor([request.prompt_ids for request in batch], np.int64)
    responses = as_tensor([output.token_ids for output in flat], np.int64)
    rows = unpadded_rows(prompts.repeat_interleave(batch[0].num_samples, 0), responses)
    rows["old_log_probs"] = as_tensor([output.log_probs for output in flat], np.float32)
    return rows


def as_tensor(lists: Sequence[Sequence[float]], dtype: type[np.generic]) -> torch.Tensor:
    """Lists of one length, (number of lists, length)."""
    numbers = np.fromiter(chain.from_iterable(lists), dtype, len(lists) * len(lists[0]))
    return torch.from_numpy(numbers).view(len(lists), -1)


def unpadded_rows(prompts: torch.Tensor, responses: torch.Tensor) -> TensorDict:
    """Rows of prompts (B, P) and responses (B, T), samples of one prompt side by side."""
    ids = torch.cat([prompts, responses], 1)
    return TensorDict(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(ids.shape[1]).expand_as(ids).contiguous(),
            "responses": responses,
            "response_mask": torch.ones_like(responses),
        },
        batch_size=len(ids),
    )
