"""Errors of the server in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import Any

from fineserve_runtime.jobs import End, Refused

REASON_HEADER = "x-fineserve-reason"
RETRY_AFTER_S = 1


class ApiError(Exception):
    """``reason``, where given, goes into the reason header and the metrics."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        reason: str | None = None,
    ) -> None:
        self.status = status
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers: dict[str, str] = {}
        if reason is not None:
            self.headers[REASON_HEADER] = reason
        if status == 503:
            self.headers["Retry-After"] = str(RETRY_AFTER_S)
        super().__init__(message)


def refused(problem: Refused) -> ApiError:
    return ApiError(503, str(problem), kind="service_unavailable", code=problem.reason, reason=problem.reason)


def unfinished(end: End) -> ApiError:
    """What a client is told whose request was refused or failed."""
    if end.kind == "refused" and end.reason == "rejected":
        return ApiError(400, end.message, code="rejected", reason=end.reason)
    if end.kind == "refused" or end.reason == "shutdown":
        message = "the deadline of the request cannot be met" if end.reason == "deadline" else end.message
        return ApiError(503, message, kind="service_unavailable", code=end.reason, reason=end.reason)
    return ApiError(500, end.message, kind="server_error", code=end.reason, reason=end.reason)
