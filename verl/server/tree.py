"""The tree of turns that one program's calls make, and the rows that are trained on it.

    request: [system, user, assistant 1, tool, assistant 2, tool]
                            = turn 1           = turn 2    new: encoded and appended

A request is matched to the tree by its history: assistant messages that equal the ones that were
answered keep the ids that the engine sampled, and only the messages after the last of them are
encoded. What cannot be appended begins a branch, for a reason that is counted (`FORKS`). Every path
from a root to a leaf is a row; a turn that several rows share is trained in the first of them.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from verl.agent_loop.base import AgentLoopOutput
from verl.protocol.trajectory import AgentLoopMetrics
from verl.server.answers import ChatMessage
from verl.server.encoding import template_message
from verl.server.errors import ApiError
from verl.server.schemas import AssistantMessage, Message
from verl.utils.scramble import keyed_seed
from verl.workers.rollout.base import TokenOutput

FORKS = {
    "branch": "the same history was continued before",
    "samples": "several samples of one request (n > 1)",
    "history_rewritten": "the history is not the one that was answered",
    "system_changed": "the system prompt is another one",
    "tools_changed": "other tools are offered",
    "template_cannot_continue": "the chat template does not say what follows a turn",
    "new_conversation": "a conversation that begins with other words",
}
"""Why a request was not appended to the one path of its session."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How many tokens a row of the training batch takes."""

    prompt_length: int
    response_length: int

    def room(self, num_root: int, num_tokens: int) -> int:
        """Tokens that a row with so many at its root, and so many in all, may still get."""
        return self.response_length - (num_tokens - min(num_root, self.prompt_length))


@dataclass(eq=False, kw_only=True)
class ModelTurn:
    """What the model said after a history."""

    parent: "ModelTurn | None"
    path: tuple[int, ...]
    """Which child of which child; the turn's seed follows from it."""

    new_ids: list[int]
    """What was appended after the parent; at a root, the prompt."""

    tools: str
    engine_session: str
    """Under this name the engine keeps the keys and values of this path."""

    output: TokenOutput
    text: str = ""
    """What it said, in canonical form."""

    call_ids: tuple[str, ...] = ()
    quoted: tuple[str, ...] = ()
    """What a client that writes the calls as text cannot leave out: words, ids, names, values."""

    seconds: float = 0.0
    num_children: int = 0
    is_delivered: bool = True

    def line(self) -> "list[ModelTurn]":
        """The turns from the root to this one."""
        turns: list[ModelTurn] = []
        turn: ModelTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def ids(self) -> list[int]:
        """Everything up to the end of this turn."""
        return [token for turn in self.line() for token in (*turn.new_ids, *turn.output.token_ids)]


@dataclass(eq=False, kw_only=True)
class Place:
    """Where a request belongs in the tree."""

    messages: Sequence[Message]
    tools: str
    keys: list[str]
    """`keys[n]` names the first n messages."""

    parent: ModelTurn | None
    num_known: int
    """Messages that end with the parent's; the others are new."""

    fork: str | None
    """Why the request begins a branch; None if it goes on."""

    path: tuple[int, ...]
    new_ids: list[int] = field(default_factory=list)


class Tree:
    """The turns of one session."""

    def __init__(self, name: str, budget: Budget) -> None:
        self.name = name
        self.budget = budget
        self.turns: list[ModelTurn] = []
        self.forks: Counter[str] = Counter()
        self._asked: dict[str, list[ModelTurn]] = {}
        self._answered: dict[str, list[ModelTurn]] = {}
        self._beginnings: list[tuple[str, str, str]] = []  # of roots: all, system, first words
        self._num_roots = 0

    # ---- where a request belongs -----------------------------------------------------------------

    def place(self, messages: Sequence[Message], tools: str) -> Place:
        """Find the turn that the history ends with, and why a branch begins if one does."""
        texts, keys = self._read(messages)
        parent, num_known, fork = None, 0, None
        for end in range(len(messages) - 1, 0, -1):
            turns = [turn for turn in self._answered.get(keys[end], ()) if turn.is_delivered]
            if not turns:
                continue
            turns_with_tools = [turn for turn in turns if turn.tools == tools]
            if not turns_with_tools:
                fork = "tools_changed"
                break
            parent, num_known = best(turns_with_tools, messages[end - 1]), end
            if any(isinstance(message, AssistantMessage) for message in messages[end:]):
                fork = "history_rewritten"
            elif parent.num_children:
                fork = "branch"
            break
        beginning = keys[-1], *beginning_of(messages, texts)
        if parent is None and fork is None and self._num_roots:
            fork = self._why_new_root(beginning)
        place = Place(
            messages=messages,
            tools=tools,
            keys=keys,
            parent=parent,
            num_known=num_known,
            fork=fork,
            path=(),
        )
        self._begin(place, beginning)
        return place

    def _read(self, messages: Sequence[Message]) -> tuple[list[str], list[str]]:
        """Each message in canonical form, and the names of all beginnings of the history.

        Some clients send the calls of a turn back as text. Such a message is the turn that was
        answered at its place if it quotes all of it, ids included.
        """
        texts, keys = [], [""]
        for message in messages:
            text = canonical(message)
            if isinstance(message, AssistantMessage) and not message.tool_calls:
                words = template_message(message)["content"]
                quoted = (
                    turn
                    for turn in self._asked.get(keys[-1], ())
                    if turn.call_ids and all(part in words for part in turn.quoted)
                )
                text = next((turn.text for turn in quoted), text)
            texts.append(text)
            keys.append(link(keys[-1], text))
        return texts, keys

    def begin_again(self, place: Place, fork: str) -> None:
        """Nothing can be appended after the parent: the history is encoded from its beginning."""
        self.release(place)
        place.parent, place.num_known, place.fork = None, 0, fork
        texts, keys = self._read(place.messages)
        self._begin(place, (keys[-1], *beginning_of(place.messages, texts)))

    def sibling(self, place: Place) -> Place:
        """Another sample of the same request."""
        other = Place(**{**vars(place), "fork": "samples"})
        self._begin(other, None)
        return other

    def release(self, place: Place) -> None:
        """The request came to nothing; the next one takes its number."""
        if place.parent is not None:
            place.parent.num_children -= 1
        else:
            self._num_roots -= 1

    def _begin(self, place: Place, beginning: tuple[str, str, str] | None) -> None:
        if place.parent is not None:
            place.path = (*place.parent.path, place.parent.num_children)
            place.parent.num_children += 1
            return
        place.path = (self._num_roots,)
        self._num_roots += 1
        if beginning is not None and beginning not in self._beginnings:
            self._beginnings.append(beginning)

    def _why_new_root(self, beginning: tuple[str, str, str]) -> str:
        whole, system, words = beginning
        if any(known[0] == whole for known in self._beginnings):
            return "branch"
        same_words = [known for known in self._beginnings if known[2] == words]
        if not same_words:
            return "new_conversation"
        is_known = any(known[1] == system for known in same_words)
        return "history_rewritten" if is_known else "system_changed"

    # ---- what was sampled ------------------------------------------------------------------------

    def engine_session(self, place: Place) -> str:
        """The parent's where it goes on; a new name for every branch."""
        if place.parent is not None and place.path[-1] == 0:
            return place.parent.engine_session
        return f"{self.name}-{'.'.join(map(str, place.path))}"

    def record(
        self, place: Place, output: TokenOutput, said: ChatMessage, seconds: float
    ) -> ModelTurn:
        if place.fork is not None:
            self.forks[place.fork] += 1
        calls = said.tool_calls or ()
        spoken = [(call.function.name, call.function.arguments) for call in calls]
        words = (said.content or "").strip()
        text = canonical_turn(words, spoken)
        values = [leaf for _, arguments in spoken for leaf in leaves_of(arguments_of(arguments))]
        turn = ModelTurn(
            parent=place.parent,
            path=place.path,
            new_ids=place.new_ids,
            tools=place.tools,
            engine_session=self.engine_session(place),
            output=output,
            text=text,
            call_ids=tuple(call.id for call in calls),
            quoted=(words, *(part for call in calls for part in (call.id, call.function.name)))
            + tuple(values),
            seconds=seconds,
        )
        self._asked.setdefault(place.keys[-1], []).append(turn)
        self._answered.setdefault(link(place.keys[-1], text), []).append(turn)
        self.turns.append(turn)
        return turn

    def abandon(self, turn: ModelTurn) -> None:
        """The answer did not reach its client, so nothing can follow from it."""
        turn.is_delivered = False
        if turn.parent is not None:
            turn.parent.num_children -= 1
        else:
            self._num_roots -= 1

    def outputs(self) -> list[AgentLoopOutput]:
        """A row for each leaf, in the order in which the leaves were sampled."""
        turns = [turn for turn in self.turns if turn.is_delivered]
        parents = {turn.parent for turn in turns}
        trained: set[ModelTurn] = set()
        return [self._row(leaf, trained) for leaf in turns if leaf not in parents]

    def _row(self, leaf: ModelTurn, trained: set[ModelTurn]) -> AgentLoopOutput:
        line = leaf.line()
        root_ids = line[0].new_ids
        ids: list[int] = root_ids[self.budget.prompt_length :]
        mask, log_probs, seconds, num_preempted = [0] * len(ids), [0.0] * len(ids), 0.0, 0
        for turn in line:
            others = [] if turn is line[0] else turn.new_ids
            ids += [*others, *turn.output.token_ids]
            is_new = turn not in trained
            num_sampled = len(turn.output.token_ids)
            mask += [0] * len(others) + [int(is_new)] * num_sampled
            log_probs += [0.0] * len(others)
            log_probs += turn.output.log_probs if is_new else [0.0] * num_sampled
            if is_new:
                seconds += turn.seconds
                num_preempted += turn.output.num_preempted
        trained.update(line)
        return AgentLoopOutput(
            prompt_ids=root_ids[: self.budget.prompt_length],
            response_ids=ids,
            response_mask=mask,
            response_logprobs=log_probs,
            num_turns=2 * len(line),
            stop_reason=leaf.output.stop_reason,
            metrics=AgentLoopMetrics(generate_sequences=seconds, num_preempted=num_preempted),
        )


def best(turns: Sequence[ModelTurn], message: Message) -> ModelTurn:
    """Among turns with the same words: the one with these call ids, not continued yet, the last."""
    calls = (isinstance(message, AssistantMessage) and message.tool_calls) or ()
    ids = tuple(call.id for call in calls)
    return max(turns, key=lambda turn: (turn.call_ids == ids, not turn.num_children, turn.path))


# ---- messages that mean the same -----------------------------------------------------------------


def canonical(message: Message) -> str:
    """A message without what clients add or drop on its way: names, ids, spaces around a turn."""
    plain = template_message(message)
    if isinstance(message, AssistantMessage):
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        return canonical_turn(plain["content"], calls)
    return json.dumps([plain["role"], plain["content"]])


def canonical_turn(content: str, calls: Sequence[tuple[str, str]]) -> str:
    return json.dumps(
        ["assistant", content.strip(), [[name, arguments_of(text)] for name, text in calls]],
        sort_keys=True,
    )


def arguments_of(text: str) -> Any:
    try:
        return from_json(text or "{}")
    except ValueError:  # a client's own text; it equals itself only
        return text


def link(before: str, text: str) -> str:
    return hashlib.blake2b(f"{before}{text}".encode(), digest_size=16).hexdigest()


def leaves_of(value: Any) -> list[str]:
    """The texts and numbers in the arguments of a call."""
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves_of(inner)]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in leaves_of(inner)]
    return [] if value is None or isinstance(value, bool) else [str(value)]


def beginning_of(messages: Sequence[Message], texts: Sequence[str]) -> tuple[str, str]:
    """The system prompt, and the first message of somebody else."""
    roles = [template_message(message)["role"] for message in messages]
    num_system = next((n for n, role in enumerate(roles) if role != "system"), len(roles))
    return link("", "".join(texts[:num_system])), "".join(texts[num_system : num_system + 1])


def derived_seed(seed: int | None, path: tuple[int, ...]) -> int | None:
    """The seed of a turn: the sample's, the turn's number and the branches that lead to it."""
    if seed is None:
        return None
    if any(path):
        return keyed_seed(seed, "path", *path)
    turn = len(path) - 1
    return keyed_seed(seed, "turn", turn) if turn else seed  # as in a `Conversation`


def too_long(num_tokens: int, budget: Budget) -> ApiError:
    most = budget.prompt_length + budget.response_length
    return ApiError(
        400,
        f"the conversation has {num_tokens} tokens and no room for an answer: a trajectory has "
        f"{budget.response_length} beyond a prompt of {budget.prompt_length}, {most} in all",
        param="messages",
        code="context_length_exceeded",
    )


def fork_counts(forks: Mapping[str, int]) -> dict[str, int]:
    """All reasons, so that every row has the same columns."""
    return {f"forks/{reason}": forks.get(reason, 0) for reason in FORKS}
