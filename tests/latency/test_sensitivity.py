"""The benchmark that moves assumptions: catalog numbers change for everybody in the process, keys of the file are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from fineserve_sim.catalog import Quantity
from fineserve_sim.experiment import load_experiment

ROOT = Path(__file__).parents[2]

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT))
    from benchmarks import sensitivity

FILE_KEYS = ("token_budget", "max_sequences", "block_tokens", "context_bytes", "base rate A", "base rate B")
OPTIONS = ("scheduler.moore_hodgson.reserve_fraction", "memory.kv_slab.slab_cap_bytes")


def moved(name: str, factor: float) -> list[tuple[str, str]]:
    (assumption,) = (each for each in sensitivity.ASSUMPTIONS if each.name == name)
    return list(assumption.move(factor))


def test_a_catalog_number_moves_where_it_is_read() -> None:
    number = Quantity(value=5.0, kind="assumed", source="test")
    assert list(sensitivity.of_catalog("x", lambda: number).move(1.2)) == []
    assert number.value == pytest.approx(6.0)


@pytest.mark.parametrize("name", [*FILE_KEYS, *OPTIONS])
def test_moved_keys_are_accepted_and_change_the_experiment(name: str) -> None:
    plain = load_experiment(sensitivity.FIG10, sensitivity.POINT)
    changed = load_experiment(sensitivity.FIG10, [*sensitivity.POINT, *moved(name, 1.2)])
    assert [point.system for point in changed.points] == [point.system for point in plain.points]
    assert changed.setup != plain.setup


def test_a_number_that_cannot_be_is_shown_as_a_dash() -> None:
    assert sensitivity.attainment((_index("memory_utilization"), 0.8), quick=True, seeds=1) == {}
    assert sensitivity._change({}, {"A x": 1.0}, "A x") == "-"
    assert sensitivity._change({"A x": 1.5}, {"A x": 1.0}, "A x") == "+0.5"


def test_the_output_says_how_it_was_made() -> None:
    said = sensitivity.conditions(["--quick", "--only", "host time"], quick=True, seeds=2)
    assert said.startswith("python benchmarks/sensitivity.py --quick --only 'host time': seeds 0, 1; ")
    assert said.endswith("50 + 300 requests a run")


def _index(name: str) -> int:
    return [assumption.name for assumption in sensitivity.ASSUMPTIONS].index(name)
