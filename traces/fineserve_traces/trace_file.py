"""A trace file whose requests are read on demand: the requests of `read_trace`, to the last bit, and its errors.

A file is cut into blocks of whole lines. A block goes to the reader of its format behind the header and the first row of the
file, from which recorded formats count time. So one set of readers does for both, and what is held is a block. A result of
``vllm bench serve`` is one JSON document, and one block; so are turns of conversations, which come after each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fineserve_traces.files import read_blocks, read_text
from fineserve_traces.readers import READERS, detect_format
from fineserve_traces.rows import Rows, model_names, named_source
from fineserve_traces.schema import IntArray, Trace, TraceError, error_at

BLOCK_BYTES = 1 << 18
_DOCUMENTS = ("vllm-bench", "sessions")
_HEADED = ("csv", "arena", "azure", "burstgpt")


@dataclass(frozen=True, slots=True, eq=False)
class TraceFile:
    """The requests of a file that has been read once, and what was found; a ``Requests``.

    By model, int64 (models,): how many ``requests``, their ``prompt_tokens`` and ``output_tokens`` together. ``longest``:
    by token column the most tokens of a request, and the number of the first one with so many, from 1 on.
    """

    path: Path
    format: str
    models: tuple[str, ...]
    source: str
    requests: IntArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    first_s: float
    last_s: float
    longest: dict[str, tuple[int, int]]

    def __len__(self) -> int:
        return int(self.requests.sum())

    def chunks(self) -> Iterator[Trace]:
        seen = 0
        for rows in _parts(self.path, self.format):
            chunk = _requests_of(rows, self.models, self.source, seen)
            if chunk is not None:
                seen += len(chunk)
                yield chunk


def open_trace(path: str | Path, format: str | None = None, *, model: str = "default") -> TraceFile:
    """Read a trace file through, without keeping its rows; arguments and errors as of a strict `read_trace`."""
    path = Path(path)
    if format is None:
        format = detect_format(_start(read_blocks(path, BLOCK_BYTES, cells=False)), path)
    if format not in READERS:
        raise TraceError(f"{path}: unknown format {format!r}; known are {', '.join(READERS)}")
    found, names, dropped = _Found(), dict[str, None](), 0
    for rows in _parts(path, format):
        names |= dict.fromkeys([model] if rows.names is None else rows.names)
        chunk = _requests_of(rows, tuple(names), path.name, found.seen)
        dropped += len(rows.arrival_s) - (0 if chunk is None else len(chunk))
        if chunk is not None:
            found.add(chunk)
    source = named_source(f"{path.name} ({format})", dropped)
    if not found.seen:
        raise TraceError(f"{source}: the trace is empty; give at least one request")
    models, place = model_names(names), {name: index for index, name in enumerate(names)}
    requests, prompts, outputs = found.sums(len(names))[:, [place[name] for name in models]]
    return TraceFile(
        path, format, models, source, requests, prompts, outputs, found.first_s, found.last_s, found.longest
    )


class _Found:
    """What has been seen of the requests so far; their models are numbered as they appear."""

    def __init__(self) -> None:
        self.seen = 0
        self.first_s = self.last_s = 0.0
        self.longest = {"prompt_tokens": (0, 0), "output_tokens": (0, 0)}
        self._sums = np.zeros((3, 0), dtype=np.int64)

    def add(self, chunk: Trace) -> None:
        own = [np.bincount(chunk.model, minlength=len(chunk.models))]
        for name, (most, _) in self.longest.items():
            tokens = getattr(chunk, name)
            own.append(np.bincount(chunk.model, tokens, len(chunk.models)).astype(np.int64))
            if tokens.max() > most:
                self.longest[name] = int(tokens.max()), self.seen + int(tokens.argmax()) + 1
        self._sums = self.sums(len(chunk.models)) + np.array(own)
        self.first_s = self.first_s if self.seen else float(chunk.arrival_s[0])
        self.last_s = float(chunk.arrival_s[-1])
        self.seen += len(chunk)

    def sums(self, models: int) -> IntArray:
        """Requests, prompt and output tokens of so many models, (3, models)."""
        return np.pad(self._sums, ((0, 0), (0, models - self._sums.shape[1])))


def _requests_of(rows: Rows, models: tuple[str, ...], source: str, seen: int) -> Trace | None:
    """The rows that are requests, if any; so many came before."""
    keep = rows.requests()
    if not len(keep):
        return None
    with _further_down(seen, 0):
        return rows.trace_of(keep, models, source)


def _parts(path: Path, format: str) -> Iterator[Rows]:
    """The rows of the file, a block at a time. Raises TraceError as the reader, and where a row comes before the one ahead."""
    read, where = READERS[format], str(path)
    if format in _DOCUMENTS:
        yield read(read_text(path), path)
        return
    blocks = read_blocks(path, BLOCK_BYTES, cells=format in _HEADED)
    block = _start(blocks)
    rows = read(block, path)
    rows.check_order(where)
    yield rows
    ahead = _ahead(block, format)
    first_s, last_s, seen, lines = float(rows.arrival_s[0]), float(rows.arrival_s[-1]), len(rows.arrival_s), 0
    for next_block in blocks:
        lines += block.count(b"\n")
        block = next_block
        with _further_down(seen - 1, lines - ahead.count(b"\n")):
            rows = read(ahead + block, path)
            # A reader may count from the earliest row: one before the first of all shifts the times of this part.
            rows = rows.after(last_s + (float(rows.arrival_s[0]) - first_s))
            rows.check_order(where)
        last_s, seen = float(rows.arrival_s[-1]), seen + len(rows.arrival_s) - 1
        yield rows.but_first()


def _start(blocks: Iterator[bytes]) -> bytes:
    """The first block, with more of them until two lines are in it."""
    start = b""
    for block in blocks:
        start += block
        if len(_lines(start, 2)) == 2:
            break
    return start


def _ahead(block: bytes, format: str) -> bytes:
    """The header, if there is one, and the first row."""
    return b"".join(line + b"\n" for line in _lines(block, 2 if format in _HEADED else 1))


def _lines(block: bytes, number: int) -> list[bytes]:
    """The first lines that are not blank."""
    return [line for line in block.split(b"\n") if line.strip()][:number]


@contextmanager
def _further_down(rows: int, lines: int) -> Iterator[None]:
    """Errors say where they are in the whole file: so many rows or lines after the place in a part of it."""
    try:
        yield
    except TraceError as error:
        if error.place is None:
            raise
        where, unit, number, problem = error.place
        raise error_at(where, unit, number + (rows if unit == "row" else lines), problem) from None
