"""`PromptEncoder`: how the options of a run turn a prompt into text, token ids and pixels.

It binds `encode_prompt` to a tokenizer, a processor, the tool schemas and the options, for the
dataset that measures prompts and for code that wants token ids in its rows (`PromptRow`).

Prompts with images go through a `MediaEncoder`, here as in agent loops, so what is measured is what
is sent.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.config.data import DataConfig
from verl.utils.dataset.media import load_media, media_encoder_of
from verl.utils.dataset.prompts import Prompt, PromptTooLong, encode_prompt, has_media, prompt_text
from verl.utils.dataset.tables import DataError
from verl.utils.media import Media

PADDED = ("input_ids", "attention_mask", "position_ids")
Column = Callable[[], Any]


class PromptEncoder:
    """Prompts with images or videos need `processor`; all others need only `tokenizer`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: Any,
        config: DataConfig,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_images: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = config
        self.tools = list(tools)
        self.media = media_encoder_of(
            tokenizer, processor, config.mm_processor_kwargs, max_images=max_images
        )

    def text(self, prompt: Prompt) -> str:
        kwargs = self.config.apply_chat_template_kwargs
        return prompt_text(prompt, self.tokenizer, tools=self.tools, template_kwargs=kwargs)

    def ids(self, prompt: Prompt, truncation: str | None = None) -> list[int]:
        """At most `data.max_prompt_length` token ids, cut as `truncation` says."""
        if has_media(prompt):
            return self.with_images(prompt)[0]
        return encode_prompt(
            prompt,
            self.tokenizer,
            max_tokens=self.config.max_prompt_length,
            truncation=truncation or self.config.truncation,
            tools=self.tools,
            template_kwargs=self.config.apply_chat_template_kwargs,
        )

    def fault(self, prompt: Prompt) -> Exception | None:
        """Why a prompt cannot be sent as a whole: it is too long, or the template refuses it."""
        try:
            if not has_media(prompt):
                text = self.text(prompt)
                if text.isascii() and len(text) <= self.config.max_prompt_length - 2:
                    return None  # a token is a character or more; two may be added around the text
            self.ids(prompt, truncation="error")
        except (PromptTooLong, TemplateError, TypeError, DataError) as fault:
            return fault
        return None

    def with_images(self, prompt: Prompt) -> tuple[list[int], tuple[Media, ...]]:
        """The ids of a prompt with images, and the images."""
        assert not isinstance(prompt, str)
        return self.media.encode_prompt(
            prompt,
            max_tokens=self.config.max_prompt_length,
            tools=self.tools,
            template_kwargs=self.config.apply_chat_template_kwargs,
        )

    def offered(self, prompt: Prompt) -> dict[str, Column]:
        """The columns that a row can be asked for."""
        columns: dict[str, Column] = {
            "full_prompts": partial(self.text, prompt),
            "raw_prompt_ids": partial(self.ids, prompt),
            **{name: partial(self._padded, prompt, name) for name in PADDED},
        }
        if has_media(prompt):
            columns["multi_modal_data"] = partial(self._media, prompt)
            if self.config.return_multi_modal_inputs:
                columns["multi_modal_inputs"] = partial(self._media_inputs, prompt)
        return columns

    def _padded(self, prompt: Prompt, name: str) -> Tensor:
        pad = self.tokenizer.pad_token_id
        if not isinstance(pad, int):
            raise ValueError("the tokenizer has no pad token; load it with hf_tokenizer")
        return padded_prompt(self.ids(prompt), self.config.max_prompt_length, pad)[name]

    def _media(self, prompt: Prompt) -> dict[str, list[Any]]:
        assert not isinstance(prompt, str)
        images, videos = load_media(prompt)
        return {name: found for name, found in (("image", images), ("video", videos)) if found}

    def _media_inputs(self, prompt: Prompt) -> dict[str, Any]:
        """The processor's outputs for all images together."""
        _, media = self.with_images(prompt)
        names = dict.fromkeys(name for one in media for name in one.inputs)
        return {name: torch.cat([one.inputs[name] for one in media]) for name in names}


class PromptRow(dict[str, Any]):
    """A dictionary with further entries, `offered`, that are computed when they are read."""

    def __init__(self, columns: dict[str, Any], offered: dict[str, Column]) -> None:
        super().__init__(columns)
        self.offered = offered

    def __missing__(self, name: str) -> Any:
        if name not in self.offered:
            raise KeyError(name)
        self[name] = value = self.offered[name]()
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        """Only what is there travels to other processes."""
        return dict, (dict(self),)


def padded_prompt(ids: list[int], length: int, pad_token_id: int) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask` and `position_ids`, (length,) each, padded on the left."""
    padding = length - len(ids)
    return {
        "input_ids": torch.tensor([pad_token_id] * padding + ids),
        "attention_mask": torch.tensor([0] * padding + [1] * len(ids)),
        "position_ids": torch.tensor([0] * padding + list(range(len(ids)))),
    }


def schema_without_nulls(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: schema_without_nulls(value) for key, value in schema.items() if value is not None
        }
    if isinstance(schema, list):
        return [schema_without_nulls(value) for value in schema]
    return schema
