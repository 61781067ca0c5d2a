"""The prompts of a parquet file, checked before the first is answered.

A row whose prompt cannot be sent (null, longer than `rollout.prompt_length`, refused by the chat
template) is named with its number and gets no responses; too many of them end the run before it
begins (`verl.utils.dataset.quarantine`).
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from verl.config.data import DataConfig
from verl.config.generation import GenerationConfig
from verl.utils.dataset.media import media_fault, with_media
from verl.utils.dataset.prompt_encoder import PromptEncoder
from verl.utils.dataset.prompts import (
    Prompt,
    PromptTooLong,
    as_prompt,
    has_media,
    set_chat_template,
)
from verl.utils.dataset.quarantine import prompt_fault, sound_rows
from verl.utils.dataset.tables import DataError, ParquetFile, open_table
from verl.utils.media import Media


class PromptFile:
    """Rows count from 0. `path` is the local file, a copy where `data.path` is a remote one."""

    def __init__(
        self, config: GenerationConfig, tokenizer: PreTrainedTokenizerBase, processor: Any = None
    ) -> None:
        options, max_tokens = config.data, config.rollout.prompt_length
        self._image_key = options.image_key
        set_chat_template(tokenizer, options.chat_template)
        self._tokenizer, self._key, self._max_tokens = tokenizer, options.prompt_key, max_tokens
        encoding = DataConfig(
            max_prompt_length=max_tokens,
            apply_chat_template_kwargs=options.apply_chat_template_kwargs,
            mm_processor_kwargs=options.mm_processor_kwargs,
        )
        self._encoder = PromptEncoder(tokenizer, processor, encoding)
        self._table = open_table(options.path)
        (file,) = self._table.files
        if not isinstance(file, ParquetFile):
            raise DataError(f"data.path is {options.path}; it must be a .parquet file")
        self.path = file.path
        self.num_rows = len(self._table)
        self._check_column()
        sound = sound_rows(self._table, self._fault, columns={self._key, self._image_key})
        self._sound = frozenset(sound.numbers.tolist())

    @property
    def num_sound(self) -> int:
        return len(self._sound)

    def has_prompt(self, row: int) -> bool:
        """Whether the row can be answered."""
        return row in self._sound

    def encoded(self, row: int) -> tuple[list[int], tuple[Media, ...]]:
        """The token ids that the model continues, and the images among them."""
        prompt = self._prompt(self._table[row])
        if has_media(prompt):
            return self._encoder.with_images(prompt)
        return self._encoder.ids(prompt), ()

    def _prompt(self, row: Mapping[str, Any]) -> Prompt:
        prompt = as_prompt(row[self._key], self._tokenizer)
        images = row.get(self._image_key) or ()
        if not images:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return with_media(messages, images, ())

    def _fault(self, row: Mapping[str, Any]) -> str | None:
        """Why a row gets no responses."""
        fault = prompt_fault(row[self._key])
        if fault is not None:
            return f"{self._key} {fault}"
        fault = media_fault(row[self._key], row.get(self._image_key) or (), ())
        if fault is not None:
            return fault
        prompt = self._prompt(row)
        if not isinstance(prompt, str) and self._tokenizer.chat_template is None:
            return (
                f"{self._key} is a list of messages, but the tokenizer has no chat template; set "
                "data.chat_template=chatml (or a Jinja template), or write prompts as text"
            )
        found = self._encoder.fault(prompt)
        if isinstance(found, PromptTooLong):
            return (
                f"{self._key} has more than {self._max_tokens} tokens; raise rollout.prompt_length"
            )
        if isinstance(found, DataError):
            return str(found)
        return None if found is None else f"{self._key} is refused by the chat template: {found}"

    def _check_column(self) -> None:
        columns = pq.read_schema(self.path).names
        if self._key not in columns:
            close = get_close_matches(self._key, columns, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise DataError(
                f"{self.path} has no column {self._key!r} (data.prompt_key); {hint}"
                f"it has: {', '.join(columns)}"
            )
