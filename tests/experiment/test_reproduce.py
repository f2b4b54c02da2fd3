"""The ledger, its judge, and ``reproduce`` from experiment files to verdicts."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from fineserve_sim.experiment.reproduce import (
    Experiments,
    LedgerError,
    chosen,
    load_all,
    read_ledger,
    reproduce,
    targets,
)
from fineserve_sim.experiment.reproduce.curves import Step, crossing, order
from fineserve_sim.experiment.reproduce.finished import MissingError, Results
from fineserve_sim.experiment.reproduce.judge import Evaluation, Quantity, judge
from fineserve_sim.experiment.reproduce.ledger import Target, denominator
from fineserve_sim.experiment.reproduce.papers import DECIDERS
from fineserve_sim.experiment.reproduce.text import (
    BEGIN,
    END,
    as_json,
    check_markdown,
    counted,
    expected,
    ours,
    share,
    write_markdown,
)
from fineserve_sim.experiment.results.stats import Estimate

SPEC = Path(__file__).parents[3] / "shared" / "spec" / "claims.yaml"

SMALL = """\
fineserve: 1
title: Small
cluster: {gpu: h100-sxm, count: 1}
models:
  - {id: A, model: llama-3.1-8b, precision: fp8, rate_per_s: 5}
workload: {lengths: {prompt_tokens: 256, output_tokens: 8}, requests: 40}
slo: {ttft_s: 0.5}
systems: [fineserve, "static*", "prism*"]
seeds: 2
claims:
  - {id: FS-10c/prism*, paper: 2.2, measure: ratio, metric: ttft_attainment, of: fineserve, over: "prism*", at: {sweep: run}}
  - {id: FS-10c/static*, paper: 1.2, measure: ratio, metric: ttft_attainment, of: fineserve, over: "static*", at: {sweep: run}}
  - {id: FS-10d-abs, paper: 1, measure: value, metric: throughput_per_s, of: fineserve, at: {sweep: run}, calibration: true}
  - {id: FS-10a/prism*, paper: ">= 0", measure: order, metric: ttft_attainment, of: fineserve, over: "prism*", at: {sweep: run}}
"""


def target(*expect: Any, kind: str = "number", **more: Any) -> Target:
    return Target("x", "P", "here", "what", kind, "sim", tuple(expect), **more)


def verdict_on(wanted: Target, *values: Any) -> str:
    found = (value if isinstance(value, Quantity) else Quantity(value) for value in values)
    return judge(wanted, Evaluation(tuple(found)))


# --- the ledger ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not SPEC.exists(), reason="shared/spec/claims.yaml is not beside the checkout")
def test_the_specification_says_the_same_numbers() -> None:
    stated = yaml.safe_load(SPEC.read_text(encoding="utf-8"))["claims"]
    found = read_ledger(SPEC)
    assert list(found) == [claim["id"] for claim in stated]
    assert all(each == targets()[name] for name, each in found.items())
    assert {claim["id"]: claim["backend"] for claim in stated} == {name: each.backend for name, each in found.items()}


def ledger(tmp_path: Path, *claims: dict[str, Any]) -> Path:
    path = tmp_path / "ledger.yaml"
    common = {"paper": "FineServe", "where": "there", "kind": "ratio", "backend": "sim", "value": "", "unit": "ratio"}
    path.write_text(yaml.safe_dump({"claims": [common | claim for claim in claims]}), encoding="utf-8")
    return path


def test_numbers_of_another_ledger_replace_ours(tmp_path: Path) -> None:
    path = ledger(
        tmp_path,
        {"id": "FS-10c", "target": {"Prism*": 3, "Static*": 4.5}},
        {"id": "KS-13-p99ttft", "target": [1, 2]},
        {"id": "PR-7-gpus", "target": {"a": 3, "b": 6, "baselines": ">7"}},
        {"id": "FS-10a", "target": None},
        {"id": "FS-eq-tokensize", "target": None},
    )
    found = read_ledger(path)
    assert [each.expect for each in found.values()] == [
        (3, 4.5),
        ((1, 2),),
        (3, 6, "> 7"),
        ("holds",),
        (4096, 2048, 1024, 2048),
    ]


def test_an_unknown_claim_is_not_decidable(tmp_path: Path) -> None:
    found = read_ledger(ledger(tmp_path, {"id": "FS-99", "target": 7}))
    (row,) = reproduce(list(found.values()), Experiments(), tmp_path)
    assert (row.verdict, row.reason) == ("not decidable here", "No evaluator knows this claim.")


@pytest.mark.parametrize("text", ["claims: 3", "[]", "claims: [{id: x}]", "a: [", "claims:\n"])
def test_another_file_is_no_ledger(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ledger.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(LedgerError, match="not a ledger"):
        read_ledger(path)


def test_choosing_claims() -> None:
    assert {each.paper for each in chosen(targets(), "vtensor", ())} == {"vTensor/FlexInfer"}
    assert [each.id for each in chosen(targets(), None, ["KS-5", "FS-3-order"])] == ["FS-3-order", "KS-5"]
    with pytest.raises(LedgerError, match="--paper Orca: no such paper; choose from FineServe, Prism"):
        chosen(targets(), "Orca", ())
    with pytest.raises(LedgerError, match="--claims KS-5: no such claim"):
        chosen(targets(), "Prism", ["KS-5"])


# --- the judge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "values", "verdict"),
    [
        (target(10.0), (11.9,), "reproduced"),
        (target(10.0), (12.1,), "not reproduced"),
        (target(10.0, tolerance=0), (10.0,), "reproduced"),
        (target(2.0, neutral=1.0), (1.3,), "direction only"),
        (target(2.0, neutral=1.0), (0.9,), "not reproduced"),
        (target((3.0, 4.0)), (3.5,), "reproduced"),
        (target((3.0, 4.0)), (3.5, 4.5), "not reproduced"),
        (target((3.0, 4.0), neutral=1.0), (3.5, 2.0), "direction only"),
        (target((3.0, 4.0), neutral=1.0), (3.5, 0.5), "not reproduced"),
        (target("> 5"), (6.0,), "reproduced"),
        (target("> 5"), (Quantity(6.0, 2.0),), "direction only"),
        (target("holds"), (True,), "reproduced"),
        (target("holds"), (False,), "not reproduced"),
        (target("holds"), (Quantity("5 of 6", verdict="direction only"),), "direction only"),
        (target(50.0, scale=100.0, neutral=0.0), (0.45,), "reproduced"),
        (target(8.0, 20.0), (8.0, 40.0), "not reproduced"),
        (target(8.0, 20.0), (8.0, Quantity(21.0, part=1), Quantity(19.0, part=1)), "reproduced"),
        (target(2.0, 5.0, neutral=(1.0, 0.0)), (2.0, 0.5), "direction only"),
        (target(2.0), (math.nan,), "not reproduced"),
        (target(2.0, role="calibration"), (2.0,), "input"),
    ],
)
def test_verdicts(wanted: Target, values: tuple[Any, ...], verdict: str) -> None:
    assert verdict_on(wanted, *values) == verdict


def test_too_few_numbers_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="x: 1 numbers for 2 targets"):
        verdict_on(target(1.0, 2.0), 1.0)


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ([(2, 1), (3, 1)], "reproduced"),
        ([(2, 1), (1, 1)], "reproduced"),
        ([(1, 1), (1, 1)], "not reproduced"),
        ([(2, 1), (3, 1), (1, 2)], "direction only"),
        ([(2, 1), (1, 2)], "not reproduced"),
        ([(2, 1), (math.nan, 2)], "not reproduced"),
    ],
)
def test_an_order_at_several_points(gaps: list[tuple[float, float]], verdict: str) -> None:
    steps = [Step(str(place), Estimate(high, 0.1), Estimate(low, 0.1)) for place, (high, low) in enumerate(gaps)]
    assert verdict_on(target("holds"), *order(steps).quantities) == verdict


# --- from files to verdicts ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experiments")
    (path / "small.yaml").write_text(SMALL, encoding="utf-8")
    return path


def test_parts_of_a_claim_are_judged_together(folder: Path, tmp_path: Path) -> None:
    wanted = chosen(targets(), None, ["FS-10a", "FS-10c", "FS-10d-abs", "KS-T1", "KS-5", "PR-9-70b"])
    calls: list[tuple[int, int]] = []
    rows = reproduce(
        wanted, load_all(folder, False), tmp_path, jobs=1, on_progress=lambda *call: calls.append(call[:2])
    )
    by_id = {row.target.id: row for row in rows}
    assert by_id["FS-10c"].verdict == "not reproduced"  # nobody is late: both ratios are 1
    assert [quantity.value for quantity in by_id["FS-10c"].quantities] == [1.0, 1.0]
    assert by_id["FS-10a"].verdict == "not reproduced"  # never clearly above
    assert by_id["FS-10d-abs"].verdict == by_id["PR-9-70b"].verdict == "input"
    assert by_id["KS-T1"].verdict == "reproduced"
    assert by_id["KS-5"].reason == "There is no experiments/kunserve_fig05.yaml."
    assert calls[-1] == (6, 6)
    again = reproduce(wanted, load_all(folder, False), tmp_path, jobs=1)
    assert again == rows
    assert counted(rows) == "1 reproduced, 2 not reproduced, 1 not decidable here, 2 input"


def test_nothing_is_run_for_an_analytic_claim(folder: Path, tmp_path: Path) -> None:
    (row,) = reproduce(chosen(targets(), None, ["FS-8-blkid"]), load_all(folder, False), tmp_path)
    assert (row.verdict, row.by) == ("reproduced", "analysis")
    assert not list(tmp_path.iterdir())


def test_algorithm_2_is_checked_on_random_waiting_sets(tmp_path: Path) -> None:
    rows = reproduce(chosen(targets(), None, ["FS-alg2-anchor", "FS-alg2-vs-mh"]), Experiments(), tmp_path)
    assert [row.verdict for row in rows] == ["reproduced", "reproduced"]


def test_results_that_are_not_there(tmp_path: Path) -> None:
    results = Results(tmp_path, {"broken": "experiments/broken.yaml: no such GPU"})
    with pytest.raises(MissingError, match=r"experiments/broken.yaml: no such GPU"):
        results.summary("broken")
    with pytest.raises(MissingError, match=r"experiments/other.yaml was not run"):
        results.cells("other", "fineserve")
    with pytest.raises(LedgerError, match="no experiment files there"):
        load_all(tmp_path, False)


def test_a_broken_experiment_leaves_its_claims_open(folder: Path, tmp_path: Path) -> None:
    both = tmp_path / "experiments"
    both.mkdir()
    (both / "small.yaml").write_text(SMALL, encoding="utf-8")
    (both / "kunserve_fig05.yaml").write_text("fineserve: 1\nclusster: 3\n", encoding="utf-8")
    heavy = SMALL.replace("llama-3.1-8b, precision: fp8", "llama-3.1-70b, precision: fp16").replace("FS-10", "FS-12")
    (both / "heavy.yaml").write_text(heavy, encoding="utf-8")
    wanted = chosen(targets(), None, ["FS-10c", "FS-12-3x", "KS-5", "KS-14-drop", "FS-13-order", "KS-T1"])
    rows = {row.target.id: row for row in reproduce(wanted, load_all(both, False), tmp_path / "out", jobs=1)}
    assert {name for name, row in rows.items() if row.failed} == {"KS-5", "KS-14-drop", "FS-12-3x", "FS-13-order"}
    assert all(
        rows[name].verdict == "not decidable here" and "\n" not in rows[name].reason
        for name in rows
        if rows[name].failed
    )
    assert "kunserve_fig05.yaml:2: clusster: unknown key" in rows["KS-5"].reason
    assert rows["KS-14-drop"].reason == "There is no experiments/kunserve_fig14.yaml."
    assert (
        "No experiment file states this claim" in rows["FS-13-order"].reason and "fig05" in rows["FS-13-order"].reason
    )
    assert (rows["FS-10c"].by, rows["KS-T1"].verdict) == ("small", "reproduced")


# --- for readers --------------------------------------------------------------------------------------------------------


def test_texts() -> None:
    assert expected(targets()["KS-13-p99ttft"]) == "12.7 to 72.2"
    assert expected(targets()["FS-10a"]) == "holds"
    assert expected(targets()["PR-7-gpus"]) == "4; 5; > 8 GPUs"


def test_markdown_goes_between_its_lines(tmp_path: Path) -> None:
    rows = reproduce(chosen(targets(), None, ["KS-T1", "FS-alg2-vs-mh", "PR-9-70b"]), Experiments(), tmp_path)
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n", encoding="utf-8")
    write_markdown(rows, path)
    first = path.read_text(encoding="utf-8")
    write_markdown(rows, path)
    assert path.read_text(encoding="utf-8") == first
    assert first.startswith("before\n") and first.endswith("after\n") and "stale" not in first
    assert "| KS-T1 | weights over HBM: 14B, 72B, 253B, 405B | 34.4; 42.3; 73.8; 59.1 % of HBM |" in first
    assert "### Inputs and load calibration, not evidence" in first
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "kunserve.md").write_text("# Why", encoding="utf-8")
    write_markdown(rows, path)
    linked = path.read_text(encoding="utf-8")
    assert linked.replace("Reasons and ablations: [page/kunserve.md](page/kunserve.md).\n\n", "") == first != linked
    path.write_text("nothing", encoding="utf-8")
    with pytest.raises(LedgerError, match="expected the lines"):
        check_markdown(path)
    with pytest.raises(LedgerError, match="there is no folder"):
        check_markdown(tmp_path / "nowhere" / "page.md")


def test_json_counts_no_inputs(tmp_path: Path) -> None:
    data = as_json(reproduce(chosen(targets(), None, ["KS-T1", "PR-9-70b"]), Experiments(), tmp_path))
    json.dumps(data, allow_nan=False)
    assert data["counts"] == {"reproduced": 1, "direction only": 0, "not reproduced": 0, "not decidable here": 0}
    assert (data["inputs"], len(data["claims"])) == (1, 2)


def test_the_denominator_is_a_fixed_list(tmp_path: Path) -> None:
    """A claim of it that becomes an input, or can no longer be decided, counts as not reproduced."""
    assert len(denominator()) == 116 and denominator() <= targets().keys()
    rows = reproduce(chosen(targets(), None, ["KS-T1", "PR-9-70b"]), Experiments(), tmp_path)
    assert share(rows) == (1, 1)
    (row,) = (row for row in rows if row.target.id == "KS-T1")
    assert share([dataclasses.replace(row, verdict="input")]) == (0, 1)


def test_intervals_are_scaled_with_their_numbers(tmp_path: Path) -> None:
    (row,) = reproduce(chosen(targets(), None, ["KS-2-token"]), Experiments(), tmp_path)
    assert ours(row) == "192"


# --- where a curve meets a level ----------------------------------------------------------------------------------------


def curve(*points: tuple[float, float]) -> list[dict[str, Any]]:
    return [
        {"system": "s", "sweep": "w", "axes": {"x": x}, "metrics": {"m": {"mean": y, "half_width": None}}}
        for x, y in points
    ]


@pytest.mark.parametrize(
    ("points", "rising", "found"),
    [
        ([(1, 1.0), (2, 1.0), (4, 0.8)], False, (3.0, "")),
        ([(4, 0.8), (2, 1.0), (1, 1.0)], False, (3.0, "")),
        ([(1, 1.0), (2, 0.95)], False, (2.0, "all")),
        ([(1, 0.8), (2, 0.7)], False, (1.0, "none")),
        ([(1, 1.0), (2, 0.7), (3, 1.0), (4, 0.8)], False, (1 + 1 / 3, "")),
        ([(1, 0.5), (2, 0.8), (4, 1.0)], True, (3.0, "")),
        ([(1, 0.9), (2, 0.8), (4, 1.0)], True, (3.0, "")),
        ([(1, 0.5), (2, 0.8)], True, (2.0, "none")),
        ([(1, 0.95), (2, 1.0)], True, (1.0, "all")),
    ],
)
def test_a_curve_meets_a_level(points: list[tuple[float, float]], rising: bool, found: tuple[float, str]) -> None:
    at, beyond = crossing(curve(*points), "x", "m", 0.9, rising=rising)
    assert (pytest.approx(at), beyond) == found


# --- evaluators on hand-made results ------------------------------------------------------------------------------------


def write_summary(out: Path, name: str, cells: list[dict[str, Any]]) -> Results:
    (out / name).mkdir(parents=True)
    (out / name / "summary.json").write_text(json.dumps({"cells": cells, "claims": []}), encoding="utf-8")
    return Results(out)


def rated(system: str, *attainments: float) -> list[dict[str, Any]]:
    """Attainment of a system at rate scales 1, 2, 3, ..."""
    return [
        {
            "system": system,
            "sweep": "hyperbolic-rate",
            "axes": {"rate_scale": float(rate)},
            "metrics": {"ttft_attainment": {"mean": attainment, "half_width": 0.001}},
        }
        for rate, attainment in enumerate(attainments, 1)
    ]


def test_rates_that_systems_hold(tmp_path: Path) -> None:
    baselines = rated("muxserve++", 1.0, 0.98, 0.5) + rated("s-partition", 0.9, 0.8, 0.7) + rated("qlm", 0.2, 0.1, 0.1)
    results = write_summary(tmp_path, "prism_fig07", rated("prism", 1.0, 1.0, 0.98) + baselines)
    found = DECIDERS["PR-7-rate-hyp"].decide(results).quantities
    assert [quantity.label for quantity in found] == ["MuxServe++", "S-Partition (at least)"]
    assert [quantity.value for quantity in found] == pytest.approx([2.5 / 1.5, 2.5])


def test_rates_outside_the_sweep_decide_nothing(tmp_path: Path) -> None:
    everybody = [cell for system in ("prism", "muxserve++", "s-partition", "qlm") for cell in rated(system, 1.0, 1.0)]
    results = write_summary(tmp_path, "prism_fig07", everybody)
    with pytest.raises(MissingError, match="Prism and MuxServe\\+\\+ both hold 99 % at every rate"):
        DECIDERS["PR-7-rate-hyp"].decide(results)


def test_latency_over_stages(tmp_path: Path) -> None:
    def staged(slow_pp4: float) -> list[dict[str, Any]]:
        seconds = {"vllm-dp": 1.0, "pp2": 2.0, "pp4": slow_pp4, "pp8": 4.0}
        return [
            {
                "system": system,
                "sweep": "degree",
                "axes": {"rate_scale": 20},
                "metrics": {name: {"mean": value, "half_width": 0.1} for name in ("ttft_mean_s", "tpot_mean_s")},
            }
            for system, value in seconds.items()
        ]

    for place, (pp4, verdict) in enumerate([(3.0, "reproduced"), (1.0, "direction only")]):
        results = write_summary(tmp_path / str(place), "kunserve_fig05", staged(pp4))
        assert judge(targets()["KS-5"], DECIDERS["KS-5"].decide(results)) == verdict
