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

from dataclasses import dataclass
from math import erfc, exp, inf, log, pi, sqrt

from fineserve_sim.policy.interfaces import ModelDemand

PARTS = (2 / 3, 1 / 6)
"""The parts of all time in which a model has each of its `rates`."""

UNSEEN = 0.5
"""The variance of a rate beyond ``ModelDemand.rate_variance``, since another day has other bursts. Where the past is not known,
too, the coefficient of variation is 1, as in Azure's code trace by the minute."""


Pair = tuple[float, float]
"""Compute units, and bandwidth."""


@dataclass(frozen=True)
class Load:
    """One engine and its part of a model's requests: ``rate_per_s`` of them, ``weight_per_s`` as counted on each of its GPUs.

    ``prompt_s`` and ``work_s``: a prompt alone, and one of many. ``first_s`` and ``more_s``: a decode step, and the seconds
    that each further request adds. ``prefill`` and ``decode``: the parts of a step in which compute units and bandwidth are
    busy. ``decoding`` and ``busy``: the parts of all time in which an engine alone keeps them so, with decodes and with
    anything.
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
    prefill: Pair
    decode: Pair
    decoding: Pair
    busy: Pair
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
    prefilling = min(1.0, rate_per_s * work_s)
    decoding = (1.0 - prefilling) * (1.0 - exp(-rate_per_s * tokens * first_s))
    compute, bandwidth = decoding * model.decode.compute, decoding * model.decode.bandwidth
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
        decoding=(compute, bandwidth),
        busy=(compute + prefilling * model.prefill.compute, bandwidth + prefilling * model.prefill.bandwidth),
        request_bytes=first.kv_bytes / first.batch,
        engine_bytes=model.engine_bytes,
    )


def late_per_s(loads: list[Load], memory_bytes: int) -> float:
    """Requests a second that engines with these loads serve too late on one GPU; infinite where they do not fit."""
    left_bytes = memory_bytes
    decode_compute = decode_bandwidth = compute = bandwidth = 0.0
    for load in loads:
        left_bytes -= load.engine_bytes
        decode_compute += load.decoding[0]
        decode_bandwidth += load.decoding[1]
        compute += load.busy[0]
        bandwidth += load.busy[1]
    if left_bytes <= 0:
        return inf
    slower, rho, square_s = [], 0.0, 0.0
    for load in loads:  # prompts beside decodes of neighbours; all prompts wait in one queue
        beside = load.prefill[0] * (decode_compute - load.decoding[0])
        prompts = 1.0 + max(beside, load.prefill[1] * (decode_bandwidth - load.decoding[1]))
        work = load.rate_per_s * load.work_s * prompts
        rho += work
        square_s += work * load.work_s * prompts
        slower.append(prompts)
    late = used_bytes = spread = weight_per_s = 0.0
    for load, prompts in zip(loads, slower, strict=True):
        share = _too_late(load.slo_s - load.prompt_s * prompts, rho, square_s)
        served_per_s, service_s = load.rate_per_s * (1.0 - share), load.work_s * prompts
        beside = load.decode[0] * (compute - load.busy[0])
        decodes = 1.0 + max(beside, load.decode[1] * (bandwidth - load.busy[1]))
        running, stay_s = _decoding(load, decodes, served_per_s, service_s)
        if load.tpot_slo_s < inf:
            share += _too_slow(load, served_per_s, service_s, stay_s)
        used_bytes += running * load.request_bytes
        spread += 2.0 * running * load.request_bytes * load.request_bytes
        late += load.weight_per_s * share
        weight_per_s += load.weight_per_s
    return late + weight_per_s * _excess(left_bytes, used_bytes, spread)


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


def _decoding(load: Load, slower: float, served_per_s: float, service_s: float) -> tuple[float, float]:
    """Requests that decode at once, and how long each does, in steps that are so many times ``slower``."""
    left = max(0.0, 1.0 - served_per_s * service_s)
    step_s, more_s = load.first_s * slower, load.more_s * slower
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


def _too_slow(load: Load, served_per_s: float, service_s: float, stay_s: float) -> float:
    """The part of the requests whose later tokens take too long."""
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
