"""A run is freed whole: once its result is gone, so are its engines, queues and pools."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import suppress

import pytest
from randomkit import KINDS, scenario_of

from fineserve_sim.cluster import ScenarioError, simulate

STATE = tuple(
    f"fineserve_sim.{name}"
    for name in ("cluster.clock", "cluster.host", "cluster.engine", "cluster.fleet", "policy.memory")
)


def alive() -> Counter[str]:
    """How many objects there are of each class that holds state."""
    gc.collect()
    classes = [type(each) for each in gc.get_objects()]
    return Counter(each.__name__ for each in classes if str(each.__module__).startswith(STATE))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_run_outlives_it(kind: str) -> None:
    """A compiled class that declares an attribute of its base anew counts it twice, and is never collected."""
    before = alive()
    for seed in range(3):
        with suppress(ScenarioError):
            simulate(scenario_of(kind, seed))
    left = alive() - before
    assert not left
