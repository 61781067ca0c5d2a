"""Pairs of responses for a reward model: to the same prompt, one chosen and one rejected."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.prompts import as_prompt, encode_prompt
from verl.utils.dataset.quarantine import prompt_fault, sound_rows
from verl.utils.dataset.sft_dataset import end_token
from verl.utils.dataset.tables import open_table
from verl.utils.tokenizer import hf_tokenizer


class RMDataset(Dataset[dict[str, Tensor]]):
    """Gives `input_ids`, `attention_mask` and `position_ids`, (2, max_length) each.

    Row 0 is the chosen response after its prompt, row 1 the rejected one, padded on the right. A
    sequence that is too long loses the beginning of its prompt: the score is read at its end.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase | str,
        prompt_key: str = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        max_length: int = 1024,
        add_eos: bool = True,
        cache_dir: str | None = None,
        max_samples: int = -1,
    ) -> None:
        self.tokenizer = hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.prompt_key, self.keys = prompt_key, (chosen_key, rejected_key)
        self.max_length = max_length
        self.add_eos = add_eos
        self.eos_token_id = end_token(self.tokenizer)
        table = open_table(parquet_files, cache_dir=cache_dir)
        columns = (prompt_key, *self.keys)
        self.rows = sound_rows(table, self._fault, columns=columns, cache_dir=cache_dir)
        if max_samples > 0:
            self.rows = self.rows.select(range(min(max_samples, len(self.rows))))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        row = self.rows[item]
        prompt_ids = encode_prompt(as_prompt(row[self.prompt_key], self.tokenizer), self.tokenizer)
        sides = [self._padded(prompt_ids, row[key]) for key in self.keys]
        return {name: torch.stack([side[name] for side in sides]) for name in sides[0]}

    def _padded(self, prompt_ids: list[int], response: str) -> dict[str, Tensor]:
        response_ids = list(self.tokenizer(response, add_special_tokens=False)["input_ids"])
        if self.add_eos and response_ids[-1:] != [self.eos_token_id]:
            response_ids.append(self.eos_token_id)
        ids = (prompt_ids + response_ids)[-self.max_length :]
        padding = self.max_length - len(ids)
        pad = self.tokenizer.pad_token_id
        return {
            "input_ids": torch.tensor(ids + [self.eos_token_id if pad is None else pad] * padding),
            "attention_mask": torch.tensor([1] * len(ids) + [0] * padding),
            "position_ids": torch.tensor([*range(len(ids)), *[0] * padding]),
        }

    def _fault(self, row: Mapping[str, Any]) -> str | None:
        """What is wrong with a row, or None."""
        for key in (self.prompt_key, *self.keys):
            if key not in row:
                return f"has no column {key!r}; its columns are {sorted(row)}"
        fault = prompt_fault(row[self.prompt_key])
        if fault is not None:
            return f"{self.prompt_key} {fault}"
        for key in self.keys:
            if not isinstance(row[key], str):
                return f"{key} is {row[key]!r:.80}; it must be text"
        return None
