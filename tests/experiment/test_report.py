"""What the terminal shows of a summary: numbers with units and intervals, verdicts, cells to be careful with."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from fineserve_sim.experiment.show.report import report


def cell(system: str, slo_scale: float, load: str, attainment: float | None, flags: list[str]) -> dict[str, Any]:
    half_width = None if attainment is None else 0.0123
    return {
        "sweep": "slo",
        "system": system,
        "title": system.title(),
        "axes": {"slo_scale": slo_scale, "load": load, "rate_scale": 8.0},
        "seeds": 3,
        "metrics": {
            "ttft_attainment": {"mean": attainment, "half_width": half_width},
            "decode_throughput_tokens_per_s": {"mean": 2345.6, "half_width": 12.3},
            "goodput_per_s": {"mean": 3.14159, "half_width": None},
        },
        "flags": flags,
    }


def claim(verdict: str, paper: Any = 2.2, ours: Any = 2.0) -> dict[str, Any]:
    half_width = 0.05 if isinstance(ours, float) else None
    return {
        "id": f"claim-{verdict.split(maxsplit=1)[0]}",
        "paper": paper,
        "ours": ours,
        "half_width": half_width,
        "measure": "ratio",
        "verdict": verdict,
        "note": "",
    }


def shown(cells: list[dict[str, Any]], claims: list[dict[str, Any]] | None = None, **more: Any) -> str:
    console = Console(width=160, force_terminal=False, color_system=None)
    with console.capture() as capture:
        summary = {"cells": cells, "claims": claims or [], "step_times": {}, "warnings": []} | more
        console.print(report(summary))
    return capture.get()


def row(text: str, *words: str) -> list[str]:
    """The words of the one line that holds all of ``words``."""
    found = [line.split() for line in text.splitlines() if all(word in line.split() for word in words)]
    assert len(found) == 1, (words, text)
    return found[0]


def test_a_sweep_is_a_table_a_metric_with_systems_down_and_the_axis_across() -> None:
    cells = [
        cell(system, scale, load, (scale - 1) / scale - 0.1 * (system == "static") - 0.2 * (load == "B"), [])
        for load in ("A", "B")
        for system in ("mine", "static")
        for scale in (20.0, 5.0)
    ]
    attainment, throughput = shown(cells).split("slo: Decode throughput (tokens/s) by SLO scale")
    assert "slo: TTFT SLO attainment (%) by SLO scale" in attainment
    assert row(attainment, "Load", "System") == ["Load", "System", "5", "20"]
    assert row(attainment, "A", "Mine") == ["A", "Mine", "80.0", "±", "1.2", "95.0", "±", "1.2"]
    assert row(attainment, "B", "Mine") == ["B", "Mine", "60.0", "±", "1.2", "75.0", "±", "1.2"]
    assert row(attainment, "50.0") == ["Static", "50.0", "±", "1.2", "65.0", "±", "1.2"]
    assert row(throughput, "A", "Mine") == ["A", "Mine", "2,346", "±", "12", "2,346", "±", "12"]


def test_a_sweep_of_one_point_is_one_table_of_metrics() -> None:
    text = shown([cell("mine", 5.0, "A", 0.5, []), cell("static", 5.0, "A", None, [])])
    assert "TTFT SLO attainment (%)" in text
    assert row(text, "Mine")[:8] == ["Mine", "50.0", "±", "1.2", "2,346", "±", "12", "3.14"]
    assert row(text, "Static")[:2] == ["Static", "–"]


def test_claims_show_the_papers_value_ours_and_the_verdict_and_are_counted() -> None:
    claims = [
        claim("reproduced"),
        claim("reproduced", "> 1", None),
        claim("direction only", ["A:0", "B:1"], ["B:1", "A:0"]),
        claim("input"),
    ]
    text = shown([cell("mine", 5.0, "A", 0.5, [])], claims)
    assert row(text, "claim-direction")[1:] == ["ratio", "A:0", "B:1", "B:1", "A:0", "direction", "only"]
    assert row(text, "claim-input") == ["claim-input", "ratio", "2.2", "2.00", "±", "0.05", "input"]
    assert row(text, ">")[-2:] == ["–", "reproduced"]
    assert "2 reproduced, 1 direction only, 1 input" in text
    assert "not reproduced" not in text


def test_flags_name_their_cells_and_end_after_a_dozen() -> None:
    common = [cell("mine", float(scale), "A", 0.5, ["short run"]) for scale in range(1, 4)]
    text = shown(common)
    assert "short run: Mine, SLO scale 1, Load A, Rate scale 8 and 2 other cells" in text
    many = [cell("mine", float(scale), "A", 0.5, [f"flag {scale}"]) for scale in range(1, 16)]
    assert sum(line.startswith("  flag ") for line in shown(many).splitlines()) == 12
    assert "and 3 more flags" in shown(many)
    assert "Handle with care" not in shown([cell("mine", 5.0, "A", 0.5, [])])


def test_what_step_times_rest_on_is_said_and_warned_of() -> None:
    shares = {"measured": 0.712, "fitted": 0.0, "roofline": 0.2, "assumed": 0.088}
    cells = [cell("mine", 5.0, "A", 0.5, ["short run"])]
    text = shown(cells, step_times={"shares": shares}, warnings=["beyond the measured latency tables: lm_head 4.0%"])
    assert "of the engines' time: 71% measured, 0% fitted, 20% roofline, 9% assumed" in text
    assert text.index("Handle with care") < text.index("lm_head 4.0%") < text.index("short run")
