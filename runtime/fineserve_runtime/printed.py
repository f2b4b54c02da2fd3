"""What engine processes and libraries print: into the log, through a pipe that is always read.

They write to file descriptor 2 themselves. Were that a pipe without a reader, an engine that starts (vLLM
shows its progress) would wait in its first full write for ever.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

_STDERR = 2
_LINE_BYTES = 4096
_END_S = 2.0

Log = Callable[[str, Mapping[str, object]], None]


class Printed:
    """``stream`` is where stderr went before, for the log; ``into`` says which that is."""

    def __init__(self, stream: TextIO, reading: int) -> None:
        self.stream = stream
        self._reading = reading

    def into(self, log: Log) -> None:
        self.thread = threading.Thread(target=self._read, args=(log,), name="printed", daemon=True)
        self.thread.start()

    def _read(self, log: Log) -> None:
        """Read until no process has the other end any more."""
        rest = b""
        while data := os.read(self._reading, 65536):
            *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
            if len(rest) > _LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                if line.strip():
                    log("printed", {"text": line[:_LINE_BYTES].decode(errors="replace")})
        os.close(self._reading)


@contextmanager
def catch_printed() -> Iterator[Printed]:
    """Lead stderr of this process and its children to the log, to the end of the block."""
    before = os.dup(_STDERR)
    reading, writing = os.pipe()
    os.dup2(writing, _STDERR)  # inherited by children
    os.close(writing)
    ours = _is_stderr(sys.stderr)
    stream = os.fdopen(os.dup(before), "w", encoding="utf-8", errors="backslashreplace") if ours else sys.stderr
    printed = Printed(stream, reading)
    try:
        yield printed
    finally:
        os.dup2(before, _STDERR)
        os.close(before)
        printed.thread.join(_END_S)  # a child that was left behind may still have the other end


def _is_stderr(stream: TextIO) -> bool:
    """Tests put something else there, which has no descriptor or another."""
    with contextlib.suppress(OSError, ValueError):
        return stream.fileno() == _STDERR
    return False
