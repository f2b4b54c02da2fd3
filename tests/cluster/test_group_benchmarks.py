"""The speed benchmark of groups measures what it says: instances that are short of memory, and two checkouts by one program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import engine

    return engine


@pytest.mark.parametrize(("name", "migrates"), [("vllm-dp", False), ("llumnix", True)])
def test_groups_preempt_and_migrate(engine: ModuleType, name: str, migrates: bool) -> None:
    result = engine.simulate(engine.groups(engine.workload(3000), name))
    assert np.isfinite(result.finish_s).all()
    assert 0 < result.preemptions.sum() < 300
    assert (result.counters["migrations"] > 0) == migrates
    assert np.bincount(result.engine).min() > 200


def test_two_checkouts_take_turns(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, list[str]]] = []

    def speed(checkout: Path, options: list[str]) -> float:
        asked.append((checkout, options))
        return 3.0 if checkout == engine.THIS else 2.0

    monkeypatch.setattr(engine, "_speed", speed)
    other = Path("other")
    found = dict(engine.against_checkout(other, ["--requests", "10"], rounds=3))
    assert list(found) == list(engine.SET_UPS)
    assert all(row["ratio"] == row["ratio_min"] == row["ratio_max"] == 1.5 for row in found.values())
    assert [checkout for checkout, _ in asked[:6]] == [other, engine.THIS, engine.THIS, other, other, engine.THIS]
    assert asked[-1][1] == ["--groups", "llumnix", "--requests", "10"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--groups", "llumnix", "--colocated"], "set-up of its own"),
        (["--groups", "qlm"], "invalid choice"),
        (["--against", "nowhere"], "it has no folder fineserve_sim"),
        (["--against", ".", "--replicas", "2"], "--against is a set-up of its own"),
    ],
)
def test_wrong_use_is_told(arguments: list[str], words: str) -> None:
    command = [sys.executable, "benchmarks/engine.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2 and words in done.stderr
