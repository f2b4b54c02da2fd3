"""summary.json: cells with their metrics and flags, SLOs, placements, claims.

It says in a line how a model was simplified, so that no approximation passes for a measurement.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fineserve_sim import __version__
from fineserve_sim.catalog import ModelSpec
from fineserve_sim.cluster.compose.memory import kinds_of
from fineserve_sim.experiment.file.metric_names import CLUSTER_WIDE, EACH, overall
from fineserve_sim.experiment.file.plan import Experiment, Point
from fineserve_sim.experiment.file.resolve import Setup
from fineserve_sim.experiment.file.sources import describe
from fineserve_sim.experiment.results.answer import DEFAULT_TARGETS, Targets, answer_of
from fineserve_sim.experiment.results.binding import binds
from fineserve_sim.experiment.results.claims import evaluate_claims
from fineserve_sim.experiment.results.cost import by_kind, costs, price_of
from fineserve_sim.experiment.results.metrics import Measures, estimate, present
from fineserve_sim.experiment.results.places import Places, mean_over_seeds
from fineserve_sim.experiment.results.stats import Estimate
from fineserve_sim.experiment.results.step_times import pooled, tables_of, warnings
from fineserve_sim.experiment.results.summarised import NOTE
from fineserve_sim.experiment.run.rates import mean_lengths
from fineserve_sim.experiment.run.runner import Outcome
from fineserve_sim.experiment.run.store import Store
from fineserve_sim.systems.spec import ClairvoyantSpec, SystemSpec

SCHEMA = 2
"""Raised whenever summary.json loses or changes what its readers ask for."""

ENOUGH_REQUESTS = 2000
ENOUGH_PRECISION = 0.02
"""A cell says so when it measured fewer requests a run, or when its attainment is less certain than two points."""


class Judged(NamedTuple):
    """The outcome of one run of a cell, the places of its models, and the use of its GPUs (nothing for a bound)."""

    measures: Measures
    places: Places
    gpus: list[dict[str, Any]]


def cell_entry(
    experiment: Experiment, outcome: Outcome, judged: Sequence[Judged], targets: Targets = DEFAULT_TARGETS
) -> dict[str, Any]:
    """One entry of summary.json's cells, without its sweep. It has the attainment of the worst model where ``targets`` ask for
    each model."""
    runs = [each.measures for each in judged]
    measured = sum(run.counts["arrived"] for run in runs)
    totals = {name: sum(run.counts[name] for run in runs) for name in runs[0].counts}
    of_each = [metric for metric in targets if metric.startswith(EACH) and overall(metric) in runs[0].hits]
    metrics = {metric: _metric(runs, metric) for metric in (*present(runs), *of_each)}
    models = {name: _model(name, judged) for name in runs[0].models}
    gpus = mean_over_seeds([each.gpus for each in judged])
    setup = experiment.setup_of(outcome.point)
    unplaced = judged[0].places.unplaced() if judged[0].gpus else []
    return {
        "system": outcome.point.system,
        "title": setup.systems[outcome.point.system].title,
        "axes": outcome.point.axes,
        "cluster": cluster_of(setup),
        "seeds": len(runs),
        "requests": measured,
        **totals,
        "misses": _summed(run.misses[""] for run in runs),
        "ttft_slo_s": outcome.limits_s,
        **({"context_tokens": contexts} if (contexts := _contexts(setup, models)) else {}),
        **({"reach_tokens": dict(outcome.reach_tokens)} if outcome.reach_tokens else {}),
        **({"tpot_slo_s": outcome.tpot_limits_s} if outcome.tpot_slos else {}),
        **({"e2e_slo_s": dict(outcome.e2e_limits_s)} if outcome.e2e_limits_s else {}),
        "derived": not all(slo.fixed or slo.reference == "absolute" for slo in outcome.slos.values()),
        "runs": list(outcome.keys),
        "metrics": metrics,
        "cost": costs(setup, metrics),
        **({"cost_by_kind": by_kind(setup)} if len(setup.kinds) > 1 else {}),
        "models": models,
        "gpus": gpus,
        "models_move": setup.systems[outcome.point.system].residency is not None,
        "binds": binds(models, gpus)
        if unplaced or any(gpu["busy"] for gpu in gpus)
        else [],  # nobody looks at real GPUs
        "unplaced": unplaced,
        "flags": list(_flags(runs, metrics, [entry["model"] for entry in unplaced])),
    }


def cluster_of(setup: Setup) -> dict[str, Any]:
    """The GPUs bought, and where MIG divides them, how many slices of which profiles."""
    slices = Counter(gpu.spec.name for gpu in setup.gpus if gpu.spec.whole)
    told = ", ".join(f"{count} of {name.removeprefix(f'{setup.gpu_name} ')}" for name, count in slices.items())
    return {"gpu": setup.gpu_name, "count": setup.bought, **({"slices": told} if told else {})}


def _model(name: str, judged: Sequence[Judged]) -> dict[str, Any]:
    """Requests, misses by cause and tokens of a model over all seeds; the GPUs of its instances in the first."""
    runs = [each.measures for each in judged]
    instances = [each for each in judged[0].places.instances if each["model"] == name] if judged[0].gpus else []
    return {
        "requests": sum(len(run.hits["slo_attainment"][name]) for run in runs),
        "within": sum(run.hits["slo_attainment"][name].sum() for run in runs),
        "misses": _summed(run.misses[name] for run in runs),
        "tokens": _summed(run.tokens[name] for run in runs),
        "instances": [instance["gpus"] for instance in instances],
    }


def _contexts(setup: Setup, models: Mapping[str, Any]) -> dict[str, int]:
    """The context of each model that had to turn requests away."""
    specs = {model.id: model.spec for model in setup.models}
    return {name: specs[name].max_context_tokens for name, model in models.items() if model["misses"]["rejected"]}


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in counts:
        found = {name: found.get(name, 0) + count for name, count in each.items()}
    return found


def _metric(runs: Sequence[Measures], metric: str) -> dict[str, Any]:
    overall = estimate(runs, metric)
    found = _jsonable(overall) | {"observations": [_number(value) for value in overall.observations]}
    if metric in CLUSTER_WIDE or metric.startswith(EACH):
        return found
    return found | {"by_model": {name: _jsonable(estimate(runs, metric, name)) for name in runs[0].models}}


def _jsonable(value: Estimate) -> dict[str, Any]:
    return {"mean": _number(value.mean), "half_width": _number(value.half_width)}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _flags(runs: Sequence[Measures], metrics: Mapping[str, Any], unplaced: Sequence[str]) -> Iterator[str]:
    """The warnings that a reader should see before trusting the numbers of a cell."""
    if unplaced:
        yield f"no GPU for {', '.join(unplaced)}"
    fewest = min(run.counts["arrived"] for run in runs)
    if fewest < ENOUGH_REQUESTS:
        yield f"{fewest} measured request{'s' * (fewest != 1)} a run < {ENOUGH_REQUESTS}"
    half_width = metrics["ttft_attainment"]["half_width"]
    if half_width is None:
        yield "attainment without interval: too few requests"
    elif round(half_width, 3) > ENOUGH_PRECISION:
        yield f"attainment half-width {100 * half_width:.1f} points > {100 * ENOUGH_PRECISION:.0f}"
    cut = sum(run.counts["cut"] for run in runs)
    if cut:
        yield f"{cut} outputs cut short of what was asked, at the end of KV memory or context"
    for fate in ("rejected", "unfinished"):
        count = sum(run.counts[fate] for run in runs)
        if count:
            yield f"{count} requests {fate}"


def summary_of(
    experiment: Experiment,
    outcomes: Sequence[Outcome],
    cells: Mapping[Point, dict[str, Any]],
    store: Store,
    targets: Targets,
) -> dict[str, Any]:
    listed = [
        {"sweep": sweep, **cells[point], "axes": experiment.ordered_axes(sweep, point)}
        for sweep, points in experiment.sweeps.items()
        for point in points
    ]
    placements = [_placement(outcome, store) for outcome in outcomes]
    step_times = pooled([store.meta(key) for outcome in outcomes for key in outcome.keys])
    setup = experiment.setup
    kinds = [*kinds_of(setup.gpus)]
    return {
        "schema": SCHEMA,
        "fineserve": __version__,
        "title": experiment.file.title,
        "experiment": experiment.name,
        "workload": _workload(experiment),
        "slo": _slo(outcomes),
        "price": price_of(setup)._asdict(),
        "answer": answer_of(
            listed,
            setup.bought,
            [name for name, system in setup.systems.items() if is_bound(system)],
            targets,
            experiment.file.answer.at if experiment.file.answer else {},
        ),
        "assumptions": [assumption.model_dump(mode="json") for assumption in experiment.file.assumptions],
        "placements": placements,
        "step_times": step_times | ({"tables_of": tables_of(kinds, setup.engine)} if step_times else {}),
        "warnings": [
            *warnings(step_times, kinds, setup.engine),
            *simplified((model.id, model.spec) for model in setup.models),
            *_kept(outcomes, store),
        ],
        "cells": listed,
        "claims": evaluate_claims(experiment.file.claims, listed, placements),
    }


def _kept(outcomes: Sequence[Outcome], store: Store) -> list[str]:
    """A line where metrics alone were kept."""
    return [NOTE] if any(store.summary(key) is not None for outcome in outcomes for key in outcome.keys) else []


def is_bound(system: SystemSpec) -> bool:
    """The system bounds what others reach: it cannot run, so it uses no GPU."""
    return isinstance(system.scheduler, ClairvoyantSpec)


def _workload(experiment: Experiment) -> dict[str, Any]:
    setup = experiment.setup
    means = {model.id: mean_lengths(setup, model.id) for model in setup.models}
    return {
        "source": describe(setup),
        "requests": setup.workload.requests,
        "warmup_requests": setup.workload.warmup_requests,
        "loads": {name: load.model_dump() for name, load in setup.loads.items()},
        "mean_tokens": {name: {"prompt": prompt, "output": output} for name, (prompt, output) in means.items()},
    }


def _slo(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The base SLO of each model; null where it differs from cell to cell (the cells have the limits themselves)."""
    found: dict[str, Any] = {}
    for name in outcomes[0].slos:
        bases = {outcome.slos[name].base_s for outcome in outcomes}
        found[name] = {
            "base_s": bases.pop() if len(bases) == 1 else None,
            "reference": outcomes[0].slos[name].reference,
        }
    return found


def _placement(outcome: Outcome, store: Store) -> dict[str, Any]:
    return {"system": outcome.point.system, **outcome.point.axes, **store.meta(outcome.keys[0])["placement"]}


def read_summary(results_dir: Path) -> dict[str, Any]:
    """summary.json of a results folder. Raises ValueError when there is none, or one of another version."""
    path = results_dir / "summary.json"
    if not path.is_file():
        raise ValueError(f"{results_dir}: no summary.json here; give a folder that `fineserve-sim run` has written")
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise _damaged(path, problem) from None
    if not isinstance(summary, dict) or summary.get("schema") != SCHEMA:
        raise ValueError(
            f"{path}: written by another version; run the same command again, which keeps the simulations that it can"
        )
    if missing := _missing(summary):
        raise _damaged(path, f"no {missing}")
    return summary


def runs_told(results_dir: Path) -> set[str]:
    """The keys of all runs that the summary of a folder tells of; none where there is no whole one."""
    try:
        return {key for cell in read_summary(results_dir)["cells"] for key in cell["runs"]}
    except ValueError:
        return set()


_KEYS = ("title", "placements", "warnings", "claims")
_CELL_KEYS = ("sweep", "system", "title", "axes", "runs", "metrics")


def _missing(summary: Mapping[str, Any]) -> str:
    """The first thing that every summary has and this one has not; empty where it is whole."""
    cells = summary.get("cells")
    if not isinstance(cells, list) or not cells:
        return "cells"
    of_cells = [key for cell in cells for key in _CELL_KEYS if not isinstance(cell, dict) or key not in cell]
    return next((key for key in _KEYS if key not in summary), of_cells[0] if of_cells else "")


def _damaged(path: Path, problem: object) -> ValueError:
    return ValueError(f"{path}: damaged ({problem}); run the experiment again to write it anew")


def simplified(models: Iterable[tuple[str, ModelSpec]]) -> Iterator[str]:
    """One line for each simplification, with the ids of the models that it is about; none for dense models."""
    found: dict[str, list[str]] = {}
    for id, spec in models:
        for line in _of(spec):
            found.setdefault(line, []).append(id)
    for line, ids in found.items():
        yield f"{', '.join(ids)}: {line}"


def _of(spec: ModelSpec) -> Iterator[str]:
    if spec.experts is not None:
        yield "routing among experts is random with a mild skew, the same for every prompt"
    if spec.window is not None or spec.linear is not None:
        yield "KV of a sequence that does not grow evenly (windows, states) counts at the mean length of the requests"
    if spec.latent is not None and spec.latent.index_tokens:
        yield "sparse attention by roofline: no table was measured"
    if spec.other_parameters:
        yield "weights of its vision tower count; only text is served"
