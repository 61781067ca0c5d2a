"""Pairs of responses for a reward model: to the same prompt, one chosen and one rejected.

A side is a text, the assistant's message in a list, or a whole conversation that ends with it; then
what comes before it is the prompt, and must be the same on both sides. Pairs that teach nothing or
cannot be read (equal sides, a missing column, conversations that differ earlier) are named and left
out, as in every dataset (`quarantine`).
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.prompts import as_prompt, encode_prompt
from verl.utils.dataset.quarantine import prompt_fault, sound_rows
from verl.utils.dataset.sft_dataset import RowTooLong, end_token
from verl.utils.dataset.tables import DataError, open_table
from verl.utils.tokenizer import hf_tokenizer

logger = logging.getLogger(__name__)


class RMDataset(Dataset[dict[str, Tensor]]):
    """Gives `input_ids`, `attention_mask`, `position_ids` and `loss_mask`, (2, max_length) each.

    Row 0 is the chosen response after its prompt, row 1 the rejected one, padded on the right;
    `loss_mask` is 1 on response tokens. With `truncation=left` a sequence that is too long loses
    the beginning of its prompt, with `right` the end of its response, with `error` it is refused.
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
        *,
        truncation: str = "left",
        use_shm: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.prompt_key, self.keys = prompt_key, (chosen_key, rejected_key)
        self.max_length, self.truncation = max_length, truncation
        self.add_eos = add_eos
        self.template_kwargs = dict(template_kwargs or {})
        self.eos_token_id = end_token(self.tokenizer)
        table = open_table(parquet_files, cache_dir=cache_dir, use_shm=use_shm)
        columns = (prompt_key, *self.keys)
        self.rows = sound_rows(table, self._fault, columns=columns, cache_dir=cache_dir)
        if max_samples > 0:
            self.rows = self.rows.select(range(min(max_samples, len(self.rows))))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        sides = [self._padded(ids, length) for ids, length in self._cut_sides(item)]
        return {name: torch.stack([side[name] for side in sides]) for name in sides[0]}

    def check_lengths(self) -> None:
        """Look at every pair once, so that one that is too long, or whose sides are the same after
        truncation, stops the run before it starts."""
        num_cut = 0
        for item in range(len(self)):
            whole, sides = self._sides(item), self._cut_sides(item)
            num_cut += any(len(ids) > self.max_length for ids, _ in whole)
            if sides[0] == sides[1]:
                raise DataError(
                    f"{self.rows.location(item)} has the same tokens on both sides after "
                    f"truncation to data.max_length={self.max_length}; raise it, or choose "
                    "data.truncation=left"
                )
        if num_cut:
            logger.warning(
                "%d of %d pairs are longer than data.max_length=%d and lose their %s",
                *(num_cut, len(self), self.max_length),
                "beginning" if self.truncation == "left" else "end",
            )

    def _sides(self, item: int) -> list[tuple[list[int], int]]:
        """The tokens of each side, and how many of them are the response."""
        prompt, *responses = self._texts(self.rows[item])
        prompt_ids = encode_prompt(
            as_prompt(prompt, self.tokenizer), self.tokenizer, template_kwargs=self.template_kwargs
        )
        sides = []
        for response in responses:
            ids = list(self.tokenizer(response, add_special_tokens=False)["input_ids"])
            if self.add_eos and ids[-1:] != [self.eos_token_id]:
                ids.append(self.eos_token_id)
            sides.append((prompt_ids + ids, len(ids)))
        return sides

    def _cut_sides(self, item: int) -> list[tuple[list[int], int]]:
        limit, sides = self.max_length, self._sides(item)
        longest = max(len(ids) for ids, _ in sides)
        if longest > limit and self.truncation == "error":
            raise RowTooLong(
                f"{self.rows.location(item)} has {longest} tokens, more than data.max_length="
                f"{limit}; raise it, or cut such pairs with data.truncation=left or right"
            )
        if self.truncation == "right":
            cut = [(ids[:limit], num - max(0, len(ids) - limit)) for ids, num in sides]
            return [(ids, max(0, num)) for ids, num in cut]
        return [(ids[-limit:], min(num, limit)) for ids, num in sides]

    def _padded(self, ids: list[int], num_response: int) -> dict[str, Tensor]:
        padding = self.max_length - len(ids)
        pad = self.tokenizer.pad_token_id
        response = [0] * (len(ids) - num_response) + [1] * num_response
        return {
            "input_ids": torch.tensor(ids + [self.eos_token_id if pad is None else pad] * padding),
            "attention_mask": torch.tensor([1] * len(ids) + [0] * padding),
            "position_ids": torch.tensor([*range(len(ids)), *[0] * padding]),
            "loss_mask": torch.tensor(response + [0] * padding),
        }

    def _texts(self, row: Mapping[str, Any]) -> tuple[Any, str, str]:
        """The prompt and both responses."""
        prompt = row.get(self.prompt_key)
        before, responses = [], []
        for key in self.keys:
            side = row[key]
            before.append([] if isinstance(side, str) else list(side[:-1]))
            responses.append(side if isinstance(side, str) else side[-1]["content"])
        return (before[0] or prompt, responses[0], responses[1])

    def _fault(self, row: Mapping[str, Any]) -> str | None:
        """What is wrong with a row, or None."""
        for key in self.keys:
            if key not in row:
                return f"has no column {key!r}; its columns are {sorted(row)}"
            fault = side_fault(row[key])
            if fault is not None:
                return f"{key} {fault}"
        conversations = [
            [] if isinstance(row[key], str) else list(row[key][:-1]) for key in self.keys
        ]
        chosen, rejected = self.keys
        if conversations[0] != conversations[1]:
            return f"{chosen} and {rejected} differ before their last message"
        if not conversations[0]:
            if self.prompt_key not in row:
                return f"has no column {self.prompt_key!r}; its columns are {sorted(row)}"
            fault = prompt_fault(row[self.prompt_key])
            if fault is not None:
                return f"{self.prompt_key} {fault}"
        elif not self._is_of_prompt(row.get(self.prompt_key), conversations[0]):
            return f"{self.prompt_key} is not what {chosen} begins with"
        _, one, other = self._texts(row)
        return f"{chosen} and {rejected} are the same" if one == other else None

    def _is_of_prompt(self, prompt: Any, conversation: list[Any]) -> bool:
        """Whether a prompt column, if there is one, says what a conversation begins with."""
        if prompt is None:
            return True
        if isinstance(prompt, str):
            return any(message["content"] == prompt for message in conversation)
        return list(prompt) == conversation


def side_fault(side: Any) -> str | None:
    if isinstance(side, str):
        return None
    if not isinstance(side, list):
        return f"is {side!r:.80}; it must be text, or messages that end with the assistant's"
    fault = prompt_fault(side)
    if fault is not None:
        return fault
    last = side[-1]
    if last["role"] != "assistant" or not isinstance(last["content"], str):
        return f"ends with {last!r:.80}; it must end with a text of the assistant"
    return None
