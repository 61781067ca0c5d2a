"""Values as JSON Schema means them, where pydantic means something else.

There, 5.0 is a whole number and 0 is not false. A server that publishes a schema must see it so.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class Whole:
    """`Annotated[int, Whole(low, high)]`: a whole number, however it is written."""

    low: int
    high: int
    title: str | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        exact = core_schema.int_schema(ge=self.low, le=self.high, strict=True)
        number = core_schema.float_schema(
            ge=self.low, le=self.high, strict=True, allow_inf_nan=False
        )
        written = core_schema.no_info_after_validator_function(_as_int, number)
        return core_schema.union_schema([(exact, "as integer"), (written, "as number")])

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        named = {} if self.title is None else {"title": self.title}
        return {"type": "integer", "minimum": self.low, "maximum": self.high, **named}


@dataclass(frozen=True)
class Only:
    """`Annotated[bool, Only(False)]`: a switch that has one position."""

    value: bool

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            self._check, core_schema.bool_schema(strict=True)
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "boolean", "const": self.value}

    def _check(self, value: bool) -> bool:
        if value is not self.value:
            raise ValueError(f"it can only be {str(self.value).lower()}")
        return value


def _as_int(value: float) -> int:
    if not value.is_integer():
        raise ValueError("it must be a whole number")
    return int(value)
