"""`Continuation`: the token ids that follow a turn of the model; its history is not rendered again.

A chat template that writes a conversation anew seldom reproduces the ids that the model sampled:
many drop the thinking of earlier turns, others trim. So the history stays as it is and only what
follows is rendered, after a short conversation that is made up:

    user: ...  assistant: MARK<end of turn>[rest: the new messages, the next turn's beginning]

The rest is what is appended. It is proven once per shape of messages that it depends neither on
what the made-up turn says nor on whether there was such a turn before, that no token reaches across
its border, and that the template writes every message. What cannot be proven is refused.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.prompts import (
    Message,
    Shield,
    render,
    replaced,
    shield,
    special_texts,
    texts_in,
    without_nulls,
    words_of,
)
from verl.utils.template_probe import REFUSALS

MAX_HEADS = 256
EARLIER = "QzearlierQ"
MARKS = ("QzanswerQ", "Qz other words jQ")
"""What made-up turns end with; letters that no template trims, escapes or takes for syntax."""


class CannotContinue(ValueError):
    """It cannot be proven which ids follow a turn; the message says why."""


@dataclass(frozen=True)
class TurnEnd:
    """How a template goes on after the words of a turn."""

    closing: str
    """Text from the last word of the made-up turn to the end of the turn; `rest` follows."""

    end: str
    """The part of `closing` that a turn without an end of its own still lacks."""

    other_ends: tuple[int, ...]
    """Tokens that end the last turn of a conversation where others end earlier ones."""


@dataclass(frozen=True)
class Rendering:
    """One made-up conversation with the new messages."""

    head: str
    """The text up to the last word of the made-up turn."""

    tail: str
    """The text after it."""

    marks: Shield


class Continuation:
    """What a tokenizer's chat template writes between two turns of the model.

    `template_kwargs` and `tools` are those of the prompt. `stop_token_ids` are tokens that end a
    turn beside the tokenizer's own. Serves any thread.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        if tokenizer.chat_template is None:
            raise CannotContinue(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template, so nothing says "
                "how a second turn begins; set data.chat_template=chatml (or a Jinja template)"
            )
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.tools = [dict(tool) for tool in tools or ()]
        eos = tokenizer.eos_token_id
        self._stop_ids = {*([eos] if isinstance(eos, int) else ()), *stop_token_ids}
        vocabulary = tokenizer.get_vocab()
        special_ids = {vocabulary[token] for token in special_texts(tokenizer)}
        self._special_ids = special_ids | self._stop_ids
        self._ends: dict[tuple[Any, ...], TurnEnd] = {}
        self._heads: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def prove(self, *roles: str) -> None:
        """Raise `CannotContinue` unless messages of these roles may follow a turn, each alone."""
        for role in roles:
            message = {"role": role, "content": "a reply"}
            if role == "tool":
                message |= {"name": self._tool_name(), "tool_call_id": _call_id(0)}
            self.ids_after_turn([], [message])

    def ids_after_turn(
        self,
        turn_ids: Sequence[int] | None,
        messages: Sequence[Message],
        *,
        has_ended: bool = False,
    ) -> list[int]:
        """The ids to append so that the model speaks next, after `messages`.

        The turn's own end token counts as the template's. A turn that lacks one (it was cut at its
        token limit) is given the template's, unless `has_ended` says that an engine stopped at its
        last token by itself. None is a turn that ended as the template ends it.
        """
        if not messages:
            raise ValueError("messages is empty; the model can only speak again after a message")
        messages = [without_nulls(message) for message in messages]
        shape = _shape(messages)
        turn_end = self._ends.get(shape)
        if turn_end is None:
            turn_end = self._proven(messages)
            self._ends[shape] = turn_end
        end, rest = self._ids(self._rendering(messages, MARKS[0]), turn_end)
        if turn_ids is None:
            return rest
        if not turn_ids:
            return end + rest
        last = turn_ids[-1]
        if end and last == end[-1]:
            return rest
        if last == rest[0] and (has_ended or last in self._special_ids):
            return rest[1:]  # templates whose turns end where the next begins
        if has_ended or last in self._stop_ids or last in turn_end.other_ends:
            return rest
        for length in range(len(end) - 1, 0, -1):
            if end[length - 1] in self._special_ids and list(turn_ids[-length:]) == end[:length]:
                return end[length:] + rest
        return end + rest

    # ---- proof ----------------------------------------------------------------------------------

    def _proven(self, messages: list[dict[str, Any]]) -> TurnEnd:
        first, second = (self._rendering(messages, mark) for mark in MARKS)
        longer = self._rendering(messages, MARKS[1], has_earlier_round=True)
        turn_end = self._turn_end(messages, first)
        ids = self._ids(first, turn_end)
        for other in (second, longer):
            if other.tail != first.tail or self._ids(other, turn_end) != ids:
                raise CannotContinue(
                    f"the chat template of {self.tokenizer.name_or_path!r} writes "
                    f"{_roles(messages)} as {first.tail!r:.200} after one conversation and as "
                    f"{other.tail!r:.200} after another; what follows a turn must not depend on "
                    "what came before. Set data.chat_template to a template that only appends"
                )
        return turn_end

    def _turn_end(self, messages: list[dict[str, Any]], rendering: Rendering) -> TurnEnd:
        """Where the made-up turn ends: with the last special token that it has when nothing
        follows, too."""
        alone = self._rendering(messages, MARKS[0], without=True)
        special = special_texts(self.tokenizer)
        shared = common_prefix(rendering.tail, alone.tail)
        length = max(
            (shared.rfind(token) + len(token) for token in special if token in shared), default=0
        )
        closing, other_ends = shared[:length], ()
        if not closing:  # the last turn may end otherwise than those before it
            here = next((token for token in special if rendering.tail.startswith(token)), None)
            there = next((token for token in special if alone.tail.startswith(token)), None)
            if here is not None and there is not None:
                closing, other_ends = here, tuple(self._encode(there))
        end = closing
        if messages[0]["role"] == "tool":
            # What stands before it closes the made-up call, which an unfinished turn may not have.
            end = next((token for token in special if closing.endswith(token)), "")
            if not closing and shared == alone.tail:
                closing = shared.rstrip()
        self._check_written(messages, rendering)
        return TurnEnd(closing, end, other_ends)

    def _check_written(self, messages: list[dict[str, Any]], rendering: Rendering) -> None:
        probes = [f"Zreply{index}Z" for index in range(len(messages))]
        probe = [
            {**message, "content": text} for message, text in zip(messages, probes, strict=True)
        ]
        tail = self._rendering(probe, MARKS[0]).tail
        places = [tail.find(text) for text in probes]
        if -1 in places or places != sorted(places):
            index = places.index(-1) if -1 in places else 0
            raise CannotContinue(
                f"the chat template of {self.tokenizer.name_or_path!r} leaves out a message of role"
                f" {messages[index]['role']!r} after a turn of the assistant; it writes "
                f"{rendering.tail!r:.200}. Set data.chat_template to a template that writes it"
            )

    def _ids(self, rendering: Rendering, turn_end: TurnEnd) -> tuple[list[int], list[int]]:
        """The ids of the end of the turn and of the rest."""
        if not rendering.tail.startswith(turn_end.closing):
            raise CannotContinue(
                f"the chat template of {self.tokenizer.name_or_path!r} ends a turn with "
                f"{rendering.tail!r:.80} here and with {turn_end.closing!r} elsewhere"
            )
        text = rendering.head + rendering.tail
        cut = len(rendering.head) + len(turn_end.closing)
        ids = rendering.marks.encode(text, self.tokenizer)
        before, spoken = text[:cut], text[: cut - len(turn_end.end)]
        for border in dict.fromkeys((before, spoken)):
            head = self._head_ids(border, rendering.marks)
            if ids[: len(head)] != head:
                raise CannotContinue(
                    f"with the tokenizer {self.tokenizer.name_or_path!r} a token reaches across "
                    f"the end of a turn at {border[-20:]!r}; use a chat template whose turns end "
                    "with a special token"
                )
        num_spoken = len(self._head_ids(spoken, rendering.marks))
        num_before = len(self._head_ids(before, rendering.marks))
        if len(ids) == num_before:
            raise CannotContinue(
                f"the chat template of {self.tokenizer.name_or_path!r} writes nothing after a turn"
            )
        return ids[num_spoken:num_before], ids[num_before:]

    def _head_ids(self, text: str, marks: Shield) -> list[int]:
        if any(mark in text for mark in marks.texts):  # in the name of a call
            return marks.encode(text, self.tokenizer)
        ids = self._heads.get(text)
        if ids is None:
            ids = self._encode(text)
            with self._lock:
                if len(self._heads) >= MAX_HEADS:
                    self._heads.clear()
                self._heads[text] = ids
        return ids

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    # ---- made-up conversations ------------------------------------------------------------------

    def _rendering(
        self,
        messages: Sequence[Message],
        mark: str,
        *,
        has_earlier_round: bool = False,
        without: bool = False,
    ) -> Rendering:
        """The made-up conversation with the messages, or `without` them.

        With `has_earlier_round` there is a turn and such messages before it already.
        """
        words = "\n".join(texts_in([words_of(message) for message in messages]))
        while mark in words:
            mark += "Q"
        shielded, marks = shield(messages, self.tokenizer)
        refusal: Exception | None = None
        for turn in self._turns(shielded, mark):
            history: list[dict[str, Any]] = [_user("What is it?"), turn]
            if has_earlier_round:
                earlier = [{**message, "content": "So it was."} for message in shielded]
                history = [history[0], _renamed(turn, mark, EARLIER), *earlier, turn]
            for in_parts in (False, True):
                conversation = history if without else [*history, *shielded]
                try:
                    text = render(
                        [_in_parts(m) if in_parts else m for m in conversation],
                        self.tokenizer,
                        add_generation_prompt=not without,
                        tools=self.tools,
                        template_kwargs=self.template_kwargs,
                    )
                except REFUSALS as error:
                    refusal = refusal or error
                    continue
                place = text.rfind(mark)
                if place >= 0:
                    cut = place + len(mark)
                    return Rendering(text[:cut], text[cut:], marks)
        name = self.tokenizer.name_or_path
        if refusal is not None:
            raise CannotContinue(
                f"the chat template of {name!r} refuses {_roles(messages)} after a turn of the "
                f"assistant: {refusal}. Set data.chat_template to a template that takes them"
            ) from refusal
        raise CannotContinue(f"the chat template of {name!r} leaves out turns of the assistant")

    def _turns(self, messages: Sequence[Message], mark: str) -> list[dict[str, Any]]:
        """Made-up turns that end with `mark`, in the order in which templates are asked: replies of
        tools follow calls, whose arguments some take as text."""
        plain = {"role": "assistant", "content": mark}
        replies = [message for message in messages if message["role"] == "tool"]
        if not replies or messages[0]["role"] != "tool":
            return [plain]
        turns: list[dict[str, Any]] = []
        for content in ("", mark):
            for arguments in ({"x": mark}, json.dumps({"x": mark})):
                calls = [
                    {
                        "type": "function",
                        "id": reply.get("tool_call_id") or _call_id(index),
                        "function": {
                            "name": reply.get("name") or self._tool_name(),
                            "arguments": arguments,
                        },
                    }
                    for index, reply in enumerate(replies)
                ]
                turns.append({"role": "assistant", "content": content, "tool_calls": calls})
        return [*turns, plain]

    def _tool_name(self) -> str:
        return self.tools[0]["function"]["name"] if self.tools else "f"


def continuation_of(
    tokenizer: PreTrainedTokenizerBase,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    stop_token_ids: Sequence[int] = (),
) -> Continuation:
    """The `Continuation` of these arguments; what one has proven serves all who ask again."""
    stop_ids = tuple(sorted(stop_token_ids))
    return _continuation(
        tokenizer,
        str(tokenizer.chat_template),
        json.dumps(dict(template_kwargs or {}), sort_keys=True),
        json.dumps(list(tools or ())),
        stop_ids,
    )


@lru_cache(maxsize=256)
def _continuation(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    template_kwargs: str,
    tools: str,
    stop_ids: tuple[int, ...],
) -> Continuation:
    del template  # a tokenizer that has been given another template is another one
    return Continuation(
        tokenizer,
        template_kwargs=json.loads(template_kwargs),
        tools=json.loads(tools),
        stop_token_ids=stop_ids,
    )


def common_prefix(one: str, other: str) -> str:
    length = next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return one[:length]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _renamed(turn: Message, mark: str, other: str) -> dict[str, Any]:
    return replaced(turn, lambda text: text.replace(mark, other))


def _in_parts(message: Message) -> dict[str, Any]:
    """The form that templates of vision models want."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    return dict(message)


def _call_id(index: int) -> str:
    return f"call{index:05d}"  # nine letters and digits, as some templates demand


def _shape(messages: Sequence[Message]) -> tuple[Any, ...]:
    return tuple(
        (message["role"], type(message.get("content")), *sorted(message)) for message in messages
    )


def _roles(messages: Sequence[Message]) -> str:
    return "messages of role " + ", ".join(str(message["role"]) for message in messages)
