"""Clients of engines under the names of verl 0.8 and later (`verl.workers.rollout.llm_server`).

`GlobalRequestLoadBalancer` chooses an engine per request: the one that has the session's prefix,
else the one with the fewest requests. `LLMServerClient` sends a request to the chosen engine, and
`LLMServerManager.create` makes both for the engines of a run. `AgentLoopWorker` runs agent loops
over the engines of a client.
"""

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl.agent_loop.manager import AgentLoopManager
from verl.agent_loop.server_manager import AsyncLLMServerManager, TokenOutput
from verl.workers.rollout.base import Rollout


class GlobalRequestLoadBalancer:
    """`servers` are engines by id, or a list of ids. Of the last `max_cache_size` requests it is
    known which server had them; `full_determinism` chooses by the request's id alone."""

    def __init__(
        self,
        servers: Mapping[str, Any] | Iterable[str],
        max_cache_size: int = 10000,
        full_determinism: bool = False,
    ) -> None:
        self.servers: dict[str, Any] = {}
        self.max_cache_size = max_cache_size
        self.full_determinism = full_determinism
        self._in_flight: dict[str, int] = {}
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self.add_servers(servers)

    def acquire_server(self, request_id: str) -> str:
        """The id of the server for a request; `release_server` when it is answered."""
        if not self.servers:
            raise ValueError("there are no servers; add some with add_servers")
        server = self._sticky.pop(request_id, None)
        if server not in self.servers:
            names = list(self.servers)
            if self.full_determinism:
                server = sorted(names)[zlib.crc32(request_id.encode()) % len(names)]
            else:
                server = min(names, key=self._in_flight.__getitem__)
        assert server is not None
        self._sticky[request_id] = server
        while len(self._sticky) > self.max_cache_size:
            self._sticky.popitem(last=False)
        self._in_flight[server] += 1
        return server

    def release_server(self, server_id: str) -> None:
        """A request is answered. A server that was removed meanwhile is forgotten."""
        if server_id in self._in_flight:
            self._in_flight[server_id] = max(0, self._in_flight[server_id] - 1)

    def add_servers(self, servers: Mapping[str, Any] | Iterable[str]) -> None:
        added = dict(servers) if isinstance(servers, Mapping) else dict.fromkeys(servers)
        self.servers |= added
        for server in added:
            self._in_flight.setdefault(server, 0)

    def remove_servers(self, server_ids: Iterable[str]) -> None:
        """Give them no further requests; sessions they had go to others."""
        for server in server_ids:
            self.servers.pop(server, None)
            self._in_flight.pop(server, None)

    def clear_sticky_cache(self) -> None:
        """Forget which server had which session, after new weights for example."""
        self._sticky.clear()

    def get_status(self) -> dict[str, Any]:
        return {"in_flight": dict(self._in_flight), "num_sticky": len(self._sticky)}


class LLMServerClient:
    """Asks the engines of a balancer."""

    def __init__(
        self, config: Any, load_balancer_handle: GlobalRequestLoadBalancer | None = None
    ) -> None:
        self.config = config
        self.load_balancer = load_balancer_handle or GlobalRequestLoadBalancer({})
        self._managers: dict[str, AsyncLLMServerManager] = {}

    @property
    def servers(self) -> list[Rollout]:
        return list(self.load_balancer.servers.values())

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Continue a prompt once. Engines admit requests in their order, whatever `priority`."""
        if audio_data or mm_processor_kwargs:
            raise ValueError("audio and mm_processor_kwargs are not given to engines")
        server = self.load_balancer.acquire_server(request_id)
        if server not in self._managers:
            engines = [self.load_balancer.servers[server]]
            self._managers[server] = AsyncLLMServerManager(self.config, engines)
        try:
            return await self._managers[server].generate(
                request_id,
                prompt_ids=prompt_ids,
                sampling_params=sampling_params,
                image_data=image_data,
                video_data=video_data,
            )
        finally:
            self.load_balancer.release_server(server)


FullyAsyncLLMServerClient = LLMServerClient
"""The same: the gate of a row says what happens to requests when weights change."""


class LLMServerManager:
    """The engines of a run with their balancer and client."""

    def __init__(self, config: Any, rollouts: Sequence[Rollout]) -> None:
        self.rollout_replicas = list(rollouts)
        names = {f"server_{number}": one for number, one in enumerate(rollouts)}
        self.load_balancer = GlobalRequestLoadBalancer(names)
        self.client = LLMServerClient(config, self.load_balancer)

    @classmethod
    def create(cls, config: Any, rollouts: Sequence[Rollout]) -> "LLMServerManager":
        return cls(config, rollouts)

    def get_client(self) -> LLMServerClient:
        return self.client


class AgentLoopWorker(AgentLoopManager):
    """Agent loops over the engines of a client; `generate_sequences` takes and gives batches.

    Rewards are computed where the batch goes: `reward_loop_worker_handles` are not asked.
    """

    def __init__(
        self,
        config: Any,
        llm_client: LLMServerClient,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
        **options: Any,
    ) -> None:
        if teacher_client is not None:
            raise ValueError("teachers are asked by the recipe of distillation, not by agent loops")
        super().__init__(config, rollouts=llm_client.servers, **options)
