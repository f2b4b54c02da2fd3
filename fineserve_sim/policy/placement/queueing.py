"""How many requests will be late on a GPU, in closed form: what ``balanced`` places by.

An engine is told by its rate, the seconds and busy parts of a prompt and of a decode step, and its KV bytes a request. It waits
for compute units or for bandwidth, whichever is worse, as under MPS. The prompts of all engines of a GPU are computed as by one
server, which is slower beside decodes of other engines:

    slower     s = 1 + max(compute x busy compute of the others, bandwidth x busy bandwidth of the others)
    prompts    late = (1 - r) r E / (1 - r^2 E), E = exp(-(1 - r) T / S)                         (M/M/1 with a deadline T)
               r = sum(rate S), S = s x prompt seconds, T what the TTFT limit leaves
    decoding   L = served x D, D (1 - served S) = s x step(L) (tokens - served D)               (Little)
               a step with a prompt takes S and gives a token, too; step(b) = first + (b - 1) x more
    memory     bytes in use: mean m = sum(L x kv), variance 2 sum(L x kv^2), normal; late = E(bytes beyond what is left) / m
    decodes    D = tokens x step seconds behind prompts, with the variance 2 served S^2 of each second of it, normal

The law of prompts is Barrer's (Operations Research 5, 1957): a request that waited beyond its deadline gives way, as under
deadline-aware schedulers. A request is late if its first token is, if it finds no memory, or if its later tokens are too
slow; the three probabilities are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import erfc, exp, inf, log, pi, sqrt
from typing import NamedTuple

from fineserve_sim.policy.interfaces import ModelDemand

PARTS = (2 / 3, 1 / 6)
"""The parts of all time in which a model has each of its `rates`."""

UNSEEN = 0.5
"""The variance of a rate beyond ``ModelDemand.rate_variance``, since another day has other bursts. Where the past is not known,
too, the coefficient of variation is 1, as in Azure's code trace by the minute."""


class Load(NamedTuple):
    """One engine and its part of a model's requests: ``rate_per_s`` of them, ``weight_per_s`` as counted on each of its GPUs.

    ``prompt_s`` and ``work_s``: a prompt alone, and one of many. ``first_s`` and ``more_s``: a decode step, and the seconds
    that each further request adds. ``prefill`` and ``decode``: the parts of a step in which compute units and bandwidth are
    busy.
    """

    rate_per_s: float
    weight_per_s: float
    slo_s: float
    tpot_slo_s: float
    decode_tokens: float
    prompt_s: float
    work_s: float
    first_s: float
    more_s: float
    most: int
    prefill: tuple[float, float]
    decode: tuple[float, float]
    request_bytes: float
    engine_bytes: int


def rates(model: ModelDemand) -> tuple[float, float]:
    """How many times its mean a model's rate is, in each of the ``PARTS``. They are nodes of Gauss and Hermite for a log-normal
    rate. The lowest is left out: few are late there."""
    spread = log(1.0 + model.rate_variance + UNSEEN)
    return exp(-spread / 2.0), exp(sqrt(3.0 * spread) - spread / 2.0)


def load_of(model: ModelDemand, engines: float, times: float = 1.0) -> Load:
    """The load of one of so many engines that share the requests of a model evenly, at so many ``times`` its rate. Raises
    ValueError without a profile."""
    if not model.profile:
        raise ValueError(f"model {model.id} has no profile, by which late requests are predicted")
    first, last = model.profile[0], model.profile[-1]
    rate_per_s, tokens = times * model.rate_per_s / engines, max(1.0, model.decode_tokens)
    work_s = min(point.ttft_s / point.batch for point in model.profile)
    first_s = max(0.0, first.batch / first.throughput_per_s - first.ttft_s) / tokens
    last_s = max(first_s, (last.batch / last.throughput_per_s - last.batch * work_s) / tokens)
    more_s = (last_s - first_s) / max(1, last.batch - 1)
    return Load(
        rate_per_s=rate_per_s,
        weight_per_s=rate_per_s / model.tp,
        slo_s=model.slo_s,
        tpot_slo_s=inf if model.tpot_slo_s is None else model.tpot_slo_s,
        decode_tokens=tokens,
        prompt_s=first.ttft_s / first.batch,
        work_s=work_s,
        first_s=first_s,
        more_s=more_s,
        most=last.batch,
        prefill=model.prefill,
        decode=model.decode,
        request_bytes=first.kv_bytes / first.batch,
        engine_bytes=model.engine_bytes,
    )


class _Pace(NamedTuple):
    """How many times longer prompts and decode steps of an engine last beside its neighbours."""

    prompts: float
    decodes: float


class _Busy(NamedTuple):
    """The parts of all time in which an engine keeps compute units and bandwidth busy: with decodes, and with anything."""

    decode_compute: float
    decode_bandwidth: float
    compute: float
    bandwidth: float


def late_per_s(loads: Sequence[Load], memory_bytes: int) -> float:
    """Requests a second that engines with these loads serve too late on one GPU; infinite where they do not fit."""
    left_bytes = memory_bytes - sum([load.engine_bytes for load in loads])
    if left_bytes <= 0:
        return inf
    paces = _paces(loads)
    rho = square_s = 0.0
    for load, pace in zip(loads, paces, strict=True):
        work = load.rate_per_s * load.work_s * pace.prompts
        rho += work
        square_s += work * load.work_s * pace.prompts
    late = used_bytes = spread = weight_per_s = 0.0
    for load, pace in zip(loads, paces, strict=True):
        share = _too_late(load.slo_s - load.prompt_s * pace.prompts, rho, square_s)
        served_per_s = load.rate_per_s * (1.0 - share)
        running, stay_s = _decoding(load, pace, served_per_s)
        if load.tpot_slo_s < inf:
            share += _too_slow(load, pace, served_per_s, stay_s)
        used_bytes += running * load.request_bytes
        spread += 2.0 * running * load.request_bytes**2
        late += load.weight_per_s * share
        weight_per_s += load.weight_per_s
    return late + weight_per_s * _excess(left_bytes, used_bytes, spread)


def _paces(loads: Sequence[Load]) -> list[_Pace]:
    """The pace of each engine, beside neighbours that are as busy as if they were alone."""
    if len(loads) == 1:
        return [_Pace(1.0, 1.0)]
    each = [_busy(load) for load in loads]
    every = _Busy(*[sum(column) for column in zip(*each, strict=True)])
    return [_pace(load, own, every) for load, own in zip(loads, each, strict=True)]


def _busy(load: Load) -> _Busy:
    """The fractions of time and bandwidth in which an engine alone is busy."""
    prefilling = min(1.0, load.rate_per_s * load.work_s)
    decoding = (1.0 - prefilling) * (1.0 - exp(-load.rate_per_s * load.decode_tokens * load.first_s))
    compute, bandwidth = decoding * load.decode[0], decoding * load.decode[1]
    return _Busy(compute, bandwidth, compute + prefilling * load.prefill[0], bandwidth + prefilling * load.prefill[1])


def _pace(load: Load, own: _Busy, every: _Busy) -> _Pace:
    """The pace of an engine that is ``own`` busy, where all together are ``every``. Prompts of others wait in the one queue
    of the GPU, not here."""
    compute, bandwidth = every.decode_compute - own.decode_compute, every.decode_bandwidth - own.decode_bandwidth
    prompts = max(load.prefill[0] * compute, load.prefill[1] * bandwidth)
    decodes = max(load.decode[0] * (every.compute - own.compute), load.decode[1] * (every.bandwidth - own.bandwidth))
    return _Pace(1.0 + prompts, 1.0 + decodes)


def _too_late(slack_s: float, rho: float, square_s: float) -> float:
    """The part of the requests that wait longer than ``slack_s`` for a server of load ``rho``."""
    if slack_s <= 0.0:
        return 1.0
    if rho <= 0.0:
        return 0.0
    deadlines, idle = slack_s * rho / square_s, 1.0 - rho  # the deadline in mean services
    if abs(idle) * (2.0 + deadlines) < 1e-6:
        return 1.0 / (2.0 + deadlines)
    if idle * deadlines < -500.0:
        return -idle / rho
    beyond = exp(-idle * deadlines)
    return idle * rho * beyond / (1.0 - rho * rho * beyond)


def _decoding(load: Load, pace: _Pace, served_per_s: float) -> tuple[float, float]:
    """Requests that decode at once, and how long each does."""
    left = max(0.0, 1.0 - served_per_s * load.work_s * pace.prompts)
    step_s, more_s = load.first_s * pace.decodes, load.more_s * pace.decodes
    stay_s = load.decode_tokens * step_s / (left + served_per_s * step_s)
    running = served_per_s * stay_s
    if running > 1.0:  # a longer step: L left = (rate x tokens - rate L) x step(L), a quadratic in L
        running = _root(served_per_s, load.decode_tokens, left, step_s - more_s, more_s)
        stay_s = running / served_per_s
    if running > load.most:
        running, stay_s = float(load.most), stay_s * load.most / running
    return running, stay_s


def _root(rate_per_s: float, tokens: float, left: float, fixed_s: float, more_s: float) -> float:
    """The L of ``L left = rate (tokens - L) (fixed_s + more_s L)``, between 0 and ``tokens``."""
    a, c = rate_per_s * more_s, rate_per_s * tokens * fixed_s
    b = left + rate_per_s * fixed_s - a * tokens
    if a <= 0.0:
        return c / b
    return 2.0 * c / (b + sqrt(b * b + 4.0 * a * c)) if b > 0.0 else (-b + sqrt(b * b + 4.0 * a * c)) / (2.0 * a)


def _too_slow(load: Load, pace: _Pace, served_per_s: float, stay_s: float) -> float:
    """The part of the requests whose later tokens take too long."""
    service_s = load.work_s * pace.prompts
    return _beyond(load.decode_tokens * load.tpot_slo_s, stay_s, 2.0 * served_per_s * service_s**2 * stay_s)


def _beyond(limit: float, mean: float, variance: float) -> float:
    """P(X > limit) for a normal X."""
    return 0.5 * erfc((limit - mean) / sqrt(2.0 * variance)) if variance > 0.0 else float(mean > limit)


def _excess(limit: float, mean: float, variance: float) -> float:
    """E(X - limit, where positive) / E(X) for a normal X."""
    if variance <= 0.0:
        return 0.0
    deviation, over = sqrt(variance), mean - limit
    density = exp(-0.5 * (over / deviation) ** 2) / sqrt(2.0 * pi)
    return max(0.0, deviation * density + over * _beyond(limit, mean, variance)) / mean
