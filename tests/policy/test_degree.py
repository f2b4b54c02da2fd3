"""The TP degree that carries a rate within an SLO: fewest replicas, then the smallest batch, then the smallest degree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand, OperatingPoint
from fineserve_sim.policy.placement.fineserve import placed_degrees, tp_degree
from fineserve_sim.policy.placement.static import DedicatedPlacement

# (throughput, TTFT) at batches 1, 2 and 4
SLOW, FAST = ((1.0, 0.4), (1.8, 0.6), (3.0, 0.9)), ((2.0, 0.2), (3.5, 0.3), (6.0, 0.5))


def demand(tp: int, curve: tuple[tuple[float, float], ...], rate_per_s: float, slo_s: float) -> ModelDemand:
    points = tuple(OperatingPoint(2**i, rate, ttft_s, 0, 0) for i, (rate, ttft_s) in enumerate(curve))
    return ModelDemand("m", rate_per_s, slo_s, tp, 10, 1, points)


def chosen(rate_per_s: float, slo_s: float, groups: dict[int, int] | None = None) -> int:
    demands = [demand(1, SLOW, rate_per_s, slo_s), demand(2, FAST, rate_per_s, slo_s)]
    return tp_degree(demands, groups or {1: 4, 2: 2})


def test_the_smaller_degree_is_enough_where_both_need_the_same_batch() -> None:
    assert chosen(0.9, 1.0) == 1


def test_the_smaller_batch_wins() -> None:
    assert chosen(1.7, 1.0) == 2


def test_a_degree_counts_within_the_limit_alone() -> None:
    assert chosen(0.9, 0.3) == 2
    assert chosen(0.9, 0.1) == 1  # none does: the smallest


def test_replicas_grow_only_where_no_degree_carries_the_rate() -> None:
    assert chosen(5.0, 1.0) == 2  # two of degree 1 would do, too
    assert chosen(11.0, 1.0) == 2  # two of degree 2, four of degree 1
    assert chosen(11.0, 1.0, {1: 4, 2: 1}) == 1  # there is no second group


@given(st.floats(0.1, 20), st.floats(0.05, 2))
def test_no_other_degree_needs_fewer_replicas(rate_per_s: float, slo_s: float) -> None:
    """Against every number of replicas, tried one by one."""
    curves, groups = {1: SLOW, 2: FAST}, {1: 4, 2: 2}
    for replicas in range(1, 5):
        found = {}
        for tp, curve in curves.items():
            carrying = [i for i, (rate, _) in enumerate(curve) if rate >= rate_per_s / replicas]
            if replicas <= groups[tp] and carrying and curve[carrying[0]][1] <= slo_s:
                found[tp] = carrying[0]
        if found:
            assert chosen(rate_per_s, slo_s) == min(found, key=lambda tp: (found[tp], tp))
            return
    assert chosen(rate_per_s, slo_s) == 1


def test_a_model_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one degree"):
        tp_degree([], {})
    with pytest.raises(ValueError, match="has no profile"):
        tp_degree([replace(demand(1, SLOW, 1.0, 1.0), profile=())], {1: 1})


def of_each(tps: tuple[int, ...], rate_per_s: float = 1.0, weight_bytes: int = 80) -> dict[int, ModelDemand]:
    """A model at each degree, ``weight_bytes`` in all."""
    return {tp: ModelDemand("m", rate_per_s, 1.0, tp, weight_bytes // tp, 1, ()) for tp in tps}


def apart(models: dict[str, dict[int, ModelDemand]], wanted: dict[str, int], gpus: int) -> dict[str, int]:
    """As a placement has them that lets no models share a GPU."""
    named = {name: {tp: replace(each, id=name) for tp, each in own.items()} for name, own in models.items()}
    slots = [GpuSlot(gpu, 0, 100) for gpu in range(gpus)]

    def placed(degrees: Mapping[str, int]) -> bool:
        return not DedicatedPlacement().place([named[name][tp] for name, tp in degrees.items()], slots).unplaced

    found = placed_degrees({name: named[name][tp] for name, tp in wanted.items()}, named, placed)
    assert placed(found) or found == {name: min(own) for name, own in models.items()}
    return found


def test_models_keep_the_degrees_that_they_want_while_all_have_gpus() -> None:
    models = {"a": of_each((1, 2, 4)), "b": of_each((1, 2, 4))}
    assert apart(models, {"a": 4, "b": 4}, 8) == {"a": 4, "b": 4}


def test_the_largest_degree_goes_down_first_of_equal_ones_that_of_the_least_rate() -> None:
    models = {"a": of_each((1, 2, 4)), "b": of_each((1, 2, 4), rate_per_s=9.0), "c": of_each((1,))}
    assert apart(models, {"a": 4, "b": 4, "c": 1}, 7) == {"a": 2, "b": 4, "c": 1}
    assert apart(models, {"a": 4, "b": 4, "c": 1}, 4) == {"a": 1, "b": 2, "c": 1}


def test_no_degree_is_one_at_which_a_model_does_not_fit() -> None:
    models = {"a": of_each((2, 4), weight_bytes=160), "b": of_each((1, 2))}
    assert apart(models, {"a": 4, "b": 1}, 4) == {"a": 2, "b": 1}
    assert apart(models, {"a": 4, "b": 2}, 2) == {"a": 2, "b": 1}  # one of them has no GPU at any degree
