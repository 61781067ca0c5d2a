"""Between batches and an engine's requests: prompts out of a batch, responses into one.

Prompts are padded on the left, responses on the right. Masks come from the lengths, never from pad
ids: a pad token may also be the end of a sentence.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.dataset.prompts import encode_prompt
from verl.utils.model import compute_position_id_with_mask
from verl.utils.torch_functional import kept_tokens
from verl.workers.rollout.base import GenerationRequest, SamplingParams

SEED_COLUMN = "sampling_seed"
"""Rows may carry the seed of their sample; without it the engine takes a fresh one."""


def sampling_options(rollout: Any, meta_info: Mapping[str, Any]) -> dict[str, Any]:
    """What all rows of a batch are sampled with, from the options of `rollout`.

    With `meta_info["validate"]` those of validation; `meta_info["do_sample"]=False` is greedy.
    """
    is_validation = bool(meta_info.get("validate", False))
    source = rollout.val_kwargs if is_validation else rollout
    does_sample = bool(meta_info.get("do_sample", source.do_sample))
    options = {
        "temperature": source.temperature if does_sample else 0.0,
        "top_p": source.top_p,
        "top_k": source.top_k,
        "repetition_penalty": rollout.repetition_penalty,
        "ignore_eos": rollout.ignore_eos,
    }
    # Exact mode returns the log-probs of training, which knows no filters.
    log_probs = "raw" if rollout.exact else rollout.logprobs_mode.removesuffix("_logprobs")
    return options if log_probs == "processed" else {**options, "log_probs": log_probs}


def prompts_of(batch: DataProto, tokenizer: Any, *, max_tokens: int) -> list[list[int]]:
    """The token ids of each prompt: from `input_ids`, else `raw_prompt_ids`, else `raw_prompt`."""
    if batch.batch is not None and "input_ids" in batch.batch:
        kept = kept_tokens(batch.batch["input_ids"], batch.batch["attention_mask"])
        return [row.tolist() for row in kept]
    columns = batch.non_tensor_batch
    if "raw_prompt_ids" in columns:
        return [list(map(int, ids)) for ids in columns["raw_prompt_ids"]]
    if "raw_prompt" not in columns:
        raise ValueError(
            f"the batch has the columns {sorted(columns)}; generate_sequences takes prompts from "
            "input_ids (with attention_mask), raw_prompt_ids or raw_prompt"
        )
    return [
        encode_prompt(prompt, tokenizer, max_tokens=max_tokens, truncation="error")
        for prompt in columns["raw_prompt"]
    ]


def requests_of(
    prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[Any] | None
) -> list[GenerationRequest]:
    """A request for each run of equal prompts, so that an engine computes the prompt once."""
    requests: list[GenerationRequest] = []
    start = 0
    for row in range(1, len(prompts) + 1):
        if row < len(prompts) and list(prompts[row]) == list(prompts[start]):
            continue
        own = None if seeds is None else tuple(int(seed) for seed in seeds[start:row])
        requests.append(
            GenerationRequest(
                request_id=f"row {start}",
                prompt_ids=tuple(prompts[start]),
                params=params,
                num_samples=row - start,
                seeds=own,
            )
        )
        start = row
    return requests


def padded_sequences(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    response_masks: Sequence[Sequence[int]],
    *,
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
) -> dict[str, Tensor]:
    """The columns of prompts and responses, which must fit. Masks say which tokens to train."""
    prompt_ids, prompt_mask = pad(prompts, prompt_length, pad_token_id, on_left=True)
    response_ids, response_tokens = pad(responses, response_length, pad_token_id)
    response_mask, _ = pad(response_masks, response_length, 0)
    attention_mask = torch.cat([prompt_mask, response_tokens], dim=1)  # (B, P + T)
    return {
        "prompts": prompt_ids,
        "responses": response_ids,
        "response_mask": response_mask,
        "input_ids": torch.cat([prompt_ids, response_ids], dim=1),
        "attention_mask": attention_mask,
        "position_ids": compute_position_id_with_mask(attention_mask),
    }


def pad(
    rows: Sequence[Sequence[int]], length: int, value: int, *, on_left: bool = False
) -> tuple[Tensor, Tensor]:
    """The rows as (B, length), and a mask that is 1 where they have a token."""
    is_token = _entry_mask(rows, length, on_left=on_left)
    padded = torch.full((len(rows), length), value, dtype=torch.long)
    padded[is_token] = _joined(rows, np.int64)
    return padded, is_token.long()


def pad_floats(rows: Sequence[Sequence[float] | None], length: int) -> Tensor:
    """The rows as (B, length), cut off there, with zeros behind them."""
    kept = [(row or [])[:length] for row in rows]
    padded = torch.zeros(len(rows), length)
    padded[_entry_mask(kept, length)] = _joined(kept, np.float32)
    return padded


def _entry_mask(rows: Sequence[Sequence[Any]], length: int, *, on_left: bool = False) -> Tensor:
    """Mask of the entries of padded rows, (B, length)."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)[:, None]  # (B, 1)
    longest = int(lengths.max()) if rows else 0
    if longest > length:
        raise ValueError(f"a row has {longest} entries; it is to be padded to {length}")
    columns = torch.arange(length)
    return columns >= length - lengths if on_left else columns < lengths


def _joined(rows: Sequence[Sequence[Any]], dtype: type[np.generic]) -> Tensor:
    """All entries one after the other: several times as fast as a tensor for each row."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype, sum(map(len, rows))))
