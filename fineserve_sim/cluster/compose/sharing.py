"""How the engines of a scenario share their GPUs: the law of each GPU, and the part of its SMs that an engine may take."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from fineserve_sim.catalog import GpuSpec
from fineserve_sim.cluster.compose.profiling import mean_lengths, operating_points, step_model, typical
from fineserve_sim.cluster.scenario import EngineSettings, Gpu, Scenario, ScenarioError, ServedModel
from fineserve_sim.latency.sharing import LAWS, Demand, SharingLaw, under_cap
from fineserve_sim.policy.interfaces import Instance, OperatingPoint
from fineserve_sim.systems.sharing import Sharing
from fineserve_sim.systems.spec import PrismResidencySpec

PERCENTS = range(30, 101, 10)
"""Parts of the SMs that MuxServe profiles (hao-ai-lab/MuxServe @ 223148033454, examples/placement/llama.json)."""


def law_of(gpu: Gpu, scenario: Scenario) -> SharingLaw:
    """Engines that meet in one slice of a GPU take turns there; of exclusive GPUs each has one engine."""
    return LAWS.get(_on(gpu, scenario).mode, LAWS["time_slice"])


def _on(gpu: Gpu, scenario: Scenario) -> Sharing:
    return gpu.sharing or scenario.system.sharing


def check_exclusive(scenario: Scenario, instances: Iterable[Instance]) -> None:
    """Raises ScenarioError when two engines are on a GPU that is for one, or will be."""
    here: dict[int, str] = {}
    alone = {gpu.id for gpu in scenario.gpus if _on(gpu, scenario).mode == "exclusive"}
    if alone and isinstance(scenario.system.residency, PrismResidencySpec):
        raise ScenarioError(
            f"system {scenario.system.name} brings several models to a GPU: it cannot run with sharing exclusive"
        )
    for instance in instances:
        for gpu in alone.intersection(instance.gpus):
            if other := here.get(gpu):
                raise ScenarioError(
                    f"system {scenario.system.name} puts {other} and {instance.model} on GPU {gpu}, whose sharing is "
                    f"exclusive; share it (mps, time_slice) or take another placement or more GPUs"
                )
            here[gpu] = instance.model


def sm_share(scenario: Scenario, served: ServedModel, gpus: Iterable[Gpu]) -> float:
    """The part of the SMs, in (0, 1], that an engine of the model may take of each of its GPUs: the least of theirs."""
    return min(_share_on(gpu, scenario, served) for gpu in gpus)


def _share_on(gpu: Gpu, scenario: Scenario, served: ServedModel) -> float:
    percent = _on(gpu, scenario).percent
    if percent == "by_rate":
        return _least_share(served, gpu.spec, scenario.engine)
    return 1.0 if percent is None else percent.get(served.id, 100) / 100


@lru_cache(maxsize=256)
def _least_share(served: ServedModel, gpu: GpuSpec, settings: EngineSettings) -> float:
    """The smallest part of the SMs with which one engine meets the model's rate, alone; all of them if none does."""
    step = step_model(served, gpu, settings)
    prompt, output = mean_lengths(served)
    chunk = min(prompt, settings.token_budget)
    prefill = step.demand(0, 0, chunk, chunk * (chunk + 1) / 2, 0, 1)
    points = operating_points(typical(served), gpu, settings)
    decodes = [step.demand(p.batch, p.batch * (prompt + output // 2), 0, 0, 0, p.batch) for p in points]

    def meets(share: float) -> bool:
        return any(
            _served_per_s(point, prefill._replace(sm_share=share), decode._replace(sm_share=share)) >= served.rate_per_s
            for point, decode in zip(points, decodes, strict=True)
        )

    return next((percent / 100 for percent in PERCENTS if meets(percent / 100)), 1.0)


def _served_per_s(point: OperatingPoint, prefill: Demand, decode: Demand) -> float:
    """Requests per second of a batch that is prefilled together and then decoded, under a cap."""
    decode_s = max(0.0, point.batch / point.throughput_per_s - point.ttft_s)
    return point.batch / (point.ttft_s * under_cap(prefill) + decode_s * under_cap(decode))
