"""A gateway over scripted engines, on an event loop of its own thread."""

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any

from tests.agent_loop.fakes import loop_config
from tests.server.engines import ScriptedRollout, byte_tokenizer
from verl.agent_loop.server_manager import AsyncLLMServerManager
from verl.server.gateway import Gateway
from verl.server.session import Session
from verl.server.tree import Budget
from verl.workers.rollout.base import GenerationRequest

SECONDS = 60.0
PARAMS = {"temperature": 0.7, "top_p": 0.9, "seed": 11}
GUESS = {
    "name": "guess",
    "description": "Guess the number.",
    "parameters": {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
TOOL = {"type": "function", "function": GUESS}


class GatewayBench:
    """`with GatewayBench(reply) as bench`: `reply` gives the text of a turn for a prompt's text."""

    def __init__(
        self,
        reply: Callable[[str], str],
        *,
        prompt_length: int = 1024,
        response_length: int = 2048,
        tokenizer: Any = None,
        call_format: str = "hermes",
        **engine: Any,
    ) -> None:
        self.tokenizer = tokenizer or byte_tokenizer()
        ends = [self.tokenizer.convert_tokens_to_ids("<|im_end|>")]

        def ids(request: GenerationRequest) -> Sequence[int]:
            text = reply(str(self.tokenizer.decode(list(request.prompt_ids))))
            return self.tokenizer(text, add_special_tokens=False)["input_ids"] + ends

        self.engine = ScriptedRollout(ids, **{"per_delta": 1 << 20, **engine})
        self._call_format = call_format
        self._budget = Budget(prompt_length=prompt_length, response_length=response_length)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def run(self, work: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result(SECONDS)

    def __enter__(self) -> "GatewayBench":
        self._thread.start()

        async def start() -> Gateway:
            length = self._budget.response_length
            config = loop_config(prompt_length=1024, response_length=length)
            manager = AsyncLLMServerManager(config, [self.engine])
            form = self._call_format
            gateway = Gateway(manager, self.tokenizer, self._budget, call_format=form)
            await gateway.start()
            return gateway

        self.gateway = self.run(start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.run(self.gateway.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def open(self, **options: Any) -> Session:
        async def begin() -> Session:
            return self.gateway.open({**PARAMS, **options.pop("params", {})}, **options)

        return self.run(begin())

    def end(self, session: Session) -> list[Any]:
        """Close a session; its rows."""
        self.run(self.gateway.end(session))
        return session.tree.outputs()

    def check_rows(self, rows: Sequence[Any]) -> None:
        """What is trained are the engine's ids, and each of its prompts begins a row."""
        wholes = [[*row.prompt_ids, *row.response_ids] for row in rows]
        for request in self.engine.requests:
            ids = list(request.prompt_ids)
            assert any(whole[: len(ids)] == ids for whole in wholes)
        num_sampled = sum(
            len(self.engine.reply(request)) * request.num_samples
            for request in self.engine.requests
        )
        assert sum(sum(row.response_mask) for row in rows) == num_sampled
        for row in rows:
            pairs = zip(row.response_mask, row.response_logprobs, strict=True)
            assert all(log_prob == (-0.5 if is_ours else 0.0) for is_ours, log_prob in pairs)


def call_text(n: int) -> str:
    return f'<tool_call>\n{{"name": "guess", "arguments": {{"n": {n}}}}}\n</tool_call>'


def bisecting(prompt: str) -> str:
    """Plays guess the number: halves what is left, and says so when it has won."""
    low, high, last = 1, 16, 8
    for guess, reply in re.findall(r'"n": (\d+)}}\n</tool_call>.*?(low|high|win)', prompt, re.S):
        last = int(guess)
        if reply == "win":
            return f"The number is {last}."
        low, high = (last + 1, high) if reply == "low" else (low, last - 1)
    return call_text((low + high) // 2)


def judged(target: int, n: int) -> str:
    return "win" if n == target else "low" if n < target else "high"


SYSTEM = "You guess."
QUESTION = "Guess a number from 1 to 16."


def play_chat(client: Any, target: int, *, is_streamed: bool = False) -> str:
    """Guess the number with OpenAI's chat client."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    while True:
        stated = {"model": "gpt-9", "messages": messages, "tools": [TOOL], "temperature": 0.1}
        if is_streamed:
            with client.chat.completions.stream(**stated) as stream:
                said = stream.get_final_completion().choices[0].message
        else:
            said = client.chat.completions.create(**stated).choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return said.content
        for call in said.tool_calls:
            n = json.loads(call.function.arguments)["n"]
            reply = {"role": "tool", "tool_call_id": call.id, "content": judged(target, n)}
            messages.append(reply)


def play_responses(
    client: Any, target: int, *, is_streamed: bool = False, is_chained: bool = False
) -> str:
    """With OpenAI's responses; chained ones send new items only."""
    tool = {"type": "function", "strict": True, **GUESS}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    more: dict[str, Any] = {}
    while True:
        stated = {"model": "gpt-9", "instructions": SYSTEM, "input": items, "tools": [tool], **more}
        if is_streamed:
            with client.responses.stream(**stated) as stream:
                answer = stream.get_final_response()
        else:
            answer = client.responses.create(**stated)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        if is_chained:
            items, more = [], {"previous_response_id": answer.id}
        else:
            items += answer.output
        for call in calls:
            reply = judged(target, json.loads(call.arguments)["n"])
            said = {"type": "function_call_output", "call_id": call.call_id, "output": reply}
            items.append(said)


def play_messages(client: Any, target: int, *, is_streamed: bool = False) -> str:
    """With Anthropic's messages."""
    tool = {
        "name": "guess",
        "description": GUESS["description"],
        "input_schema": GUESS["parameters"],
    }
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        stated = {
            "model": "claude-9",
            "max_tokens": 500,
            "system": SYSTEM,
            "messages": messages,
            "tools": [tool],
        }
        if is_streamed:
            with client.messages.stream(**stated) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**stated)
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            return answer.content[0].text
        replies = [
            {"type": "tool_result", "tool_use_id": b.id, "content": judged(target, b.input["n"])}
            for b in answer.content
            if b.type == "tool_use"
        ]
        messages.append({"role": "user", "content": replies})
