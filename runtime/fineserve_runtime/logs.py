"""Structured logs: one JSON object a line."""

from __future__ import annotations

import json
import sys
import threading
from datetime import UTC, datetime
from typing import TextIO


class JsonLog:
    """Writes ``{"time": ..., "event": ..., facts}`` lines; safe from any thread."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr
        self._lock = threading.Lock()

    def __call__(self, event: str, facts: dict[str, object]) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "event": event, **facts}, default=str)
        with self._lock:
            print(line, file=self._file, flush=True)
