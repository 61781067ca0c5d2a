"""`ImageZoomInTool`: the model asks for a part of the row's image and gets it as an image.

The reply carries an image (`ToolResponse.image`), so the model must be one that sees.
"""

import asyncio
import uuid
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.images import open_image

MIN_SIDE = 28
"""Pixels: what vision models take as their smallest side."""
MAX_RATIO = 100.0
BAD_BOX = -0.05
"""Reward of a call whose box is of no use."""
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "image_zoom_in_tool",
        "description": "Zoom in on a part of the image: crop it to a box.",
        "parameters": {
            "type": "object",
            "properties": {
                "bbox_2d": {
                    "type": "array",
                    "items": {"type": "number"},
                    "minItems": 4,
                    "maxItems": 4,
                    "description": "The box as [x1, y1, x2, y2] in pixels: left top, right bottom.",
                },
                "label": {"type": "string", "description": "What is in the box."},
            },
            "required": ["bbox_2d"],
        },
    },
}


class ImageZoomInTool(BaseTool):
    """Crops the image that the row gives in `create_kwargs.image`."""

    allows_parallel_calls = True
    default_schema = SCHEMA

    def __init__(
        self, config: Any = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config or {}, tool_schema)
        self._instance_dict: dict[str, Any] = {}

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id = instance_id or uuid.uuid4().hex
        image = (kwargs.get("create_kwargs") or kwargs).get("image")
        if image is None:
            raise ValueError(
                f"the row has no image for tool {self.name!r}; it belongs in "
                f"extra_info.tools_kwargs.{self.name}.create_kwargs.image"
            )
        self._instance_dict[instance_id] = await asyncio.to_thread(open_image, image)
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        image = self._instance_dict[instance_id]
        try:
            box = usable_box(parameters.get("bbox_2d"), *image.size)
        except ValueError as error:
            return ToolResponse(text=f"Error: {error}"), BAD_BOX, {"success": False}
        part = await asyncio.to_thread(image.crop, box)
        label = f" ({parameters['label']})" if parameters.get("label") else ""
        text = f"The part {list(box)} of the image{label}."
        return ToolResponse(text=text, image=[part]), 0.0, {"success": True}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._instance_dict.pop(instance_id, None)


def usable_box(value: Any, width: int, height: int) -> tuple[int, int, int, int]:
    """The box within the image, grown to `MIN_SIDE` where it is smaller."""
    is_box = isinstance(value, list | tuple) and len(value) == 4
    if not is_box or not all(
        isinstance(side, int | float) and abs(side) < 1e9 and not isinstance(side, bool)
        for side in value
    ):
        raise ValueError(f"bbox_2d is {value!r:.100}; it must be [x1, y1, x2, y2], four numbers")
    left, top = max(0, int(value[0])), max(0, int(value[1]))
    right, bottom = min(width, int(value[2])), min(height, int(value[3]))
    if left >= right or top >= bottom:
        raise ValueError(
            f"bbox_2d is {list(value)}; no part of the {width} x {height} image is in it"
        )
    wide, high = right - left, bottom - top
    if max(wide, high) > MAX_RATIO * min(wide, high):
        raise ValueError(
            f"bbox_2d is {list(value)}; one side is over {MAX_RATIO:g} times the other"
        )
    left, right = grown(left, right, width)
    top, bottom = grown(top, bottom, height)
    return left, top, right, bottom


def grown(low: int, high: int, limit: int) -> tuple[int, int]:
    """An interval of at least `MIN_SIDE` around this one, as far as the image goes."""
    missing = max(0, MIN_SIDE - (high - low))
    low = max(0, low - (missing + 1) // 2)
    high = min(limit, max(high, low + MIN_SIDE))
    return max(0, min(low, high - MIN_SIDE)), high
