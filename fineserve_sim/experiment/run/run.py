"""One simulation as a small description that travels to a worker, without the requests themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fineserve_traces import Requests, totals

from fineserve_sim.cluster import Clients, Gpu, Scenario, ServedModel
from fineserve_sim.experiment.file.degrees import least_degree
from fineserve_sim.experiment.file.resolve import Overrides, Setup
from fineserve_sim.experiment.run.alone import own_gpus
from fineserve_sim.experiment.run.degrees import at_degrees
from fineserve_sim.experiment.run.rates import expected_rates, has_clients, mean_lengths
from fineserve_sim.experiment.run.workload import (
    ISOLATED_GAP_S,
    alone_trace,
    build_requests,
    build_trace,
    clients_of,
    isolated_trace,
)
from fineserve_sim.systems.spec import ClairvoyantSpec, PinnedPlacementSpec

SAMPLE_S = 1.0
"""There is a sample of a run's timeline in each so many seconds (``cluster/samples.py`` says where)."""


@dataclass(frozen=True, slots=True)
class Run:
    """A simulation of ``system`` in one variant of the file (``setup``, named by the overridden keys ``variant``).

    ``slo_s`` are the TTFT limits of the models in their order, ``tpot_slo_s`` their limits of the time per token, if any.
    Reference runs have one model: ``isolated``, in which each request is alone, or ``alone``, under its own arrivals on GPUs
    of its own.
    """

    setup: Setup = field(compare=False, repr=False)
    variant: Overrides
    system: str
    load: str | None
    rate_scale: float
    seed: int
    slo_s: tuple[float, ...]
    isolated: str | None = None
    alone: str | None = None
    tpot_slo_s: tuple[float, ...] | None = None

    @property
    def warmup(self) -> int:
        """Requests at the start that are not measured."""
        return 0 if self.isolated or self.alone else self.setup.workload.warmup_requests

    def __str__(self) -> str:
        variant = "".join(f", {key} {value}" for key, value in self.variant)
        if self.isolated:
            return f"{self.system}, model {self.isolated} isolated{variant}"
        load = "" if self.load is None else f", load {self.load}"
        load += f", model {self.alone} alone" if self.alone else ""
        return f"{self.system}{load}, rate scale {self.rate_scale:g}{variant}, seed {self.seed}"


def scenario(run: Run, *, streams: bool = False) -> Scenario:
    """The simulation that ``run`` describes; ``streams``: with requests that are drawn while it reads them, where they can be.
    Raises ValueError when it has no request to measure."""
    setup = run.setup
    trace: Requests
    if run.isolated:
        rates = {run.isolated: 1 / ISOLATED_GAP_S}
        trace = isolated_trace(setup, run.isolated)
    elif run.alone:
        rates = {run.alone: expected_rates(setup, run.load, 1.0)[run.alone]}
        trace = alone_trace(setup, run.alone, run.load, run.seed)
    else:
        rates = dict(expected_rates(setup, run.load, run.rate_scale))
        looks_at_all = isinstance(setup.systems[run.system].scheduler, ClairvoyantSpec)
        at_once = not streams or looks_at_all or has_clients(setup)
        build = build_trace if at_once else build_requests
        trace = build(setup, run.load, run.rate_scale, run.seed)
    models = _served(run, rates)
    return Scenario(
        system=setup.systems[run.system],
        models=models,
        gpus=_reference_gpus(run, models[0]) if run.isolated or run.alone else setup.gpus,
        trace=trace,
        engine=setup.engine,
        sample_s=0.0 if run.isolated else SAMPLE_S,
        faults=() if run.isolated or run.alone else setup.faults,
        clients=_clients(run, trace),
    )


def _clients(run: Run, trace: Requests) -> Clients | None:
    """The clients that send the requests of a run, if any do."""
    if run.isolated or not has_clients(run.setup):
        return None
    if not run.alone:
        return clients_of(run.setup, run.rate_scale)
    everybody, own = clients_of(run.setup, 1.0), [model.id for model in run.setup.models].index(run.alone)
    return Clients((everybody.of[own],), (everybody.think_s[own],), int(totals(trace).requests.sum()))


def _reference_gpus(run: Run, model: ServedModel) -> tuple[Gpu, ...]:
    """The GPUs of the one model of a reference run: the cluster's where it is pinned, else GPUs of its own kind."""
    pinned = isinstance(run.setup.systems[run.system].placement, PinnedPlacementSpec)
    gpus = run.setup.gpus if pinned else own_gpus(run.setup, model)
    return gpus[: model.tp * model.ranks] if run.alone else gpus


def _served(run: Run, rates: Mapping[str, float]) -> tuple[ServedModel, ...]:
    setup = run.setup
    blind = setup.systems[run.system].dispatch is not None  # no policy of such a system sees an SLO: one run for all
    tpot_slo_s = run.tpot_slo_s or (None,) * len(run.slo_s)
    found = []
    for model, slo_s, token_slo_s in zip(setup.models, run.slo_s, tpot_slo_s, strict=True):
        if model.id in rates:
            prompt, output = mean_lengths(setup, model.id)
            served = ServedModel(
                id=model.id,
                model=model.spec,
                precision=model.precision,
                tp=least_degree(setup, model),
                rate_per_s=rates[model.id],
                ttft_slo_s=math.inf if blind else slo_s,
                mean_prompt_tokens=prompt,
                mean_output_tokens=output,
                tpot_slo_s=None if blind else token_slo_s,
            )
            found.append(served)
    return tuple(found) if run.isolated or run.alone else at_degrees(setup, setup.systems[run.system], found)
