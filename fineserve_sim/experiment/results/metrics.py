"""The metrics of one run (systems.md 1.4, claims.yaml meta.definitions).

The window lasts from the first measured arrival (after the warm-up) to the last arrival. Rates count everything that
happens inside it, whichever request it belongs to. So a queue carried over from the warm-up and one left at the end weigh
the same. Latencies and attainment count the measured requests, however late they finish.

* TTFT: first token - arrival. TPOT: (finish - first token) / (output tokens - 1), for two tokens and more.
* attainment: share of measured arrivals that finished and met the limit (slo: every limit); all others (dropped, rejected,
  unfinished, late) are misses. ``misses`` tells their causes.
* throughput: completions in the window a second; goodput: completions within their TTFT limit.
* decode throughput: output tokens after the first, spread evenly from a request's first token to its finish, those
  inside the window a second; token throughput: with the first tokens.
* percentiles are over all measured requests (TPOT: of two tokens and more). One that never got so far is infinitely late:
  a system that drops has no better percentiles than one that serves. Means are over those that did.
* GPU hours: all GPUs of the cluster in the window count, slices by MIG as the GPUs that they are of. They are told a million
  output tokens, and a thousand requests within all limits.
* KV use: bytes used / KV capacity of the cluster, mean and peak over the timeline's samples in the window.
* counters of single-model clusters (demand, drops, exchanges, bubbles): ``cluster/samples.py``.
* counters of fleets whose engines sleep: activations by where the weights were (``scenario.WAKES``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fineserve_sim.cluster import Fate
from fineserve_sim.cluster.scenario import COUNTERS, WAKES
from fineserve_sim.experiment.file.metric_names import ATTAINMENTS, EACH, METRICS, PER_MODEL, PERCENTILES, overall
from fineserve_sim.experiment.results import misses
from fineserve_sim.experiment.results.hits import Hits
from fineserve_sim.experiment.results.stats import Sample, of_share, over_runs
from fineserve_sim.experiment.run.run_data import Columns, Floats, Limits, Mask, RunData


@dataclass(frozen=True, slots=True)
class Measures:
    """All metrics of one run: hits among measured requests for the attainments, one number each for the rest.

    Keys of the inner mappings are model ids; ``""`` stands for all models together. ``misses`` counts requests by cause,
    ``tokens`` are prompt and output tokens of measured requests (output: what those got that finished or were cut).
    """

    counts: dict[str, int]
    hits: dict[str, dict[str, Hits]]
    values: dict[str, dict[str, float]]
    models: tuple[str, ...] = field(default=())
    misses: dict[str, dict[str, int]] = field(default_factory=dict)
    tokens: dict[str, dict[str, int]] = field(default_factory=dict)


def counts(run: RunData) -> dict[str, int]:
    """Measured requests by their end. Raises AssertionError when a request got lost: every arrival has one fate."""
    measured = run.measured
    found = {fate.name.lower(): int(np.sum(run.fate[measured] == fate)) for fate in Fate}
    arrived = int(measured.sum())
    if arrived != sum(found.values()):
        raise AssertionError(f"{arrived} requests arrived, but their fates add up to {found}")
    if np.any(np.isnan(run.finish_s) == np.isin(run.fate, (Fate.FINISHED, Fate.CUT))):
        raise AssertionError("a finished or cut request has no finish time, or another one has")
    return {"arrived": arrived, **found, "preemptions": int(run.preemptions[measured].sum())}


def measure(
    run: RunData,
    ttft_slo_s: Mapping[str, float],
    tpot_slo_s: Mapping[str, float] | None = None,
    e2e_slo_s: Mapping[str, float] | None = None,
    accept_cut: bool = False,
    reach_tokens: Mapping[str, int] | None = None,
    unplaced: Collection[str] = (),
) -> Measures:
    """Evaluate one run under the TTFT limits of all models and, if given, TPOT and end-to-end limits; with ``accept_cut`` a cut
    output is a whole one. ``reach_tokens``: as of ``Limits``. ``unplaced`` models had no instance. AssertionError as in
    ``counts``."""
    if accept_cut:
        run = run.accepting_cuts()
    met = misses.met(run, Limits(ttft_slo_s, tpot_slo_s, e2e_slo_s))
    codes = misses.causes(run, met, unplaced, reach_tokens)
    groups = {"": np.ones(len(run.model), dtype=np.bool_)}
    places = {name: index for index, name in enumerate(run.models)}
    groups |= {name: run.model == places.get(name, -1) for name in ttft_slo_s}  # a seed may have no request of a model
    hits = {
        metric: {name: Hits.among(hit[group & run.measured]) for name, group in groups.items()}
        for metric, hit in met.items()
    }
    by_group = {
        name: _request_values(run, group, met["ttft_attainment"]) | _timeline_values(run, name)
        for name, group in groups.items()
    }
    values = {metric: {name: found[metric] for name, found in by_group.items()} for metric in PER_MODEL}
    within = hits["slo_attainment"][""].sum()
    used = run.kv_used_bytes[_samples(run)].sum(axis=1)
    of_cluster = Cluster(run.gpus, run.kv_capacity_bytes, run.counters)
    mean_and_peak = (float(used.mean()), float(used.max())) if len(used) else (math.nan, math.nan)
    tokens_per_s = values["token_throughput_per_s"][""]
    wide = cluster_values(of_cluster, mean_and_peak, tokens_per_s, run.window_s, within)
    values |= {metric: {"": value} for metric, value in wide.items()}
    return Measures(
        counts(run),
        hits,
        values,
        tuple(ttft_slo_s),
        {name: misses.counted(codes[group & run.measured]) for name, group in groups.items()},
        {name: _tokens(run, group & run.measured) for name, group in groups.items()},
    )


def _tokens(run: RunData, group: Mask) -> dict[str, int]:
    return {"prompt": int(run.prompt_tokens[group].sum()), "output": int(run.generated_tokens[group].sum())}


def _request_values(run: RunData, group: Mask, met_ttft: Mask) -> dict[str, float]:
    start_s, end_s = run.window_s
    span_s = end_s - start_s if end_s > start_s else math.nan
    ended = group & (run.finish_s >= start_s) & (run.finish_s <= end_s)
    first = group & (run.first_token_s >= start_s) & (run.first_token_s <= end_s)
    decoded = float(decoded_tokens(run, start_s, end_s)[group].sum())
    sums = (ended & met_ttft, ended, first, group & run.measured)
    values = rates(span_s, decoded, *(float(np.sum(each)) for each in sums))
    own = group & run.measured
    due = {"ttft": own, "tpot": own & (run.output_tokens > 1), "e2e": own}
    latencies = {"ttft": run.ttft_s, "tpot": run.tpot_s, "e2e": run.e2e_s}
    for moment, latency_s in latencies.items():
        all_s = np.nan_to_num(latency_s[due[moment]], nan=np.inf)
        for percent in PERCENTILES:
            values[f"{moment}_p{percent}_s"] = _percentile(all_s, percent)
        known = all_s[np.isfinite(all_s)]
        values[f"{moment}_mean_s"] = float(known.mean()) if len(known) else math.nan
    return values


def rates(span_s: float, decoded: float, good: float, ended: float, first: float, arrived: float) -> dict[str, float]:
    """Per second of the window: decoded tokens, and requests that ended within their TTFT limit, that ended, got their first
    token and arrived there."""
    return {
        "goodput_per_s": good / span_s,
        "throughput_per_s": ended / span_s,
        "decode_throughput_tokens_per_s": decoded / span_s,
        "token_throughput_per_s": (decoded + first) / span_s,
        "arrival_rate_per_s": arrived / span_s,
    }


def _percentile(latency_s: Floats, percent: float) -> float:
    """Infinite where it falls on or beside a request that never got so far; NaN without requests."""
    if not len(latency_s):
        return math.nan
    known = latency_s[np.isfinite(latency_s)]
    if len(known) == len(latency_s):
        return float(np.percentile(known, percent))
    rank = (len(latency_s) - 1) * percent / 100
    low, high = math.floor(rank), math.ceil(rank)
    if high >= len(known):
        return math.inf
    known.sort()
    return float(known[low] + (known[high] - known[low]) * (rank - low))


def decoded_tokens(run: Columns, start_s: float, end_s: float) -> Floats:
    """Output tokens after the first that each request which ended with one produced inside the window."""
    duration_s = run.finish_s - run.first_token_s
    inside_s = np.minimum(run.finish_s, end_s) - np.maximum(run.first_token_s, start_s)
    at_once = (run.finish_s >= start_s) & (run.finish_s <= end_s)
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(duration_s > 0, np.clip(inside_s / duration_s, 0, 1), at_once)
    return np.where(run.generated_tokens > 0, (run.generated_tokens - 1) * part, 0.0)


def _timeline_values(run: RunData, name: str) -> dict[str, float]:
    rows = _samples(run)
    columns = np.array([name in ("", model) for model in run.engine_models], dtype=np.bool_)
    waiting = run.waiting[rows][:, columns].sum(axis=1)
    used = run.kv_used_bytes[rows][:, columns].sum(axis=1)
    if not len(waiting):
        return {"waiting_mean": math.nan, "waiting_max": math.nan, "kv_used_peak_bytes": math.nan}
    return {
        "waiting_mean": float(waiting.mean()),
        "waiting_max": float(waiting.max()),
        "kv_used_peak_bytes": float(used.max()),
    }


def _samples(run: RunData) -> Mask:
    start_s, end_s = run.window_s
    return (run.sample_s >= start_s) & (run.sample_s <= end_s)


class Cluster(NamedTuple):
    """What metrics of a whole cluster are taken of, beside its requests."""

    gpus: int
    kv_capacity_bytes: int
    counters: Mapping[str, float]


def cluster_values(
    cluster: Cluster,
    used_bytes: tuple[float, float],
    tokens_per_s: float,
    window_s: tuple[float, float],
    within: int,
) -> dict[str, float]:
    """``used_bytes``: mean and peak of its KV memory in use, NaN without samples; ``within``: requests within all limits."""
    capacity_bytes, seconds = cluster.kv_capacity_bytes or math.nan, window_s[1] - window_s[0]
    return {
        "kv_use_mean": used_bytes[0] / capacity_bytes,
        "kv_use_peak": used_bytes[1] / capacity_bytes,
        "gpu_hours_per_mtoken": cluster.gpus / 3600 * 1e6 / tokens_per_s if tokens_per_s else math.nan,
        "gpu_hours_per_1000_within": cluster.gpus * seconds / 3600 / within * 1000 if within and seconds else math.nan,
    } | {
        name: cluster.counters.get(name, math.nan)
        for kind in (COUNTERS, tuple(WAKES.values()))
        if not cluster.counters.keys().isdisjoint(kind)
        for name in kind
    }


def estimate(runs: Sequence[Measures], metric: str, model: str = "") -> Sample:
    """A metric over the runs of one cell, of one model or (``""``) all: the right interval for its kind. For an attainment of
    each model, the model that attains least counts."""
    if metric.startswith(EACH):
        own = overall(metric)
        asked = [name for name in runs[0].models if any(len(run.hits[own][name]) for run in runs)]
        return min((estimate(runs, own, name) for name in asked), key=lambda found: found.mean)
    if metric in ATTAINMENTS:
        return of_share([run.hits[metric][model] for run in runs])
    return over_runs([run.values[metric][model] for run in runs])


def present(runs: Sequence[Measures]) -> list[str]:
    """The metrics that the runs have, in the fixed order of ``METRICS``."""
    return [metric for metric in METRICS if metric in runs[0].hits or metric in runs[0].values]
