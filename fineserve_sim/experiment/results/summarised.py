"""A run of which metrics alone are kept: requests stream through it, and what it comes to is one JSON document.

Numbers that are not finite are texts there (``inf``, ``nan``), which JSON does not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fineserve_sim.cluster import RunResult, Scenario, simulate, simulate_streamed
from fineserve_sim.cluster.scenario import OUTCOMES, Ended, EndedRequests, boards
from fineserve_sim.experiment.file.metric_names import PER_MODEL
from fineserve_sim.experiment.results.hits import Batches, Hits
from fineserve_sim.experiment.results.metrics import Cluster, Measures, cluster_values
from fineserve_sim.experiment.results.seen import Seen
from fineserve_sim.experiment.results.tally import ALL, Tally
from fineserve_sim.experiment.run.run_data import Limits
from fineserve_sim.systems.spec import ClairvoyantSpec

Document = dict[str, Any]
NOTE = "metrics alone were kept: percentiles come from histograms and are right to 0.5 %"


def summarised(scenario: Scenario, warmup: int, limits: Limits) -> tuple[RunResult, Document]:
    """Simulate ``scenario`` and judge it by ``limits``; the first ``warmup`` requests do not count."""
    names, whole = tuple(limits.ttft_s or {}), None
    if isinstance(scenario.system.scheduler, ClairvoyantSpec) or scenario.clients is not None:
        whole = simulate(scenario)
        scenario = replace(scenario, trace=whole.sent or scenario.trace)
    batches = Batches(scenario.trace, warmup, names)
    tally, seen = Tally(batches, limits), Seen(batches.window_s)
    if whole is not None:
        result = whole
        tally.add(_all_of(scenario, result))
        if len(result.timeline.time_s):
            seen.add(result.timeline)
    else:
        result = simulate_streamed(scenario, tally.add, seen.add)
    return result, _document(scenario, result, batches, tally, seen, names)


def _all_of(scenario: Scenario, result: RunResult) -> EndedRequests:
    trace = scenario.whole_trace
    became = Ended(np.arange(len(trace)), *(getattr(result, name) for name in OUTCOMES))
    ended = replace(became, visits=result.visits)
    return EndedRequests(ended, trace.model, trace.arrival_s, trace.prompt_tokens, trace.output_tokens)


def _document(
    scenario: Scenario, result: RunResult, batches: Batches, tally: Tally, seen: Seen, names: Sequence[str]
) -> Document:
    rows = {"": ALL} | {name: batches.models.index(name) for name in names}
    unplaced = set(result.placement.unplaced)
    by_group = {name: tally.values(row) | seen.values(name) for name, row in rows.items()}
    values = {metric: {name: found[metric] for name, found in by_group.items()} for metric in PER_MODEL}
    own = Cluster(boards(scenario.gpus), sum(result.kv_capacity_bytes), result.counters)
    within = tally.hits("slo_attainment", ALL).sum()
    tokens_per_s = values["token_throughput_per_s"][""]
    wide = cluster_values(own, seen.used_bytes(), tokens_per_s, batches.window_s, within)
    values |= {metric: {"": value} for metric, value in wide.items()}
    missed = {name: tally.missed(row, unplaced=name in unplaced) for name, row in rows.items() if name}
    homeless = sum(each["unplaced"] for each in missed.values())
    everything = tally.missed(ALL)
    missed[""] = everything | {"unplaced": homeless, "rejected": everything["rejected"] - homeless}
    return {
        "counts": tally.counts(),
        "hits": {
            metric: {name: _hits(tally.hits(metric, row)) for name, row in rows.items()} for metric in tally.metrics
        },
        "values": {metric: {name: _told(value) for name, value in own.items()} for metric, own in values.items()},
        "models": list(names),
        "misses": missed,
        "tokens": {name: tally.tokens(row) for name, row in rows.items()},
        "kv_left": seen.kv_left(),
    }


def _hits(hits: Hits) -> list[list[int]]:
    return [hits.met.tolist(), hits.of.tolist()]


def _told(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def measures_of(document: Mapping[str, Any]) -> Measures:
    """The metrics of a run from its document."""
    return Measures(
        document["counts"],
        {
            metric: {name: Hits(*(np.array(each, dtype=np.int64) for each in hits)) for name, hits in own.items()}
            for metric, own in document["hits"].items()
        },
        {metric: {name: float(value) for name, value in own.items()} for metric, own in document["values"].items()},
        tuple(document["models"]),
        document["misses"],
        document["tokens"],
    )
