"""The matrix of situations: all are there, each makes its requests, and the table counts what it says."""

import csv
import json
import re
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from fineserve_sim.planning.wish import model_wish

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    """A script of the folder benchmarks, which is no installed package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import plan_matrix

        yield plan_matrix
        sys.modules.pop("plan_matrix", None)


@pytest.fixture(scope="module")
def situations(matrix: ModuleType) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(matrix.SITUATIONS.read_text(encoding="utf-8"))["situations"]
    return found


def test_the_situations_are_of_all_kinds(situations: list[dict[str, Any]]) -> None:
    assert len({each["name"] for each in situations}) == len(situations) >= 24
    assert {each["arrivals"] for each in situations} == {
        *("azure2023_conv", "azure2023_code", "mooncake_conversation"),
        *("arena", "servegen", "burstgpt", "alibaba"),
    }
    assert {each.get("gpu", "h100-sxm") for each in situations} == {"h100-sxm", "a100-80gb"}
    assert (min(len(each["models"]) for each in situations), max(len(each["models"]) for each in situations)) == (4, 64)
    assert (min(each["gpus"] for each in situations), max(each["gpus"] for each in situations)) == (2, 64)
    assert all(model_wish(model).options for each in situations for model in each["models"])


@pytest.mark.skipif(not DATA.exists(), reason="needs ../shared")
def test_each_situation_has_its_requests(matrix: ModuleType, situations: list[dict[str, Any]], tmp_path: Path) -> None:
    one_of_each = {each["arrivals"]: each for each in situations}
    for situation in one_of_each.values():
        trace = matrix.requests_of(situation, DATA)
        assert 0.8 * situation["requests"] <= len(trace) <= situation["requests"]
        assert len(trace.models) in (1, len(situation["models"]))
        wish = matrix.wish_of(situation, DATA, tmp_path)
        assert wish.spread == (len(trace.models) == 1)
        assert (trace.model < len(trace.models)).all()


def test_the_table_counts_what_it_says(matrix: ModuleType, situations: list[dict[str, Any]], tmp_path: Path) -> None:
    def write(name: str, plan: float, chosen: float, hindsight: float, balanced: float) -> None:
        systems = {"prism": [90.0, chosen], "muxserve": [80.0, hindsight], "balanced": [90.0, balanced]}
        found = {"plan": plan, "chosen": "prism", "hindsight": "muxserve", "bound": 100.0, "systems": systems}
        found |= {"plan_half_width": 0.5, "balanced_half_width": 0.5, "rate_per_s": 10.0}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))

    first, second = situations[:2]
    write(first["name"], 95.0, 90.0, 91.0, 90.0)
    write(second["name"], 88.0, 90.0, 90.0, 85.0)
    lines = list(matrix.table(situations, tmp_path))
    assert sum(line.startswith(("| conv-12-8 ", "| conv-12-7 ")) for line in lines) == 2
    assert "| 50 % |" in lines[2]
    assert "Plans not worse than the chosen system: 1 of 2; `balanced`: 1 of 2." in lines
    assert "Misses above the bound that plans spare, median of 2: 15 %." in lines


PAGE = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
RESULTS = ROOT / "docs" / "data" / "plan_matrix.json"
IN_TIME = ROOT / "docs" / "data" / "plan_in_time.csv"


def table_of(page: str, header: str) -> list[list[str]]:
    """The cells of the table with this header."""
    lines = page[page.index(header) :].splitlines()[2:]
    rows = lines[: next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_page_has_the_results_of_the_matrix(matrix: ModuleType) -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = table_of(PAGE, "| situation | plan | best on the first part |")
    assert [row[0] for row in rows] == [f"{name} †" if "before" in each else name for name, each in results.items()]
    for name, plan, chosen, hindsight, bound, balanced in rows:
        found = results[name.removesuffix(" †")]
        later = {system: unseen for system, (_, unseen) in found["systems"].items()}
        assert plan == f"{found['plan']:.1f} ± {found['plan_half_width']:.1f}"
        assert chosen == f"{found['chosen']} {later[found['chosen']]:.1f}"
        assert hindsight == f"{found['hindsight']} {later[found['hindsight']]:.1f}"
        assert bound == f"{found['bound']:.1f}"
        assert balanced == f"{later['balanced']:.1f} ± {found['balanced_half_width']:.1f}"


def test_the_sentences_below_count_what_the_table_has(matrix: ModuleType) -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8")).values()
    seen = [found["systems"][found["chosen"]][1] for found in results]
    spared = [matrix.spared(found, found["plan"], theirs) for found, theirs in zip(results, seen, strict=True)]
    known = [share for share in spared if share is not None]
    assert f"the median over the {len(known)} situations" in " ".join(PAGE.split())
    assert f"plans spare {100 * statistics.median(known):.0f} % of these misses" in " ".join(PAGE.split())
    worse = [
        found for found, theirs in zip(results, seen, strict=True) if found["plan"] < theirs - found["plan_half_width"]
    ]
    assert not worse and "No plan is worse than the system that was best on the first part" in PAGE
    assert all(found["plan"] >= found["systems"][found["hindsight"]][1] - 1 for found in results)
    shares = [
        matrix.spared(found, found["systems"]["balanced"][1], theirs)
        for found, theirs in zip(results, seen, strict=True)
    ]
    own = statistics.median(share for share in shares if share is not None)
    assert f"`balanced` spares {100 * own:.0f} %" in PAGE
    good = sum(
        found["systems"]["balanced"][1] >= theirs - found["balanced_half_width"]
        for found, theirs in zip(results, seen, strict=True)
    )
    assert f"as good as it within the interval in {good} of {len(results)}" in PAGE


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="needs ../shared")
def test_twelve_models_without_a_search_keep_what_the_page_says(tmp_path: Path) -> None:
    """The search takes minutes, and is not run."""
    from benchmarks.plan_twelve import case, share

    said = " ".join(PAGE.split())
    for gpus, systems in ((8, ("balanced", "fineserve")), (7, ("balanced", "muxserve++"))):
        problem, later = case(DATA, tmp_path, gpus)
        for name in systems:
            first, second = (100 * share(problem, name, each) for each in later)
            assert f"{first:.1f} and {second:.1f} %" in said, (gpus, name)


def test_the_page_has_the_plan_in_time() -> None:
    found = {row["what"]: row for row in csv.DictReader(IN_TIME.read_text(encoding="utf-8").splitlines())}
    names = {
        "plan in time": "plan in time",
        "its first plan, kept": "the first plan kept",
        "its first plan, `drifting` from there": "the first plan, drifting",
        "one plan that knows all of the trace": "one plan that knows all",
        "Prism": "prism",
    }
    rows = table_of(PAGE, "| | on time |")
    assert [name for name, _ in rows] == list(names)
    for name, told in rows:
        row = found[names[name]]
        assert told == " ± ".join(filter(None, (row["on_time"], row["half_width"])))
    moved = [row["gigabytes"] for what, row in found.items() if what.startswith("from ") and row["engines"] != "0"]
    said = re.search(r"It changes twice, for (\d+) and (\d+) GB", PAGE)
    assert said is not None and list(said.groups()) == moved
