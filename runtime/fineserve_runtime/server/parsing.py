"""Bodies of requests read as pydantic models, and the field that is wrong named as the client wrote it."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticUseDefault

from fineserve_runtime.server.errors import ApiError

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

Many = Annotated[list[T], Field(fail_fast=True)]
"""A list that is refused for its first wrong entry. A million wrong entries would cost a kilobyte each, and the event loop
seconds."""

TokenIds = Many[Annotated[int, Field(ge=0)]]


def _no_null(value: T | None) -> T:
    if value is None:
        raise PydanticUseDefault
    return value


Given = Annotated[T, BeforeValidator(_no_null)]
"""An option for which null is the same as leaving it out, as OpenAI has it."""


def parse(kind: type[B], raw: bytes) -> B:
    """The body of a request. Raises ApiError, which names the field. JSON that no text can be (lone surrogates) is no JSON."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as problem:
        errors = problem.errors(include_url=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        raise ApiError(400, f"the body is no JSON: {errors[0]['msg']}")
    body = json.loads(raw)
    places = [_place(each, body) for each in errors]
    where = max(places, key=len)  # of the kinds of value that were tried, that which went furthest
    param = ".".join(str(part) for part in where) or None
    raise ApiError(400, f"{param or 'body'}: {errors[places.index(where)]['msg']}", param=param)


def _place(error: ErrorDetails, body: Any) -> list[int | str]:
    """Where in the body that is, without the kinds of value that were tried there."""
    found = error["loc"]
    absent = found[-1:] if error["type"] == "missing" else ()
    place: list[int | str] = []
    for part in found[: len(found) - len(absent)]:
        if part in body if isinstance(body, dict) else isinstance(body, list) and part in range(len(body)):
            body = body[part]
            place.append(part)
    unknown = [error["ctx"]["key"]] if error["type"] == "unknown_key" else []
    return [*place, *absent, *unknown]
