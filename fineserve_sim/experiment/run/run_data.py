"""One finished run as arrays, and the limits that it is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.cluster import Fate, GpuUse, Visits

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Limits(NamedTuple):
    """Seconds by model; None or nothing where a moment has no limit. A model that a limit does not name has none.
    ``accept_cut``: an output that was cut is as good as a whole one. ``reach_tokens``: the longest prompt whose first token an
    idle engine gives in time; a model that it lacks has no such bound."""

    ttft_s: Mapping[str, float] | None
    tpot_s: Mapping[str, float] | None = None
    e2e_s: Mapping[str, float] | None = None
    accept_cut: bool = False
    reach_tokens: Mapping[str, int] | None = None

    @property
    def moments(self) -> tuple[Mapping[str, float] | None, ...]:
        """The limits of the first token, the time per token and the last token."""
        return self[:3]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Requests and what became of them, an entry each; ``model`` indexes ``models``. NaN where a moment never came.
    ``output_tokens``: what was asked for; ``generated_tokens``: what finished and cut requests got, 0 of others."""

    models: tuple[str, ...]
    model: NDArray[np.int32]
    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    first_token_s: Floats
    finish_s: Floats
    fate: NDArray[np.int8]
    preemptions: Ints
    engine: NDArray[np.int32]
    cause: NDArray[np.int8]
    generated_tokens: Ints

    @property
    def ttft_s(self) -> Floats:
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """Seconds per output token after the first; NaN for requests of one token and for requests that did not finish."""
        later = np.where(self.generated_tokens > 1, self.generated_tokens - 1, np.nan)
        result: Floats = (self.finish_s - self.first_token_s) / later
        return result

    @property
    def e2e_s(self) -> Floats:
        """Seconds from arrival to the last token; NaN for requests that did not get what they asked for."""
        result: Floats = np.where(self.fate == Fate.FINISHED, self.finish_s - self.arrival_s, np.nan)
        return result

    def accepting_cuts(self) -> Self:
        """The same, cut outputs being whole ones."""
        return replace(self, fate=np.where(self.fate == Fate.CUT, Fate.FINISHED, self.fate).astype(np.int8))


@dataclass(frozen=True, slots=True, eq=False)
class RunData(Columns):
    """One finished run. Columns are in arrival order; ``visits`` are by request, none in a bound.

    Timeline arrays have one row a sample and one column an engine, ``engine_models`` names each engine's model;
    ``gpu_free_bytes`` has a column a GPU with KV memory. ``gpus`` counts the slices of a GPU once.
    """

    warmup: int
    engine_models: tuple[str, ...]
    sample_s: Floats
    waiting: Ints
    kv_used_bytes: Ints
    kv_capacity_bytes: int
    gpus: int
    counters: Mapping[str, float] = field(default_factory=dict)
    gpu_free_bytes: Ints = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    gpu_use: tuple[GpuUse, ...] = ()
    visits: Visits = field(default_factory=partial(Visits.joined, ()))

    @property
    def measured(self) -> Mask:
        return np.arange(len(self.arrival_s)) >= self.warmup

    @property
    def window_s(self) -> tuple[float, float]:
        return float(self.arrival_s[self.warmup]), float(self.arrival_s[-1])
