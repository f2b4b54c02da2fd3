"""Prism's traces, section 3: statistics of generated ones.

The traces are private, so our generators (``fineserve_traces.prism``) are made from the claims on them. The findings say
whether a generated trace shows the statistics that the paper reports, not that the world does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from fineserve_traces import ConstantLengths
from fineserve_traces.model_stats import ModelStats, model_stats, tail_share
from fineserve_traces.prism import arena_trace, provider_trace

from fineserve_sim.experiment.reproduce.judge import Evaluation, numbers
from fineserve_sim.experiment.reproduce.registry import claim

HOURS = 48
"""Length of the generated traces: statistics per hour of 24 models settle within a few per cent."""

FOUR_MONTHS_H = 4 * 30.4 * 24
MANY = 0.3
"""The paper's "many models", not quantified there: at least this part of them (the ledger's reading)."""


@cache
def _provider() -> tuple[ModelStats, ...]:
    """24 models, as Hyperbolic has."""
    models = [f"m{rank:02}" for rank in range(24)]
    trace = provider_trace(np.random.default_rng(0), models, HOURS * 3600.0, lengths=ConstantLengths(1, 1))
    return tuple(model_stats(trace, HOURS * 3600.0))


@cache
def _arena() -> tuple[ModelStats, ...]:
    """84 models, as Arena-Chat has."""
    models = [f"m{rank:02}" for rank in range(84)]
    trace = arena_trace(np.random.default_rng(0), models, HOURS * 3600.0, lengths=ConstantLengths(1, 1))
    return tuple(model_stats(trace, HOURS * 3600.0))


def _exceeded_by(part: float, values: Sequence[float]) -> float:
    """What this part of the values exceeds."""
    return float(np.quantile(values, 1 - part))


def _idle_s(stats: Sequence[ModelStats]) -> list[float]:
    return [found.median_idle_s or 0.0 for found in stats]


def _cv(stats: Sequence[ModelStats]) -> list[float]:
    return [found.cv_per_minute or 0.0 for found in stats]


@claim("PR-1a-tail")
def tail_rate() -> Evaluation:
    """Requests per hour of the models that the paper calls the tail."""
    stats = _provider()
    tail = [found.per_hour for found in stats[-round(0.6 * len(stats)) :]]
    head = 1 - tail_share([found.requests for found in stats])
    return numbers(
        float(np.median(tail)),
        detail=f"Of 24 generated models, {sum(rate < 100 for rate in tail)} of the {len(tail)} least popular stay below 100 an "
        f"hour; the others make {100 * head:.0f} % of the requests.",
    )


@claim("PR-1-idle-count")
def idle_periods() -> Evaluation:
    """Idle periods over 10 s in four months."""
    periods = [found.idle_per_hour * FOUR_MONTHS_H for found in _provider()]
    return numbers(
        100.0 * sum(count > 1000 for count in periods) / len(periods),
        _exceeded_by(0.6, periods),
        detail=f"Rates per hour over {HOURS} generated hours, extended to four months; the least is {min(periods):.0f}.",
    )


@claim("PR-1b-fluct")
def fluctuation() -> Evaluation:
    """The largest ratio of rates in bins of 10 s within a minute, for the three most popular models."""
    swings = [found.swing or 1.0 for found in _provider()[:3]]
    return numbers(
        min(swings),
        detail=f"The three most popular generated models swing {', '.join(f'{swing:.0f}' for swing in swings)}-fold in a "
        "minute; an empty bin counts as one request.",
    )


@claim("PR-2a-share")
def tail_requests() -> Evaluation:
    """The requests of the least popular 60 % of models."""
    shares = [100 * tail_share([found.requests for found in stats]) for stats in (_provider(), _arena())]
    return numbers(
        60.0,
        shares[0],
        detail=f"Zipf shares made for it; drawn, {shares[0]:.1f} % in the provider's trace and {shares[1]:.1f} % in "
        "the Arena's.",
    )


@claim("PR-2b-idle")
def idle_times() -> Evaluation:
    """Medians of idle times over models."""
    provider, arena = _idle_s(_provider()), _idle_s(_arena())
    return numbers(
        min(_exceeded_by(MANY, provider), _exceeded_by(MANY, arena)),
        _exceeded_by(0.5, arena),
        detail=f"Medians of gaps over 10 s: {100 * np.mean(np.array(provider) > 30):.0f} % of the provider's models are above "
        f"30 s, {100 * np.mean(np.array(arena) > 80):.0f} % of the Arena's above 80 s.",
    )


@claim("PR-2c-idle-rate")
def idle_rates() -> Evaluation:
    """Idle intervals per hour over models."""
    rates = [found.idle_per_hour for found in _provider()]
    return numbers(
        float(np.median(rates)),
        max(rates),
        100 * max(rates) * 10 / 3600,
        detail=f"Gaps over 10 s in {HOURS} generated hours of 24 models; {sum(rate > 100 for rate in rates)} have "
        "over 100 an hour.",
    )


@claim("PR-2d-cv")
def minute_variation() -> Evaluation:
    """Variation of requests per minute over models."""
    provider, arena = _cv(_provider()), _cv(_arena())
    return numbers(
        _exceeded_by(MANY, provider),
        _exceeded_by(MANY, arena),
        detail=f"{100 * np.mean(np.array(provider) > 1):.0f} % of the provider's models are above 1.0, "
        f"{100 * np.mean(np.array(arena) > 0.5):.0f} % of the Arena's above 0.5.",
    )
