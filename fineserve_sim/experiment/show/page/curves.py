"""How latencies are spread: the share of all requests that were as quick as a time or quicker, a curve a system and model.

Requests that never got a first token (dropped, rejected, unfinished) never come, so that the curve of a system that drops ends
below 100 %. Each curve is some forty quantiles of the first seed's measured requests, however many those are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.experiment.run.run_data import RunData
from fineserve_sim.experiment.show.page.style import Looks, Spec, layout, log_ticks

LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "e2e": "End-to-end latency",
}
_SHARES = np.array([0, 0.01, *np.linspace(0.05, 0.95, 19), 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 1.0])
_LEAST_S = 1e-4
_MOST_MODELS = 40
"""Beyond so many models the curves are of all together."""


def latency_chart(latency: str) -> Spec:
    """An empty figure of a latency; the page puts ``latency_traces`` of a place into it."""
    across = {"title": "s"} | log_ticks(_LEAST_S, 1e5, (1, 2, 5) if latency == "tpot" else (1, 3))
    upward = {"title": "% of all requests", "range": [0, 104]}
    return {"data": [], "layout": layout(LATENCIES[latency], x=across, y=upward)}


def latency_traces(
    latency: str, runs: Mapping[str, RunData], cells: Mapping[str, Mapping[str, Any]], looks: Looks
) -> list[Spec]:
    """The curves of every system's run at one place, and the limit of each model."""
    found = [trace for system, run in runs.items() for trace in _curves(latency, run, cells[system], looks)]
    return [*found, *_limits(cells[next(iter(runs))].get(f"{latency}_slo_s", {}))] if runs else []


def _curves(latency: str, run: RunData, cell: Mapping[str, Any], looks: Looks) -> Iterator[Spec]:
    values_s, counted = _latency_s(latency, run)
    models = run.models if len(run.models) <= _MOST_MODELS else ()
    for model, group in [("", counted), *((name, counted & (run.model == i)) for i, name in enumerate(models))]:
        if group.any():
            times_s, shares = _quantiles(values_s[group])
            yield {
                "type": "scatter",
                "mode": "lines",
                "x": times_s,
                "y": shares,
                "name": cell["title"],
                "legendgroup": cell["system"],
                "line": looks.stroke(cell["system"]),
                "meta": {"system": cell["system"], "model": model},
            }


def _latency_s(latency: str, run: RunData) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Seconds of each request, NaN for one that never comes, and which requests count."""
    if latency == "ttft":
        return run.ttft_s, run.measured
    if latency == "e2e":
        return run.finish_s - run.arrival_s, run.measured
    return run.tpot_s, run.measured & (run.output_tokens > 1)


def _quantiles(values_s: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    came = values_s[np.isfinite(values_s)]
    if not len(came):
        return [], []
    times_s = np.maximum(np.quantile(came, _SHARES), _LEAST_S)
    shares = 100 * _SHARES * len(came) / len(values_s)
    return [float(f"{value:.4g}") for value in times_s], [float(f"{value:.4g}") for value in shares]


def _limits(limits_s: Mapping[str, float]) -> Iterator[Spec]:
    """A dashed line at the limit of each model, and of all where they have one limit."""
    shown: Sequence[tuple[str, float]] = list(limits_s.items())
    if len(set(limits_s.values())) == 1:
        shown = [*shown, ("", next(iter(limits_s.values())))]
    for model, limit_s in shown:
        yield {
            "type": "scatter",
            "mode": "lines",
            "x": [limit_s, limit_s],
            "y": [0, 104],
            "name": f"Limit, {limit_s:.3g} s",
            "hoverinfo": "name",
            "line": {"color": "#808080", "dash": "dash", "width": 1.5},
            "meta": {"model": model},
        }
