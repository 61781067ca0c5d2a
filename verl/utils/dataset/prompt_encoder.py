"""`PromptEncoder`: how the options of a run turn a prompt into text, token ids and pixels.

It binds `encode_prompt` to a tokenizer, a processor, the tools and the options, for the dataset
that measures prompts and for code that still wants token ids in its rows.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.config.data import DataConfig
from verl.utils.dataset.prompt_encoder import Column, load_media, padded_prompt
from verl.utils.dataset.prompts import (
    Prompt,
    PromptTooLong,
    encode_prompt,
    prompt_text,
    shield,
    truncate,
)
from verl.utils.dataset.tables import DataError

PADDED = ("input_ids", "attention_mask", "position_ids")


class PromptEncoder:
    """Prompts with images or videos need `processor`; all others need only `tokenizer`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: Any,
        config: DataConfig,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = config
        self.tools = list(tools)

    def text(self, prompt: Prompt) -> str:
        kwargs = self.config.apply_chat_template_kwargs
        return prompt_text(prompt, self.tokenizer, tools=self.tools, template_kwargs=kwargs)

    def ids(self, prompt: Prompt, truncation: str | None = None) -> list[int]:
        """At most `data.max_prompt_length` token ids, cut as `truncation` says."""
        limit, truncation = self.config.max_prompt_length, truncation or self.config.truncation
        if has_media(prompt):
            return truncate(list(self.processed(prompt)["input_ids"][0]), limit, truncation)
        return encode_prompt(
            prompt,
            self.tokenizer,
            max_tokens=limit,
            truncation=truncation,
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

    def processed(self, prompt: Prompt) -> Mapping[str, Any]:
        """What the processor makes of a prompt with images: ids with places for them, pixels."""
        assert not isinstance(prompt, str)
        _, marks = shield(prompt, self.tokenizer)
        if marks.texts:  # a processor takes text, in which they would be control tokens
            raise DataError(
                f"its words hold the special tokens {sorted(marks.texts.values())}, which cannot "
                "be sent as text beside images and videos; take them out of the row"
            )
        images, videos = load_media(prompt)
        media = {"images": images, "videos": videos}
        return self.processor(
            text=[self.text(prompt)], **{name: found for name, found in media.items() if found}
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
        outputs = dict(self.processed(prompt))
        return {name: value for name, value in outputs.items() if name not in PADDED}


def has_media(prompt: Prompt) -> bool:
    """Whether a message has a part that is an image or a video."""
    return not isinstance(prompt, str) and any(
        part.get("type") in ("image", "video")
        for message in prompt
        if isinstance(message["content"], list)
        for part in message["content"]
    )
