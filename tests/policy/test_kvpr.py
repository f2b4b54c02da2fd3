"""KVPR greedy placement: the table of the FineServe paper, exhaustive search, TP parts, thresholds."""

from dataclasses import replace
from itertools import product
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand, OperatingPoint, Placement, PlacementPolicy
from fineserve_sim.policy.placement.fineserve import FineServePlacement
from fineserve_sim.policy.placement.kvpr import KvprPlacement

GB = 10**9
GIB = 2**30


def model(id: str, weight: float, weight_bytes: int, tp: int = 1, token_bytes: int = 1) -> ModelDemand:
    """A model with SLO 1 s, so that its weight is its rate."""
    return ModelDemand(id, weight, 1.0, tp, weight_bytes, token_bytes)


def cluster(*memory_bytes: int, node_size: int = 8) -> list[GpuSlot]:
    return [GpuSlot(id, id // node_size, memory) for id, memory in enumerate(memory_bytes)]


def where(placement: Placement) -> list[tuple[str, tuple[int, ...]]]:
    return [(instance.model, instance.gpus) for instance in placement.instances]


def test_weight_is_rate_over_slo() -> None:
    """b: 4/s at 2 s; a: 3/s at 1 s. a goes first."""
    models = [ModelDemand("b", 4.0, 2.0, 1, 1, 1), ModelDemand("a", 3.0, 1.0, 1, 1, 1)]
    policy: PlacementPolicy = KvprPlacement()
    placement = policy.place(models, cluster(100, 100))
    assert where(placement) == [("a", (0,)), ("b", (1,))]
    assert [(i.rate_per_s, i.footprint_bytes) for i in placement.instances] == [(3.0, 1), (4.0, 1)]


def replicated(id: str, rate_per_s: float, weight_bytes: int, slo_s: float = 1.0) -> ModelDemand:
    """A model whose batch of one carries a request a second in half a second, and whose batch of two is slower."""
    points = (OperatingPoint(1, 1.0, 0.5, 0, 0), OperatingPoint(2, 2.0, 1.0, 0, 0))
    return ModelDemand(id, rate_per_s, slo_s, 1, weight_bytes, 1, points)


class TestReplicas:
    """Prism* of FineServe: "each replica is treated as a separate model for placement and scheduling" (section 4)."""

    def test_each_is_placed_by_its_part_of_the_rate(self) -> None:
        """a has 3/s in two replicas, 1.5/s each and less than b's 2/s, which goes first; whole, a would."""
        models = [replicated("a", 3.0, 10), replicated("b", 2.0, 10)]
        whole = KvprPlacement().place(models, cluster(100, 100))
        assert where(whole) == [("a", (0,)), ("b", (1,))]
        placement = KvprPlacement(replicas="slo").place(models, cluster(100, 100))
        assert sorted(where(placement)) == [("a", (0,)), ("a", (1,)), ("b", (0,))]
        assert {i.rate_per_s for i in placement.instances} == {1.5, 2.0}

    def test_there_are_as_many_as_fineserve_has(self) -> None:
        models = [replicated("a", 3.0, 10, slo_s=0.7), replicated("b", 2.0, 10, slo_s=0.7)]
        gpus = cluster(*[100] * 4)
        for replicas in ("slo", "rate"):
            ours = FineServePlacement(replicas=replicas).place(models, gpus)  # type: ignore[arg-type]
            prism = KvprPlacement(replicas=replicas).place(models, gpus)  # type: ignore[arg-type]
            rates = [sorted((i.model, i.replica, i.rate_per_s) for i in each.instances) for each in (ours, prism)]
            assert rates[0] == rates[1]

    def test_first_places_come_first_and_siblings_part_where_they_can(self) -> None:
        """Two replicas of a fit on GPU 0 alone; b, of less weight, has its place before the second."""
        models = [replicated("a", 8.0, 30), replicated("b", 1.0, 30)]
        placement = KvprPlacement(replicas="rate").place(models, cluster(100, 20))
        assert where(placement) == [("a", (0,)), ("a", (0,)), ("b", (0,))]
        apart = KvprPlacement(replicas="rate").place([replicated("a", 4.0, 10)], cluster(100, 1000))
        assert where(apart) == [("a", (0,)), ("a", (1,))]
        full = KvprPlacement(replicas="rate").place(models, cluster(80, 20))
        assert where(full) == [("a", (0,)), ("b", (0,))]
        assert [i.rate_per_s for i in full.instances] == [8.0, 1.0]


TABLE_4_PRISM = [("B", (0,)), ("A", (1,)), ("C", (0,))]


def table_4(ratio: float) -> list[tuple[str, tuple[int, ...]]]:
    """KVPR's decisions for A (8B FP16), B (8B FP8), C (70B AWQ) on two 80 GiB GPUs when w_B = ratio x w_A."""
    models = [model("A", 1.0, 16 * GB), model("B", ratio, 9 * GB), model("C", 0.5, 40 * GB)]
    return where(KvprPlacement().place(models, cluster(*[int(0.9 * 80 * GIB)] * 2)))


def test_table_4_of_prism_star_holds_for_nearly_equal_weights_of_a_and_b(capsys: pytest.CaptureFixture[str]) -> None:
    """Claim FS-T4-prism: B, A, C on GPUs 0, 1, 0 needs w_B > w_A, and C sees less pressure beside B while
    w_B / (S - 9 GB) <= w_A / (S - 16 GB)."""
    shared = int(0.9 * 80 * GIB)
    ratios = [step / 1000 for step in range(800, 1400)]
    inside = [ratio for ratio in ratios if table_4(ratio) == TABLE_4_PRISM]
    with capsys.disabled():
        print(f"\nTable 4 of Prism*: w_B / w_A in [{inside[0]}, {inside[-1]}]")
    upper = (shared - 9 * GB) / (shared - 16 * GB)
    assert inside == [ratio for ratio in ratios if 1.0 < ratio <= upper]
    assert upper == pytest.approx(1.1, abs=0.03)


@pytest.mark.parametrize(("evaluate", "gpu"), [("pre", 1), ("post", 0)])
def test_the_ratio_before_and_after_may_disagree(evaluate: Literal["pre", "post"], gpu: int) -> None:
    """c sees 10/90 on GPU 0 and 3/35 on GPU 1 before, 12/60 and 5/5 after."""
    models = [model("a", 10, 10), model("b", 3, 65), model("c", 2, 30)]
    placement = KvprPlacement(evaluate).place(models, cluster(100, 100))
    assert where(placement) == [("a", (0,)), ("b", (1,)), ("c", (gpu,))]


def test_ties_go_to_the_lower_ids() -> None:
    assert where(KvprPlacement().place([model("b", 1, 10), model("a", 1, 10)], cluster(100, 100))) == [
        ("a", (0,)),
        ("b", (1,)),
    ]


def test_a_gpu_must_keep_memory_for_kv() -> None:
    placement = KvprPlacement().place([model("a", 2, 100), model("b", 1, 99)], cluster(100, 100))
    assert where(placement) == [("b", (0,))]
    assert placement.unplaced == ("a",)


def test_token_weight() -> None:
    """a: 9 x 20 tokens/s x 2 bytes / 0.1 s = 3600; b: 1 x 50 x 10 / 0.1 = 5000. Without an SLO of its own for tokens, b's
    TTFT SLO of 1 s makes it 500."""
    a = ModelDemand("a", 9, 1.0, 1, 10, 2, tokens_per_request=20, tpot_slo_s=0.1)
    b = ModelDemand("b", 1, 1.0, 1, 10, 10, tokens_per_request=50, tpot_slo_s=0.1)
    policy = KvprPlacement(weight="token_rate")
    assert where(policy.place([a, b], cluster(100, 100))) == [("b", (0,)), ("a", (1,))]
    assert where(policy.place([a, replace(b, tpot_slo_s=None)], cluster(100, 100))) == [("a", (0,)), ("b", (1,))]
    with pytest.raises(ValueError, match="model b has no tokens_per_request"):
        policy.place([a, model("b", 1, 10)], cluster(100))


class TestTensorParallel:
    def test_the_second_part_takes_the_second_lowest_gpu(self) -> None:
        """Ratios before p: 3/90, 2/90, 0. With the first part GPU 2 is still the lowest, 1/80, but hosts a sibling."""
        models = [model("x", 3, 10), model("y", 2, 10), model("p", 2, 20, tp=2)]
        gpus = cluster(100, 100, 100)
        placement = KvprPlacement().place(models, gpus)
        assert where(placement) == [("x", (0,)), ("y", (1,)), ("p", (1, 2))]

    def test_a_part_weighs_its_share(self) -> None:
        """p's 6/s are two parts of 3: x with 4 goes first."""
        placement = KvprPlacement().place([model("p", 6, 10, tp=2), model("x", 4, 10)], cluster(100, 100))
        assert where(placement) == [("x", (0,)), ("p", (0, 1))]

    def test_siblings_stay_in_one_node(self) -> None:
        """GPU 2 has the lowest ratio, but GPU 3, the other one of its node, has no room for a part."""
        models = [model("a", 9, 1), model("b", 8, 1), model("p", 2, 20, tp=2)]
        placement = KvprPlacement().place(models, cluster(100, 100, 100, 20, node_size=2))
        assert dict(where(placement))["p"] == (0, 1)

    def test_a_group_that_fits_in_no_node_is_unplaced(self) -> None:
        placement = KvprPlacement().place([model("p", 2, 20, tp=2)], cluster(100, 20, node_size=2))
        assert placement.unplaced == ("p",)


class TestReplacement:
    models = (model("a", 10, 10), model("b", 9, 10))
    gpus = cluster(100, 100)

    def test_models_stay_where_ratios_tie(self) -> None:
        current = {"a": (1,), "b": (0,)}
        assert dict(where(KvprPlacement().place(self.models, self.gpus, current))) == current

    @pytest.mark.parametrize(
        ("policy", "d_weight", "moves"),
        [
            (KvprPlacement(), 7.9, True),
            (KvprPlacement(), 8.1, False),
            (KvprPlacement(tau=0.5), 4.9, True),
            (KvprPlacement(tau=0.5), 5.1, False),
            (KvprPlacement(tau=3 / 90, threshold="absolute"), 6.9, True),
            (KvprPlacement(tau=3 / 90, threshold="absolute"), 7.1, False),
        ],
    )
    def test_threshold(self, policy: KvprPlacement, d_weight: float, moves: bool) -> None:
        """b lives on GPU 0 with c: ratio 10/90. GPU 1 holds d: ratio d/90."""
        models = [model("c", 10, 10), model("d", d_weight, 10), model("b", 1, 10)]
        found = dict(where(policy.place(models, self.gpus, {"c": (0,), "d": (1,), "b": (0,)})))
        assert found == {"c": (0,), "d": (1,), "b": (1,) if moves else (0,)}

    def test_a_home_that_became_too_small_is_left(self) -> None:
        found = where(KvprPlacement().place([model("a", 1, 50)], cluster(50, 100), {"a": (0,)}))
        assert found == [("a", (1,))]

    def test_all_parts_stay_or_all_move(self) -> None:
        models = [model("c", 10, 10), model("d", 1, 10), model("p", 1, 10, tp=2)]
        current = {"c": (0,), "d": (2,), "p": (0, 1)}
        found = dict(where(KvprPlacement().place(models, cluster(*[100] * 4), current)))
        assert found["p"] == (1, 3)
        alone = KvprPlacement().place(models[2:], cluster(*[100] * 4), {"p": (2, 3)})
        assert where(alone) == [("p", (2, 3))]

    def test_an_unknown_home_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"model a is said to run on GPUs \(5,\)"):
            KvprPlacement().place(self.models, self.gpus, {"a": (5,)})


def max_kvpr(models: list[ModelDemand], gpus: list[int], capacity: int) -> float:
    """The largest ratio of an assignment; infinite where it leaves no memory."""
    ratios = []
    for gpu in set(gpus):
        here = [demand for demand, home in zip(models, gpus, strict=True) if home == gpu]
        left = capacity - sum(demand.weight_bytes for demand in here)
        ratios.append(sum(demand.rate_per_s for demand in here) / left if left > 0 else float("inf"))
    return max(ratios)


@given(
    facts=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 30)), min_size=1, max_size=6),
    slack=st.integers(1, 60),
    count=st.integers(1, 3),
)
def test_greedy_stays_within_its_bound_of_the_optimum(facts: list[tuple[int, int]], slack: int, count: int) -> None:
    """max KVPR <= OPT x (1 + C / (S - w)), S the memory of the bottleneck GPU before its last model, of w bytes. The
    bound presumes that every GPU could take every model, so each one alone can hold all."""
    capacity = sum(weight_bytes for _, weight_bytes in facts) + slack
    models = [model(f"m{i}", weight, weight_bytes) for i, (weight, weight_bytes) in enumerate(facts)]
    placement = KvprPlacement().place(models, cluster(*[capacity] * count))
    home = {id: gpus[0] for id, gpus in where(placement)}
    greedy = max_kvpr(models, [home[demand.id] for demand in models], capacity)
    optimum = min(max_kvpr(models, list(homes), capacity) for homes in product(range(count), repeat=len(models)))
    assert greedy >= optimum

    def pressure(gpu: int) -> float:
        here = [demand for demand in models if home[demand.id] == gpu]
        return sum(demand.rate_per_s for demand in here) / (capacity - sum(demand.weight_bytes for demand in here))

    bottleneck = max(set(home.values()), key=pressure)
    charged = [i.footprint_bytes for i in placement.instances if i.gpus == (bottleneck,)]
    before, last = capacity - sum(charged[:-1]), charged[-1]
    assert greedy <= optimum * (1 + capacity / (before - last)) * (1 + 1e-9)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="evaluate is 'later'"):
        KvprPlacement("later")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight is 'size'"):
        KvprPlacement(weight="size")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threshold is 'fuzzy'"):
        KvprPlacement(threshold="fuzzy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tau is -1"):
        KvprPlacement(tau=-1)


def test_activations_count_where_engines_are_charged() -> None:
    """70 of weights and 15 of activations, then 10 of weights: by weights the second is better off beside the first (3/20
    against 1/6 on the GPU of 16), by whole engines it is not (3/5)."""
    models = [replace(model("a", 2, 70), activation_bytes=15), model("b", 1, 10)]
    gpus = cluster(100, 16)
    assert where(KvprPlacement("post").place(models, gpus)) == [("a", (0,)), ("b", (0,))]
    assert where(KvprPlacement("post", charges="engine").place(models, gpus)) == [("a", (0,)), ("b", (1,))]
    with pytest.raises(ValueError, match="charges is 'all': use 'weights' or 'engine'"):
        KvprPlacement(charges="all")  # type: ignore[arg-type]


def test_no_engine_goes_where_it_could_not_start() -> None:
    """Weights of 70 and 10 fit on a GPU of 100, the engines of 90 and 10 do not, whatever the ratio is judged by."""
    models = [replace(model("a", 2, 70), activation_bytes=20), model("b", 1, 10)]
    assert where(KvprPlacement("post").place(models, cluster(100, 11))) == [("a", (0,)), ("b", (1,))]
    alone = KvprPlacement("post").place(models, cluster(100))
    assert where(alone) == [("a", (0,))] and alone.unplaced == ("b",)


def literal(
    models: list[ModelDemand], gpus: list[GpuSlot], current: dict[str, tuple[int, ...]], *, post: bool, relative: bool
) -> list[tuple[str, tuple[int, ...]]]:
    """The listing as it stands: all GPUs are judged and sorted for each model."""
    left = {gpu.id: gpu.memory_bytes for gpu in gpus}
    weight = dict.fromkeys(left, 0.0)
    found = []
    for one in sorted(models, key=lambda model: (-(model.rate_per_s / model.slo_s / model.tp), model.id)):
        part = one.rate_per_s / one.slo_s / one.tp
        roomy = [gpu for gpu in left if left[gpu] > one.weight_bytes]
        added = (part, one.weight_bytes) if post else (0.0, 0)
        ratio = {gpu: (weight[gpu] + added[0]) / (left[gpu] - added[1]) for gpu in roomy}
        nodes = [
            sorted((ratio[gpu.id], gpu.id) for gpu in gpus if gpu.id in ratio and gpu.node == n) for n in range(10)
        ]
        best = min((node[: one.tp] for node in nodes if len(node) >= one.tp), default=None)
        if best is None:
            continue
        home, group = current.get(one.id), tuple(sorted(gpu for _, gpu in best))
        if home is not None and set(home) <= set(roomy):
            best_ratio, home_ratio = max(ratio[gpu] for gpu in group), max(ratio[gpu] for gpu in home)
            if not (best_ratio < 0.8 * home_ratio if relative else home_ratio - best_ratio > 0.8):
                group = home
        for gpu in group:
            weight[gpu] += part
            left[gpu] -= one.weight_bytes
        found.append((one.id, group))
    return found


@given(
    facts=st.lists(st.tuples(st.floats(0, 9), st.integers(0, 40), st.sampled_from([1, 1, 2, 3])), max_size=14),
    memory=st.lists(st.integers(-5, 100), min_size=1, max_size=10),
    homes=st.lists(st.integers(0, 9), min_size=14, max_size=14),
    node_size=st.integers(1, 4),
    post=st.booleans(),
    relative=st.booleans(),
)
def test_the_ranking_finds_what_judging_all_gpus_finds(
    facts: list[tuple[float, int, int]],
    memory: list[int],
    homes: list[int],
    node_size: int,
    post: bool,
    relative: bool,
) -> None:
    models = [model(f"m{i:02}", rate, size, tp) for i, (rate, size, tp) in enumerate(facts)]
    gpus = cluster(*memory, node_size=node_size)
    current = {
        m.id: tuple(range(home, home + m.tp))
        for m, home in zip(models, homes, strict=False)
        if home + m.tp <= len(memory)
    }
    policy = KvprPlacement("post" if post else "pre", threshold="relative" if relative else "absolute")
    assert where(policy.place(models, gpus, current)) == literal(models, gpus, current, post=post, relative=relative)
