"""Between a reader and a trace: the columns of one file as recorded, and the way from them to a `Trace`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fineserve_traces.schema import FloatArray, IntArray, Trace, arrival_column, cell_error

_LARGEST = sys.float_info.max
"""What a float holds; integers of JSON have no end."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Columns of one file, equally long, each cell checked; zero-token rows and disorder are still in them.

    names: the model of each row, or None. hashes: block ids of each prompt, or None, with their ``block_tokens``.
    time_column: what the file calls its arrivals. in_file_order: False for files whose rows are in no order of time.
    """

    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    names: Sequence[str] | None = None
    hashes: Sequence[tuple[int, ...]] | None = None
    block_tokens: int | None = None
    time_column: str = "arrival_s"
    in_file_order: bool = True

    def requests(self) -> npt.NDArray[np.intp]:
        """The rows that are requests (both token counts > 0), in arrival order."""
        order = np.argsort(self.arrival_s, kind="stable")
        served = (self.prompt_tokens > 0) & (self.output_tokens > 0)
        return order[served[order]]

    def check_order(self, where: str) -> None:
        """Raise TraceError for a row that comes before the one ahead of it, in a format that has them in order."""
        arrival_column(self.arrival_s, where, self.time_column, in_order=self.in_file_order)

    def after(self, arrival_s: float) -> Rows:
        """The same rows, of which the first arrived then."""
        return replace(self, arrival_s=np.append(arrival_s, self.arrival_s[1:]))

    def but_first(self) -> Rows:
        return replace(
            self,
            arrival_s=self.arrival_s[1:],
            prompt_tokens=self.prompt_tokens[1:],
            output_tokens=self.output_tokens[1:],
            names=None if self.names is None else self.names[1:],
            hashes=None if self.hashes is None else self.hashes[1:],
        )

    def to_trace(self, where: str, source: str, model: str, strict: bool) -> Trace:
        """The trace of these rows. ``where`` names the file in errors, ``model`` the model when the rows name none."""
        if strict:
            self.check_order(where)
        keep = self.requests()
        dropped = len(self.arrival_s) - len(keep)
        models = model_names([model] if self.names is None else self.names)
        return self.trace_of(keep, models, named_source(source, dropped), dropped)

    def trace_of(self, keep: npt.NDArray[np.intp], models: tuple[str, ...], source: str, dropped: int = 0) -> Trace:
        """The trace of the rows ``keep``, with the names of all models; rows without names are of the first."""
        position = {name: index for index, name in enumerate(models)}
        names = self.names
        return Trace(
            arrival_s=self.arrival_s[keep],
            model=np.array([0 if names is None else position[names[row]] for row in keep], dtype=np.int32),
            prompt_tokens=self.prompt_tokens[keep],
            output_tokens=self.output_tokens[keep],
            models=models,
            source=source,
            prefix_hashes=None if self.hashes is None else tuple(self.hashes[row] for row in keep),
            prefix_block_tokens=self.block_tokens,
            dropped_rows=dropped,
        )


def named_source(source: str, dropped: int) -> str:
    """Where requests come from, for people, with the rows that are none."""
    return source + (f", {dropped} rows with zero tokens dropped" if dropped else "")


def model_names(names: Iterable[str]) -> tuple[str, ...]:
    """The distinct names, sorted; numbered models (arena) come first, in the order of their numbers."""
    return tuple(
        sorted(set(names), key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    )


def since_first(times: npt.ArrayLike, where: str, column: str) -> FloatArray:
    """``times`` counted from the earliest one, in their own unit. Raises TraceError at a cell that is no time."""
    checked = arrival_column(times, where, column, in_order=False)
    return checked - checked.min() if checked.size else checked


def json_numbers(values: Sequence[Any], where: str, column: str) -> FloatArray:
    """JSON values as float64, shape (n,). Raises TraceError at the first that is no number."""
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise cell_error(where, row, column, f"{value!r} is not a number")
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise cell_error(where, row, column, "more digits than any number here has")
    return np.asarray(values, dtype=np.float64)
