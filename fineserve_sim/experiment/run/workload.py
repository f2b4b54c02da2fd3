"""The requests of a run, drawn from named random streams.

Common random numbers: all systems, rate scales and SLO scales of one seed see the same requests. A higher rate runs the same
arrivals on a faster clock, so request i has the same lengths at every rate. Phases are the exception: their durations are
fixed, so a higher rate has other, more arrivals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import fineserve_traces as traces
import numpy as np
from fineserve_traces import Draw, Drawn, LengthSource, Requests, Trace
from fineserve_traces.arrivals import gamma_gaps, poisson_gaps, renewals, segment_by_segment, weibull_gaps
from fineserve_traces.drawn import ROWS, NextLengths
from fineserve_traces.onoff import OnOff
from fineserve_traces.schema import FloatArray, IntArray
from fineserve_traces.servegen import Client
from numpy.random import Generator

from fineserve_sim.cluster import Clients
from fineserve_sim.experiment.file import schema
from fineserve_sim.experiment.file.resolve import Setup
from fineserve_sim.experiment.file.sources import (
    check_unchanged,
    length_source,
    model_rows,
    places,
    processes_of,
    recorded,
)
from fineserve_sim.experiment.file.sources import held as held_trace
from fineserve_sim.experiment.run.rates import base_rates, clients_at, has_clients, phased_s, stretch
from fineserve_sim.experiment.run.replay import Replay
from fineserve_sim.experiment.run.streams import stream, stream_names

ISOLATED_REQUESTS = 4096  # common to all models: what sampling error is left moves all base SLOs alike

ISOLATED_GAP_S = 1000.0
"""Isolated requests come so far apart that none meets another: no prefill lasts a thousand seconds."""


def build_trace(setup: Setup, load: str | None, rate_scale: float, seed: int) -> Trace:
    """The requests of one run, warm-up first, all of them there. Raises ValueError when there are none to measure."""
    return traces.whole(_requests(setup, load, rate_scale, seed, held=True))


def build_requests(setup: Setup, load: str | None, rate_scale: float, seed: int) -> Requests:
    """Like ``build_trace``, but drawn or read from their file on demand; a trace where they are turns of conversations."""
    return _requests(setup, load, rate_scale, seed, held=False)


def _requests(setup: Setup, load: str | None, rate_scale: float, seed: int, *, held: bool) -> Requests:
    """Requests of a file are ``held``, for other runs of it, too, or not."""
    work = setup.workload
    requests: Drawn | Replay | Trace
    if work.trace is not None:
        requests = _replayed(setup, load, rate_scale, seed, held=held)
    elif has_clients(setup):
        requests = _of_clients(setup, rate_scale, seed)
    elif isinstance(work.arrivals, schema.ManyModels):
        requests = _many_models(setup, work.arrivals.duration_s, work.arrivals.scale * rate_scale, seed)
    elif phased_s(setup):
        requests = _phased(setup, load, rate_scale, seed)
    else:
        requests = _stationary(setup, load, rate_scale, seed)
    if work.conversations is not None:
        told = work.conversations
        requests = traces.conversations(
            traces.whole(requests), shared_tokens=told.shared_tokens, turns=told.turns, gap_s=told.gap_s / rate_scale
        )
    count = len(requests) if isinstance(requests, Trace) else requests.requests
    if count <= work.warmup_requests:
        raise ValueError(f"{count} requests in all, {work.warmup_requests} of them warm-up: none is left to measure")
    return requests


def _of_clients(setup: Setup, rate_scale: float, seed: int) -> Trace:
    """What the clients of each model send in turn, in rows whose times mean nothing: as many rows a model as all clients send
    together, since it is not known which of them will be the faster ones."""
    count, models = clients_of(setup, rate_scale).requests, len(setup.models)
    columns = [
        length_source(setup).in_turn(stream(seed, f"lengths/{name}"), count)(count)
        for name in _stream_names(setup).values()
    ]
    prompts, outputs = (np.stack([column[part] for column in columns], axis=1).ravel() for part in (0, 1))
    return Trace(
        arrival_s=np.zeros(count * models),
        model=np.tile(np.arange(models, dtype=np.int32), count),
        prompt_tokens=prompts,
        output_tokens=outputs,
        models=tuple(model.id for model in setup.models),
        source=length_source(setup).source,
    )


def clients_of(setup: Setup, rate_scale: float) -> Clients:
    """The clients of all models, so many times as many as the file has."""
    work = setup.workload
    count = (work.requests or 0) + work.warmup_requests
    if work.trace is not None:
        count = len(recorded(setup)) if work.requests is None else min(len(recorded(setup)), count)
    return Clients(
        of=tuple(clients_at(model, rate_scale) for model in setup.models),
        think_s=tuple(model.entry.think_s or 0.0 for model in setup.models),
        requests=count,
    )


def _stream_names(setup: Setup) -> dict[str, str]:
    return stream_names(model.id for model in setup.models)


def _stationary(setup: Setup, load: str | None, rate_scale: float, seed: int) -> Drawn:
    """The first requests of the merged processes of all models, whose order does not depend on the rate scale."""
    work, lengths, rates = setup.workload, length_source(setup), base_rates(setup, load)
    count, rate_per_s = (work.requests or 0) + work.warmup_requests, sum(rates.values())
    process, named = work.arrivals or schema.Poisson(), _stream_names(setup)
    draws = [
        Draw(
            name,
            partial(_renewals, process, own_per_s, max(16, int(ROWS * own_per_s / rate_per_s)), seed, named[name]),
            partial(_lengths, lengths, seed, named[name], count),
        )
        for name, own_per_s in rates.items()
    ]
    return Drawn(tuple(draws), count, rate_per_s, lengths.source, rate_scale)


def _renewals(
    process: schema.Poisson | schema.Gamma | schema.Weibull | schema.ManyModels | schema.Replay,
    rate_per_s: float,
    rows: int,
    seed: int,
    name: str,
) -> Iterator[FloatArray]:
    rng = stream(seed, f"arrivals/{name}")
    if isinstance(process, schema.Gamma):
        return renewals(gamma_gaps(rng, rate_per_s, process.cv), rows)
    if isinstance(process, schema.Weibull):
        return renewals(weibull_gaps(rng, rate_per_s, process.cv), rows)
    return renewals(poisson_gaps(rng, rate_per_s), rows)


def _lengths(lengths: LengthSource, seed: int, name: str, count: int) -> NextLengths:
    return lengths.in_turn(stream(seed, f"lengths/{name}"), count)


def _phased(setup: Setup, load: str | None, rate_scale: float, seed: int) -> Drawn:
    """Poisson arrivals through the phases; a model without phases keeps its rate for as long as they last."""
    rates, span_s, named = base_rates(setup, load), phased_s(setup), _stream_names(setup)
    arrivals = {}
    for model in setup.models:
        steady = [(span_s, rates[model.id])]
        phases = [(phase.duration_s, phase.rate_per_s) for phase in model.entry.phases or ()] or steady
        scaled = [(duration_s, rate * rate_scale) for duration_s, rate in phases]
        arrivals[model.id] = partial(_segments, scaled, seed, named[model.id])
    return _until_they_end(setup, arrivals, span_s, seed, "no request arrives in any phase")


def _segments(segments: list[tuple[float, float]], seed: int, name: str) -> Iterator[FloatArray]:
    return segment_by_segment(stream(seed, f"arrivals/{name}"), segments)


def _many_models(setup: Setup, duration_s: float, scale: float, seed: int) -> Drawn:
    named = _stream_names(setup)
    arrivals = {
        model.id: partial(_pieces, process, duration_s, scale, seed, named[model.id])
        for model, process in zip(setup.models, processes_of(setup), strict=True)
    }
    problem = f"no request comes to any model in {duration_s:g} s"
    return _until_they_end(setup, arrivals, duration_s, seed, problem)


def _pieces(process: OnOff | Client, duration_s: float, scale: float, seed: int, name: str) -> Iterator[FloatArray]:
    return process.pieces(stream(seed, f"arrivals/{name}"), duration_s, scale)


def _until_they_end(
    setup: Setup, arrivals: Mapping[str, Callable[[], Iterator[FloatArray]]], span_s: float, seed: int, problem: str
) -> Drawn:
    """The requests of processes that end, in about ``span_s``. Raises ValueError, with this text, when there are none."""
    counts = {name: sum(map(len, begin())) for name, begin in arrivals.items()}
    if not any(counts.values()):
        raise ValueError(problem)
    lengths, count, named = length_source(setup), sum(counts.values()), _stream_names(setup)
    draws = [
        Draw(name, begin, partial(_lengths, lengths, seed, named[name], counts[name]))
        for name, begin in arrivals.items()
        if counts[name]
    ]
    return Drawn(tuple(draws), count, count / span_s, lengths.source)


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


def _replayed(setup: Setup, load: str | None, rate_scale: float, seed: int, *, held: bool) -> Replay:
    work, trace, stamp = setup.workload, recorded(setup), setup.trace_stamp
    if not held:
        check_unchanged(trace.path, stamp)
    return Replay(
        held_trace(trace.path, stamp) if held else trace,
        len(trace) if work.requests is None else min(len(trace), work.requests + work.warmup_requests),
        trace.first_s,
        rate_scale * stretch(setup, load),
        tuple(model.id for model in setup.models),
        places(setup),
        tuple(model.entry.share or 0.0 for model in setup.models) if work.assign == "share" else None,
        seed,
    )


def _recorded_prompts(setup: Setup, model: str, rng: Generator) -> IntArray:
    """Prompt tokens of requests of the model that are drawn from the trace file; of any where it has none."""
    trace, own = recorded(setup), model_rows(setup, model)
    if not trace.requests[own].sum():
        own = np.arange(len(trace.models))
    chosen = rng.choice(int(trace.requests[own].sum()), size=ISOLATED_REQUESTS)
    found, seen = np.empty(len(chosen), dtype=np.int64), 0
    for chunk in trace.chunks():
        prompts = chunk.prompt_tokens[np.isin(chunk.model, own)]
        here = (seen <= chosen) & (chosen < seen + len(prompts))
        found[here] = prompts[chosen[here] - seen]
        seen += len(prompts)
    return found


def isolated_trace(setup: Setup, model: str) -> Trace:
    """Prompts of ``model`` one by one, each alone, with one output token: their TTFTs are pure prefill times. Models that
    draw from the same lengths get the same prompts, so that their base SLOs differ by the models alone."""
    rng = stream(0, "isolated")
    if setup.workload.trace is None:
        prompt, _ = length_source(setup).sample(rng, ISOLATED_REQUESTS)
    else:
        prompt = _recorded_prompts(setup, model, rng)
    count = len(prompt)
    return Trace(
        arrival_s=np.arange(count, dtype=np.float64) * ISOLATED_GAP_S,
        model=np.zeros(count, dtype=np.int32),
        prompt_tokens=prompt,
        output_tokens=np.ones(count, dtype=np.int64),
        models=(model,),
        source="isolated prompts",
    )
