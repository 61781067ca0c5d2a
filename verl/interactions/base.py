"""`BaseInteraction`: a simulated user that answers the model and may score its turns."""

import uuid
from collections.abc import Sequence
from typing import Any

Reply = tuple[bool, str, float | None, dict[str, Any]]


class BaseInteraction:
    """One object per entry of the YAML file; an instance id stands for one trajectory.

    Methods are called beside the event loop of the agent loops, so they may block.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a trajectory; `kwargs` are the row's `interaction_kwargs`."""
        return instance_id or str(uuid.uuid4())

    async def generate_response(
        self, instance_id: str, messages: Sequence[dict[str, Any]], **kwargs: Any
    ) -> Reply:
        """(whether the conversation ends, the user's words, a score of the turn or None, columns to
        add to the batch) after `messages`, the last of which is the model's. A user without this
        method has nothing to say, which ends the conversation."""
        return True, "", 0.0, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The score of the whole trajectory so far."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget a trajectory; called once, however it ended."""
