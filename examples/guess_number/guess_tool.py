"""The tool that the model is offered: `guess` of the MCP server, without the name of the game."""

from collections.abc import Mapping
from typing import Any

from verl.tools.mcp_base_tool import MCPBaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

HIDDEN = "game"
"""The server asks for it; the row knows it (`tools_kwargs`), and the model must not."""

TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "description": "Your guess."}},
            "required": ["n"],
        },
    },
}
"""What the model is shown, in supervised training and here alike."""


class GuessTool(MCPBaseTool):
    """Adds the name of the trajectory's game to every guess."""

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self.tool_schema = OpenAIFunctionToolSchema.model_validate(TOOL)
        self._games: dict[str, str] = {}

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id, response = await super().create(instance_id, **kwargs)
        self._games[instance_id] = kwargs["create_kwargs"][HIDDEN]
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        guess = {**parameters, HIDDEN: self._games[instance_id]}
        return await super().execute(instance_id, guess, **kwargs)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._games.pop(instance_id, None)
        await super().release(instance_id, **kwargs)
