"""How long a run is and how many requests it has, before any is drawn, so that a run too large is refused at once."""

from __future__ import annotations

from typing import NamedTuple

from fineserve_traces import Requests

from fineserve_sim.experiment.file import schema, values
from fineserve_sim.experiment.file.document import Document, KeyPath
from fineserve_sim.experiment.file.resolve import Setup
from fineserve_sim.experiment.file.sources import processes_of, recorded

YEAR_S = 366 * 86400
"""A run looks at its cluster every second; longer ones are mistakes."""


class Extent(NamedTuple):
    """Expected requests and seconds of a run, and the key that sets them."""

    requests: float
    seconds: float
    key: KeyPath


def check_extent(document: Document, setup: Setup, load: str | None, rate_scale: float) -> None:
    """Raise ConfigError, at the key that asks for it, for more requests or seconds than a run can have."""
    found = extent(setup, load, rate_scale)
    at = "" if rate_scale == 1 else f" at rate scale {rate_scale:g}"
    if not found.seconds <= YEAR_S:
        problem = f"arrivals of {found.seconds:.3g} s{at}; a run simulates at most a year, {YEAR_S:,} s"
        raise document.error(found.key, problem)
    if not found.requests <= values.MAX_REQUESTS:
        problem = f"about {found.requests:.3g} requests{at}; a run simulates at most {values.MAX_REQUESTS:,}"
        raise document.error(found.key, problem)


def extent(setup: Setup, load: str | None, rate_scale: float) -> Extent:
    """The expected length and requests of a run, conversations included."""
    requests, seconds, key = _opened(setup, load, rate_scale)
    told = setup.workload.conversations
    if told is None:
        return Extent(requests, seconds, key)
    lasts_s = (told.turns - 1) * told.gap_s / rate_scale
    told_of = ("workload", "conversations")
    longer = lasts_s > YEAR_S or requests * told.turns > values.MAX_REQUESTS >= requests
    return Extent(requests * told.turns, seconds + lasts_s, told_of if longer else key)


def _arrival_s(requests: Requests, number: int) -> float:
    """The arrival of the request with this number, from 1 on."""
    for chunk in requests.chunks():
        if number <= len(chunk):
            return float(chunk.arrival_s[number - 1])
        number -= len(chunk)
    raise ValueError(f"{requests.source}: the file has changed, {number} requests are missing")


def _opened(setup: Setup, load: str | None, rate_scale: float) -> Extent:
    work, entries = setup.workload, [model.entry for model in setup.models]
    wanted = (work.requests or 0) + work.warmup_requests
    if work.trace is not None:
        trace = recorded(setup)
        requests = min(len(trace), wanted) if work.requests else len(trace)
        recorded_s = (trace.last_s if requests == len(trace) else _arrival_s(trace, requests)) - trace.first_s
        whole_s = trace.last_s - trace.first_s or 1.0
        faster = 1.0 if load is None else setup.loads[load].rate_per_s * whole_s / len(trace)
        return Extent(requests, recorded_s / faster / rate_scale, ("workload", "trace"))
    if isinstance(work.arrivals, schema.ManyModels):
        rate_per_s = sum(process.rate_per_s for process in processes_of(setup)) * work.arrivals.scale * rate_scale
        return Extent(rate_per_s * work.arrivals.duration_s, work.arrivals.duration_s, ("workload", "arrivals"))
    if entries[0].clients is not None:
        return Extent(wanted, 0.0, ("workload", "requests"))  # how long, the answers say
    shared_per_s = setup.loads[load].rate_per_s if load is not None else 0.0
    steady_per_s = sum(entry.rate_per_s or 0.0 for entry in entries) + shared_per_s
    phased = [index for index, entry in enumerate(entries) if entry.phases]
    if phased:
        phases = [phase for index in phased for phase in entries[index].phases or ()]
        longest_s = max(sum(phase.duration_s for phase in entries[index].phases or ()) for index in phased)
        requests_once = sum(phase.duration_s * phase.rate_per_s for phase in phases) + steady_per_s * longest_s
        return Extent(requests_once * rate_scale, longest_s, ("models", phased[0], "phases"))
    key: KeyPath = ("models", 0, "rate_per_s") if not shared_per_s else ("loads", str(load), "rate_per_s")
    return Extent(wanted, wanted / steady_per_s / rate_scale, key)
