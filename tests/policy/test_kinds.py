"""Each placement on GPUs of two kinds, worked out by hand.

Kind 0 is fast and small: GPU 0 with 100 bytes. Kind 1 is slow and large: GPUs with 200 bytes in a node of their own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fineserve_sim.policy.fleet.prism import PrismResidency
from fineserve_sim.policy.fleet.qlm import QlmSwapping
from fineserve_sim.policy.fleet.views import EngineView, FleetView, Pending, Start, Status, Stop
from fineserve_sim.policy.interfaces import GpuSlot, KindFacts, ModelDemand, OperatingPoint, Placement, PlacementPolicy
from fineserve_sim.policy.placement.balanced import BalancedPlacement
from fineserve_sim.policy.placement.fineserve import FineServePlacement
from fineserve_sim.policy.placement.kvpr import KvprPlacement
from fineserve_sim.policy.placement.muxserve import MuxServePlacement
from fineserve_sim.policy.placement.static import (
    DedicatedPlacement,
    PinnedPlacement,
    ReplicasPlacement,
    RoundRobinPlacement,
)

FAST = (OperatingPoint(1, 4.0, 0.1, 0, 10), OperatingPoint(4, 8.0, 0.4, 0, 40))
SLOW = (OperatingPoint(1, 1.0, 0.4, 0, 10), OperatingPoint(4, 2.0, 1.6, 0, 40))


def model(
    id: str = "m",
    rate_per_s: float = 2.0,
    weight_bytes: int = 20,
    tp: int = 1,
    facts: tuple[tuple[OperatingPoint, ...], ...] = (FAST, SLOW),
    mme: tuple[float | None, float | None] = (None, None),
) -> ModelDemand:
    """SLO 1 s, one byte of KV a token."""
    kinds = tuple(map(KindFacts, facts, mme))
    return ModelDemand(id, rate_per_s, 1.0, tp, weight_bytes, 1, *kinds[0][:2], by_kind=kinds)


def cluster(slow: int = 1, slow_bytes: int = 200) -> list[GpuSlot]:
    return [GpuSlot(0, 0, 100), *(GpuSlot(1 + number, 1, slow_bytes, 1) for number in range(slow))]


def where(placement: Placement) -> list[tuple[str, tuple[int, ...], float]]:
    return [(instance.model, instance.gpus, pytest.approx(instance.rate_per_s)) for instance in placement.instances]


class TestFineServe:
    """On the fast kind one replica carries 2/s with a batch of 1, on the slow kind two do; F_M is 20 + 10 on both."""

    def test_replicas_are_as_many_as_their_kind_needs(self) -> None:
        """Slow GPUs keep 170 bytes, the fast one 70: two replicas there, of 1/s each."""
        assert where(FineServePlacement().place([model()], cluster(2))) == [("m", (1,), 1.0), ("m", (2,), 1.0)]

    def test_a_kind_that_misses_the_slo_comes_last(self) -> None:
        """One slow GPU would need a batch of 4, whose first token takes 1.6 s."""
        placement = FineServePlacement().place([model()], cluster(1))
        assert where(placement) == [("m", (0,), 2.0)] and not placement.infeasible
        full = [replace(cluster(1)[0], memory_bytes=25), cluster(1)[1]]
        placement = FineServePlacement().place([model()], full)
        assert where(placement) == [("m", (1,), 2.0)] and placement.infeasible == ("m",)

    def test_replicas_on_both_kinds_carry_their_parts(self) -> None:
        """The other slow GPU is full: half on the first, and a whole one on the fast GPU, 2/s in the ratio 1 : 2."""
        gpus = [*cluster(1), GpuSlot(2, 1, 25, 1)]
        placement = FineServePlacement().place([model()], gpus)
        assert where(placement) == [("m", (1,), 2 / 3), ("m", (0,), 4 / 3)] and not placement.infeasible

    def test_marginal_efficiency_is_that_of_the_kind(self) -> None:
        """70 bytes of 3 tokens each are worth more than 170 of one."""
        assert where(FineServePlacement().place([model(mme=(3.0, 1.0))], cluster(2))) == [("m", (0,), 2.0)]
        assert where(FineServePlacement().place([model(mme=(2.0, 1.0))], cluster(2)))[0] == ("m", (1,), 1.0)

    def test_the_charge_is_the_footprint_of_the_kind(self) -> None:
        """1/s takes 20 + 10 on either kind; 4/s would take a batch of 1 on the fast kind and misses the SLO on the slow."""
        large = (SLOW[0]._replace(kv_bytes=50), SLOW[1])
        instances = FineServePlacement().place([model(facts=(FAST, large))], cluster(2)).instances
        assert [(instance.gpus, instance.footprint_bytes) for instance in instances] == [((1,), 70), ((2,), 70)]


class TestOthers:
    def test_kvpr_compares_pressure_by_the_memory_of_each(self) -> None:
        """a to the lowest id, b to the empty GPU; c: 3 / 90 beside a, 2 / 190 beside b."""
        models = [model(id, rate, 10) for id, rate in (("a", 3.0), ("b", 2.0), ("c", 1.0))]
        placement = KvprPlacement().place(models, cluster())
        assert where(placement) == [("a", (0,), 3.0), ("b", (1,), 2.0), ("c", (1,), 1.0)]

    def test_muxserve_fills_the_kind_that_serves_more(self) -> None:
        """A batch takes 1 s on the fast kind and 2 s on the slow one, KV 10 bytes a request. 3/s of a and b are met by batches
        of 3 on the fast GPU, whose 100 bytes are 40 of weights and 60 of KV then. With c as well, all three would complete
        4/s there, less than a and b do; alone on the slow GPU it completes 2/s."""
        fast = (OperatingPoint(1, 1.0, 0.0, 0, 10), OperatingPoint(4, 4.0, 0.0, 0, 40))
        slow = (OperatingPoint(1, 0.5, 0.0, 0, 10), OperatingPoint(4, 2.0, 0.0, 0, 40))
        models = [model(id, 3.0, facts=(fast, slow)) for id in "abc"]
        assert where(MuxServePlacement().place(models, cluster())) == [
            ("a", (0,), 3.0),
            ("b", (0,), 3.0),
            ("c", (1,), 3.0),
        ]

    def test_balanced_goes_where_fewer_are_late(self) -> None:
        """3/s are more than the slow kind carries (2/s) and less than the fast one does (8/s), though that has less memory and
        comes last."""
        gpus = [GpuSlot(0, 0, 200, 1), GpuSlot(1, 1, 100)]
        assert where(BalancedPlacement().place([model(rate_per_s=3.0)], gpus)) == [("m", (1,), 3.0)]

    def test_dedicated_and_round_robin_go_by_memory(self) -> None:
        """150 bytes fit a slow GPU alone; the rest goes in the order of the GPUs."""
        models = [model("large", weight_bytes=150), model("small", weight_bytes=20)]
        assert where(DedicatedPlacement().place(models, cluster())) == [("large", (1,), 2.0), ("small", (0,), 2.0)]
        models += [model("third", weight_bytes=40)]
        assert where(RoundRobinPlacement().place(models, cluster())) == [
            ("large", (1,), 2.0),
            ("third", (0,), 2.0),
            ("small", (1,), 2.0),
        ]

    @pytest.mark.parametrize("policy", [ReplicasPlacement(), PinnedPlacement({"m": [(0,), (1,)]})])
    def test_replicas_get_rates_by_what_they_can_serve(self, policy: PlacementPolicy) -> None:
        """At most 8/s on the fast kind and 2/s on the slow one."""
        assert where(policy.place([model()], cluster())) == [("m", (0,), 1.6), ("m", (1,), 0.4)]

    @pytest.mark.parametrize(
        "policy",
        [
            FineServePlacement(),
            BalancedPlacement(),
            KvprPlacement(),
            MuxServePlacement(),
            DedicatedPlacement(),
            ReplicasPlacement(),
            RoundRobinPlacement(),
        ],
        ids=lambda policy: type(policy).__name__,
    )
    def test_tp_groups_lie_within_a_kind(self, policy: PlacementPolicy) -> None:
        assert where(policy.place([model(tp=2)], cluster(2))) == [("m", (1, 2), 2.0)]


class TestResidency:
    def test_qlm_estimates_by_the_kind_of_its_worker(self) -> None:
        """20 requests take 2.5 s at 8/s and 10 s at 2/s, a swap 3 s, the waiting request itself an eighth or half a second;
        it waits for 5 s already, and its limit is 13.5 s."""
        models = {id: replace(model(id), slo_s=13.5) for id in "ab"}
        policy = QlmSwapping(models, cluster(), swap_s=3.0, service="closes")
        for gpu, late in ((0, False), (1, True)):
            busy = EngineView(7, "a", (gpu,), Status.RESIDENT, 0.0, 20)
            other = EngineView(8, "a", (1 - gpu,), Status.LOADING, 0.0, 0)
            policy._queues = [["b"] if worker == gpu else [] for worker in (0, 1)]
            view = FleetView((busy, other), (Pending("b", 1, 0.0, 0.0),), {}, {0: 0, 1: 0}, frozenset())
            assert policy.suggest(5.0, view) == ([Stop(7, drain=True)] if late else [])

    def test_prism_activates_groups_within_a_kind(self) -> None:
        pending = (Pending("m", 1, 0.0, 0.0),)
        view = FleetView((), pending, {"m": 1.0}, {0: 100, 1: 200, 2: 200}, frozenset())
        prism = PrismResidency({"m": model(tp=2)}, cluster(2), KvprPlacement())
        assert prism.suggest(0.0, view) == [Start("m", (1, 2))]
