"""The one trace schema: every format is read into these columns, every generator produces them.

A trace is columnar: row i is request i, rows are in arrival order. Checks name the file, the row (1 = first data row)
and the column, so that a wrong value in a million-row file is found by its message.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
IndexArray = npt.NDArray[np.int32]

# Token counts pass through float64 when they are read from text; above 2**53 a float no longer holds every integer.
_MAX_TOKENS = 2**53


class Place(NamedTuple):
    """A row or a line of a file (``unit``, counted from 1) and what is wrong there."""

    where: str
    unit: str
    number: int
    problem: str


class TraceError(ValueError):
    """A trace or a trace file is not usable; the text says what, where and what would be right, in one line."""

    place: Place | None = None


def error_at(where: str, unit: str, number: int, problem: str) -> TraceError:
    """The error for one row or line; ``problem`` goes on behind its number."""
    error = TraceError(f"{where}, {unit} {number}{problem}")
    error.place = Place(where, unit, number, problem)
    return error


def cell_error(where: str, row: int, column: str, problem: str) -> TraceError:
    """The error for one cell; ``row`` is the 0-based index of the request."""
    return error_at(where, "row", row + 1, f", column {column}: {problem}")


def arrival_column(values: npt.ArrayLike, where: str, column: str = "arrival_s", in_order: bool = True) -> FloatArray:
    """``values`` as float64 seconds, shape (n,): finite, >= 0 and, with ``in_order``, non-decreasing.

    Raises TraceError naming ``where``, the row and ``column``.
    """
    seconds = _numeric(values, where, column).astype(np.float64)
    _reject(~np.isfinite(seconds), seconds, where, column, "is not a time; give seconds as a finite number")
    _reject(seconds < 0, seconds, where, column, "is negative; give seconds >= 0")
    if in_order:
        backwards = np.flatnonzero(np.diff(seconds) < 0)
        if backwards.size:
            row = int(backwards[0]) + 1
            before = f"{seconds[row]:.12g} is earlier than the row before it ({seconds[row - 1]:.12g})"
            raise cell_error(
                where, row, column, f"{before}; sort the rows by arrival (in Python, read_trace does with strict=False)"
            )
    return seconds


def token_column(values: npt.ArrayLike, where: str, column: str, minimum: int = 1) -> IntArray:
    """``values`` as int64 token counts, shape (n,), each a whole number >= ``minimum``.

    Raises TraceError naming ``where``, the row and ``column``.
    """
    tokens = _numeric(values, where, column)
    expected = f"give a whole number >= {minimum}"
    if tokens.dtype.kind == "f":
        _reject(~np.isfinite(tokens), tokens, where, column, f"is not a number of tokens; {expected}")
        _reject(tokens != np.floor(tokens), tokens, where, column, f"is not a whole number of tokens; {expected}")
    _reject(tokens < minimum, tokens, where, column, f"is too few tokens; {expected}")
    _reject(tokens > _MAX_TOKENS, tokens, where, column, f"is too many tokens; {expected} and <= 2**53")
    return tokens.astype(np.int64)


def _numeric(values: npt.ArrayLike, where: str, column: str) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise TraceError(f"{where}, column {column}: give one row of numbers, not {array.dtype} of shape {array.shape}")
    return array


def _index_column(values: npt.ArrayLike, where: str) -> IndexArray:
    index = _numeric(values, where, "model")
    if index.dtype.kind == "f":
        raise TraceError(f"{where}, column model: give integer indices into models, not {index.dtype}")
    return index.astype(np.int32)


def _reject(bad: npt.NDArray[np.bool_], values: npt.NDArray[Any], where: str, column: str, problem: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise cell_error(where, row, column, f"{values[row]:.12g} {problem}")


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in arrival order, as read-only columns of equal length n >= 1.

    arrival_s: float64 (n,), seconds, >= 0, non-decreasing. model: int32 (n,), index into ``models``.
    prompt_tokens, output_tokens: int64 (n,), >= 1. prefix_hashes, where known: one id per block of
    ``prefix_block_tokens`` tokens of prompt and output together. prefix_tokens: int64 (n,), how many tokens the ids of each
    request cover, by default its prompt as far as the blocks reach. Equal ids mean equal tokens from the first one up to the
    end of the block, as far as both requests cover it. source: where the rows come from, for people. dropped_rows: rows of
    the source that are no requests (zero tokens).

    Raises TraceError on construction when a column is wrong.
    """

    arrival_s: FloatArray
    model: IndexArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    models: tuple[str, ...]
    source: str
    prefix_hashes: tuple[tuple[int, ...], ...] | None = None
    prefix_block_tokens: int | None = None
    prefix_tokens: IntArray | None = None
    dropped_rows: int = 0

    def __post_init__(self) -> None:
        columns: dict[str, npt.NDArray[Any]] = {
            "arrival_s": arrival_column(self.arrival_s, self.source),
            "prompt_tokens": token_column(self.prompt_tokens, self.source, "prompt_tokens"),
            "output_tokens": token_column(self.output_tokens, self.source, "output_tokens"),
            "model": _index_column(self.model, self.source),
        }
        for name, column in columns.items():
            column.setflags(write=False)
            object.__setattr__(self, name, column)
        self._check_shape()
        self._check_hashes()

    def _check_shape(self) -> None:
        rows = len(self.arrival_s)
        if rows == 0:
            raise TraceError(f"{self.source}: the trace is empty; give at least one request")
        for name in ("model", "prompt_tokens", "output_tokens"):
            if len(getattr(self, name)) != rows:
                raise TraceError(
                    f"{self.source}, column {name}: {len(getattr(self, name))} rows, but arrival_s has {rows}"
                )
        if len(set(self.models)) != len(self.models):
            raise TraceError(f"{self.source}: a model is named twice in {self.models}")
        outside = np.flatnonzero((self.model < 0) | (self.model >= len(self.models)))
        if outside.size:
            row = int(outside[0])
            problem = f"{self.model[row]} is no index into the {len(self.models)} models"
            raise cell_error(self.source, row, "model", problem)

    def _check_hashes(self) -> None:
        if self.prefix_hashes is None:
            object.__setattr__(self, "prefix_tokens", None)
            return
        if self.prefix_block_tokens is None or self.prefix_block_tokens < 1:
            raise TraceError(
                f"{self.source}: prefix_hashes need prefix_block_tokens >= 1, not {self.prefix_block_tokens}"
            )
        if len(self.prefix_hashes) != len(self):
            raise TraceError(f"{self.source}, column prefix_hashes: {len(self.prefix_hashes)} rows, not {len(self)}")
        blocks = np.fromiter(map(len, self.prefix_hashes), np.int64, len(self))
        tokens = self.prompt_tokens + self.output_tokens
        most = -(-tokens // self.prefix_block_tokens)
        wrong = np.flatnonzero(blocks > most)
        if wrong.size:
            row = int(wrong[0])
            problem = f"{blocks[row]} blocks of {self.prefix_block_tokens} tokens, but prompt and output fill only {most[row]}"
            raise cell_error(self.source, row, "prefix_hashes", problem)
        self._set_prefix_tokens(np.minimum(blocks * self.prefix_block_tokens, tokens))

    def _set_prefix_tokens(self, most: IntArray) -> None:
        """Check the column, or fill it in; ``most`` tokens of each request lie in its blocks."""
        if self.prefix_tokens is None:
            covered = np.minimum(most, self.prompt_tokens)
        else:
            covered = token_column(self.prefix_tokens, self.source, "prefix_tokens", minimum=0)
            if len(covered) != len(self):
                raise TraceError(
                    f"{self.source}, column prefix_tokens: {len(covered)} rows, but arrival_s has {len(self)}"
                )
            beyond = np.flatnonzero(covered > most)
            if beyond.size:
                row = int(beyond[0])
                problem = f"{covered[row]} tokens, but only {most[row]} lie in the blocks of prefix_hashes"
                raise cell_error(self.source, row, "prefix_tokens", problem)
        covered.setflags(write=False)
        object.__setattr__(self, "prefix_tokens", covered)

    def __len__(self) -> int:
        return len(self.arrival_s)

    def chunks(self) -> Iterator[Trace]:
        """The whole trace, as the one chunk of a source of requests (``source.Requests``)."""
        yield self

    def take(self, rows: npt.NDArray[np.intp]) -> Trace:
        """The requests at these 0-based ``rows``, whose arrivals must be in order. Raises TraceError when there are
        none."""
        hashes, covered = self.prefix_hashes, self.prefix_tokens
        return replace(
            self,
            arrival_s=self.arrival_s[rows],
            model=self.model[rows],
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            prefix_hashes=None if hashes is None else tuple(hashes[row] for row in rows),
            prefix_tokens=None if covered is None else covered[rows],
        )

    def head(self, requests: int) -> Trace:
        """The first ``requests`` requests (all, when there are fewer)."""
        return self.take(np.arange(min(requests, len(self))))

    def window(self, start_s: float, end_s: float) -> Trace:
        """The requests with start_s <= arrival < end_s, arrivals counted from ``start_s``. TraceError when there are
        none."""
        first, last = np.searchsorted(self.arrival_s, [start_s, end_s])
        if first >= last:
            raise TraceError(f"{self.source}: no request arrives in [{start_s:g}, {end_s:g}) s")
        part = self.take(np.arange(first, last))
        return part.with_arrivals(part.arrival_s - start_s)

    def with_arrivals(self, arrival_s: FloatArray) -> Trace:
        """The same requests at other times, shape (n,)."""
        return replace(self, arrival_s=arrival_s)

    def with_models(self, models: Sequence[str], model: npt.ArrayLike) -> Trace:
        """The same requests for other ``models``; ``model``, shape (n,), holds indices into them."""
        return replace(self, models=tuple(models), model=np.asarray(model))

    def to_csv(self, path: str | Path) -> None:
        """Write arrival_s, model, prompt_tokens, output_tokens; `read_trace` gives the same columns back. No prefix
        hashes."""
        names = [self.models[index] for index in self.model]
        rows = zip(
            self.arrival_s.tolist(), names, self.prompt_tokens.tolist(), self.output_tokens.tolist(), strict=True
        )
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["arrival_s", "model", "prompt_tokens", "output_tokens"])
            writer.writerows(rows)


def merge(traces: Sequence[Trace]) -> Trace:
    """All requests of ``traces`` on one clock, in arrival order (ties: in the order of the arguments); models by name.

    Prefix hashes are kept when every trace has them with one block size; equal ids of two traces stay different
    prefixes.
    """
    if not traces:
        raise TraceError("merge: give at least one trace")
    models = tuple(dict.fromkeys(name for trace in traces for name in trace.models))
    position = {name: index for index, name in enumerate(models)}
    arrival_s = np.concatenate([trace.arrival_s for trace in traces])
    order = np.argsort(arrival_s, kind="stable")
    hashes = _merged_hashes(traces)
    covered = [trace.prefix_tokens for trace in traces if trace.prefix_tokens is not None]
    return Trace(
        arrival_s=arrival_s[order],
        model=np.concatenate([np.array([position[name] for name in t.models])[t.model] for t in traces])[order],
        prompt_tokens=np.concatenate([trace.prompt_tokens for trace in traces])[order],
        output_tokens=np.concatenate([trace.output_tokens for trace in traces])[order],
        models=models,
        source=" + ".join(trace.source for trace in traces),
        prefix_hashes=None if hashes is None else tuple(hashes[row] for row in order),
        prefix_block_tokens=None if hashes is None else traces[0].prefix_block_tokens,
        prefix_tokens=None if hashes is None else np.concatenate(covered)[order],
        dropped_rows=sum(trace.dropped_rows for trace in traces),
    )


def _merged_hashes(traces: Sequence[Trace]) -> list[tuple[int, ...]] | None:
    """Hashes of all requests, trace after trace, shifted so that the ids of two traces never meet."""
    merged: list[tuple[int, ...]] = []
    next_id = 0
    for trace in traces:
        if trace.prefix_hashes is None or trace.prefix_block_tokens != traces[0].prefix_block_tokens:
            return None
        low, high = hash_range(trace.prefix_hashes)
        merged += [tuple(block - low + next_id for block in blocks) for blocks in trace.prefix_hashes]
        next_id += high - low + 1
    return merged


def hash_range(hashes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The smallest and the largest block id; (0, 0) when no request has a block."""
    ids = [block for blocks in hashes for block in blocks]
    return min(ids, default=0), max(ids, default=0)
