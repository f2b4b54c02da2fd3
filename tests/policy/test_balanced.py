"""Balanced placement: what brute force finds, and never worse with more GPUs."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, pairwise, product

import pytest

from fineserve_sim.policy.interfaces import Busy, GpuSlot, Instance, ModelDemand, OperatingPoint
from fineserve_sim.policy.memory.ledger import MemoryLedger
from fineserve_sim.policy.placement.balanced import BalancedPlacement, Homes
from fineserve_sim.policy.placement.queueing import PARTS, late_per_s, load_of, rates

GIB = 2**30


def models(count: int, seed: int, degrees: Sequence[int] = (1,), load: float = 1.0) -> list[ModelDemand]:
    """Models of 1 to 30 GiB whose prompts take the longer the larger they are; all together keep ``load`` GPUs busy."""
    draw, found = random.Random(seed), []
    for number in range(count):
        size, part, tp = draw.choice((1, 8, 16, 30)), draw.uniform(0.2, 1.8), draw.choice(degrees)
        prompt_s = size / 200
        points = tuple(
            OperatingPoint(b, b / (b * prompt_s + 100 * prompt_s / 5), b * prompt_s, GIB, b * GIB // 8)
            for b in (1, 4, 16, 64)
        )
        found.append(
            ModelDemand(
                f"m{number}", part * load / count / prompt_s, 1.0, tp, size * GIB, 100_000, points,
                decode_tokens=100, prefill=Busy(0.8, 0.4), decode=Busy(0.05, 0.7),
            )
        )  # fmt: skip
    return found


def gpus(count: int) -> list[GpuSlot]:
    return [GpuSlot(id, id // 8, 70 * GIB) for id in range(count)]


def late(demands: Sequence[ModelDemand], instances: Sequence[Instance]) -> float:
    """What is predicted to be late, all requests of models without a place included."""
    by_id = {model.id: model for model in demands}
    engines = {id: sum(instance.model == id for instance in instances) for id in by_id}
    total = sum(by_id[id].rate_per_s for id, count in engines.items() if not count)
    for gpu in {gpu for instance in instances for gpu in instance.gpus}:
        here = [by_id[each.model] for each in instances if gpu in each.gpus]
        for number, part in enumerate(PARTS):
            loads = [load_of(model, engines[model.id], rates(model)[number]) for model in here]
            total += part * late_per_s(loads, 70 * GIB)
    return total


def brute_force(demands: Sequence[ModelDemand], count: int) -> float:
    """The least that is late over all ways to give each model one or more GPUs."""
    homes = list(chain.from_iterable(combinations(range(count), size) for size in range(1, count + 1)))
    ways = (
        [Instance(model.id, 0, (gpu,), 1.0, 0) for model, home in zip(demands, way, strict=True) for gpu in home]
        for way in product(homes, repeat=len(demands))
    )
    return min(late(demands, way) for way in ways)


@pytest.mark.parametrize("seed", range(6))
def test_it_finds_what_brute_force_finds(seed: int) -> None:
    demands = models(4, seed, load=1.5)
    found = late(demands, BalancedPlacement().place(demands, gpus(3)).instances)
    assert found - brute_force(demands, 3) <= 0.02 * sum(model.rate_per_s for model in demands)


@pytest.mark.parametrize(("seed", "degrees", "load"), [(2, (1, 2), 6.0), (3, (1, 2), 2.0), (4, (1,), 1.0)])
def test_no_change_spares_more_than_the_best(seed: int, degrees: tuple[int, ...], load: float) -> None:
    def late_on(groups: Mapping[str, tuple[tuple[int, ...], ...]]) -> float:
        return late(demands, [Instance(id, 0, group, 1.0, 0) for id, own in groups.items() for group in own])

    demands = models(9, seed, degrees, load)
    groups = {model.id: (tuple(range(2 * (at % 2), 2 * (at % 2) + model.tp)),) for at, model in enumerate(demands)}
    for _ in range(6):
        homes = Homes(demands, gpus(6), groups)
        for gpu in gpus(6):
            homes.open(gpu)
        changes = [change for candidate in homes._candidates(6) for change in homes._changes(*candidate)]
        best = homes.best(6, -1e-9)
        least = min(late_on(groups | change) for change in changes)
        if best is None:
            assert least > late_on(groups) - 1e-8
            return
        assert late_on(groups | best) == pytest.approx(least, rel=1e-9)
        groups |= best


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "degrees"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 4))])
def test_more_gpus_never_raise_what_is_late(seed: int, degrees: tuple[int, ...]) -> None:
    demands = models(14, seed, degrees, load=6.0)
    placed = [BalancedPlacement().place(demands, gpus(count)) for count in range(1, 15)]
    all_placed = [not each.unplaced for each in placed]
    assert all_placed == sorted(all_placed)
    predicted = [late(demands, each.instances) for each in placed if not each.unplaced]
    assert len(predicted) > 4
    assert all(more <= fewer * (1 + 1e-9) for fewer, more in pairwise(predicted))
    assert predicted[-1] < predicted[0]


def test_engines_fit_and_no_gpu_has_two_of_a_model() -> None:
    demands = models(12, 5, (1, 2), load=5.0)
    placed = BalancedPlacement().place(demands, gpus(8))
    ledger, by_id = MemoryLedger.of(gpus(8)), {model.id: model for model in demands}
    for instance in placed.instances:
        assert len(instance.gpus) == by_id[instance.model].tp
        ledger.claim((instance.model, instance.replica), instance.gpus, by_id[instance.model].engine_bytes)
    taken = [(instance.model, gpu) for instance in placed.instances for gpu in instance.gpus]
    assert len(taken) == len(set(taken))
    assert math.fsum(each.rate_per_s for each in placed.instances) == pytest.approx(
        math.fsum(each.rate_per_s for each in demands)
    )


def test_a_model_gets_replicas_where_its_rate_asks_for_them_alone() -> None:
    busy, calm = models(2, 1, load=1.0)
    demands = [models(1, 1, load=1.8)[0], calm]
    placed = BalancedPlacement().place(demands, gpus(3))
    assert [each.model for each in placed.instances].count(busy.id) >= 2
    assert [each.model for each in placed.instances].count(calm.id) == 1


def test_a_model_whose_rate_changes_gets_the_replica() -> None:
    (steady,) = models(1, 1, load=0.5)
    demands = [replace(steady, id=id, rate_per_s=5.0, rate_variance=0.1) for id in ("a", "b")]
    for id in ("a", "b"):
        bursty = [replace(each, rate_variance=4.0) if each.id == id else each for each in demands]
        placed = BalancedPlacement().place(bursty, gpus(3))
        counts = {each.id: [one.model for one in placed.instances].count(each.id) for each in bursty}
        assert counts[id] > min(counts.values()), counts


def test_what_fits_nowhere_is_unplaced() -> None:
    demands = models(3, 1, load=0.1)
    assert BalancedPlacement().place(demands, [GpuSlot(0, 0, GIB)]).unplaced == ("m0", "m1", "m2")
    assert not BalancedPlacement().place([], gpus(2)).instances
    assert BalancedPlacement().place(demands, []).unplaced == ("m0", "m1", "m2")
