"""Placement in turn, by hand-worked examples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand, Placement
from fineserve_sim.policy.placement.static import RoundRobinPlacement


def demand(id: str, weight_bytes: int, tp: int = 1) -> ModelDemand:
    return ModelDemand(id, 1.0, 1.0, tp, weight_bytes, 1)


def gpus(*memory_bytes: int) -> list[GpuSlot]:
    return [GpuSlot(id, 0, memory) for id, memory in enumerate(memory_bytes)]


def where(placement: Placement) -> list[tuple[str, tuple[int, ...]]]:
    return [(instance.model, instance.gpus) for instance in placement.instances]


def test_heavier_models_go_first_in_turn() -> None:
    models = [demand("a", 10), demand("b", 30), demand("c", 20), demand("d", 20)]
    placement = RoundRobinPlacement().place(models, gpus(100, 100))
    assert where(placement) == [("b", (0,)), ("c", (1,)), ("d", (0,)), ("a", (1,))]


def test_a_full_gpu_is_passed_over_and_loses_its_turn() -> None:
    models = [demand("a", 60), demand("b", 30), demand("c", 20), demand("d", 10)]
    placement = RoundRobinPlacement().place(models, gpus(70, 35))
    assert where(placement) == [("a", (0,)), ("b", (1,))]  # 10 and 5 bytes are left, and some must stay for KV
    assert placement.unplaced == ("c", "d")


def test_tp_models_take_groups() -> None:
    placement = RoundRobinPlacement().place([demand("big", 30, tp=2), demand("a", 10)], gpus(*[100] * 4))
    assert where(placement) == [("big", (0, 1)), ("a", (0,))]


@given(st.lists(st.integers(1, 60), max_size=8), st.lists(st.integers(1, 100), min_size=1, max_size=4))
def test_no_gpu_is_filled_up(weights: list[int], memory_bytes: list[int]) -> None:
    models = [demand(f"m{i}", weight) for i, weight in enumerate(weights)]
    placement = RoundRobinPlacement().place(models, gpus(*memory_bytes))
    left = list(memory_bytes)
    for instance in placement.instances:
        left[instance.gpus[0]] -= instance.footprint_bytes
    assert min(left) > 0
    smallest = min((model.weight_bytes for model in models if model.id in placement.unplaced), default=None)
    assert smallest is None or max(left) <= smallest
    assert len(placement.instances) + len(placement.unplaced) == len(models)
