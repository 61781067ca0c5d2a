"""Which tokens of a conversation the assistant wrote.

The tokens are those of the whole conversation, written once by the chat template. A turn of the
assistant begins where the prompt ends that a model would be given at this point, and it ends where
the template ends it: so what is trained is what the model has to say there, its end token included,
and nothing else. Both borders are compared with the whole conversation, as text and as tokens; a
template that writes earlier turns differently once later ones follow (many drop the thinking) does
not pass, because the model would be trained on prompts that it will never see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.prompts import Message, Shield, render, shield, special_texts
from verl.utils.dataset.tables import DataError
from verl.utils.py_functional import printable

ASSISTANT = "assistant"


class TemplateMismatch(DataError, AssertionError):
    """The template writes a turn differently when the conversation goes on."""


@dataclass(frozen=True)
class Conversation:
    """`loss_mask` is 1 for each token of the assistant, the one that ends its turn included."""

    input_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True)
class Span:
    """Characters of a text, from `start` to before `end`."""

    start: int
    end: int


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
        turns = [place for place, message in enumerate(shielded) if message["role"] == ASSISTANT]
        spans = [
            turn_span(shielded, turn, text, write, tokenizer, accepts_mismatch) for turn in turns
        ]
    except (TemplateError, TypeError) as error:
        raise DataError(f"the chat template refuses the conversation: {error}") from error
    ids, places = encode_with_places(text, marks, tokenizer)
    if not accepts_mismatch:
        for turn, span in zip(turns, spans, strict=True):
            check_tokens(turn, span, text, marks, tokenizer, ids, places)
    mask = [int(any(span.start <= place.start < span.end for span in spans)) for place in places]
    return Conversation(ids, mask)


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


def spoken_end(text: str, start: int, end: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """The end of a turn without the spaces that a template writes after its end token: generation
    stops before them."""
    spoken = text[start:end].rstrip()
    ends_itself = spoken.endswith(special_texts(tokenizer))
    return start + len(spoken) if ends_itself else end


def first_special_end(text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    ends = [
        place + len(token)
        for token in special_texts(tokenizer)
        if (place := text.find(token, start)) >= 0
    ]
    return min(ends, default=len(text))


def around_difference(text: str, other: str) -> str:
    """The text near the place where it departs from the other."""
    place = num_in_common(text, other)
    return repr(printable(text[max(0, place - 20) : place + 30]))


def num_in_common(text: str, other: str) -> int:
    """How many characters both begin with."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))
    )


# ---- tokens --------------------------------------------------------------------------------------


def encode_with_places(
    text: str, marks: Shield, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[Span]]:
    """Token ids and where in the text each token stands."""
    ids: list[int] = []
    places: list[Span] = []
    start = 0
    for piece in marks.split(text):
        if piece in marks.texts:
            new = marks.encode(piece, tokenizer)
            places += [Span(start, start + len(piece))] * len(new)
        else:
            encoded = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)
            new = list(encoded["input_ids"])
            places += [Span(start + a, start + b) for a, b in encoded["offset_mapping"]]
        ids += new
        start += len(piece)
    return ids, places


def check_tokens(
    turn: int,
    span: Span,
    text: str,
    marks: Shield,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    places: Sequence[Span],
) -> None:
    """The tokens of a prompt alone must be those it has in the conversation."""
    num_before = sum(place.start < span.start for place in places)
    crosses = any(place.start < span.end < place.end for place in places)
    if crosses or marks.encode(text[: span.start], tokenizer) != list(ids[:num_before]):
        border = span.end if crosses else span.start
        raise TemplateMismatch(
            f"message {turn}: a token reaches over the border of the turn at "
            f"{printable(text[max(0, border - 20) : border + 20])!r}, so the model never sees this "
            "prompt as it is trained. Use a template that ends and begins turns with special "
            "tokens, or accept it with data.ignore_input_ids_mismatch=True"
        )
