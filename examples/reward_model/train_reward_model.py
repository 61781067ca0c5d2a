"""Trains a reward model on pairs of responses, one chosen and one rejected.

    python examples/reward_model/train_reward_model.py --model Qwen/Qwen2.5-0.5B-Instruct \
        --train_files train.parquet --val_files test.parquet --output_dir runs/reward_model

A language model gets a linear layer with one output, the score of the whole text. By the model of
Bradley and Terry a response is preferred with the probability sigmoid(its score - the other's), and
training makes the preferences that people stated likely:

    loss = -mean log sigmoid(score of chosen - score of rejected)

The folder that it writes is what `reward_model.model.path` takes.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig

from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.loading import load_reward_model, load_value_model
from verl.utils.checkpoint.hf_model import save_hf_model
from verl.utils.dataset.rm_dataset import RMDataset
from verl.utils.device import resolve_device
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.engine.base import Columns, MicroBatching
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.spec import compute_dtype
from verl.workers.reward_model.scores import as_rows, sequence_scores

Pair = tuple[list[int], list[int]]
"""The tokens of a chosen and of a rejected conversation."""


def train(options: argparse.Namespace) -> list[dict[str, float]]:
    """Train, write the model, and give what was measured after each epoch (the first before)."""
    tokenizer = hf_tokenizer(options.model)
    load = partial(
        RMDataset,
        tokenizer=tokenizer,
        prompt_key=options.prompt_key,
        chosen_key=options.chosen_key,
        rejected_key=options.rejected_key,
        max_length=options.max_length,
    )
    pairs = load(options.train_files)
    held_out = load(options.val_files)
    steps_per_epoch = len(pairs) // options.batch_size
    if not steps_per_epoch:
        raise SystemExit(f"{len(pairs)} pairs do not fill a batch of {options.batch_size}")
    engine = build_engine(options, steps_per_epoch * options.epochs)
    history = [report(0, evaluate(engine, held_out, options))]
    for epoch in range(1, options.epochs + 1):
        losses = [step(engine, batch, options) for batch in epoch_batches(pairs, options, epoch)]
        measured = evaluate(engine, held_out, options)
        history.append(report(epoch, {"loss": sum(losses) / len(losses), **measured}))
    save_hf_model(engine.module, tokenizer, Path(options.output_dir))
    return history


def build_engine(options: argparse.Namespace, num_steps: int) -> OneDeviceEngine:
    """A model that has a head keeps it; a language model gets one that says 0."""
    device = resolve_device(options.device)
    architectures = AutoConfig.from_pretrained(options.model).architectures or []
    has_head = any(name.endswith("Classification") for name in architectures)
    build_model = partial(
        load_reward_model if has_head else load_value_model,
        options.model,
        dtype=compute_dtype("auto", device),
        device=device,
    )
    optimizer = FSDPOptimizerConfig(
        lr=options.lr,
        weight_decay=options.weight_decay,
        lr_scheduler_type="cosine",
        lr_warmup_steps_ratio=0.05,
        total_training_steps=num_steps,
    )
    engine = OneDeviceEngine(build_model, optimizer, is_value_model=True)
    engine.initialize()
    return engine


def epoch_batches(
    pairs: RMDataset, options: argparse.Namespace, epoch: int
) -> Iterator[list[Pair]]:
    """All pairs once, in an order that follows from seed and epoch; the rest sits out."""
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + epoch)
    order = torch.randperm(len(pairs), generator=generator).tolist()
    size = options.batch_size
    for start in range(0, len(order) - size + 1, size):
        yield [pair_of(pairs[index]) for index in order[start : start + size]]


def step(engine: OneDeviceEngine, batch: Sequence[Pair], options: argparse.Namespace) -> float:
    """One optimizer step; a pair is never parted by the cut into micro-batches."""

    def loss(columns: Columns, rows: TensorDict) -> tuple[Tensor, dict[str, Any]]:
        scores = columns["values"][:, 0]
        margins = scores[0::2] - scores[1::2]
        return -F.logsigmoid(margins).sum() / len(batch), {}

    rows = as_rows([tokens for pair in batch for tokens in pair])
    cut = MicroBatching(rows=2 * options.micro_batch_size)
    result = engine.train_batch(rows, loss, micro_batching=cut)
    engine.lr_scheduler_step()
    return result.loss


def evaluate(
    engine: OneDeviceEngine, pairs: RMDataset, options: argparse.Namespace
) -> dict[str, float]:
    """How often the chosen response has the higher score; an equal score is half a hit."""
    sequences = [tokens for index in range(len(pairs)) for tokens in pair_of(pairs[index])]
    cut = MicroBatching(rows=2 * options.micro_batch_size)
    scores = sequence_scores(engine, sequences, micro_batching=cut)
    margins = scores[0::2] - scores[1::2]
    hits = (margins > 0).float() + 0.5 * (margins == 0).float()
    return {
        "val_loss": float(-F.logsigmoid(margins).mean()),
        "val_accuracy": float(hits.mean()),
        "val_margin": float(margins.mean()),
    }


def pair_of(row: dict[str, Tensor]) -> Pair:
    chosen, rejected = (
        ids[mask.bool()].tolist()
        for ids, mask in zip(row["input_ids"], row["attention_mask"], strict=True)
    )
    return chosen, rejected


def report(epoch: int, measured: dict[str, float]) -> dict[str, float]:
    line = {"epoch": float(epoch), **measured}
    print(json.dumps({name: round(value, 4) for name, value in line.items()}))
    return line


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="a language model, or a reward model")
    parser.add_argument("--train_files", required=True, nargs="+")
    parser.add_argument("--val_files", required=True, nargs="+")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--prompt_key", default="prompt")
    parser.add_argument("--chosen_key", default="chosen")
    parser.add_argument("--rejected_key", default="rejected")
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--batch_size", type=int, default=64, help="pairs per optimizer step")
    parser.add_argument("--micro_batch_size", type=int, default=8, help="pairs per forward pass")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
