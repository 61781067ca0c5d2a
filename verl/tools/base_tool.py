"""`BaseTool`: a tool with a life: created for a trajectory, called, scored, released.

One object serves a whole run. What belongs to one trajectory is an instance, named by its id and
kept by the tool. `config.scope` says how long an instance lives: `trajectory` (the default; created
at the first call, released when the trajectory ends) or `call` (created and released around every
call). Who creates and releases, with which deadlines, is in `leases`.
"""

import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

SCOPES = ("trajectory", "call")


class BaseTool:
    """Override `execute`, and `create` and `release` for what an instance holds.

    Methods are coroutines on an event loop that all tools share; a method that blocks may be a
    plain `def`, which then runs in a thread.
    """

    allows_parallel_calls: ClassVar[bool] = False
    """Whether calls of one turn may run at once on one instance; else in the order written."""

    options: ClassVar[tuple[str, ...] | None] = None
    """What the class reads of `config` beside `type`, `scope` and `timeout`; a file with anything
    else is refused. None, and a subclass that does not say, takes what it is given."""

    default_schema: ClassVar[Mapping[str, Any] | None] = None
    """The schema of a tool whose entry in the YAML file has none, as OpenAI's API writes it."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tool_schema: OpenAIFunctionToolSchema | None = None,
    ) -> None:
        self.config = dict(config)
        schema = tool_schema or self.get_openai_tool_schema()
        if schema is None:
            raise ValueError(
                f"{type(self).__name__} has no schema; give tool_schema, or override "
                "get_openai_tool_schema"
            )
        self.tool_schema: OpenAIFunctionToolSchema = schema
        self.name: str = schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The schema that the model is shown; override it to need none in the YAML file."""
        stated = vars(self).get("tool_schema")
        if stated is None and self.default_schema is not None:
            return OpenAIFunctionToolSchema.model_validate(self.default_schema)
        return stated

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Make an instance; `create_kwargs` holds what the row's `tools_kwargs` give this tool."""
        return instance_id or uuid.uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Answer a call: response, reward of the call, metrics. `agent_data` is the loop's state.

        Raise `InfraFault` where the world is broken; any other exception is told to the model.
        """
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of an instance as a whole, asked for once, before it is released."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Give back what the instance holds; called once per instance, whatever happened."""

    async def reap(self, instance_id: str) -> None:
        """Give back what an instance of a process that was killed holds outside of it.

        Called at the next start, with nothing known but the id. Instances are recorded on disk
        only for tools that override this.
        """

    def close(self) -> None:
        """Give back what the tool itself holds, at the end of the run."""
