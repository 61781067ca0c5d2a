"""Conversations for supervised fine-tuning: a loss on every turn of the assistant, on nothing else.

A row has messages, and may have the tools that were offered and a switch for thinking. Every row is
encoded once when the dataset is made, so that one that cannot be trained is named before the first
step. `loss_mask[t]` says whether token t itself is trained, other than in `SFTDataset`.

The tokens are those of the whole conversation, written once by the chat template. A turn of the
assistant begins where the prompt ends that a model would be given at this point, and ends where the
template ends it, its end token included. Both borders are compared with the whole conversation, as
text and as tokens; a template that writes earlier turns differently once later ones follow (many
drop the thinking) is refused, because the model would be trained on prompts that it never sees.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jinja2 import TemplateError
from omegaconf import DictConfig
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from verl.config.convert import omega_conf_to_dataclass, plain
from verl.config.sft import SFTEngineDataConfig
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.dataset.media import (
    load_media,
    media_encoder_of,
    media_fault,
    with_media,
    without_content,
)
from verl.utils.dataset.prompt_encoder import schema_without_nulls
from verl.utils.dataset.prompts import (
    Message,
    Shield,
    has_media,
    render,
    shield,
    special_texts,
    without_nulls,
)
from verl.utils.dataset.quarantine import (
    Verdict,
    measured,
    prompt_fault,
    settle_refused,
    sound_rows,
)
from verl.utils.dataset.sft_dataset import RowTooLong
from verl.utils.dataset.tables import DataError, RowTable, open_table
from verl.utils.media import MEDIA, Media, rope_positions
from verl.utils.py_functional import printable
from verl.utils.tokenizer import hf_tokenizer

logger = logging.getLogger(__name__)
COLUMN_KEYS = ("messages_key", "tools_key", "enable_thinking_key")
ASSISTANT = "assistant"


@dataclass(frozen=True)
class Conversation:
    """`loss_mask` is 1 for each token of the assistant, the one that ends its turn included."""

    input_ids: list[int]
    loss_mask: list[int]
    media: tuple[Media, ...] = ()


@dataclass(frozen=True)
class Span:
    """Characters of a text, from `start` to before `end`."""

    start: int
    end: int


def turn_span(
    messages: Sequence[Message],
    turn: int,
    text: str,
    write: Any,
    tokenizer: PreTrainedTokenizerBase,
    accepts_mismatch: bool,
) -> Span:
    """Where message number `turn`, one of the assistant's, stands in the text of all of them."""
    if turn == 0:
        raise DataError("the conversation begins with the assistant; a prompt must come first")
    prompt = write(messages[:turn], add_generation_prompt=True)
    so_far = write(messages[: turn + 1], add_generation_prompt=False)
    if text.startswith(prompt) and text.startswith(so_far) and len(so_far) >= len(prompt):
        return Span(len(prompt), spoken_end(text, len(prompt), len(so_far), tokenizer))
    if accepts_mismatch:
        start = num_in_common(text, prompt)
        return Span(start, first_special_end(text, start, tokenizer))
    wrong = prompt if not text.startswith(prompt) else so_far
    raise TemplateMismatch(
        f"message {turn}: the chat template writes the conversation up to here as "
        f"{around_difference(wrong, text)} by itself and as {around_difference(text, wrong)} in "
        "the whole conversation. Cut the conversation before the later turns, or accept it with "
        "data.ignore_input_ids_mismatch=True"
    )


# ---- tokens --------------------------------------------------------------------------------------


def encode_with_spans(
    text: str, marks: Shield, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[Span]]:
    """Token ids and where in the text each token stands."""
    ids: list[int] = []
    token_spans: list[Span] = []
    start = 0
    for piece in marks.split(text):
        if piece in marks.texts:
            new = marks.encode(piece, tokenizer)
            token_spans += [Span(start, start + len(piece))] * len(new)
        else:
            encoded = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)
            new = list(encoded["input_ids"])
            token_spans += [Span(start + a, start + b) for a, b in encoded["offset_mapping"]]
        ids += new
        start += len(piece)
    return ids, token_spans


def check_tokens(
    turn: int,
    span: Span,
    text: str,
    marks: Shield,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    token_spans: Sequence[Span],
) -> None:
    """The tokens of a prompt alone must be those it has in the conversation."""
    num_before = sum(token.start < span.start for token in token_spans)
    crosses = any(token.start < span.end < token.end for token in token_spans)
    if crosses or marks.encode(text[: span.start], tokenizer) != list(ids[:num_before]):
        border = span.end if crosses else span.start
        raise TemplateMismatch(
            f"message {turn}: a token reaches over the border of the turn at "
            f"{printable(text[max(0, border - 20) : border + 20])!r}, so the model never sees this "
            "prompt as it is trained. Use a template that ends and begins turns with special "
            "tokens, or accept it with data.ignore_input_ids_mismatch=True"
        )


class MultiTurnSFTDataset(Dataset[dict[str, Any]]):
    """Gives `input_ids`, `attention_mask`, `position_ids` and `loss_mask`; rows with images also
    give `media`, and positions (3, length) where the model has these.

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
        self.media = media_encoder_of(self.tokenizer, processor, self.config.mm_processor_kwargs)
        table = open_table(parquet_files, use_shm=self.config.use_shm)
        columns = [self.config[key] for key in (*COLUMN_KEYS, "image_key")]
        rows = sound_rows(table, self._fault, columns=columns)
        if max_samples > 0:
            rows = rows.select(range(min(max_samples, len(rows))))
        self.rows = self._encodable(rows)
        self._warn_without_end()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        conversation = self._encode(self.rows[index])
        kept = self._kept(self.rows, index, len(conversation.input_ids))
        ids, mask = conversation.input_ids[kept], conversation.loss_mask[kept]
        padding = self.config.max_length - len(ids) if self.pad_mode is DatasetPadMode.RIGHT else 0
        row: dict[str, Any] = {
            "input_ids": torch.tensor(ids + [self._pad_token_id()] * padding),
            "attention_mask": torch.tensor([1] * len(ids) + [0] * padding),
            "position_ids": torch.tensor([*range(len(ids)), *[0] * padding]),
            "loss_mask": torch.tensor(mask + [0] * padding),
        }
        if conversation.media:
            row[MEDIA] = conversation.media
            positions = rope_positions(len(ids), conversation.media)
            if positions is not None:
                row["position_ids"] = F.pad(torch.from_numpy(positions), (0, padding))
        return row

    def _fault(self, row: Mapping[str, Any]) -> str | None:
        """What is wrong with a row, or None."""
        key = self.config.messages_key
        if key not in row:
            return f"has no column {key!r} (data.messages_key); its columns are {sorted(row)}"
        images = row.get(self.config.image_key) or ()
        fault = messages_fault(key, row[key]) or media_fault(row[key], images, ())
        if fault is None and images and self.processor is None:
            return (
                f"has {self.config.image_key}, and the model has no processor for them; choose a "
                "model that sees, or leave the column out"
            )
        return fault

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
        messages = [without_nulls(message) for message in row[config.messages_key]]
        images = row.get(config.image_key) or ()
        messages = with_media(messages, images, ()) if images else messages
        conversation = encode_conversation(
            without_content(messages) if has_media(messages) else messages,
            self.tokenizer,
            tools=offered_tools(row.get(config.tools_key)),
            template_kwargs=kwargs,
            accepts_mismatch=config.ignore_input_ids_mismatch,
        )
        return self._with_images(conversation, messages) if has_media(messages) else conversation

    def _with_images(self, conversation: Conversation, messages: Sequence[Message]) -> Conversation:
        """The conversation with the tokens of its images; such a one is never cut."""
        images, _ = load_media(messages)
        ids, media = self.media.place(conversation.input_ids, images)
        sizes = iter([len(self.media.expansion(image).ids) for image in images])
        mask: list[int] = []
        for token, is_trained in zip(conversation.input_ids, conversation.loss_mask, strict=True):
            is_place = token == self.media.processor.image_token_id
            mask += [is_trained] * (next(sizes) if is_place else 1)
        if len(ids) > self.config.max_length and self.config.truncation != "error":
            raise DataError(
                f"has {len(ids)} tokens with its images; data.max_length is "
                f"{self.config.max_length}, and a row with images is never cut"
            )
        return Conversation(ids, mask, media)

    def _warn_without_end(self) -> None:
        """A template whose turns end with no token of their own teaches no model to stop."""
        first = self._encode(self.rows[0])
        trained = [i for i, mask in zip(first.input_ids, first.loss_mask, strict=True) if mask]
        if trained and trained[-1] not in self.tokenizer.all_special_ids:
            logger.warning(
                "%s: the assistant's turn ends with %r, which is no special token; a model trained "
                "on it may not learn to stop",
                self.rows.location(0),
                self.tokenizer.decode(trained[-1:]),
            )

    def _kept(self, rows: RowTable, index: int, length: int) -> slice:
        limit = self.config.max_length
        if length <= limit:
            return slice(None)
        if self.config.truncation == "error":
            raise RowTooLong(
                f"{rows.location(index)} has {length} tokens, more than data.max_length={limit}; "
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
    for message in messages:
        content = message["content"]
        kinds = {part.get("type") for part in content} if isinstance(content, list) else set()
        if kinds - {"text", "image"}:
            return f"{key} has parts of type {sorted(map(str, kinds))}; text and image are known"
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
    values: dict[str, Any] = dict(plain(config) or {})
    nested: Mapping[str, Any] = values.pop("multiturn", None) or {}
    named = {key: nested[key] for key in COLUMN_KEYS if key in nested}
    return omega_conf_to_dataclass({**values, **named}, SFTEngineDataConfig)


class TemplateMismatch(DataError, AssertionError):
    """The template writes a turn differently when the conversation goes on."""


def encode_conversation(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    accepts_mismatch: bool = False,
) -> Conversation:
    """Token ids of a conversation and which of them are the assistant's.

    With `accepts_mismatch` a turn that does not pass begins where the text departs from its prompt
    and ends with its first special token.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"{tokenizer.name_or_path!r} is a slow tokenizer, which does not say where its tokens "
            "stand in the text; conversations need a fast one"
        )
    shielded, marks = shield(messages, tokenizer)
    write = partial(render, tokenizer=tokenizer, tools=tools, template_kwargs=template_kwargs)
    try:
        text = write(shielded, add_generation_prompt=False)
        turns = [index for index, message in enumerate(shielded) if message["role"] == ASSISTANT]
        spans = [
            turn_span(shielded, turn, text, write, tokenizer, accepts_mismatch) for turn in turns
        ]
    except (TemplateError, TypeError) as error:
        raise DataError(f"the chat template refuses the conversation: {error}") from error
    ids, token_spans = encode_with_spans(text, marks, tokenizer)
    if not accepts_mismatch:
        for turn, span in zip(turns, spans, strict=True):
            check_tokens(turn, span, text, marks, tokenizer, ids, token_spans)
    mask = [
        int(any(span.start <= token.start < span.end for span in spans)) for token in token_spans
    ]
    return Conversation(ids, mask)


def spoken_end(text: str, start: int, end: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """The end of a turn without the spaces that a template writes after its end token: generation
    stops before them."""
    spoken = text[start:end].rstrip()
    ends_itself = spoken.endswith(special_texts(tokenizer))
    return start + len(spoken) if ends_itself else end


def first_special_end(text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    ends = [
        index + len(token)
        for token in special_texts(tokenizer)
        if (index := text.find(token, start)) >= 0
    ]
    return min(ends, default=len(text))


def around_difference(text: str, other: str) -> str:
    """The text around the first character that differs from the other."""
    index = num_in_common(text, other)
    return repr(printable(text[max(0, index - 20) : index + 30]))


def num_in_common(text: str, other: str) -> int:
    """How many characters both begin with."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))
    )
