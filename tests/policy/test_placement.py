"""FineServe's Algorithm 1, and the placements without a score."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand, OperatingPoint, Placement, PlacementPolicy
from fineserve_sim.policy.placement import tp_groups
from fineserve_sim.policy.placement.fineserve import FineServePlacement, base_footprint
from fineserve_sim.policy.placement.mme import marginal_efficiency, score_mean
from fineserve_sim.policy.placement.static import DedicatedPlacement, PinnedPlacement

GB = 10**9
GIB = 2**30
H100_BYTES = int(0.9 * 80 * GIB)


def point(batch: int, throughput: float, ttft_s: float, activation: int = 0, kv: int = 0) -> OperatingPoint:
    return OperatingPoint(batch, throughput, ttft_s, activation, kv)


PROFILE = (point(1, 2.0, 0.1, 1, 10), point(4, 6.0, 0.3, 2, 40), point(8, 8.0, 0.8, 3, 80))
EASY = (point(1, 100.0, 0.1),)


def model(id: str, weights: int, **facts: object) -> ModelDemand:
    given = {"rate_per_s": 1.0, "slo_s": 1.0, "tp": 1, "token_bytes": 131_072, "profile": EASY} | facts
    return ModelDemand(id=id, weight_bytes=weights, **given)  # type: ignore[arg-type]


def cluster(*memory_bytes: int, node_size: int = 8) -> list[GpuSlot]:
    return [GpuSlot(id, id // node_size, memory) for id, memory in enumerate(memory_bytes)]


def where(placement: Placement) -> list[tuple[str, tuple[int, ...]]]:
    return [(instance.model, instance.gpus) for instance in placement.instances]


class TestBaseFootprint:
    def test_takes_the_smallest_batch_that_carries_the_rate(self) -> None:
        footprint = base_footprint(model("m", 1000, rate_per_s=5.0, profile=PROFILE[::-1]), candidates=4)
        assert footprint == (1000 + 2 + 40, 1, PROFILE[1], True)

    def test_the_rate_and_the_slo_may_be_met_exactly(self) -> None:
        demand = model("m", 1000, rate_per_s=6.0, slo_s=0.3, profile=PROFILE)
        assert base_footprint(demand, candidates=4).point == PROFILE[1]

    def test_replicates_until_the_batch_meets_the_slo(self) -> None:
        """8/s need batch 8, too slow; 4/s need batch 4, too slow for 0.2 s; 8/3 too; 2/s do with batch 1."""
        footprint = base_footprint(model("m", 1000, rate_per_s=8.0, slo_s=0.2, profile=PROFILE), candidates=4)
        assert footprint == (1011, 4, PROFILE[0], True)

    def test_replicates_until_some_batch_carries_the_rate(self) -> None:
        footprint = base_footprint(model("m", 1000, rate_per_s=20.0, profile=PROFILE), candidates=4)
        assert footprint == (1083, 3, PROFILE[2], True)

    def test_a_rate_beyond_all_candidates_gets_all_of_them_at_the_smallest_batch(self) -> None:
        footprint = base_footprint(model("m", 1000, rate_per_s=99.0, profile=PROFILE), candidates=4)
        assert footprint == (1011, 4, PROFILE[0], False)

    def test_an_slo_that_no_batch_meets_gets_one_replica(self) -> None:
        footprint = base_footprint(model("m", 1000, rate_per_s=1.0, slo_s=0.05, profile=PROFILE), candidates=4)
        assert footprint == (1011, 1, PROFILE[0], False)

    def test_without_hope_for_the_slo_replicas_are_as_many_as_the_rate_needs(self) -> None:
        """2/s and replica: batch 1 is in time; four carry 8/s so, no number of four carries 9/s within 0.2 s."""
        tight = model("m", 1000, rate_per_s=9.0, slo_s=0.2, profile=PROFILE)
        assert base_footprint(tight, candidates=4) == (1011, 2, PROFILE[0], False)
        assert base_footprint(tight, candidates=4, unmet="spread") == (1011, 4, PROFILE[0], False)

    def test_needs_a_profile_and_a_candidate(self) -> None:
        with pytest.raises(ValueError, match="model m has no profile"):
            base_footprint(model("m", 1000, profile=()), candidates=1)
        with pytest.raises(ValueError, match="model m has no candidate GPU group of size 1"):
            base_footprint(model("m", 1000), candidates=0)


class TestFineServePlacement:
    def test_table_4(self) -> None:
        """Claim FS-T4-fineserve: C on GPU 0, then A and B together on GPU 1."""
        models = [
            model("A", 16 * GB, token_bytes=128 * 1024),
            model("B", 9 * GB, token_bytes=64 * 1024),
            model("C", 40 * GB, token_bytes=320 * 1024),
        ]
        policy: PlacementPolicy = FineServePlacement()
        placement = policy.place(models, cluster(H100_BYTES, H100_BYTES))
        assert where(placement) == [("C", (0,)), ("A", (1,)), ("B", (1,))]
        assert placement.unplaced == placement.infeasible == ()

    def test_good_company_may_outweigh_more_memory(self) -> None:
        """Z beside X: 40 left x mean 0.5 = 20; beside Y: 50 left x mean 0.1 = 5."""
        models = [
            model("X", 50, mme_tokens_per_byte=0.9),
            model("Y", 40, mme_tokens_per_byte=0.1),
            model("Z", 10, mme_tokens_per_byte=0.1),
        ]
        assert where(FineServePlacement().place(models, cluster(100, 100))) == [("X", (0,)), ("Y", (1,)), ("Z", (0,))]

    @pytest.mark.parametrize(("score", "gpu"), [("mean", 1), ("exact", 0)])
    def test_mean_and_exact_score_may_disagree(self, score: Literal["mean", "exact"], gpu: int) -> None:
        """Z beside X: 40 left, mean 0.5 makes 20, the best 0.9 makes 36. Beside Y: 55 left, 0.37 makes 20.35, 0.64
        makes 35.2."""
        models = [
            model("X", 50, mme_tokens_per_byte=0.9),
            model("Y", 35, mme_tokens_per_byte=0.64),
            model("Z", 10, mme_tokens_per_byte=0.1),
        ]
        placement = FineServePlacement(score).place(models, cluster(100, 100))
        assert where(placement) == [("X", (0,)), ("Y", (1,)), ("Z", (gpu,))]

    def test_a_gpu_without_room_is_no_candidate_and_leftovers_are_unplaced(self) -> None:
        models = [model("big", 90), model("mid", 60), model("small", 10)]
        placement = FineServePlacement().place(models, cluster(100))
        assert where(placement) == [("big", (0,)), ("small", (0,))]
        assert placement.unplaced == ("mid",)

    def test_a_model_may_fill_a_gpu_to_the_last_byte(self) -> None:
        assert where(FineServePlacement().place([model("m", 100)], cluster(100))) == [("m", (0,))]

    def test_a_whole_engine_must_fit(self) -> None:
        """Its operating point needs 10 bytes beside the weights, the engine itself reserves 30."""
        models = [
            model("a", 50, profile=(point(1, 100.0, 0.1, 10),), activation_bytes=30),
            model("b", 25, profile=(point(1, 100.0, 0.1, 10),), activation_bytes=30),
        ]
        assert where(FineServePlacement().place(models, cluster(110))) == [("a", (0,))]
        assert where(FineServePlacement().place(models, cluster(140))) == [("a", (0,)), ("b", (0,))]

    def test_the_footprint_of_a_tp_group_is_that_of_all_its_gpus(self) -> None:
        """60 on each of two GPUs is more than 70 on one; as shares of a GPU it is less."""
        models = [model("one", 70), model("two", 60, tp=2)]
        assert where(FineServePlacement().place(models, cluster(100, 100))) == [("two", (0, 1))]
        by_gpu = FineServePlacement(order="gpu")
        assert where(by_gpu.place(models, cluster(100, 100))) == [("one", (0,))]

    def test_equal_footprints_go_by_weights_then_id(self) -> None:
        profile = (point(1, 100.0, 0.1, kv=10),)
        models = [model("b", 20), model("a", 20), model("0", 10, profile=profile)]
        order = [id for id, _ in where(FineServePlacement().place(models, cluster(1000)))]
        assert order == ["a", "b", "0"]

    def test_equal_scores_go_to_fewer_residents_then_the_lower_id(self) -> None:
        """X and Y stand on GPUs 0 and 1; Z scores the same on GPU 0 (10 left) as alone on GPU 2 (10 left)."""
        models = [model("X", 70), model("Y", 60), model("Z", 20)]
        gpus = [GpuSlot(0, 0, 100), GpuSlot(1, 0, 60), GpuSlot(2, 0, 30)]
        assert where(FineServePlacement().place(models, gpus)) == [("X", (0,)), ("Y", (1,)), ("Z", (2,))]

    def test_replicas_share_the_rate_on_distinct_gpus(self) -> None:
        models = [model("m", 30, rate_per_s=20.0, profile=(point(8, 8.0, 0.5),))]
        placement = FineServePlacement().place(models, cluster(100, 100, 100, 100))
        assert [(i.replica, i.gpus, i.footprint_bytes) for i in placement.instances] == [
            (0, (0,), 30),
            (1, (1,), 30),
            (2, (2,), 30),
        ]
        assert [i.rate_per_s for i in placement.instances] == pytest.approx([20 / 3] * 3)

    def test_replicas_share_a_gpu_only_when_they_must_and_may(self) -> None:
        models = [model("m", 30, rate_per_s=12.0, profile=(point(8, 8.0, 0.5),))]
        gpus = cluster(100, 10)
        avoid = FineServePlacement().place(models, gpus)
        assert where(avoid) == [("m", (0,)), ("m", (0,))]
        assert avoid.infeasible == ()
        forbid = FineServePlacement(colocation="forbid").place(models, gpus)
        assert where(forbid) == [("m", (0,))]
        assert forbid.instances[0].rate_per_s == 12.0
        assert forbid.infeasible == ("m",)
        allow = FineServePlacement(colocation="allow").place(models, cluster(1000, 100))
        assert where(allow) == [("m", (0,)), ("m", (0,))]

    def test_a_model_that_misses_its_slo_is_placed_and_flagged(self) -> None:
        placement = FineServePlacement().place([model("m", 30, slo_s=0.01)], cluster(100, 100))
        assert where(placement) == [("m", (0,))]
        assert placement.infeasible == ("m",)

    def test_tp_groups_are_charged_on_every_gpu_and_scored_by_the_fullest(self) -> None:
        """L takes GPU 0. With P the pair (0, 1) has 20 left on its fuller GPU (80 on the other), the pair (2, 3) 70."""
        placement = FineServePlacement().place([model("L", 60), model("P", 20, tp=2)], cluster(100, 100, 90, 90))
        assert where(placement) == [("L", (0,)), ("P", (2, 3))]
        full = FineServePlacement().place([model("L", 90), model("P", 20, tp=2)], cluster(100, 100))
        assert full.unplaced == ("P",)

    def test_a_group_larger_than_every_node_is_unplaced(self) -> None:
        placement = FineServePlacement().place([model("P", 20, tp=2)], cluster(100, 100, node_size=1))
        assert placement.unplaced == ("P",)
        assert placement.infeasible == ()

    @given(
        weights=st.lists(st.integers(1, 60), min_size=1, max_size=8),
        rates=st.lists(st.floats(0.5, 30), min_size=8, max_size=8),
        tps=st.lists(st.sampled_from([1, 1, 2, 4]), min_size=8, max_size=8),
        memory=st.lists(st.integers(30, 120), min_size=4, max_size=8),
    )
    def test_laws(self, weights: list[int], rates: list[float], tps: list[int], memory: list[int]) -> None:
        """No GPU is over its budget, rates add up, every model is placed or reported, input order is irrelevant."""
        profile = (point(4, 5.0, 0.2, 1, 2), point(8, 8.0, 0.5, 1, 4))
        models = [
            model(f"m{i}", weight, rate_per_s=rates[i], tp=tps[i], profile=profile) for i, weight in enumerate(weights)
        ]
        gpus = cluster(*memory, node_size=4)
        placement = FineServePlacement().place(models, gpus)
        assert FineServePlacement().place(models[::-1], gpus[::-1]).instances == placement.instances
        for gpu in gpus:
            assert sum(i.footprint_bytes for i in placement.instances if gpu.id in i.gpus) <= gpu.memory_bytes
        for later in (False, True):  # first places come first, in the order of footprints, then all other replicas
            footprints = [len(i.gpus) * i.footprint_bytes for i in placement.instances if (i.replica > 0) == later]
            assert footprints == sorted(footprints, reverse=True)
        assert [i.replica > 0 for i in placement.instances] == sorted(i.replica > 0 for i in placement.instances)
        for demand in models:
            mine = [i for i in placement.instances if i.model == demand.id]
            assert bool(mine) != (demand.id in placement.unplaced)
            assert all(i.gpus in tp_groups(gpus, demand.tp) for i in mine)
            if mine:
                assert sum(i.rate_per_s for i in mine) == pytest.approx(demand.rate_per_s)

    def test_unknown_options_are_refused(self) -> None:
        with pytest.raises(ValueError, match="score is 'best'"):
            FineServePlacement("best")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="colocation is 'never'"):
            FineServePlacement(colocation="never")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="order is 'size'"):
            FineServePlacement(order="size")  # type: ignore[arg-type]


class TestTpGroups:
    def test_are_aligned_contiguous_and_inside_one_node(self) -> None:
        gpus = cluster(*[1] * 10, node_size=5)
        assert tp_groups(gpus, 1) == [(id,) for id in range(10)]
        assert tp_groups(gpus[::-1], 2) == [(0, 1), (2, 3), (5, 6), (7, 8)]
        assert tp_groups(gpus, 6) == []

    def test_a_degree_below_one_is_refused(self) -> None:
        with pytest.raises(ValueError, match="degree is 0"):
            tp_groups(cluster(1), 0)


class TestPinnedPlacement:
    def test_follows_the_pins_and_splits_the_rate(self) -> None:
        policy: PlacementPolicy = PinnedPlacement({"a": [(1,), (0,)], "p": [(2, 3)]})
        models = [model("p", 50, tp=2), model("a", 20, rate_per_s=3.0), model("idle", 1)]
        placement = policy.place(models, cluster(100, 100, 100, 100))
        assert where(placement) == [("p", (2, 3)), ("a", (1,)), ("a", (0,))]
        assert [i.rate_per_s for i in placement.instances] == [1.0, 1.5, 1.5]
        assert placement.unplaced == ("idle",)

    @pytest.mark.parametrize(
        ("groups", "message"),
        [
            ({"a": [(0, 1)]}, r"needs 1 distinct GPUs, but is pinned to \(0, 1\)"),
            ({"p": [(1, 1)]}, r"needs 2 distinct GPUs"),
            ({"a": [(7,)]}, r"pinned to GPUs \(7,\), but the cluster has \[0, 1\]"),
            ({"x": [(0,)]}, r"pins \['x'\]"),
            ({"a": [(0,)], "p": [(0, 1)]}, "GPU 0 has .* does not fit"),
        ],
    )
    def test_pins_that_cannot_be_are_refused(self, groups: dict[str, list[tuple[int, ...]]], message: str) -> None:
        models = [model("a", 60), model("p", 50, tp=2)]
        with pytest.raises(ValueError, match=message):
            PinnedPlacement(groups).place(models, cluster(100, 100))


class TestDedicatedPlacement:
    def test_nobody_shares_a_gpu(self) -> None:
        models = [model("s", 10), model("m", 30), model("p", 40, tp=2), model("late", 5)]
        placement = DedicatedPlacement().place(models, cluster(100, 100, 100, 100))
        assert where(placement) == [("p", (0, 1)), ("m", (2,)), ("s", (3,))]
        assert placement.unplaced == ("late",)

    def test_weights_must_fit(self) -> None:
        placement = DedicatedPlacement().place([model("m", 50), model("x", 90)], cluster(40, 60))
        assert where(placement) == [("m", (1,))]
        assert placement.unplaced == ("x",)


def test_first_places_leave_none_without_a_place() -> None:
    # "busy" asks for two replicas of 6 bytes; with both on the two GPUs of 10, "late" (5 bytes) fits nowhere.
    def demand(id: str, rate_per_s: float, weight_bytes: int) -> ModelDemand:
        return ModelDemand(id, rate_per_s, 1.0, 1, weight_bytes, 1, (OperatingPoint(1, 1.0, 0.5, 0, 0),))

    models = [demand("busy", 2.0, 6), demand("late", 1.0, 5)]
    gpus = [GpuSlot(0, 0, 10), GpuSlot(1, 0, 10)]
    literal = FineServePlacement(turns="literal").place(models, gpus)
    first = FineServePlacement(turns="first_places").place(models, gpus)
    assert [(i.model, i.gpus) for i in literal.instances] == [("busy", (0,)), ("busy", (1,))]
    assert literal.unplaced == ("late",)
    assert [(i.model, i.gpus) for i in first.instances] == [("busy", (0,)), ("late", (1,))]
    assert first.unplaced == () and first.infeasible == ("busy",)


def test_replicas_take_what_first_places_leave() -> None:
    """A third GPU has room for the second replica of "busy", and for its third one beside "late"."""
    point = (OperatingPoint(1, 1.0, 0.5, 0, 0),)
    models = [ModelDemand("busy", 3.0, 1.0, 1, 6, 1, point), ModelDemand("late", 1.0, 1.0, 1, 4, 1, point)]
    gpus = [GpuSlot(gpu, 0, 10) for gpu in range(3)]
    placement = FineServePlacement(turns="first_places").place(models, gpus)
    assert [(i.model, i.replica) for i in placement.instances] == [("busy", 0), ("late", 0), ("busy", 1), ("busy", 2)]
    assert placement.infeasible == placement.unplaced == ()
    assert {i.gpus for i in placement.instances if i.model == "busy"} == {(0,), (1,), (2,)}


def test_as_many_replicas_as_the_rate_needs() -> None:
    """A batch of two carries the rate and breaks the SLO of 0.6 s; two replicas at a batch of one keep it."""
    points = (OperatingPoint(1, 1.0, 0.5, 0, 0), OperatingPoint(2, 2.0, 1.0, 0, 0))
    one, gpus = ModelDemand("busy", 2.0, 0.6, 1, 6, 1, points), cluster(10, 10)
    by_rate, by_slo = FineServePlacement(replicas="rate").place([one], gpus), FineServePlacement().place([one], gpus)
    assert [(i.gpus, i.rate_per_s) for i in by_rate.instances] == [((0,), 2.0)]
    assert [(i.gpus, i.rate_per_s) for i in by_slo.instances] == [((0,), 1.0), ((1,), 1.0)]
    assert by_rate.infeasible == ("busy",) and by_slo.infeasible == ()
    faster = replace(one, rate_per_s=4.0)
    assert len(FineServePlacement(replicas="rate").place([faster], gpus).instances) == 2


def literal_places(
    models: list[ModelDemand], gpus: list[GpuSlot], score: str, colocation: str
) -> list[tuple[str, int, tuple[int, ...]]]:
    """Algorithm 1 as it is written: every number of replicas is tried, every candidate scored by its list of residents."""
    order = []
    for one in models:
        groups = tp_groups(gpus, one.tp)
        for replicas in range(1, len(groups) + 1):
            carrying = [point for point in one.profile if point.throughput_per_s >= one.rate_per_s / replicas]
            if carrying and min(carrying).ttft_s <= one.slo_s:
                order.append((one, replicas, min(carrying), groups))
                break
        else:
            fastest_per_s = max(point.throughput_per_s for point in one.profile)
            enough = [count for count in range(1, len(groups)) if fastest_per_s >= one.rate_per_s / count]
            if groups:
                order.append((one, min([*enough, len(groups)]), min(one.profile), groups))

    def footprint_bytes(one: ModelDemand, point: OperatingPoint) -> int:
        return one.weight_bytes + point.activation_bytes + point.kv_bytes

    order.sort(
        key=lambda row: (-row[0].tp * footprint_bytes(row[0], row[2]), -row[0].tp * row[0].weight_bytes, row[0].id)
    )
    left = {gpu.id: gpu.memory_bytes for gpu in gpus}
    here: dict[int, dict[tuple[str, int], float]] = {gpu.id: {} for gpu in gpus}
    placed = []
    for one, replicas, point, groups in order:
        taken_bytes, mu = footprint_bytes(one, point), marginal_efficiency(one)
        for replica in range(replicas):
            ranked = []
            for group in groups:
                residents = {name: value for gpu in group for name, value in here[gpu].items()}
                remaining = min(left[gpu] for gpu in group) - taken_bytes
                shared = colocation != "allow" and any(model == one.id for model, _ in residents)
                if remaining >= 0 and not (shared and colocation == "forbid"):
                    mus = [*residents.values(), mu]
                    gained = score_mean(remaining, mus) if score == "mean" else remaining * max(mus)
                    ranked.append((shared, -gained, len(residents), group))
            if not ranked:
                break
            group = min(ranked)[-1]
            for gpu in group:
                left[gpu] -= taken_bytes
                here[gpu][one.id, replica] = mu
            placed.append((one.id, replica, group))
    return placed


@given(
    facts=st.lists(
        st.tuples(st.floats(0.5, 40), st.integers(1, 60), st.sampled_from([1, 1, 2]), st.sampled_from([0.1, 0.4, 0.9])),
        min_size=1,
        max_size=9,
    ),
    memory=st.lists(st.sampled_from([60, 100, 100, 150]), min_size=1, max_size=7),
    node_size=st.integers(1, 4),
    slo_s=st.sampled_from([0.05, 0.2, 1.0]),
    score=st.sampled_from(["mean", "exact"]),
    colocation=st.sampled_from(["avoid", "forbid", "allow"]),
)
def test_kept_sums_score_as_the_lists_of_residents_do(
    facts: list[tuple[float, int, int, float]],
    memory: list[int],
    node_size: int,
    slo_s: float,
    score: Literal["mean", "exact"],
    colocation: Literal["avoid", "forbid", "allow"],
) -> None:
    models = [
        model(f"m{i}", size, rate_per_s=rate, tp=tp, mme_tokens_per_byte=mu, slo_s=slo_s, profile=PROFILE)
        for i, (rate, size, tp, mu) in enumerate(facts)
    ]
    gpus = cluster(*memory, node_size=node_size)
    placement = FineServePlacement(score, colocation, turns="literal").place(models, gpus)
    found = [(i.model, i.replica, i.gpus) for i in placement.instances]
    assert found == literal_places(models, gpus, score, colocation)
