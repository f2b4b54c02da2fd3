"""Claims under every open reading: which systems take part, what is kept, and what the ledger says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fineserve_sim.experiment.reproduce import LedgerError, Row, load_all, reproduce, targets
from fineserve_sim.experiment.reproduce.readings import DEFAULT, moves, read, read_as, sweep, under
from fineserve_sim.experiment.reproduce.text import BEGIN, END, as_json, write_markdown
from fineserve_sim.systems import OpenReading, open_readings
from fineserve_sim.systems.spec import LeastQueuedDispatchSpec

SMALL = """\
fineserve: 1
title: Small
cluster: {gpu: h100-sxm, count: 1}
models:
  - {id: A, model: llama-3.1-8b, precision: fp8, rate_per_s: 5}
workload: {lengths: {prompt_tokens: 256, output_tokens: 8}, requests: 40}
slo: {ttft_s: 0.5}
systems:
  - fineserve
  - "static*"
  - "prism*"
  - {base: fineserve, name: exact, title: By eq. 1, placement: {score: exact}}
seeds: 1
claims:
  - {id: FS-10c/prism*, paper: 2.2, measure: ratio, metric: ttft_attainment, of: fineserve, over: "prism*", at: {sweep: run}}
  - {id: FS-10c/static*, paper: 1.2, measure: ratio, metric: ttft_attainment, of: fineserve, over: "static*", at: {sweep: run}}
"""
SCORE = next(reading for reading in open_readings() if reading.option == "placement.fineserve.score")
CLAIM = targets()["FS-10c"]


@pytest.fixture
def experiments(tmp_path: Path):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "small.yaml").write_text(SMALL, encoding="utf-8")
    return load_all(tmp_path / "experiments", quick=False)


def test_a_reading_changes_the_systems_that_have_its_default(experiments) -> None:
    small = experiments.readable["small"]
    systems = read_as(small, SCORE, "exact").setup.systems
    before = small.setup.systems
    assert before["fineserve"].placement.score == "mean" and systems["fineserve"].placement.score == "exact"
    assert systems["exact"] == before["exact"] and systems["prism*"] == before["prism*"]


def test_systems_that_one_sentence_speaks_of_are_read_alike(experiments) -> None:
    """FineServe, section 6.2: replicas are instances, whoever places them."""
    (reading,) = (each for each in open_readings() if each.option == "placement.fineserve.replicas")
    systems = read_as(experiments.readable["small"], reading, "rate").setup.systems
    assert {systems[name].placement.replicas for name in ("fineserve", "static*", "prism*", "exact")} == {"rate"}


def test_a_policy_itself_may_be_open() -> None:
    (reading,) = (each for each in open_readings() if each.option == "dispatch.least_loaded.policy")
    whole = load_all(Path(__file__).parents[2] / "experiments", quick=True).readable["kunserve_fig02"]
    systems = read_as(whole, reading, "least_queued").setup.systems
    assert systems["kunserve"].dispatch == LeastQueuedDispatchSpec()
    assert systems["llumnix"] == whole.setup.systems["llumnix"]


def test_an_experiment_without_such_a_system_is_itself(experiments) -> None:
    small = experiments.readable["small"]
    elsewhere = OpenReading(option="residency.qlm.swap_s", values=(30.0, 5.0), paper="QLM", where="there", says="so")
    assert read_as(small, elsewhere, 5.0) is small


def test_each_reading_is_run_once_and_kept(experiments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fineserve_sim.experiment.reproduce.readings.open_readings", lambda: (SCORE,))
    found = tmp_path / "readings.csv"
    first = sweep([CLAIM], experiments, tmp_path / "out", found, jobs=1)
    assert list(first) == [DEFAULT, ("placement.fineserve.score", "exact")]
    assert all(set(verdicts) == {"FS-10c"} for verdicts in first.values())
    assert (tmp_path / "out" / "small" / "summary.json").exists()
    kept = found.read_text(encoding="utf-8").replace("not reproduced", "reproduced")
    found.write_text(kept + "placement.fineserve.score,closed since,FS-10c,reproduced\n", encoding="utf-8")
    again = sweep([CLAIM], experiments, tmp_path / "other", found, jobs=1)
    assert list(again) == list(first)
    assert again[("placement.fineserve.score", "exact")] == {"FS-10c": "reproduced"}
    assert not (tmp_path / "other").exists()


def test_the_systems_of_the_default_are_judged_as_without_a_sweep(
    experiments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fineserve_sim.experiment.reproduce.readings.open_readings", lambda: (SCORE,))
    plain = reproduce([CLAIM], experiments, tmp_path / "plain", jobs=1)
    sweep([CLAIM], experiments, tmp_path / "out", tmp_path / "readings.csv", jobs=1)
    assert reproduce([CLAIM], experiments, tmp_path / "out", jobs=1) == plain


@pytest.mark.parametrize(
    ("verdict", "others", "which", "deciding"),
    [
        ("reproduced", ["reproduced", "reproduced"], "every", []),
        ("reproduced", ["not reproduced", "reproduced"], "some", ["a=0"]),
        ("direction only", ["reproduced", "not reproduced"], "some", ["a=0"]),
        ("direction only", ["not reproduced", "direction only"], "none", []),
        ("reproduced", [], "every", []),
    ],
)
def test_under_which_readings_a_claim_is_reproduced(verdict, others, which: str, deciding: list[str]) -> None:
    row = Row(CLAIM, verdict)
    verdicts = {("a", str(number)): {CLAIM.id: other} for number, other in enumerate(others)}
    verdicts["b", "1"] = {"another claim": "reproduced"}
    verdicts[DEFAULT] = {CLAIM.id: verdict}
    assert under(row, verdicts) == which and moves(row, verdicts) == deciding
    assert under(row, {}) == ("every" if verdict == "reproduced" else "none")


def test_the_ledger_has_a_column_for_it(tmp_path: Path) -> None:
    page = tmp_path / "ledger.md"
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    rows = [Row(CLAIM, "direction only")]
    verdicts = {DEFAULT: {CLAIM.id: "direction only"}, ("placement.fineserve.score", "exact"): {CLAIM.id: "reproduced"}}
    write_markdown(rows, page, verdicts)
    text = page.read_text(encoding="utf-8")
    assert "| verdict | reproduced under | by |" in text
    assert "| direction only | some (`placement.fineserve.score=exact`) |" in text
    assert "0 reproduced under every, 1 reproduced under some, 0 reproduced under none of the readings" in text
    assert as_json(rows, verdicts)["claims"][0]["under"] == "some" and "under" not in as_json(rows)["claims"][0]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(LedgerError, match="expected a CSV file with the columns option, value, claim, verdict"):
        read(path)
