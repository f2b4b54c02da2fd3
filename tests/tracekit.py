"""Traces for tests in more than one folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from fineserve_traces import Trace


@dataclass(frozen=True)
class Chunked:
    """A trace that comes some rows at a time."""

    trace: Trace
    rows: int

    @property
    def models(self) -> tuple[str, ...]:
        return self.trace.models

    @property
    def source(self) -> str:
        return self.trace.source

    def chunks(self) -> Iterator[Trace]:
        for first in range(0, len(self.trace), self.rows):
            yield self.trace.take(np.arange(first, min(first + self.rows, len(self.trace))))
