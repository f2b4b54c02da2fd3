"""diff: what changed between two results folders in inputs, results and decisions, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fineserve_sim.experiment import load_experiment, run_experiment, run_loaded
from fineserve_sim.experiment.show.diff import Diff, diff
from fineserve_sim.experiment.show.diff.text import told

Run = Callable[..., Path]


@pytest.fixture
def run(write_file: Any, tmp_path: Path) -> Run:
    """Run the small experiment with some values replaced, into a folder of this name."""
    file = write_file(("slo_scale: [2, 4]", "slo_scale: [2]"), ("rate_scale: [1, 2]", "rate_scale: [1]"))

    def made(name: str, decisions: bool = False, **overrides: str) -> Path:
        pairs = [(key.replace("__", "."), value) for key, value in overrides.items()]
        run_experiment(file, tmp_path / name, jobs=1, overrides=pairs, decisions=decisions)
        return tmp_path / name

    return made


def text(found: Diff) -> str:
    console = Console(width=200, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(told(found))
    return capture.get()


def test_the_same_experiment_twice_is_the_same(run: Run) -> None:
    found = diff(run("a"), run("b"))
    assert found.same and found.moved == () and found.steady > 50
    assert text(found).strip() == "The same in all 4 cells: inputs, results, decisions, claims."


def test_a_changed_key_is_told_with_both_values(run: Run) -> None:
    found = diff(run("a"), run("b", engine__token_budget="512"))
    assert [(change.key, change.a, change.b) for change in found.inputs] == [("engine.token_budget", 2048, 512)]
    assert "engine.token_budget: 2048 -> 512" in text(found)


def test_items_of_a_list_go_by_their_names(run: Run) -> None:
    found = diff(run("a"), run("b", models__1__precision="W4A16"))
    assert [change.key for change in found.inputs] == ["models.B.precision"]


def test_more_load_moves_what_it_must_and_says_by_how_much(run: Run) -> None:
    found = diff(run("a"), run("b", loads__A__rate_per_s="40"))
    moved = {each.metric: each for each in found.moved if each.cell.startswith("rate: FineServe")}
    throughput = moved["throughput_per_s"]
    assert throughput.change is not None and throughput.half_width is not None
    assert throughput.b == pytest.approx(2 * throughput.a, rel=0.1)
    assert throughput.change == pytest.approx(throughput.b - throughput.a) and throughput.change > throughput.half_width
    assert "Results that changed, beyond their 95 % intervals" in text(found)


def test_a_change_within_its_interval_is_none(run: Run) -> None:
    """Other requests of the same kind: most numbers stay within, and those that are told are beyond."""
    found = diff(run("a"), run("b", workload__requests="61"))
    assert found.steady > len(found.moved)
    assert all(each.half_width is None or abs(each.change or 0) > each.half_width for each in found.moved)


def test_cells_of_one_side_alone_are_named(run: Run) -> None:
    found = diff(run("a"), run("b", systems="[fineserve]"))
    assert found.cells == 2
    assert found.only and all(line.startswith("only in A: ") and "Prism*" in line for line in found.only)


def test_cells_that_look_alike_in_three_digits_are_others(write_file: Any, tmp_path: Path) -> None:
    def made(name: str, scales: str) -> Path:
        file = write_file(("slo_scale: [2, 4]", "slo_scale: [2]"), ("rate_scale: [1, 2]", f"rate_scale: {scales}"))
        run_experiment(file, tmp_path / name, jobs=1, overrides=[("systems", "[fineserve]")])
        return tmp_path / name

    a, b = made("a", "[1.0001, 1.0002]"), made("b", "[1.0002, 1.0003]")
    assert diff(a, a).cells == 3
    only = [line for line in diff(a, b).only if "rate: FineServe" in line]
    assert ["1.0001" in only[0], "1.0003" in only[1]] == [True, True]


def test_metrics_alone_are_compared_as_well(run: Run, tmp_path: Path, write_file: Any) -> None:
    for name in ("a", "b"):
        run_loaded(load_experiment(write_file()), tmp_path / name, jobs=1, summary=True)
    assert diff(tmp_path / "a", tmp_path / "b").same


def test_placements_and_the_first_other_command_are_told(run: Run) -> None:
    found = diff(run("a", decisions=True), run("b", decisions=True, cluster__count="1"))
    assert any("-> GPU 0 [" in line for line in found.decisions)
    assert any("command " in line and " at " in line for line in found.decisions)
