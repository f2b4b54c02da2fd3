"""The values of an experiment file: their types and ranges."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

MAX_TOKENS = 2**20
"""No served model takes a longer prompt: 1,048,576 tokens is the largest context window in use."""

MAX_REQUESTS = 100_000_000
"""The most requests of a run: a day of a large provider."""

MAX_GPUS = 100_000
"""The most GPUs of a cluster: no provider has more of one kind behind one scheduler."""

MAX_RATE_PER_S = 1e6
"""No cluster is asked more: beyond, all requests come at once and a second means nothing."""

MAX_CV = 100.0
"""The largest CV of the gaps between arrivals, far beyond any recorded: one gap lasts longer than all others together."""

Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, gt=0, le=MAX_RATE_PER_S, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, gt=0, lt=1, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
Tokens = Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)]
Requests = Annotated[int, Field(strict=True, ge=1, le=MAX_REQUESTS)]
RequestsOrZero = Annotated[int, Field(strict=True, ge=0, le=MAX_REQUESTS)]
Burstiness = Annotated[float, Field(strict=True, gt=0, le=MAX_CV, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]


def _on_a_line(value: Any) -> Any:
    if isinstance(value, str) and not value.isprintable():
        raise PydanticCustomError("line", "must be printable, on one line")
    return value


ModelId = Annotated[str, Field(min_length=1, max_length=100), BeforeValidator(_on_a_line)]
"""What people read in tables and figures."""


def _stem(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"\w[\w.-]*", value):
        raise PydanticCustomError("stem", "must begin with a letter or digit and have only letters, digits, _, . and -")
    return value


Stem = Annotated[str, BeforeValidator(_stem)]
"""A name that files are called by, in the results folder and never beside it."""


def _scalar(value: Any) -> Any:
    if not isinstance(value, str | int | float | bool):
        raise PydanticCustomError("scalar", "must be one value: a number, a word, true or false")
    return value


Scalar = Annotated[Any, BeforeValidator(_scalar)]
"""A value of an axis; its type is that of the key it is for."""
