"""A search that was stopped goes on, and comes to the same answer as one that was not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from searchkit import stopping_after

from fineserve_sim.planning import islands
from fineserve_sim.planning.find import Budget, search
from fineserve_sim.planning.problem import Problem
from fineserve_sim.planning.store import Store, digest_of
from fineserve_sim.planning.wish import ModelWish, Wish, problem_of

MODELS = (ModelWish("large", "qwen2.5-14b", (("W16A16", 1),)), ModelWish("small", "llama-3.2-1b", (("W16A16", 1),)))
EVALUATIONS = 12


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    path = tmp_path_factory.mktemp("store") / "trace.csv"
    rng = np.random.default_rng(2)
    arrival_s = np.cumsum(rng.exponential(1 / 30, 60))
    rows = [f"{a:.4f},{p},10" for a, p in zip(arrival_s, rng.integers(500, 4000, 60), strict=True)]
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return problem_of(Wish(path, MODELS, gpus=2, ttft_slo_s=0.2, spread=True))


def test_a_stopped_search_has_a_plan_and_goes_on(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "searched.jsonl"
    never_stopped = search(problem, Budget(EVALUATIONS))
    stopped = search(problem, Budget(EVALUATIONS, path=path, tell=stopping_after(1)))
    assert stopped.stopped
    assert problem.allows(stopped.layout)
    known = len(Store(path, problem))
    assert known > 0
    simulated = []

    def counted(problem: Problem, island: islands.Island, limit: float = math.inf) -> islands.Losses:
        simulated.append(island)
        return whole(problem, island, limit)

    whole = islands.losses
    monkeypatch.setattr(islands, "losses", counted)
    again = search(problem, Budget(EVALUATIONS, path=path))
    assert again == never_stopped
    assert len(Store(path, problem)) == known + len(simulated)
    assert search(problem, Budget(EVALUATIONS, path=path)) == never_stopped
    assert len(Store(path, problem)) == known + len(simulated)  # nothing was left to simulate


def test_a_cut_line_and_another_problem_count_for_nothing(problem: Problem, tmp_path: Path) -> None:
    path = tmp_path / "searched.jsonl"
    search(problem, Budget(EVALUATIONS, path=path))
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    assert len(Store(path, problem)) == len(lines) - 1
    tighter = replace(problem, limits=problem.limits._replace(ttft_s=(0.1, 0.1)))
    assert len(Store(path, tighter)) == 0
    assert json.loads(lines[0])["of"] == digest_of(problem)


def test_islands_are_kept_whatever_the_number_of_gpus(problem: Problem) -> None:
    gpus = problem.gpus
    more = replace(problem, scenario=replace(problem.scenario, gpus=(*gpus, replace(gpus[0], id=2))))
    assert digest_of(more) == digest_of(problem)
