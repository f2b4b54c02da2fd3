"""The sources of the step times of runs, pooled, and their warnings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from fineserve_sim.catalog import GpuSpec, Kind
from fineserve_sim.cluster import EngineSettings
from fineserve_sim.latency import measured_on

_LEAST_SHARE = 0.0005  # what is told as 0.1% at least


def pooled(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """From the stored counters of runs: ``shares`` of the engines' busy time by kind (measured, fitted, roofline, assumed),
    and ``beyond_tables``: the part of it, by operator, that left its table's range and is roofline therefore.

    Sums over samples; empty where no step was sampled.
    """
    samples = sum(run["step_samples"] for run in runs)
    if not samples:
        return {}
    shares: dict[str, float] = dict.fromkeys(get_args(Kind), 0.0)
    beyond: dict[str, float] = defaultdict(float)
    for run in runs:
        weight = run["step_samples"] / samples
        for part, sources in run["step_times"].items():
            for source, share in sources.items():
                shares["roofline" if source == "extrapolated" else source] += weight * share
                if source == "extrapolated":
                    beyond[part] += weight * share
    return {"samples": samples, "shares": shares, "beyond_tables": dict(beyond)}


def tables_of(gpus: Sequence[GpuSpec], engine: EngineSettings) -> str | None:
    """The GPU types whose tables make the step times of ``engine`` on GPUs of these kinds; None for rooflines and measured
    steps."""
    if engine.latency != "tables" or engine.step_times is not None:
        return None
    found = [tables.fingerprint["gpu"] for gpu in gpus if (tables := measured_on(gpu))]
    return " and ".join(dict.fromkeys(found)) or None


def own_tables(gpus: Sequence[GpuSpec], engine: EngineSettings) -> bool:
    """Whether the step times come from tables that were measured on these very types of GPU."""
    return all(gpu.tables_from is None and tables_of([gpu], engine) is not None for gpu in gpus)


def measured_text(step_times: Mapping[str, Any]) -> str:
    """How much of the engines' time is measured: ``58 %``, or ``0 % (58 % on a100-80gb, scaled)``. ``step_times``: as
    ``pooled`` gives it, with ``tables_of``, and whether these are the GPUs' ``own``."""
    if not step_times.get("shares"):
        return "–"
    share = f"{step_times['shares']['measured']:.0%}"[:-1] + " %"
    scaled = step_times["tables_of"] is not None and not step_times["own"]
    return f"0 % ({share} on {step_times['tables_of']}, scaled)" if scaled else share


def warnings(found: Mapping[str, Any], gpus: Sequence[GpuSpec], engine: EngineSettings) -> Iterator[str]:
    """One line for what leaves the measured range, one for each kind of GPU without own tables. ``found``: as ``pooled`` gives
    it."""
    for gpu in gpus:
        if engine.latency == "tables" and measured_on(gpu) is None:
            yield f"no measured latency tables for GPU {gpu.name}: step times are rooflines scaled by its data sheet"
        elif gpu.tables_from is not None and tables_of([gpu], engine):
            yield (
                f"no measured latency tables for GPU {gpu.name}: step times are those of {gpu.tables_from}, scaled by the data "
                "sheets of both"
            )
    beyond = found.get("beyond_tables", {})
    if beyond:
        shown = sorted((item for item in beyond.items() if item[1] >= _LEAST_SHARE), key=lambda item: -item[1])
        parts = ", ".join(f"{part} {share:.1%}" for part, share in shown) or "under 0.1%"
        yield f"beyond the measured tables, by roofline: {parts}"


def sentence(step_times: Mapping[str, Any]) -> str:
    """The shares for a reader, and the GPU type that was measured. ``step_times``: as in ``summary.json``."""
    on = step_times.get("tables_of")
    parts = [
        f"{share:.0%} {kind}" + (f" on {on}" if on and share and kind == "measured" else "")
        for kind, share in step_times["shares"].items()
    ]
    return "Step times, of the engines' time: " + ", ".join(parts)
