"""Training: a small random Llama, its optimizer and the PPO update, without Hydra and Ray."""

import torch
from env import END, VOCABULARY
from tensordict import TensorDict
from torch import Tensor
from transformers import LlamaConfig

from verl.config.actor import FSDPActorConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.loading import random_causal_lm
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.rollout.base import TokenOutput

Row = tuple[list[int], TokenOutput]


def build_engine(learning_rate: float, seed: int) -> OneDeviceEngine:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    engine = OneDeviceEngine(
        lambda: random_causal_lm(config, seed=seed),
        FSDPOptimizerConfig(lr=learning_rate, weight_decay=0.0),
    )
    engine.initialize()
    return engine


def build_actor(engine: OneDeviceEngine) -> DataParallelPPOActor:
    return DataParallelPPOActor(FSDPActorConfig(ppo_micro_batch_size_per_gpu=512), engine)


def as_batch(rows: list[Row]) -> TensorDict:
    """Prompts padded on the left, responses on the right, as every part of verl expects them."""
    P = max(len(prompt) for prompt, _ in rows)
    T = max(len(output.token_ids) for _, output in rows)
    ids = torch.zeros(len(rows), P + T, dtype=torch.long)
    mask, log_probs = torch.zeros_like(ids), torch.zeros(len(rows), T)
    for i, (prompt, output) in enumerate(rows):
        tokens = torch.tensor([*prompt, *output.token_ids])
        place = slice(P - len(prompt), P - len(prompt) + len(tokens))
        ids[i, place], mask[i, place] = tokens, 1
        log_probs[i, : len(output.log_probs)] = torch.tensor(output.log_probs)
    columns: dict[str, Tensor] = {
        "input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0),
        "responses": ids[:, P:], "response_mask": mask[:, P:], "old_log_probs": log_probs,
    }  # fmt: skip
    return TensorDict(columns, batch_size=len(rows))
