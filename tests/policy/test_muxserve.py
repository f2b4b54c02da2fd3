"""MuxServe's optimiser: closed forms of its estimate, hand-worked placements, cuts against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand, OperatingPoint
from fineserve_sim.policy.placement.muxserve import MuxServePlacement, batch_at, least_batch, mesh_throughput


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


def homes(models: list[ModelDemand], gpus: list[GpuSlot]) -> dict[str, tuple[int, ...]]:
    placement = MuxServePlacement().place(models, gpus)
    assert placement.unplaced == ()
    return {instance.model: instance.gpus for instance in placement.instances}


class TestEstimate:
    @given(st.floats(0.05, 50.0))
    def test_the_least_batch_solves_the_equation(self, rate: float) -> None:
        """b / (0.01 b + 1) = rate has the solution rate / (1 - 0.01 rate); beyond the profile it is the largest batch."""
        found = least_batch(model("m", rate))
        exact = rate / (1 - 0.01 * rate)
        assert found == pytest.approx(min(exact, 64.0) if rate >= 1 / 1.01 else exact, rel=1e-6)

    def test_the_profile_is_linear_between_points(self) -> None:
        m = model("m", 1.0)
        assert batch_at(m, 3.0) == pytest.approx((3.0, 0.03, 1.0, 3.0))
        assert batch_at(m, 0.5) == pytest.approx((0.5, 0.005, 1.0, 0.5))
        assert batch_at(m, 1000.0).size == 64

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


def test_cuts_are_all_ways_to_fill_a_node() -> None:
    """4 = 4 = 2+2 = 2+1+1 = 1+1+1+1; two such nodes are interchangeable: 4 * 5 / 2 ways."""
    from fineserve_sim.policy.placement.muxserve import _cuts

    def sizes(count: int, allowed: set[int]) -> set[tuple[int, ...]]:
        return {tuple(len(piece) for piece in cut) for cut in _cuts(cluster(count, node_size=4), allowed)}

    assert sizes(4, {1, 2, 4}) == {(4,), (2, 2), (2, 1, 1), (1, 1, 1, 1)}
    assert sizes(3, {2}) == {(2,)}
    assert len(list(_cuts(cluster(8, node_size=4), {1, 2, 4}))) == 10
