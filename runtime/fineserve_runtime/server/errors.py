"""Errors of the server in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fineserve_runtime.jobs import End, Refused

REASON_HEADER = "x-fineserve-reason"


class ApiError(Exception):
    """``reason``, where given, goes into the reason header and the metrics; ``retry_after_s`` into Retry-After, which every
    503 has."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        reason: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.reason = reason
        text = message.encode(errors="backslashreplace").decode()  # what a client sent may be no text
        self.body: dict[str, Any] = {"error": {"message": text, "type": kind, "param": param, "code": code}}
        self.headers = dict(headers or {})
        if reason is not None:
            self.headers[REASON_HEADER] = reason
        if status == 503 or retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s or 1.0)))
        super().__init__(message)


def refused(problem: Refused) -> ApiError:
    return _unavailable(problem.reason, str(problem), problem.retry_after_s)


def _unavailable(reason: str, message: str, retry_after_s: float | None) -> ApiError:
    kind = "service_unavailable"
    return ApiError(503, message, kind=kind, code=reason, reason=reason, retry_after_s=retry_after_s)


def unfinished(end: End) -> ApiError:
    """What a client is told whose request was refused or failed."""
    if end.kind == "refused" and end.reason == "rejected":
        return ApiError(400, end.message, code="rejected", reason=end.reason)
    if end.kind == "refused" or end.reason in ("shutdown", "model_down"):
        message = "the deadline of the request cannot be met" if end.reason == "deadline" else end.message
        return _unavailable(end.reason, message, end.retry_after_s)
    status = 504 if end.reason == "request_timeout" else 500
    return ApiError(status, end.message, kind="server_error", code=end.reason, reason=end.reason)
