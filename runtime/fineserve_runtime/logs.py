"""Logs beside the serving path: a caller puts a line into a bounded queue, and a thread of the log writes it.

A full disk, a blocked pipe or a slow device costs lines, which are counted, and nothing else. A gap is marked in the log by
``{"lost": N}``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG
from typing import Any, Protocol, TextIO

MOST_LINES = 20_000
"""So many lines wait for the disk; later ones are lost."""

FILE_BYTES = 256 * 2**20
KEPT_FILES = 4
"""A log file that has grown to ``FILE_BYTES`` becomes NAME.1, NAME.1 becomes NAME.2, ...; so many old ones are kept."""

_BATCH = 500
_CLOSE_S = 5.0


class Target(Protocol):
    def write(self, text: str) -> None:
        """Whole lines. Raises OSError or ValueError when they cannot be written; then nothing of them is there."""
        ...

    def close(self) -> None: ...


class LineLog:
    """JSON objects, one a line, written to ``target`` by a thread of this log. Safe from any thread, and never blocks."""

    def __init__(self, target: Target, name: str, most_lines: int = MOST_LINES) -> None:
        self.name = name
        self.lost = 0
        self._target = target
        self._most_lines = most_lines
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"log-{name}", daemon=True)
        self._thread.start()

    def __call__(self, entry: Mapping[str, Any]) -> None:
        with self._news:
            if self._closed or len(self._waiting) >= self._most_lines:
                self.lost += 1
                return
            self._waiting.append(entry)
            if len(self._waiting) == 1:
                self._news.notify()

    def close(self) -> None:
        """Write what waits, as far as that goes in a few seconds."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._target.close()

    def _run(self) -> None:
        told = 0
        while batch := self._take():
            gap: list[Mapping[str, Any]] = [{"lost": self.lost - told}] if self.lost > told else []
            seen = self.lost
            try:
                self._target.write("".join(_line(entry) for entry in [*gap, *batch]))
                told = seen
            except Exception:  # a full disk, a stream that is being torn down, an entry that is no JSON
                with self._news:
                    self.lost += len(batch)

    def _take(self) -> list[Mapping[str, Any]]:
        """The next lines; none once the log is closed and empty."""
        with self._news:
            self._news.wait_for(lambda: self._waiting or self._closed)
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), _BATCH))]


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":"), default=str) + "\n"


class StreamTarget:
    """An open text stream, such as stderr; it is its owner's to close."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def close(self) -> None:
        pass


class FileTarget:
    """A file that is rotated. Its first line begins each later part, too, with the number of the part. Raises OSError when it
    cannot be opened."""

    def __init__(self, path: Path, file_bytes: int = FILE_BYTES) -> None:
        self._path = path
        self._head: dict[str, Any] | None = None
        self._file_bytes = file_bytes
        self._part = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in log_parts(path)[:-1]:
            old.unlink()  # parts of an earlier log
        self._file = self._open()

    def write(self, text: str) -> None:
        if self._rotates and self._size and self._size + len(text) > self._file_bytes:
            self._rotate()
        again = not self._size and self._head is not None
        self._append(((_line({**(self._head or {}), "part": self._part}) if again else "") + text).encode())
        if self._head is None:
            self._head = json.loads(text.split("\n", 1)[0])

    def close(self) -> None:
        os.close(self._file)

    def _open(self) -> int:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._rotates = S_ISREG(os.fstat(file).st_mode)
        self._size = 0
        return file

    def _append(self, data: bytes) -> None:
        """All of it or nothing: half a line would make the log unreadable."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            if self._rotates:
                os.ftruncate(self._file, self._size)
                os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size += written

    def _rotate(self) -> None:
        """Where no new file can be opened, the old one stays open, and the next try moves no part again."""
        for number in range(KEPT_FILES if self._path.exists() else 0, 0, -1):
            older, newer = _part_path(self._path, number), _part_path(self._path, number - 1)
            if newer.exists():
                newer.replace(older)
        full, self._file = self._file, self._open()
        os.close(full)
        self._part += 1


def _part_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def log_parts(path: Path) -> list[Path]:
    """The files of a rotated log, the oldest first; ``path`` itself is the last, be it there or not."""
    older = [_part_path(path, number) for number in range(KEPT_FILES, 0, -1)]
    return [*(part for part in older if part.exists()), path]


class EventLog:
    """Structured lines ``{"time": ..., "event": ..., facts}`` on stderr."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.lines = LineLog(StreamTarget(stream or sys.stderr), "events")

    def __call__(self, event: str, facts: Mapping[str, object]) -> None:
        self.lines({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **facts})

    def close(self) -> None:
        self.lines.close()


class LoggingHandler(logging.Handler):
    """What libraries log goes into an event log: nothing of this process writes to stderr itself."""

    def __init__(self, log: Callable[[str, Mapping[str, object]], None]) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # a log line with wrong arguments
            facts: dict[str, object] = {
                "logger": record.name,
                "level": record.levelname,
                "message": record.getMessage(),
            }
            if record.exc_info and record.exc_info[1] is not None:
                facts["problem"] = repr(record.exc_info[1])
            self._log("library", facts)
