"""What an answer must be like: ``structured_outputs`` and ``response_format`` of a request."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.parsing import Many


class StructuredOutputs(BaseModel):
    """vLLM's constraints, of which one is given."""

    model_config = ConfigDict(extra="forbid")

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def constraint(self) -> tuple[str, str]:
        """Raises ApiError unless there is one."""
        given = {name: value for name, value in self.model_dump(by_alias=True).items() if value not in (None, False)}
        if len(given) != 1:
            what = " and ".join(given) or "none"
            raise ApiError(400, f"structured_outputs needs one constraint, it has {what}", param="structured_outputs")
        ((kind, value),) = given.items()
        return kind, value if isinstance(value, str) else json.dumps(value)


class JsonSchema(BaseModel):
    """``strict`` is what every schema is here."""

    name: str = ""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def constraint(self) -> tuple[str, str] | None:
        """Raises ApiError for a schema that is not there."""
        if self.type == "json_schema":
            if self.json_schema is None or self.json_schema.schema_ is None:
                raise ApiError(400, "response_format json_schema needs json_schema.schema", param="response_format")
            return "json", json.dumps(self.json_schema.schema_)
        return ("json_object", "true") if self.type == "json_object" else None
