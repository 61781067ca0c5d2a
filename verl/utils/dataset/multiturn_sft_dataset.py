"""Conversations for supervised fine-tuning: a loss on every turn of the assistant, on nothing else.

A row has messages, and may have the tools that were offered and a switch for thinking. Which tokens
are the assistant's is decided in `conversation`. Every row is encoded once when the dataset is
made, so that one that cannot be trained is named before the first step and not in the middle.

`loss_mask[t]` says whether token t itself is trained, other than in `SFTDataset`.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from verl.config.convert import omega_conf_to_dataclass
from verl.config.sft import SFTEngineDataConfig
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.dataset.multiturn_sft_dataset import ASSISTANT, Conversation, encode_conversation
from verl.utils.dataset.prompt_encoder import schema_without_nulls
from verl.utils.dataset.prompts import without_nulls
from verl.utils.dataset.quarantine import (
    Verdict,
    measured,
    prompt_fault,
    settle_refused,
    sound_rows,
)
from verl.utils.dataset.sft_dataset import RowTooLong
from verl.utils.dataset.tables import DataError, RowTable, open_table
from verl.utils.tokenizer import hf_tokenizer

logger = logging.getLogger(__name__)

COLUMN_KEYS = ("messages_key", "tools_key", "enable_thinking_key")


class MultiTurnSFTDataset(Dataset[dict[str, Tensor]]):
    """Gives `input_ids`, `attention_mask`, `position_ids` and `loss_mask`.

    They have the length of the row, or `max_length` with `pad_mode=right`. `config` may hold the
    column names itself or in a `multiturn` section.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase | str,
        config: SFTEngineDataConfig | DictConfig | Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self.config = as_conversation_config(config)
        self.pad_mode = DatasetPadMode(self.config.pad_mode)
        self.tokenizer = hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.processor = processor
        table = open_table(parquet_files, use_shm=self.config.use_shm)
        columns = [self.config[key] for key in COLUMN_KEYS]
        rows = sound_rows(table, self._fault, columns=columns)
        if max_samples > 0:
            rows = rows.select(range(min(max_samples, len(rows))))
        self.rows = self._encodable(rows)
        self._warn_without_end()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        conversation = self._encode(self.rows[index])
        kept = self._kept(self.rows, index, len(conversation.input_ids))
        ids, mask = conversation.input_ids[kept], conversation.loss_mask[kept]
        padding = self.config.max_length - len(ids) if self.pad_mode is DatasetPadMode.RIGHT else 0
        return {
            "input_ids": torch.tensor(ids + [self._pad_token_id()] * padding),
            "attention_mask": torch.tensor([1] * len(ids) + [0] * padding),
            "position_ids": torch.tensor([*range(len(ids)), *[0] * padding]),
            "loss_mask": torch.tensor(mask + [0] * padding),
        }

    def _fault(self, row: Mapping[str, Any]) -> str | None:
        """What is wrong with a row, or None."""
        key = self.config.messages_key
        if key not in row:
            return f"has no column {key!r} (data.messages_key); its columns are {sorted(row)}"
        return messages_fault(key, row[key])

    def _encodable(self, rows: RowTable) -> RowTable:
        """The rows that can be trained; one that is too long is an error if nothing is cut."""
        found = measured(partial(self._verdict, rows), len(rows), num_workers=1)
        refused = np.flatnonzero(found == Verdict.REFUSED)
        if len(refused):
            settle_refused(rows, refused, lambda item: self._attempt(rows[item]))
        too_long = np.flatnonzero(found == Verdict.TOO_LONG)
        if len(too_long) and self.config.truncation == "error":
            first = int(too_long[0])
            self._kept(rows, first, len(self._encode(rows[first]).input_ids))
        return rows.select(np.flatnonzero(found != Verdict.REFUSED))

    def _verdict(self, rows: RowTable, item: int) -> Verdict:
        made = self._attempt(rows[item])
        if isinstance(made, DataError):
            return Verdict.REFUSED
        fits = len(made.input_ids) <= self.config.max_length
        return Verdict.FITS if fits else Verdict.TOO_LONG

    def _attempt(self, row: Mapping[str, Any]) -> Conversation | DataError:
        try:
            return self._encode(row)
        except DataError as error:
            return error

    def _encode(self, row: Mapping[str, Any]) -> Conversation:
        config = self.config
        kwargs = dict(config.apply_chat_template_kwargs)
        if row.get(config.enable_thinking_key) is not None:
            kwargs["enable_thinking"] = bool(row[config.enable_thinking_key])
        return encode_conversation(
            [without_nulls(message) for message in row[config.messages_key]],
            self.tokenizer,
            tools=offered_tools(row.get(config.tools_key)),
            template_kwargs=kwargs,
            accepts_mismatch=config.ignore_input_ids_mismatch,
        )

    def _warn_without_end(self) -> None:
        """A template whose turns end with no token of their own teaches no model to stop."""
        first = self._encode(self.rows[0])
        trained = [i for i, mask in zip(first.input_ids, first.loss_mask, strict=True) if mask]
        if trained and trained[-1] not in self.tokenizer.all_special_ids:
            logger.warning(
                "%s: the assistant's turn ends with %r, which is no special token; a model trained "
                "on it may not learn to stop",
                self.rows.place(0),
                self.tokenizer.decode(trained[-1:]),
            )

    def _kept(self, rows: RowTable, index: int, length: int) -> slice:
        limit = self.config.max_length
        if length <= limit:
            return slice(None)
        if self.config.truncation == "error":
            raise RowTooLong(
                f"{rows.place(index)} has {length} tokens, more than data.max_length={limit}; "
                "raise it, or cut such rows with data.truncation=left or right"
            )
        return slice(length - limit, None) if self.config.truncation == "left" else slice(limit)

    def _pad_token_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad
        if not isinstance(pad, int):
            raise DataError(f"the tokenizer {self.tokenizer.name_or_path!r} has no pad token")
        return pad


def messages_fault(key: str, messages: Any) -> str | None:
    """Why messages cannot be trained, or None."""
    if isinstance(messages, str):
        return f"{key} is text, not a list of messages"
    fault = prompt_fault(messages)
    if fault is not None:
        return f"{key} {fault}"
    if all(message["role"] != ASSISTANT for message in messages):
        return f"{key} has no turn of the assistant, so there is nothing to train"
    if any(isinstance(message["content"], list | tuple) for message in messages):
        return f"{key} has content in parts; only text is trained here"
    return None


def offered_tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools of a row: a list of schemas, or such a list as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"its tools are no JSON: {error}") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(f"its tools are {value!r:.80}; they must be a list of schemas")
    return schema_without_nulls(value)


def as_conversation_config(
    config: SFTEngineDataConfig | DictConfig | Mapping[str, Any] | None,
) -> SFTEngineDataConfig:
    """The typed section; names of columns in a `multiturn` section count as its own."""
    if isinstance(config, SFTEngineDataConfig):
        return config
    plain: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else config
    values: dict[str, Any] = dict(plain or {})
    nested: Mapping[str, Any] = values.pop("multiturn", None) or {}
    named = {key: nested[key] for key in COLUMN_KEYS if key in nested}
    return omega_conf_to_dataclass({**values, **named}, SFTEngineDataConfig)
