"""Prism, QLM, MuxServe(++) and S-Partition as compositions of policies."""

from __future__ import annotations

import numpy as np
import pytest
from fineserve_traces import Trace

from fineserve_sim.catalog import gpu, model, precision
from fineserve_sim.cluster import Fate, Gpu, Scenario, ServedModel, simulate
from fineserve_sim.cluster.compose.facts import demands_of
from fineserve_sim.cluster.compose.memory import build_manager, tenants_on, usable_bytes
from fineserve_sim.cluster.compose.place import place
from fineserve_sim.cluster.compose.policies import build_activation_cost, build_placement, build_residency
from fineserve_sim.cluster.fleet.loader import GPU_BYTES_PER_S, PLAIN_BYTES_PER_S
from fineserve_sim.policy.fleet.prism import PrismResidency
from fineserve_sim.policy.fleet.qlm import QlmSwapping
from fineserve_sim.policy.fleet.views import FleetView, Pending
from fineserve_sim.policy.interfaces import GpuSlot, Instance, ModelDemand, OperatingPoint
from fineserve_sim.policy.memory.paged import PrivatePools
from fineserve_sim.policy.placement.balanced import BalancedPlacement
from fineserve_sim.policy.placement.kvpr import KvprPlacement
from fineserve_sim.policy.placement.muxserve import MuxServePlacement
from fineserve_sim.policy.placement.static import RoundRobinPlacement
from fineserve_sim.systems import load_systems
from fineserve_sim.systems.spec import (
    BalancedPlacementSpec,
    KvprPlacementSpec,
    MuxServePlacementSpec,
    PrismResidencySpec,
    QlmResidencySpec,
    RoundRobinPlacementSpec,
)

MODELS = {"a": ModelDemand("a", 1.0, 1.0, 1, 10, 1, (OperatingPoint(1, 1.0, 0.1, 0, 1),))}
GPUS = [GpuSlot(0, 0, 100)]


def test_systems_combine_the_policies_of_the_matrix() -> None:
    """systems.md 0. MuxServe++ differs from Prism by what Prism adds; S-Partition by a fixed share."""
    axes = {
        name: (
            spec.placement.policy,
            spec.scheduler.policy,
            spec.memory.policy,
            spec.residency and spec.residency.policy,
        )
        for name, spec in load_systems().items()
    }
    assert axes["prism"] == ("kvpr", "moore_hodgson", "kvcached", "prism")
    assert axes["muxserve++"] == ("muxserve", "fcfs", "kvcached", None)
    assert axes["muxserve"] == ("muxserve", "fcfs", "kv_slab", None)
    assert axes["qlm"] == ("dedicated", "fcfs", "private", "qlm")
    assert axes["s-partition"] == ("kvpr", "fcfs", "private", None)
    assert axes["prism*"][3] is None


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (MuxServePlacementSpec(), MuxServePlacement),
        (RoundRobinPlacementSpec(), RoundRobinPlacement),
        (BalancedPlacementSpec(), BalancedPlacement),
        (KvprPlacementSpec(weight="token_rate", tau=0.5, threshold="absolute"), KvprPlacement),
    ],
)
def test_each_placement_is_built(spec: object, kind: type) -> None:
    assert isinstance(build_placement(spec), kind)  # type: ignore[arg-type]


def test_residency_is_built_with_its_options() -> None:
    prism = build_residency(PrismResidencySpec(), KvprPlacementSpec(), MODELS, GPUS)
    assert isinstance(prism, PrismResidency)
    assert isinstance(build_residency(QlmResidencySpec(), RoundRobinPlacementSpec(), MODELS, GPUS), QlmSwapping)
    policy = build_residency(PrismResidencySpec(), KvprPlacementSpec(weight="token_rate"), MODELS, GPUS)
    with pytest.raises(ValueError, match="tokens_per_request"):  # Prism scores as the placement does
        policy.suggest(0.0, FleetView((), (Pending("a", 1, 0.0, 0.0),), {"a": 1.0}, {0: 100}, frozenset()))


def test_activation_costs_follow_the_switches() -> None:
    assert build_activation_cost(PrismResidencySpec()).gpu_bytes_per_s == GPU_BYTES_PER_S
    assert build_activation_cost(PrismResidencySpec(parallel_loading=False)).gpu_bytes_per_s == PLAIN_BYTES_PER_S
    cold = build_activation_cost(PrismResidencySpec(engine_pool=False, engine_start_s=25.0))
    assert cold.overhead_s == pytest.approx(25.02)
    assert build_activation_cost(QlmResidencySpec(swap_s=60.0)).alone_s(10**12) == 60.0


# --- runs of those whose models stay -----------------------------------------------------------------------------------


def scenario(name: str, requests: int = 12) -> Scenario:
    """Three 8B models of unequal load on two H100s."""
    rates = {"busy": 3.0, "calm": 1.0, "rare": 0.2}
    spec = model("llama-3.1-8b")
    served = tuple(ServedModel(id, spec, precision("W16A16"), 1, rate, 1.0, 220, 190) for id, rate in rates.items())
    trace = Trace(
        arrival_s=np.arange(requests) * 0.25,
        model=np.arange(requests, dtype=np.int32) % 3,
        prompt_tokens=np.full(requests, 200),
        output_tokens=np.full(requests, 20),
        models=tuple(rates),
        source="test",
    )
    return Scenario(load_systems()[name], served, (Gpu(0, 0, gpu("h100-sxm")), Gpu(1, 0, gpu("h100-sxm"))), trace)


@pytest.mark.parametrize("name", ["s-partition", "muxserve", "muxserve++", "balanced"])
def test_every_request_is_served(name: str) -> None:
    run = simulate(scenario(name))
    assert (run.fate == Fate.FINISHED).all() and run.placement.unplaced == ()
    assert np.isfinite(run.first_token_s).all()


def test_muxserve_parts_the_busy_model_from_the_others() -> None:
    described = scenario("muxserve++")
    placement, _ = place(described, demands_of(described))
    home = {instance.model: instance.gpus for instance in placement.instances}
    assert home["busy"] != home["calm"] == home["rare"]


def test_a_static_partition_follows_demand() -> None:
    """Beside each other on one GPU, the model with five times the rate gets five times the memory, and all of it is given."""
    scene = scenario("s-partition")
    served = {one.id: one for one in scene.models}
    instances = [Instance(id, 0, (0,), served[id].rate_per_s, 1) for id in ("calm", "rare")]
    tenants = tenants_on(scene, instances, {})[0]
    usable = usable_bytes(scene.gpus[0], scene.engine)
    manager = build_manager(scene.system.memory, usable, tenants)
    assert isinstance(manager, PrivatePools)
    calm, rare = (manager.pool(tenant.engine).capacity_blocks for tenant in tenants)
    assert calm / rare == pytest.approx(5.0, rel=0.01)
    left_bytes = usable - sum(tenant.fixed_bytes for tenant in tenants)
    assert (calm + rare) * tenants[0].block.block_bytes == pytest.approx(left_bytes, rel=0.001)
