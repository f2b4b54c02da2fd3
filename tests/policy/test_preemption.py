"""The preemption victim: the latest arrival, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.memory.preemption import arrival_order, preemption_victim


@dataclass(frozen=True)
class Holder:
    index: int
    arrival_s: float


holders = st.lists(st.builds(Holder, st.integers(0, 50), st.sampled_from([0.0, 1.0, 2.5])), min_size=1, unique=True)


def test_the_latest_arrival_goes_first_then_the_higher_index() -> None:
    oldest, twin, other = Holder(9, 0.0), Holder(3, 2.0), Holder(4, 2.0)
    assert preemption_victim([oldest, other, twin]) is other
    assert preemption_victim([oldest, twin]) is twin
    assert preemption_victim([oldest]) is oldest


@given(holders)
def test_the_oldest_is_spared_to_the_end(running: list[Holder]) -> None:
    """Taking victims one after another is the reverse of the order in which decodes are served."""
    order = []
    left = list(running)
    while left:
        order.append(preemption_victim(left))
        left.remove(order[-1])
    assert order[::-1] == sorted(running, key=arrival_order)


@given(holders, st.integers(0, 2**16))
def test_the_choice_does_not_depend_on_how_engines_are_listed(running: list[Holder], cut: int) -> None:
    """Two engines that name their own victims first, and then the later of both, agree with one look at all."""
    cut %= len(running) + 1
    parts = [part for part in (running[:cut], running[cut:]) if part]
    assert preemption_victim([preemption_victim(part) for part in parts]) == preemption_victim(running)


def test_there_must_be_somebody() -> None:
    with pytest.raises(ValueError, match="no request holds memory"):
        preemption_victim([])
