"""What the cluster itself costs as it grows: arrivals, samples, activations, dispatch (see ``costs.py``)."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
from fineserve_traces import Trace

from benchmarks.costs import MODELS, Cost, Work
from fineserve_sim.catalog import gpu, model, precision
from fineserve_sim.cluster import EngineSettings, Gpu, Scenario, ServedModel
from fineserve_sim.cluster.host import ARRIVAL
from fineserve_sim.cluster.run import Run
from fineserve_sim.cluster.simulation import prepare
from fineserve_sim.policy.interfaces import Request
from fineserve_sim.systems import SystemSpec, load_systems

ARRIVALS = 200
INSTANCES = (125, 250, 500, 1000)


def _fleet(models: int, hosted: int) -> Run:
    """``models`` of 1B on half as many GPUs, the first ``hosted`` of them resident; nothing has happened yet."""
    settings = EngineSettings(memory_utilization=0.15)
    served = tuple(
        ServedModel(f"m{i}", model("llama-3.2-1b"), precision("fp16"), 1, 1.0, 1.0, 100, 20) for i in range(models)
    )
    cards = tuple(Gpu(i, i // 8, gpu("h100-sxm")) for i in range(-(-models // 2)))
    groups = {f"m{i}": [[i % len(cards)]] for i in range(hosted)}
    spec = SystemSpec.model_validate(
        load_systems()["prism"].model_dump()
        | {"placement": {"policy": "pinned", "groups": groups}, "scheduler": {"policy": "fcfs"}}
        | {"residency": load_systems()["prism"].residency.model_copy(update={"move": False})}  # type: ignore[union-attr]
    )
    return _prepared(Scenario(spec, served, cards, _trace([m.id for m in served]), settings))


def _instances(number: int) -> Run:
    """So many one-stage engines of one model behind a dispatcher that looks at loads."""
    served = ServedModel("m", model("llama-3.2-1b"), precision("fp16"), 1, 1.0, 1.0, 100, 20)
    cards = tuple(Gpu(i, i // 8, gpu("h100-sxm")) for i in range(number))
    return _prepared(Scenario(load_systems()["vllm-dp"], (served,), cards, _trace(["m"])))


def _prepared(scenario: Scenario) -> Run:
    return prepare(replace(scenario, sample_s=0.0))


def _trace(models: list[str]) -> Trace:
    """Room for the outcomes of all requests of a measurement; they are told to the cluster by hand."""
    ones = np.ones(10 * ARRIVALS, dtype=np.int64)
    return Trace(np.zeros(len(ones)), np.zeros(len(ones), dtype=np.int32), 100 * ones, ones, tuple(models), "cost")


def _arrive(run: Run, ids: count[int], names: list[str]) -> int:
    for name in names:
        run.parts.cluster.arrive(Request(next(ids), name, 0.0, 100), 1, 0.0)
    return len(names)


def _resident(models: int) -> Work:
    run, ids = _fleet(models, models), count()
    names = [f"m{i * models // ARRIVALS % models}" for i in range(ARRIVALS)]
    return lambda: _arrive(run, ids, names)


def _absent(models: int) -> Work:
    """Requests of a model whose engine loads: the first one, which makes it load, is not counted."""
    run, ids = _fleet(models, models - 1), count()
    absent = f"m{models - 1}"
    _arrive(run, ids, [absent])
    return lambda: _arrive(run, ids, [absent] * ARRIVALS)


def _activation(models: int) -> Work:
    """The first request of a model that is not there: the look at everything, the decision, and what follows at once."""
    run, ids = _fleet(models, models - 1), count()
    return lambda: _arrive(run, ids, [f"m{models - 1}"])


def _sample(models: int) -> Work:
    run = _fleet(models, models)

    def work() -> int:
        run.parts.cluster.settle_all(0.0, ARRIVAL)
        run.parts.sampler.sample([0.0])
        return 1

    return work


def _dispatch(number: int) -> Work:
    run, ids = _instances(number), count()
    return lambda: _arrive(run, ids, ["m"] * ARRIVALS)


CLUSTER_COSTS = (
    Cost("arrival, model resident", "arrival", 20e-6, MODELS, _resident),
    Cost("arrival, model on its way", "arrival", 20e-6, MODELS, _absent),
    Cost("activation on a first request", "activation", 5e-3, MODELS, _activation),
    Cost("sample of all engines", "sample", 20e-3, MODELS, _sample),
    Cost("dispatch among instances by load", "request", 50e-6, INSTANCES, _dispatch),
)
