"""Rows of prompt and response for supervised fine-tuning.

The prompt is encoded exactly as reinforcement learning encodes it later (`encode_prompt`): a text
is one user turn of the chat template, unless it has been through a template already. The response
follows, then the end-of-sequence token, so that a trained model knows when to stop.

`loss_mask[t]` says whether the prediction *of the next token* at position t is trained: it is 1
from the last prompt token (which predicts the first response token) to the token before the end.
Pair it with labels as `loss_mask[:-1]` and `input_ids[1:]`; `trained_tokens` does.
"""

import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from verl.config.convert import omega_conf_to_dataclass
from verl.config.sft import SFTDataConfig
from verl.utils.dataset.prompts import as_prompt, encode_prompt, holds_special_tokens
from verl.utils.dataset.quarantine import prompt_fault, sound_rows
from verl.utils.dataset.tables import DataError, open_table
from verl.utils.environment import BadData
from verl.utils.tokenizer import hf_tokenizer

logger = logging.getLogger(__name__)


class RowTooLong(NotImplementedError, BadData):
    """A row longer than `data.max_length`, with `data.truncation=error`."""


class SFTDataset(Dataset[dict[str, Tensor]]):
    """Gives `input_ids`, `attention_mask`, `position_ids` and `loss_mask`, (max_length,) each."""

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase | str,
        config: SFTDataConfig | DictConfig | Mapping[str, Any],
        max_samples: int = -1,
    ) -> None:
        self.config: SFTDataConfig = omega_conf_to_dataclass(config, SFTDataConfig)
        self.tokenizer = hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.eos_token_id = end_token(self.tokenizer)
        table = open_table(parquet_files, use_shm=self.config.use_shm)
        names = [*column_names(self.config.prompt_key), *column_names(self.config.response_key)]
        self.rows = sound_rows(table, self._fault, columns=names)
        if max_samples > 0:
            self.rows = self.rows.select(range(min(max_samples, len(self.rows))))
        self._warn_without_turn_start()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        prompt_ids, response_ids = self.token_ids(index)
        ids = prompt_ids + response_ids
        is_trained = [0] * (len(prompt_ids) - 1) + [1] * len(response_ids) + [0]
        limit = self.config.max_length
        if len(ids) > limit:
            kept = self._kept(index, len(ids))
            ids, is_trained = ids[kept], is_trained[kept]
            is_trained[-1] = 0  # what it would predict was cut off
        padding = limit - len(ids)
        pad = self.tokenizer.pad_token_id
        attention_mask = torch.tensor([1] * len(ids) + [0] * padding)
        return {
            "input_ids": torch.tensor(ids + [self.eos_token_id if pad is None else pad] * padding),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(0) - 1) * attention_mask,
            "loss_mask": torch.tensor(is_trained + [0] * padding),
        }

    def token_ids(self, index: int) -> tuple[list[int], list[int]]:
        """The tokens of the prompt, and of the response with its end, before any truncation."""
        prompt, response = self._parts(self.rows[index])
        prompt_ids = encode_prompt(
            as_prompt(prompt, self.tokenizer),
            self.tokenizer,
            template_kwargs=self.config.apply_chat_template_kwargs,
        )
        response_ids = list(self.tokenizer(response, add_special_tokens=False)["input_ids"])
        if response_ids[-1:] != [self.eos_token_id]:
            response_ids.append(self.eos_token_id)
        return prompt_ids, response_ids

    def check_lengths(self) -> None:
        """Look at every row once, so that one that is too long stops the run before it starts."""
        if self.config.truncation == "error":
            for index in range(len(self)):
                length = sum(map(len, self.token_ids(index)))
                if length > self.config.max_length:
                    self._kept(index, length)

    def _parts(self, row: Mapping[str, Any]) -> tuple[Any, Any]:
        """The prompt and the response, from wherever the options say they are."""
        config = self.config
        prompt = cell(row, config.prompt_key, "data.prompt_key")
        response = cell(row, config.response_key, "data.response_key")
        return (
            descend(prompt, config.prompt_dict_keys or []),
            descend(response, config.response_dict_keys or []),
        )

    def _fault(self, row: Mapping[str, Any]) -> str | None:
        """What is wrong with a row, or None."""
        try:
            prompt, response = self._parts(row)
        except DataError as fault:
            return str(fault)
        fault = prompt_fault(prompt)
        if fault is not None:
            return (
                f"the prompt {fault} (it is {prompt!r:.80}). Name its column with data.prompt_key, "
                "and the way inside a dict with data.prompt_dict_keys"
            )
        if not isinstance(response, str):
            return (
                f"the response is {response!r:.80}; it must be text. Name its column with "
                "data.response_key, and the way inside a dict with data.response_dict_keys"
            )
        return None

    def _kept(self, index: int, length: int) -> slice:
        limit = self.config.max_length
        if self.config.truncation == "error":
            raise RowTooLong(
                f"{self.rows.location(index)} has {length} tokens, more than data.max_length="
                f"{limit}; "
                "raise it, or cut such rows with data.truncation=left or right"
            )
        is_left = self.config.truncation == "left"
        return slice(length - limit, None) if is_left else slice(limit)

    def _warn_without_turn_start(self) -> None:
        """A templated prompt that stops before the assistant's turn teaches to skip its start."""
        prompt, _ = self._parts(self.rows[0])
        if self.tokenizer.chat_template is None or not isinstance(prompt, str):
            return
        opening = generation_prompt(self.tokenizer)
        if (
            opening
            and holds_special_tokens(prompt, self.tokenizer)
            and not prompt.endswith(opening)
        ):
            logger.warning(
                "%s is templated but does not end with the start of the assistant's turn (%r); "
                "make it with apply_chat_template(..., add_generation_prompt=True)",
                self.rows.location(0), opening,
            )  # fmt: skip


def trained_tokens(loss_mask: Tensor) -> Tensor:
    """(..., L) shifted mask -> (..., L) mask of the tokens whose own probability is trained."""
    is_trained = torch.zeros_like(loss_mask)
    is_trained[..., 1:] = loss_mask[..., :-1]
    return is_trained


def generation_prompt(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the chat template puts between the user's turn and the assistant's words."""
    turns = [{"role": "user", "content": "?"}]
    without = str(tokenizer.apply_chat_template(turns, tokenize=False))
    whole = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    return whole.removeprefix(without)


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    if not isinstance(tokenizer.eos_token_id, int):
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token; a model "
            "trained without one never stops: set tokenizer.eos_token"
        )
    return tokenizer.eos_token_id


def column_names(key: str | list[str]) -> list[str]:
    return [key] if isinstance(key, str) else list(key)


def cell(row: Mapping[str, Any], key: str | list[str], option: str) -> Any:
    """The value in the column that an option names."""
    names = column_names(key)
    if len(names) != 1:
        raise DataError(f"{option} is {names}; it must name one column")
    if names[0] not in row:
        close = get_close_matches(names[0], row, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise DataError(f"has no column {names[0]!r} ({option}); {hint}It has: {', '.join(row)}")
    return row[names[0]]


def descend(value: Any, keys: Sequence[str]) -> Any:
    """Follow keys into nested dicts; a list of one element is entered."""
    for key in keys:
        if isinstance(value, list | tuple | np.ndarray) and len(value) == 1:
            value = value[0]
        if not isinstance(value, Mapping) or key not in value:
            known = ", ".join(map(str, value)) if isinstance(value, Mapping) else "no keys"
            raise DataError(f"has no {key!r} ({list(keys)}); there is: {known}")
        value = value[key]
    return value
