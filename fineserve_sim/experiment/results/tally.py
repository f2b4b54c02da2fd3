"""Sums and counts by model for metrics, from columns of ended requests, without a row a request.

The window and the batches of intervals are known before the run (``hits.Batches``). So counts, rates, means and the intervals
of attainments equal the ones of ``metrics.measure``. The last bits of sums may differ, which are taken in another order.
Percentiles come from histograms and are right to ``histogram.RELATIVE_ERROR``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.cluster import Fate
from fineserve_sim.cluster.scenario import EndedRequests
from fineserve_sim.experiment.file.metric_names import PERCENTILES
from fineserve_sim.experiment.results import misses
from fineserve_sim.experiment.results.histogram import Histograms
from fineserve_sim.experiment.results.hits import Batches, Hits
from fineserve_sim.experiment.results.metrics import decoded_tokens, rates
from fineserve_sim.experiment.run.run_data import Columns, Floats, Ints, Limits, Mask

MOMENTS = ("ttft", "tpot", "e2e")
ALL = -1
"""The row of all models together."""


class Tally:
    """Takes the ended requests of one run, judged by ``limits``. A row a model, and one of all models together."""

    def __init__(self, batches: Batches, limits: Limits) -> None:
        self._batches, self._limits = batches, limits
        self._models = len(batches.models)
        self._sums: dict[str, Floats] = {}
        self._hits: dict[str, list[Ints]] = {}
        self._latencies = {moment: Histograms(self._models) for moment in MOMENTS}
        self._misses = np.zeros((self._models, len(misses.CAUSES) + 1), dtype=np.int64)
        self._fates = np.zeros(len(Fate), dtype=np.int64)

    def add(self, came: EndedRequests) -> None:
        """Requests that have ended, in any order."""
        run, number = _columns(self._batches.models, came), came.ended.request
        if self._limits.accept_cut:
            run = run.accepting_cuts()
        measured = number >= self._batches.warmup
        met = misses.met(run, self._limits)
        self._count_window(run, met["ttft_attainment"])
        np.add.at(
            self._misses, (run.model[measured], misses.causes(run, met, (), self._limits.reach_tokens)[measured]), 1
        )
        self._fates += np.bincount(run.fate[measured], minlength=len(Fate))
        self._count_hits(run.model[measured], number[measured], {name: hit[measured] for name, hit in met.items()})
        self._add("preemptions", run.model, run.preemptions, measured)
        self._add("prompt", run.model, run.prompt_tokens, measured)
        self._add("output", run.model, run.generated_tokens, measured)
        self._count_latencies(run, measured)

    def _count_window(self, run: Columns, in_time: Mask) -> None:
        start_s, end_s = self._batches.window_s
        ended = (run.finish_s >= start_s) & (run.finish_s <= end_s)
        first = (run.first_token_s >= start_s) & (run.first_token_s <= end_s)
        ones = np.ones(len(run.model))
        for name, seen in (("good", ended & in_time), ("ended", ended), ("first", first)):
            self._add(name, run.model, ones, seen)
        self._add("decoded", run.model, decoded_tokens(run, start_s, end_s), np.ones(len(ended), dtype=np.bool_))

    def _count_hits(self, model: NDArray[np.int32], number: Ints, met: Mapping[str, Mask]) -> None:
        everybody = np.full(len(model), self._models)
        rows = [(each, self._batches.of(each, number)) for each in (model.astype(np.int64), everybody)]
        for metric, hit in met.items():
            counts = self._hits.setdefault(
                metric, [np.zeros(len(each), dtype=np.int64) for each in self._batches.sizes]
            )
            for row, batch in rows:
                for place, at, hits in _counted(row[hit], batch[hit]):
                    counts[place][at] += hits

    def _count_latencies(self, run: Columns, measured: Mask) -> None:
        several = measured & (run.output_tokens > 1)
        for moment, latency_s, due in (
            ("ttft", run.ttft_s, measured),
            ("tpot", run.tpot_s, several),
            ("e2e", run.e2e_s, measured),
        ):
            self._latencies[moment].add(run.model[due], latency_s[due])
            known = due & np.isfinite(latency_s)
            self._add(f"{moment}_s", run.model, latency_s, known)
            self._add(f"{moment}_known", run.model, np.ones(len(known)), known)

    def _add(self, name: str, model: NDArray[np.int32], values: NDArray[Any], where: Mask) -> None:
        here = np.bincount(model[where], values[where], self._models)
        self._sums[name] = self._sums[name] + here if name in self._sums else here.astype(np.float64)

    # --- what came of it -------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """As ``metrics.counts``."""
        fates = {fate.name.lower(): int(self._fates[fate]) for fate in Fate}
        return {"arrived": int(self._fates.sum()), **fates, "preemptions": self._sum("preemptions", ALL)}

    def hits(self, metric: str, row: int) -> Hits:
        return Hits(self._hits[metric][row], self._batches.sizes[row])

    @property
    def metrics(self) -> list[str]:
        """The attainments that there are."""
        return list(self._hits)

    def missed(self, row: int, *, unplaced: bool = False) -> dict[str, int]:
        """Measured requests by cause; of a model that is ``unplaced`` all that were rejected were so for that."""
        counts = self._misses[row] if row != ALL else self._misses.sum(axis=0)
        found = {cause: int(count) for cause, count in zip(misses.CAUSES, counts[1:], strict=True)}
        return found | {"unplaced": found["rejected"], "rejected": 0} if unplaced else found

    def tokens(self, row: int) -> dict[str, int]:
        return {side: self._sum(side, row) for side in ("prompt", "output")}

    def values(self, row: int) -> dict[str, float]:
        """As ``metrics`` has them of a model, or of all (``ALL``)."""
        start_s, end_s = self._batches.window_s
        decoded, good, ended, first = (self._float(name, row) for name in ("decoded", "good", "ended", "first"))
        arrived, span_s = float(self._batches.sizes[row].sum()), end_s - start_s if end_s > start_s else math.nan
        values = rates(span_s, decoded, good, ended, first, arrived)
        for moment, histograms in self._latencies.items():
            found = histograms.percentiles(None if row == ALL else row, PERCENTILES)
            values |= {f"{moment}_p{percent}_s": value for percent, value in zip(PERCENTILES, found, strict=True)}
            known = self._float(f"{moment}_known", row)
            values[f"{moment}_mean_s"] = self._float(f"{moment}_s", row) / known if known else math.nan
        return values

    def _float(self, name: str, row: int) -> float:
        return float(self._sums[name].sum() if row == ALL else self._sums[name][row])

    def _sum(self, name: str, row: int) -> int:
        return round(self._float(name, row))


def _counted(row: Ints, batch: Ints) -> list[tuple[int, int, int]]:
    """Row, batch and how many of each pair that occurs."""
    pairs, counts = np.unique(np.stack([row, batch]), axis=1, return_counts=True)
    return list(zip(*pairs.tolist(), counts.tolist(), strict=True)) if len(row) else []


def _columns(models: tuple[str, ...], came: EndedRequests) -> Columns:
    ended, model, arrival_s, prompt_tokens, output_tokens = came
    return Columns(
        models,
        model,
        arrival_s,
        prompt_tokens,
        output_tokens,
        ended.first_token_s,
        ended.finish_s,
        ended.fate,
        ended.preemptions,
        ended.engine,
        ended.cause,
        ended.generated_tokens,
    )
