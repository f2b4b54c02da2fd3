"""The requests of a run, drawn from named random streams.

Common random numbers: all systems, rate scales and SLO scales of one seed
see the same requests; a higher rate runs the same arrivals on a faster clock, so request i has the same lengths at
every rate. Phases are the exception: their durations are fixed, so a higher rate has other, more arrivals.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import fineserve_traces as traces
import numpy as np
from fineserve_traces import Trace

from fineserve_sim.experiment.file import schema
from fineserve_sim.experiment.file.resolve import Setup
from fineserve_sim.experiment.file.sources import length_source, processes_of, recorded
from fineserve_sim.experiment.run.rates import base_rates, phased_s, stretch
from fineserve_sim.experiment.run.streams import stream

ISOLATED_REQUESTS = 4096  # common to all models: what sampling error is left moves all base SLOs alike

ISOLATED_GAP_S = 1000.0
"""Isolated requests come so far apart that none meets another: no prefill lasts a thousand seconds."""


def build_trace(setup: Setup, load: str | None, rate_scale: float, seed: int) -> Trace:
    """The requests of one run, warm-up first. Raises ValueError when there are none to measure."""
    work = setup.workload
    if work.trace is not None:
        trace = _replayed(setup, load, rate_scale, seed)
    elif isinstance(work.arrivals, schema.ManyModels):
        trace = _many_models(setup, work.arrivals.duration_s, work.arrivals.scale * rate_scale, seed)
    elif phased_s(setup):
        trace = _phased(setup, load, rate_scale, seed)
    else:
        trace = _stationary(setup, load, rate_scale, seed)
    if work.conversations is not None:
        told = work.conversations
        trace = traces.conversations(
            trace, shared_tokens=told.shared_tokens, turns=told.turns, gap_s=told.gap_s / rate_scale
        )
    if len(trace) <= work.warmup_requests:
        raise ValueError(
            f"{len(trace)} requests in all, {work.warmup_requests} of them warm-up: none is left to measure"
        )
    return trace


def _stationary(setup: Setup, load: str | None, rate_scale: float, seed: int) -> Trace:
    """The first requests of the merged processes of all models. Each process is long enough to make up all of them, so
    where it is cut does not matter, and the order of requests does not depend on the rate scale. Only one process at a time
    is there in its full length: all are drawn twice, first to know the last arrival of them all."""
    work, lengths = setup.workload, length_source(setup)
    count = (work.requests or 0) + work.warmup_requests
    rates = base_rates(setup, load)

    def arrivals(name: str) -> traces.schema.FloatArray:
        rng = stream(seed, f"arrivals/{name}")
        return _arrivals(work.arrivals or schema.Poisson(), rng, rates[name], count)

    last_s = _last_of_first(map(arrivals, rates), count)
    parts = []
    for name in rates:
        arrival_s = arrivals(name)
        arrival_s = arrival_s[: np.searchsorted(arrival_s, last_s, side="right")].copy()
        if len(arrival_s):
            first = _First(lengths, count)
            parts.append(traces.generate(arrival_s, first, stream(seed, f"lengths/{name}"), model=name))
    merged = replace(traces.merge(parts), source=lengths.source).head(count)
    place = np.array([list(rates).index(name) for name in merged.models], dtype=np.int32)
    return merged.with_models(tuple(rates), place[merged.model]).with_arrivals(merged.arrival_s / rate_scale)


def _last_of_first(arrivals: Iterable[traces.schema.FloatArray], count: int) -> float:
    """When the last of the first ``count`` arrivals of all processes comes."""
    first = np.empty(0)
    for arrival_s in arrivals:
        first = np.partition(np.concatenate([first, arrival_s]), count - 1)[:count]
    return float(first.max())


@dataclass(frozen=True, slots=True)
class _First:
    """Lengths as the first of ``count`` draws have them, however few are asked for."""

    lengths: traces.LengthSource
    count: int

    @property
    def source(self) -> str:
        return self.lengths.source

    def sample(self, rng: np.random.Generator, n: int) -> tuple[traces.schema.IntArray, traces.schema.IntArray]:
        prompt_tokens, output_tokens = self.lengths.sample(rng, self.count)
        return prompt_tokens[:n].copy(), output_tokens[:n].copy()


def _arrivals(
    process: schema.Poisson | schema.Gamma | schema.Weibull | schema.ManyModels | schema.Replay,
    rng: np.random.Generator,
    rate_per_s: float,
    count: int,
) -> traces.schema.FloatArray:
    if isinstance(process, schema.Gamma):
        return traces.gamma(rng, rate_per_s, process.cv, count)
    if isinstance(process, schema.Weibull):
        return traces.weibull(rng, rate_per_s, process.cv, count)
    return traces.poisson(rng, rate_per_s, count)


def _phased(setup: Setup, load: str | None, rate_scale: float, seed: int) -> Trace:
    """Poisson arrivals through the phases; a model without phases keeps its rate for as long as they last."""
    rates, lengths, span_s = base_rates(setup, load), length_source(setup), phased_s(setup)
    parts = []
    for model in setup.models:
        steady = [(span_s, rates[model.id])]
        phases = [(phase.duration_s, phase.rate_per_s) for phase in model.entry.phases or ()] or steady
        rng = stream(seed, f"arrivals/{model.id}")
        arrival_s = traces.piecewise(rng, [(duration_s, rate * rate_scale) for duration_s, rate in phases])
        if len(arrival_s):
            parts.append(traces.generate(arrival_s, lengths, stream(seed, f"lengths/{model.id}"), model=model.id))
    if not parts:
        raise ValueError("no request arrives in any phase")
    return replace(traces.merge(parts), source=lengths.source)


def _many_models(setup: Setup, duration_s: float, scale: float, seed: int) -> Trace:
    lengths, parts = length_source(setup), []
    for model, process in zip(setup.models, processes_of(setup), strict=True):
        arrival_s = process.arrivals(stream(seed, f"arrivals/{model.id}"), duration_s, scale)
        if len(arrival_s):
            parts.append(traces.generate(arrival_s, lengths, stream(seed, f"lengths/{model.id}"), model=model.id))
    if not parts:
        raise ValueError(f"no request comes to any model in {duration_s:g} s")
    return replace(traces.merge(parts), source=lengths.source)


def alone_trace(setup: Setup, model: str, load: str | None, seed: int) -> Trace:
    """The requests of one model at rate scale 1; of the next seed in which it has any, if it is quiet all through this one.
    Raises ValueError when it never has."""
    for each in range(seed, seed + 100):
        trace = build_trace(setup, load, 1.0, each)
        if model in trace.models and (trace.model == trace.models.index(model)).any():
            return _requests_of(trace, model)
    raise ValueError(f"model {model} has no request of its own to take an SLO from; make the run longer")


def _requests_of(trace: Trace, model: str) -> Trace:
    own = trace.take(np.flatnonzero(trace.model == trace.models.index(model)))
    return own.with_models((model,), np.zeros(len(own), dtype=np.int32))


def _replayed(setup: Setup, load: str | None, rate_scale: float, seed: int) -> Trace:
    work, trace = setup.workload, recorded(setup)
    if work.requests is not None:
        trace = trace.head(work.requests + work.warmup_requests)
    if work.assign == "share":
        shares = np.array([model.entry.share or 0.0 for model in setup.models])
        drawn = stream(seed, "assign").choice(len(shares), size=len(trace), p=shares / shares.sum())
        trace = trace.with_models(trace.models, drawn)
    return trace.with_arrivals((trace.arrival_s - trace.arrival_s[0]) / (rate_scale * stretch(setup, load)))


def isolated_trace(setup: Setup, model: str) -> Trace:
    """Prompts of ``model`` one by one, each alone, with one output token: their TTFTs are pure prefill times. Models that
    draw from the same lengths get the same prompts, so that their base SLOs differ by the models alone."""
    rng = stream(0, "isolated")
    if setup.workload.trace is None:
        prompt, _ = length_source(setup).sample(rng, ISOLATED_REQUESTS)
    else:
        trace = recorded(setup)
        own = trace.prompt_tokens[trace.model == trace.models.index(model)]
        prompt = rng.choice(own if len(own) else trace.prompt_tokens, size=ISOLATED_REQUESTS)
    count = len(prompt)
    return Trace(
        arrival_s=np.arange(count, dtype=np.float64) * ISOLATED_GAP_S,
        model=np.zeros(count, dtype=np.int32),
        prompt_tokens=prompt,
        output_tokens=np.ones(count, dtype=np.int64),
        models=(model,),
        source="isolated prompts",
    )
