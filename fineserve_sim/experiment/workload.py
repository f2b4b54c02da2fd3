"""The requests of a run, drawn from named random streams.

Every subsystem has a stream of its own, derived from the seed and its name, so that a new consumer changes no other
(``arrivals/A``, ``lengths/A`` for model A). Common random numbers: all systems, rate scales and SLO scales of one seed
see the same requests; a higher rate runs the same arrivals on a faster clock, so request i has the same lengths at
every rate. Phases are the exception: their durations are fixed, so a higher rate has other, more arrivals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import fineserve_traces as traces
import numpy as np
from fineserve_traces import LengthPairs, LengthSource, Trace, TraceError
from fineserve_traces.onoff import OnOff
from fineserve_traces.prism import ARENA, PROVIDER, arena_lengths, processes
from fineserve_traces.servegen import Client, servegen_clients

from fineserve_sim.experiment import schema
from fineserve_sim.experiment.errors import ConfigError, nearest
from fineserve_sim.experiment.resolve import Setup
from fineserve_sim.experiment.yaml_file import Document

ISOLATED_REQUESTS = 4096  # common to all models: what sampling error is left moves all base SLOs alike
ISOLATED_GAP_S = 1000.0
"""Isolated requests come so far apart that none meets another: no prefill lasts a thousand seconds."""
_MEAN_SAMPLE = 200_000
ARENA_LENGTHS = "arena_27models"
"""Name of the length source that is the public Arena trace."""


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream of one named consumer. The same seed and name give the same draws, always."""
    return np.random.default_rng(np.random.SeedSequence([seed, crc32(name.encode())]))


def check_sources(document: Document, setup: Setup) -> None:
    """Open the length source or the trace. Raises ConfigError at the line that names it when it cannot be used."""
    key = "lengths" if setup.workload.trace is None else "trace"
    try:
        if setup.workload.trace is None:
            length_source(setup)
        else:
            recorded(setup)
    except ConfigError:
        raise
    except ValueError as problem:
        raise document.error(("workload", key), str(problem)) from None
    if isinstance(setup.workload.arrivals, schema.ManyModels):
        try:
            _processes(setup)
        except ValueError as problem:
            raise document.error(("workload", "arrivals"), str(problem)) from None


def length_source(setup: Setup) -> LengthSource:
    """Where lengths come from. Raises ValueError when the name or the folder is wrong."""
    return _length_source(*_lengths_key(setup))


def _lengths_key(setup: Setup) -> tuple[str | schema.FixedLengths, Path | None]:
    folder = setup.workload.data_dir
    return setup.workload.lengths or "", None if folder is None else setup.folder / folder


@lru_cache(maxsize=8)
def _length_source(lengths: str | schema.FixedLengths, data_dir: Path | None) -> LengthSource:
    if isinstance(lengths, schema.FixedLengths):
        return traces.ConstantLengths(lengths.prompt_tokens, lengths.output_tokens)
    if lengths == ARENA_LENGTHS:
        return arena_lengths(data_dir)
    known = [*traces.DATASETS, *traces.FITTED, ARENA_LENGTHS]
    if lengths not in known:
        raise ValueError(f'unknown length source "{lengths}"; {nearest(lengths, known)}')
    return traces.length_source(lengths, data_dir)


@lru_cache(maxsize=2)
def _read_trace(path: Path) -> Trace:
    trace = traces.read_trace(path)
    for column in ("prompt_tokens", "output_tokens"):
        tokens = getattr(trace, column)
        if tokens.max() > schema.MAX_TOKENS:
            row = int(tokens.argmax())
            raise TraceError(
                f"{path}, request {row + 1}: {tokens[row]} {column}; at most {schema.MAX_TOKENS} make sense"
            )
    return trace


def recorded(setup: Setup) -> Trace:
    """The trace file's requests, named by the models of the file. Raises ValueError when a name does not fit."""
    trace = _read_trace(setup.folder / str(setup.workload.trace))
    ids = [model.id for model in setup.models]
    if setup.workload.assign == "share":
        return trace.with_models(ids, np.zeros(len(trace), dtype=np.int32))
    for name in trace.models:
        if name not in ids:
            hint = nearest(name, ids)
            raise ValueError(f'the trace has a model "{name}" that is no id of models; {hint} Or set assign: share')
    place = np.array([ids.index(name) for name in trace.models], dtype=np.int32)
    return trace.with_models(ids, place[trace.model])


def describe(setup: Setup) -> str:
    """Where the requests come from, for people."""
    return recorded(setup).source if setup.workload.trace is not None else length_source(setup).source


def base_rates(setup: Setup, load: str | None) -> dict[str, float]:
    """Expected requests per second of each model at rate scale 1."""
    if setup.workload.trace is not None:
        return _recorded_rates(setup, load)
    if isinstance(setup.workload.arrivals, schema.ManyModels):
        scale, ids = setup.workload.arrivals.scale, [model.id for model in setup.models]
        return {name: scale * process.rate_per_s for name, process in zip(ids, _processes(setup), strict=True)}
    total_share = sum(model.entry.share or 0.0 for model in setup.models)
    span_s = _phased_s(setup)
    rates = {}
    for model in setup.models:
        entry = model.entry
        if entry.phases:
            rates[model.id] = sum(phase.duration_s * phase.rate_per_s for phase in entry.phases) / span_s
        elif entry.share is not None and load is not None:
            rates[model.id] = setup.loads[load].rate_per_s * entry.share / total_share
        else:
            rates[model.id] = entry.rate_per_s or 0.0
    return rates


def _phased_s(setup: Setup) -> float:
    """How long the longest phases last together; 0 without phases."""
    return max(sum(phase.duration_s for phase in model.entry.phases or ()) for model in setup.models)


def _recorded_rates(setup: Setup, load: str | None) -> dict[str, float]:
    total_per_s = _recorded_rate(setup) * _stretch(setup, load)
    if setup.workload.assign == "share":
        shares = {model.id: model.entry.share or 0.0 for model in setup.models}
        return {name: total_per_s * share / sum(shares.values()) for name, share in shares.items()}
    trace = recorded(setup)
    counts = np.bincount(trace.model, minlength=len(trace.models))
    return {name: total_per_s * float(counts[index]) / len(trace) for index, name in enumerate(trace.models)}


def _recorded_rate(setup: Setup) -> float:
    """Mean rate of the recorded trace. A trace of one moment counts as one second."""
    trace = recorded(setup)
    return len(trace) / (float(trace.arrival_s[-1] - trace.arrival_s[0]) or 1.0)


def _stretch(setup: Setup, load: str | None) -> float:
    """How much faster a load plays a recorded trace so that its mean rate is that of the load."""
    return 1.0 if load is None else setup.loads[load].rate_per_s / _recorded_rate(setup)


def mean_lengths(setup: Setup, model: str) -> tuple[float, float]:
    """Mean prompt and output tokens that an operator would expect of ``model``: those of the source, not of one run."""
    if setup.workload.trace is None:
        prompt, output = _source_means(*_lengths_key(setup))
        told = setup.workload.conversations or schema.Conversations()
        return told.shared_tokens + prompt + (told.turns - 1) / 2 * (prompt + output), output
    trace = recorded(setup)
    own = trace.model == trace.models.index(model)
    if not own.any():
        own[:] = True
    return float(trace.prompt_tokens[own].mean()), float(trace.output_tokens[own].mean())


@lru_cache(maxsize=8)
def _source_means(lengths: str | schema.FixedLengths, data_dir: Path | None) -> tuple[float, float]:
    source = _length_source(lengths, data_dir)
    if isinstance(source, LengthPairs):
        prompt, output = source.prompt_tokens, source.output_tokens
    else:
        prompt, output = source.sample(stream(0, "mean lengths"), _MEAN_SAMPLE)
    return float(prompt.mean()), float(output.mean())


def build_trace(setup: Setup, load: str | None, rate_scale: float, seed: int) -> Trace:
    """The requests of one run, warm-up first. Raises ValueError when there are none to measure."""
    work = setup.workload
    if work.trace is not None:
        trace = _replayed(setup, load, rate_scale, seed)
    elif isinstance(work.arrivals, schema.ManyModels):
        trace = _many_models(setup, work.arrivals.duration_s, work.arrivals.scale * rate_scale, seed)
    elif _phased_s(setup):
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
    where it is cut does not matter, and the order of requests does not depend on the rate scale."""
    work, lengths = setup.workload, length_source(setup)
    count = (work.requests or 0) + work.warmup_requests
    parts = []
    for name, rate_per_s in base_rates(setup, load).items():
        arrival_s = _arrivals(work.arrivals or schema.Poisson(), stream(seed, f"arrivals/{name}"), rate_per_s, count)
        parts.append(traces.generate(arrival_s, lengths, stream(seed, f"lengths/{name}"), model=name))
    merged = replace(traces.merge(parts), source=lengths.source).head(count)
    return merged.with_arrivals(merged.arrival_s / rate_scale)


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
    rates, lengths, span_s = base_rates(setup, load), length_source(setup), _phased_s(setup)
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


def _processes(setup: Setup) -> Sequence[OnOff | Client]:
    """The process of each model, in the order of the file."""
    arrivals, models = setup.workload.arrivals, len(setup.models)
    assert isinstance(arrivals, schema.ManyModels)
    if arrivals.process == "servegen":
        return _clients(models, _lengths_key(setup)[1])
    return processes(PROVIDER if arrivals.process == "provider" else ARENA, models)


@lru_cache(maxsize=4)
def _clients(models: int, data_dir: Path | None) -> list[Client]:
    return servegen_clients(models, data_dir)


def _many_models(setup: Setup, duration_s: float, scale: float, seed: int) -> Trace:
    lengths, parts = length_source(setup), []
    for model, process in zip(setup.models, _processes(setup), strict=True):
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
    own = trace.model == trace.models.index(model)
    return Trace(
        arrival_s=trace.arrival_s[own],
        model=np.zeros(int(own.sum()), dtype=np.int32),
        prompt_tokens=trace.prompt_tokens[own],
        output_tokens=trace.output_tokens[own],
        models=(model,),
        source=trace.source,
    )


def _replayed(setup: Setup, load: str | None, rate_scale: float, seed: int) -> Trace:
    work, trace = setup.workload, recorded(setup)
    if work.requests is not None:
        trace = trace.head(work.requests + work.warmup_requests)
    if work.assign == "share":
        shares = np.array([model.entry.share or 0.0 for model in setup.models])
        drawn = stream(seed, "assign").choice(len(shares), size=len(trace), p=shares / shares.sum())
        trace = trace.with_models(trace.models, drawn)
    return trace.with_arrivals((trace.arrival_s - trace.arrival_s[0]) / (rate_scale * _stretch(setup, load)))


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


def expected_rates(setup: Setup, load: str | None, rate_scale: float) -> Mapping[str, float]:
    """Expected requests per second of each model in one run."""
    return {name: rate_per_s * rate_scale for name, rate_per_s in base_rates(setup, load).items()}
