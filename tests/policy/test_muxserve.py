"""MuxServe's optimiser: closed forms of its estimate, hand-worked placements, cuts against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, groupby, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand, OperatingPoint
from fineserve_sim.policy.placement.muxserve import Mesh, MuxServePlacement, Profile, _cuts, _sums


def profile(prefill_s: float, decode_s: float, kv_bytes: int, largest: int = 64) -> tuple[OperatingPoint, ...]:
    """Prefill takes its time for every request, decode the same for all batches: b / (b * prefill + decode)."""
    sizes = [2**i for i in range(largest.bit_length())]
    return tuple(OperatingPoint(b, b / (b * prefill_s + decode_s), b * prefill_s, 0, b * kv_bytes) for b in sizes)


def model(
    id: str,
    rate: float,
    weight_bytes: int = 10,
    tp: int = 1,
    prefill_s: float = 0.01,
    decode_s: float = 1.0,
    kv: int = 1,
) -> ModelDemand:
    return ModelDemand(id, rate, 1.0, tp, weight_bytes, 1, profile(prefill_s, decode_s, kv))


def cluster(count: int, memory_bytes: int = 100, node_size: int = 8) -> list[GpuSlot]:
    return [GpuSlot(id, id // node_size, memory_bytes) for id in range(count)]


def mesh_throughput(models: list[ModelDemand], memory_bytes: int) -> float:
    mesh = Mesh(0, memory_bytes)
    for model in models:
        mesh.add(Profile(model))
    return mesh.throughput_per_s


def homes(models: list[ModelDemand], gpus: list[GpuSlot]) -> dict[str, tuple[int, ...]]:
    placement = MuxServePlacement().place(models, gpus)
    assert placement.unplaced == ()
    return {instance.model: instance.gpus for instance in placement.instances}


class TestEstimate:
    @given(st.floats(0.05, 50.0))
    def test_the_least_batch_solves_the_equation(self, rate: float) -> None:
        """b / (0.01 b + 1) = rate has the solution rate / (1 - 0.01 rate); beyond the profile it is the largest batch."""
        found = Profile(model("m", rate)).least
        exact = rate / (1 - 0.01 * rate)
        assert found == pytest.approx(min(exact, 64.0) if rate >= 1 / 1.01 else exact, rel=1e-6)

    def test_the_profile_is_linear_between_points(self) -> None:
        m = model("m", 1.0)
        assert Profile(m).at(3.0) == pytest.approx((3.0, 0.03, 1.0, 3.0))
        assert Profile(m).at(0.5) == pytest.approx((0.5, 0.005, 1.0, 0.5))
        assert Profile(m).at(1000.0).size == 64

    def test_a_profile_of_one_point(self) -> None:
        """An engine of one sequence at a time: 1 / (0.01 + 0.99) requests a second at most; fewer take a part of a batch."""
        points = profile(0.01, 0.99, 5, largest=1)
        assert [each.batch for each in points] == [1]
        slow, fast = (replace(model("m", rate), profile=points) for rate in (0.5, 3.0))
        assert Profile(slow).least == pytest.approx(0.5 * 0.99 / (1 - 0.5 * 0.01))
        assert Profile(fast).wanted == (1, 0.01, 0.99, 5)

    def test_alone_a_model_meets_its_rate(self) -> None:
        assert mesh_throughput([model("m", 8.0)], 100) == pytest.approx(8.0)

    def test_prefills_of_all_delay_everybody(self) -> None:
        """Each alone runs b = 8 / 0.92; together b / (2 * 0.01 b + 1)."""
        batch = 8 / 0.92
        both = mesh_throughput([model("a", 8.0), model("b", 8.0)], 100)
        assert both == pytest.approx(2 * batch / (0.02 * batch + 1))

    def test_batches_shrink_to_the_memory_that_weights_leave(self) -> None:
        """b = 8 / 0.92 of 10 bytes each needs 87 bytes; 40 are left: b = 4."""
        assert mesh_throughput([model("m", 8.0, weight_bytes=60, kv=10)], 100) == pytest.approx(4 / 1.04)

    def test_weights_that_leave_nothing_are_impossible(self) -> None:
        assert mesh_throughput([model("m", 1.0, weight_bytes=100)], 100) == float("-inf")

    def test_activations_are_no_kv_memory(self) -> None:
        """As 60 of weights above when 50 are weights and 10 activations."""
        hungry = replace(model("m", 8.0, weight_bytes=50, kv=10), activation_bytes=10)
        assert mesh_throughput([hungry], 100) == pytest.approx(4 / 1.04)
        assert mesh_throughput([replace(hungry, activation_bytes=50)], 100) == float("-inf")

    def test_a_model_without_a_profile_is_named(self) -> None:
        with pytest.raises(ValueError, match="model m has no profile"):
            MuxServePlacement().place([ModelDemand("m", 1.0, 1.0, 1, 10, 1)], cluster(1))


class TestPlacement:
    def test_heavy_models_part_and_light_ones_fill_up(self) -> None:
        """a and b on a GPU of their own; c joins where it costs less, beside b."""
        models = [model("c", 1.0), model("a", 20.0), model("b", 15.0)]
        assert homes(models, cluster(2)) == {"a": (0,), "b": (1,), "c": (1,)}

    def test_the_size_of_weights_counts(self) -> None:
        """By rate x weights b goes first; then a, whose gain is largest on the empty GPU."""
        placement = MuxServePlacement().place([model("a", 4.0, 10), model("b", 2.0, 40)], cluster(2))
        assert [(i.model, i.gpus) for i in placement.instances] == [("b", (0,)), ("a", (1,))]

    def test_memory_decides_when_batches_are_cut(self) -> None:
        """Beside a (80 of 100 bytes of weights) c would have 10 bytes for batches that want 87."""
        models = [model("a", 1.0, 80), model("b", 6.0, 10), model("c", 8.0, 10, kv=10)]
        found = homes(models, cluster(2))
        assert found["c"] != found["a"]

    def test_models_of_one_degree_share_meshes_of_that_size(self) -> None:
        models = [model("big", 1.0, 50, tp=2), model("small", 1.0), model("tiny", 0.5)]
        found = homes(models, cluster(4))
        assert found["big"] == (0, 1) and {found["small"], found["tiny"]} == {(2,), (3,)}

    def test_meshes_stay_in_nodes(self) -> None:
        found = homes(
            [model("big", 1.0, 50, tp=2), model("small", 1.0)], [*cluster(3, node_size=1), GpuSlot(3, 2, 100)]
        )
        assert found["big"] == (2, 3)

    def test_kvpr_takes_over_when_no_cut_serves_all(self) -> None:
        """On two GPUs a mesh of two leaves none of one."""
        found = homes([model("big", 1.0, 30, tp=2), model("small", 1.0)], cluster(2))
        assert found["big"] == (0, 1) and found["small"] in {(0,), (1,)}

    @given(st.lists(st.tuples(st.floats(0.5, 30), st.integers(5, 45)), min_size=1, max_size=5), st.integers(1, 3))
    def test_never_better_than_the_best_assignment(self, facts: list[tuple[float, int]], count: int) -> None:
        """Greedy against all assignments: never better than the best; and when one GPU or one model, as good."""
        models = [model(f"m{i}", rate, weight) for i, (rate, weight) in enumerate(facts)]
        placement = MuxServePlacement().place(models, cluster(count, 120))
        found = {instance.model: instance.gpus[0] for instance in placement.instances}
        if placement.unplaced:
            return

        def total(home: dict[str, int]) -> float:
            return sum(mesh_throughput([m for m in models if home[m.id] == gpu], 120) for gpu in set(home.values()))

        best = max(
            total(dict(zip([m.id for m in models], choice, strict=True)))
            for choice in product(range(count), repeat=len(models))
        )
        assert total(found) <= best + 1e-6
        if count == 1 or len(models) <= count:
            assert total(found) == pytest.approx(best, rel=1e-6)


def test_cuts_are_all_numbers_of_meshes() -> None:
    """4 = 4 = 2+2 = 2+1+1 = 1+1+1+1. Two such nodes have 4 * 5 / 2 ways, of which 2+2 beside 1+1+1+1 and twice 2+1+1 are
    the same; if GPUs differ, they are two."""

    def sizes(gpus: list[GpuSlot], allowed: set[int]) -> list[tuple[int, ...]]:
        return [tuple(len(piece) for piece in cut) for cut in _cuts(gpus, allowed)]

    assert set(sizes(cluster(4, node_size=4), {1, 2, 4})) == {(4,), (2, 2), (2, 1, 1), (1, 1, 1, 1)}
    assert sizes(cluster(3, node_size=4), {2}) == [(2,)]
    assert len(sizes(cluster(8, node_size=4), {1, 2, 4})) == 9
    assert len(sizes([*cluster(8, node_size=4), GpuSlot(9, 9, 50)], {1, 2, 4})) == 10


def literal_totals(models: list[ModelDemand], gpus: list[GpuSlot]) -> list[tuple[float, dict[str, tuple[int, ...]]]]:
    """Every way to cut every node, filled one by one, with its throughput; in the order in which they are tried."""
    nodes = [list(node) for _, node in groupby(gpus, key=lambda gpu: gpu.node)]
    order = sorted(models, key=lambda m: (-m.rate_per_s * m.weight_bytes * m.tp, m.id))
    found = []
    for cut in product(*[_sums(len(node), {m.tp for m in models}) for node in nodes]):
        meshes: list[tuple[tuple[int, ...], int, list[ModelDemand]]] = []
        for node, sizes in zip(nodes, cut, strict=True):
            for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
                piece = node[start : start + size]
                meshes.append((tuple(gpu.id for gpu in piece), min(gpu.memory_bytes for gpu in piece), []))
        for m in order:
            ranked = []
            for ids, memory_bytes, here in meshes:
                gain = mesh_throughput([*here, m], memory_bytes) - mesh_throughput(here, memory_bytes)
                if len(ids) == m.tp and gain > float("-inf"):
                    demand = sum(other.rate_per_s * other.weight_bytes * other.tp for other in here)
                    ranked.append((-round(gain, 9), demand, ids, here))
            if not ranked:
                break
            min(ranked, key=lambda row: row[:3])[3].append(m)
        else:
            total = sum(mesh_throughput(here, memory_bytes) for _, memory_bytes, here in meshes)
            found.append((total, {m.id: ids for ids, _, here in meshes for m in here}))
    return found


@given(
    facts=st.lists(
        st.tuples(st.floats(0.0, 30), st.integers(5, 60), st.sampled_from([1, 1, 2, 3]), st.integers(1, 12)),
        min_size=1,
        max_size=6,
    ),
    memory=st.lists(st.sampled_from([100, 100, 100, 140]), min_size=1, max_size=6),
    equal=st.booleans(),
    node_size=st.integers(2, 4),
)
def test_the_answer_is_that_of_all_cuts(
    facts: list[tuple[float, int, int, int]], memory: list[int], equal: bool, node_size: int
) -> None:
    """The total is the best of all; on one node, and wherever no other cut is as good, so is the placement."""
    models = [model(f"m{i}", rate, size, tp, kv=kv) for i, (rate, size, tp, kv) in enumerate(facts)]
    gpus = [GpuSlot(id, id // node_size, 100 if equal else bytes) for id, bytes in enumerate(memory)]
    placement = MuxServePlacement().place(models, gpus)
    found = {instance.model: instance.gpus for instance in placement.instances}
    totals = literal_totals(models, gpus)
    if not totals:
        return  # KVPR's
    best_total, best = max(totals, key=lambda one: one[0])
    near = [home for total, home in totals if total > best_total - 1e-9]
    assert found in near
    if len(gpus) <= node_size:
        assert found == best
