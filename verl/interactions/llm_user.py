"""A user whose words a language model writes, behind any OpenAI endpoint.

    - name: customer
      class_name: verl.interactions.llm_user.LLMUserInteraction
      config: {url: "http://127.0.0.1:8000/v1", model: some-model, api_key_env: USER_API_KEY}

The row's `interaction_kwargs` have `persona`: who the user is and what they want. The model sees
the conversation from the user's side. When too many of the last answers failed, trajectories wait
until the service is back (`verl.utils.breaker`).
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from verl.interactions.base import BaseInteraction, Reply
from verl.protocol.trajectory import InfraFault
from verl.utils.breaker import Breaker
from verl.utils.chat_client import ChatClient, ChatEndpoint, ChatUnavailable

STOP = "[END]"
RULES = (
    "You play a person who talks to an assistant. {persona}\n"
    "Write only what this person says next, in one short message. When the person has what they "
    "wanted, or there is no point in going on, write {stop} and nothing else."
)
OPTIONS = ("persona", "sampling", "max_concurrent", "max_message_chars", "stop", "name", "timeout")


class LLMUserInteraction(BaseInteraction):
    """Options: those of `ChatEndpoint` (`url`, `model`, `api_key_env`, time-outs and retries);
    `persona` where rows have none; `sampling` for every request; `max_concurrent` requests at once;
    `max_message_chars`, the longest message that is kept; `stop`, the word that ends it."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        known = {field.name for field in fields(ChatEndpoint)}
        unknown = sorted(set(config) - known - set(OPTIONS))
        missing = sorted({"url", "model"} - set(config))
        if unknown or missing:
            raise ValueError(
                f"interaction {self.name!r}: config lacks {missing} and has {unknown}, which nobody"
                f" reads; known: {sorted(known | set(OPTIONS))}"
            )
        self.client = ChatClient(ChatEndpoint(**{k: v for k, v in config.items() if k in known}))
        self.sampling = {"max_tokens": 512, **(config.get("sampling") or {})}
        self.stop = str(config.get("stop") or STOP)
        self.max_message_chars = int(config.get("max_message_chars") or 20_000)
        self._places = threading.BoundedSemaphore(int(config.get("max_concurrent") or 64))
        self._breaker = Breaker(f"interaction {self.name!r} at {config['url']}")
        self._waiting = threading.Lock()
        self._answered = [{"role": "user", "content": "Hello."}]
        self._personas: dict[str, str] = {}

    async def start_interaction(
        self, instance_id: str | None = None, persona: str | None = None, **kwargs: Any
    ) -> str:
        persona = persona or self.config.get("persona")
        if not persona:
            raise ValueError(
                f"interaction {self.name!r} needs a persona: in interaction_kwargs of the row, or "
                "in its config"
            )
        instance_id = await super().start_interaction(instance_id)
        self._personas[instance_id] = persona
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: Sequence[dict[str, Any]], **kwargs: Any
    ) -> Reply:
        rules = RULES.format(persona=self._personas[instance_id], stop=self.stop)
        said = await self._ask([{"role": "system", "content": rules}, *self._seen(messages)])
        text = said.replace(self.stop, "").strip()[: self.max_message_chars]
        return self.stop in said or not text, text, None, {}

    def _seen(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
        """The conversation from the user's side: the assistant is whom they talk to."""
        sides = {"user": "assistant", "assistant": "user"}
        return [
            {"role": sides[m["role"]], "content": str(m["content"])[: self.max_message_chars]}
            for m in messages
            if m["role"] in sides
        ]

    async def _ask(self, messages: list[dict[str, str]]) -> str:
        if self._breaker.is_open:
            await asyncio.to_thread(self._wait_for_service)
        while not self._places.acquire(blocking=False):
            await asyncio.sleep(0.01)
        try:
            said = await self.client.complete(messages, **self.sampling)
        except ChatUnavailable as error:
            self._breaker.note(str(error))
            raise InfraFault(f"interaction {self.name!r}: {error}") from error
        finally:
            self._places.release()
        self._breaker.note(None)
        self._answered = messages
        return said

    def _wait_for_service(self) -> None:
        """On a thread of its own; all who ask meanwhile wait here."""
        with self._waiting:
            if self._breaker.is_open:
                self._breaker.pause(self._failing_share)

    def _failing_share(self) -> float:
        """Whether a question that was answered before is answered still."""
        try:
            asyncio.run(self.client.complete(self._answered, **self.sampling))
        except ChatUnavailable:
            return 1.0
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._personas.pop(instance_id, None)
