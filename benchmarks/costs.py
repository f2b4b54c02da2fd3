"""What a decision costs as the cluster grows, beside what it may cost at the largest size.

    python -m benchmarks.scaling --costs [--json] [--repeat N]

``COSTS`` is the list: for each cost a function that prepares a cluster of some size and returns what is to be timed. The sizes
are models, on half as many GPUs in nodes of eight, unless the name says otherwise. Times are CPU seconds a unit of work, the
best of the repeats. Slopes are least squares of log time on log size: 0 does not see the cluster, 1 is a step for each of its
members.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fineserve_sim.policy.fleet.prism import PrismResidency
from fineserve_sim.policy.fleet.views import EngineView, FleetView, Pending, Status
from fineserve_sim.policy.groups.drop_plan import plan_drop
from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand, OperatingPoint, PlacementPolicy
from fineserve_sim.policy.memory.prefix import SharedBlocks
from fineserve_sim.policy.placement.balanced import BalancedPlacement
from fineserve_sim.policy.placement.fineserve import FineServePlacement
from fineserve_sim.policy.placement.kvpr import KvprPlacement
from fineserve_sim.policy.placement.muxserve import MuxServePlacement

GPU_BYTES = int(72e9)
NODE_GPUS = 8
BATCHES = (1, 2, 4, 8, 16, 32)
MODELS = (125, 250, 500, 1000, 2000)

Work = Callable[[], int]
"""Does what is timed, and returns how many units of it."""


@dataclass(frozen=True)
class Cost:
    """``bound_s``: CPU seconds a ``unit`` at the last of ``sizes``. ``prepare`` makes the work of one size, fresh for each
    repeat."""

    name: str
    unit: str
    bound_s: float
    sizes: tuple[int, ...]
    prepare: Callable[[int], Work]


@dataclass(frozen=True)
class Measured:
    """CPU seconds a unit at each size; ``slope`` is nan where there are not two sizes."""

    name: str
    unit: str
    sizes: list[int]
    cost_s: list[float]
    slope: float
    bound_s: float

    @property
    def holds(self) -> bool:
        return self.cost_s[-1] <= self.bound_s


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Exponent b of the least-squares fit y = a x^b."""
    exponent: float = np.polyfit(np.log(x), np.log(y), 1)[0]
    return float(exponent)


def measure(cost: Cost, repeat: int, sizes: Sequence[int] | None = None) -> Measured:
    """The cost at its own sizes, or at these."""
    at = list(sizes or cost.sizes)
    found = [min(_once(cost.prepare(size)) for _ in range(repeat)) for size in at]
    fitted = slope(at, found) if len(at) > 1 else float("nan")
    return Measured(cost.name, cost.unit, at, found, fitted, cost.bound_s)


def _once(work: Work) -> float:
    gc.collect()
    start_s = time.process_time()
    units = work()
    return (time.process_time() - start_s) / units


def table(measured: Sequence[Measured]) -> str:
    """One line a cost: what it is at each size, its slope, and the bound at the last one."""
    lines = [f"{'':42} {'slope':>6} {'bound':>9}   size: cost"]
    for one in measured:
        points = "  ".join(f"{size}: {_readable(cost_s)}" for size, cost_s in zip(one.sizes, one.cost_s, strict=True))
        mark = "" if one.holds else "  ABOVE"
        lines.append(f"{f'{one.name}, {one.unit}':42} {one.slope:6.2f} {_readable(one.bound_s):>9}   {points}{mark}")
    return "\n".join(lines)


def _readable(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


# --- clusters to decide about ------------------------------------------------------------------------------------------


def gpus(count: int) -> list[GpuSlot]:
    return [GpuSlot(gpu, gpu // NODE_GPUS, GPU_BYTES) for gpu in range(count)]


def demands(count: int, degrees: Sequence[int] = (1,)) -> list[ModelDemand]:
    """Models of 1.5 to 8 billion parameters, their rates log-normal, profiles linear in the batch."""
    rng = random.Random(count)
    models = []
    for index in range(count):
        pace = rng.uniform(0.5, 2.0)
        profile = tuple(
            OperatingPoint(batch, batch / (pace * (0.02 * batch + 0.3)), 0.015 * batch * pace, 10**8, batch * 2 * 10**8)
            for batch in BATCHES
        )
        weight_bytes = rng.choice((3, 6, 16)) * 10**9
        facts = ModelDemand(
            f"m{index:05}", rng.lognormvariate(-2, 1.2), 1.0, rng.choice(degrees), weight_bytes, 131_072
        )
        models.append(replace(facts, profile=profile, activation_bytes=10**9))
    return models


def placing(policy: PlacementPolicy, degrees: Sequence[int] = (1,), load: float = 1.0) -> Callable[[int], Work]:
    """One placement of all models. Their GPUs are nearly idle at a ``load`` of 1."""

    def prepare(size: int) -> Work:
        models = [replace(model, rate_per_s=load * model.rate_per_s) for model in demands(size, degrees)]
        slots = gpus(max(*degrees, size // 2))

        def work() -> int:
            policy.place(models, slots)
            return 1

        return work

    return prepare


def looking(pending: int, *, moves: bool = False) -> Callable[[int], Work]:
    """One look of Prism at a fleet in which so many models are pending: the unit is a pending model, or the look."""

    def prepare(size: int) -> Work:
        models, slots = {model.id: model for model in demands(size)}, gpus(max(2, size // 2))
        waiting = list(models)[:pending]
        prism = PrismResidency(models, slots, KvprPlacement(), move=moves)
        view = fleet(list(models.values())[pending:], waiting, slots)

        def work() -> int:
            prism.suggest(10.0, view)
            return max(1, pending)

        return work

    return prepare


def fleet(models: Sequence[ModelDemand], waiting: Sequence[str], slots: Sequence[GpuSlot]) -> FleetView:
    """Each model resident on a random GPU where it fits, half of them idle, and half of what is left taken by KV."""
    rng = random.Random(len(models))
    free = {slot.id: slot.memory_bytes for slot in slots}
    engines = []
    for engine, model in enumerate(models):
        gpu = max(rng.sample(sorted(free), 2), key=lambda gpu: free[gpu])
        if free[gpu] > model.weight_bytes:
            free[gpu] -= model.weight_bytes
            idle_s = rng.choice((0.0, 60.0))
            engines.append(EngineView(engine, model.id, (gpu,), Status.RESIDENT, idle_s, int(idle_s == 0)))
    rates_per_s = {model.id: model.rate_per_s for model in models} | dict.fromkeys(waiting, 1.0)
    pending = tuple(Pending(model, 1, float(turn), float(turn)) for turn, model in enumerate(waiting))
    left = {gpu: free_bytes // 2 for gpu, free_bytes in free.items()}
    return FleetView(tuple(engines), pending, rates_per_s, left, frozenset())


def evicting(leaves: int) -> Work:
    """Blocks of so many recorded prefixes, evicted one at a time while requests go on matching."""
    rng = random.Random(leaves)
    blocks = SharedBlocks()
    keys = [(-1 - leaf % 20, *range(leaf * 4, leaf * 4 + 4)) for leaf in range(leaves)]
    for leaf, key in enumerate(keys):
        mine = list(range(leaf * 5, leaf * 5 + 5))
        blocks.add(mine)
        blocks.record(key, mine)
        blocks.drop(mine)
    for leaf in rng.sample(range(leaves), leaves // 2):
        blocks.drop(blocks.match(keys[leaf]))

    def work() -> int:
        return sum(len(blocks.evict(1)) for _ in range(leaves))

    return work


def dropping(instances: int) -> Work:
    """A plan that merges nearly all instances."""
    groups, node_of = [(one,) for one in range(instances)], {one: one // NODE_GPUS for one in range(instances)}

    def work() -> int:
        plan_drop(groups, instances, 1, node_of=node_of)
        return 1

    return work


COSTS: list[Cost] = [
    Cost("Prism's rebalancing", "a look", 0.1, MODELS, looking(0, moves=True)),
    Cost("Prism, models pending", "a model", 2e-3, MODELS, looking(20)),
    Cost("Prism, one pending", "a look", 5e-3, MODELS, looking(1)),
    Cost("Algorithm 1", "a placement", 2.0, MODELS, placing(FineServePlacement())),
    Cost("KVPR", "a placement", 2.0, MODELS, placing(KvprPlacement())),
    Cost("KVPR, judged with the model", "a placement", 2.0, MODELS, placing(KvprPlacement("post"))),
    Cost("balanced", "a placement", 1.0, MODELS, placing(BalancedPlacement())),
    Cost("balanced, GPUs busy", "a placement", 1.0, MODELS, placing(BalancedPlacement(), load=15.0)),
    Cost("MuxServe", "a placement", 2.0, MODELS, placing(MuxServePlacement())),
    Cost("MuxServe, TP 1 to 8", "a placement", 2.0, (32, 64, 128), placing(MuxServePlacement(), (1, 1, 1, 1, 2, 4, 8))),
    Cost("recorded prefixes", "a block", 50e-6, (1000, 2000, 4000, 8000), evicting),
    Cost("drop plan by instances", "a plan", 0.05, (1250, 2500, 5000, 10_000), dropping),
]
