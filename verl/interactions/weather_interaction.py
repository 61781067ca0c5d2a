"""A user who asked for the weather and is content once a tool was asked for it."""

from collections.abc import Sequence
from typing import Any

from verl.interactions.base import BaseInteraction, Reply


class WeatherInteraction(BaseInteraction):
    """Scores 1 and ends the conversation if a tool has replied, else insists on the tool."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._has_replied: dict[str, bool] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        instance_id = await super().start_interaction(instance_id)
        self._has_replied[instance_id] = False
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: Sequence[dict[str, Any]], **kwargs: Any
    ) -> Reply:
        self._has_replied[instance_id] = any(message["role"] == "tool" for message in messages)
        if self._has_replied[instance_id]:
            return True, "Thank you for your weather query!", 1.0, {}
        return False, "Please use the weather tool to get the weather information.", 0.0, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return float(self._has_replied[instance_id])

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._has_replied[instance_id]
