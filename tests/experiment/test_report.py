"""What the terminal shows of a summary: numbers with units and intervals, verdicts, cells to be careful with."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from fineserve_sim.experiment.results.answer import answer_of
from fineserve_sim.experiment.results.misses import CAUSES
from fineserve_sim.experiment.show.report import report


def cell(system: str, slo_scale: float, load: str, attainment: float | None, flags: list[str]) -> dict[str, Any]:
    half_width = None if attainment is None else 0.0123
    both = {"mean": attainment, "half_width": half_width}
    number = {"mean": 1.5, "half_width": None}
    latencies = [f"{moment}_p{percent}_s" for moment in ("ttft", "tpot", "e2e") for percent in (50, 99)]
    more = ("token_throughput_per_s", "arrival_rate_per_s")
    gpu = {"gpu": 0, "node": 0, "models": ["A", "B"], "weights_bytes": 2**31, "kv_bytes": 2**33, "kv_left_bytes": 2**32}
    gpu |= {
        "kv_least_bytes": 0,
        "busy": 0.9,
        "compute": 0.8,
        "bandwidth": 0.1,
        "waiting": 0.7,
        "kv_short": 0,
        "slots_short": 0,
    }
    misses = dict.fromkeys(CAUSES, 0)
    return {
        "sweep": "slo",
        "system": system,
        "title": system.title(),
        "axes": {"slo_scale": slo_scale, "load": load, "rate_scale": 8.0},
        "cluster": {"gpu": "h100-sxm", "count": 1},
        "seeds": 3,
        "requests": 100,
        "misses": misses | {"late": 10, "dropped": 40},
        "ttft_slo_s": {"A": 0.5, "B": 2.0},
        "cost": {"usd_per_hour": 3.5, "usd_per_mtoken": None, "usd_per_1000_within": 0.25},
        "models_move": False,
        "derived": True,
        "models": {
            "A": {"requests": 60, "within": 50, "misses": misses | {"late": 10}, "instances": [[0]]},
            "B": {"requests": 40, "within": 0, "misses": misses | {"dropped": 40}, "instances": [[0]]},
        },
        "gpus": [gpu],
        "unplaced": [],
        "binds": [{"what": "compute", "misses": 50, "models": {"A": 10, "B": 40}, "gpus": [0], "waiting": 0.7}],
        "metrics": {
            "ttft_attainment": both,
            "slo_attainment": both,
            "decode_throughput_tokens_per_s": {"mean": 2345.6, "half_width": 12.3},
            **{name: number | {"by_model": {"A": number, "B": {"mean": None}}} for name in (*latencies, *more)},
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


def shown(
    cells: list[dict[str, Any]], claims: list[dict[str, Any]] | None = None, *, width: int = 240, **more: Any
) -> str:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        price = {"usd_per_gpu_hour": 3.5, "default": True, "source": "list price of X", "read_on": "2026-01-02"}
        summary = {"cells": cells, "claims": claims or [], "step_times": {}, "warnings": [], "price": price} | more
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


def test_one_place_is_a_table_of_systems_with_their_misses_in_percent() -> None:
    text = shown([cell("mine", 5.0, "A", 0.5, []), cell("static", 5.0, "A", None, [])])
    assert row(text, "System")[:9] == ["System", "GPUs", "Within", "limits", "%", "late", "%", "dropped", "%"]
    assert row(text, "Mine", "50.0")[:7] == ["Mine", "1", "50.0", "±", "1.2", "10.0", "40.0"]
    assert row(text, "Static", "10.0")[:3] == ["Static", "1", "–"]
    assert "rejected" not in text  # a cause without a miss has no column


def test_the_answer_its_models_and_its_gpus() -> None:
    cells = [cell("mine", 5.0, "A", 0.5, []), cell("static", 5.0, "A", 0.4, [])]
    cells[1]["unplaced"] = [{"model": "B", "why": "it needs 9 GiB"}]
    text = shown(cells, answer=answer_of(cells, 1))
    assert "None of 2 systems keeps 95 % of the requests within their limits on 1 h100-sxm." in text
    assert "Closest: Mine on 1 h100-sxm: 50.0 ± 1.2 %, 45.0 points below." in text
    assert "Cost of 1 h100-sxm: $3.50 an hour, $0.25 a thousand requests within limits ($3.50 a GPU-hour" in text
    assert " by default, list price of X of 2026-01-02; --price)." in text
    assert "Misses: 40.0 % dropped, 10.0 % late (first token)." in text
    assert "Worst: B 0 % within." in text
    assert "Binds: compute (100 % of misses: B, A)." in text
    assert "Limits: TTFT 0.5 s (A) to 2 s (B). Load: load A, rate scale 8, SLO scale 5, 1.5 requests/s" in " ".join(
        text.split()
    )
    assert "no other rate was run here." in " ".join(text.split())
    assert "UNPLACED on 1 h100-sxm (it needs 9 GiB): B (40.0 %) under Static." in text
    assert row(text, "B", "100.0")[:4] == ["B", "0", "40", "0.0"] and "never" in row(text, "B", "100.0")
    assert row(text, "A,", "B")[3:] == ["2.0", "8.0", "4.0", "0.0", "90", "80", "10", "70"]


def test_a_system_that_keeps_the_targets_is_taken_the_cheapest_first() -> None:
    cells = [cell("dear", 5.0, "A", 0.99, []), cell("cheap", 5.0, "A", 0.96, [])]
    cells[0]["cost"] = cells[0]["cost"] | {"usd_per_hour": 7.0}
    assert "Take Cheap on 1 h100-sxm, which keeps 95 %" in shown(cells, answer=answer_of(cells, 1))
    unsure = answer_of([cell("mine", 5.0, "A", 0.955, [])], 1)
    assert "0.5 points above, within its interval" in shown([cell("mine", 5.0, "A", 0.955, [])], answer=unsure)


def test_a_cluster_that_keeps_the_targets_without_a_model_says_so_at_once() -> None:
    taken = cell("mine", 5.0, "A", 0.99, []) | {"unplaced": [{"model": "A", "why": "no room"}]}
    assert "4.0 points above. It has no GPU for A." in shown([taken], answer=answer_of([taken], 1))
    coming = taken | {"models_move": True}
    assert "It has no GPU" not in shown([coming], answer=answer_of([coming], 1))


def test_where_nothing_holds_the_cluster_that_the_search_found_comes_first() -> None:
    cells = [cell("mine", 5.0, "A", 0.9, []), cell("static", 5.0, "A", 0.8, [])]
    answer = answer_of(cells, 1)
    assert answer is not None
    margins = {"slo_attainment": {"mean": 0.962, "half_width": 0.008, "margin": 0.012, "sure": True}}
    found = {
        "system": "mine",
        "title": "Mine",
        "value": 3,
        "margins": margins,
        "usd_per_hour": 10.5,
        "most": 16,
        "why": "",
        "not_on": None,
    }
    rate = {"value": 4.0, "fails_at": 5.0, "least": 0.1}
    text = shown(cells, answer=answer | {"search": {"gpus": found, "rate": rate}})
    assert (
        "Take Mine on 3 h100-sxm, $10.50 an hour, the fewest found that keep 95 % of the requests within their limits:"
        in text
    )
    assert "96.2 ± 0.8 %, 1.2 points above." in text
    assert "On 1 none does; closest Mine: 90.0 ± 1.2 %, 5.0 points below." in " ".join(text.split())
    none = found | {"value": None, "why": "at 16: 90 %"}
    text = shown(cells, answer=answer | {"search": {"gpus": none, "rate": rate}})
    assert "on the numbers of h100-sxm that were tried, up to 16 (Mine at 16: 90 %). On 1 none does;" in text
    text = shown(cells, answer=answer | {"search": {"gpus": found | {"not_on": 16}, "rate": rate}})
    assert "1.2 points above (16 fail: more GPUs are another placement)." in text


def twelve_models(system: str, unplaced: str) -> dict[str, Any]:
    """On eight GPUs: four models of a hundred requests without a miss, eight with more and more, of which one has no GPU."""
    shown = cell(system, 5.0, "A", 0.5, [])
    names, none = "abcdefghijkl", dict.fromkeys(CAUSES, 0)
    within = {name: min(100, 13 * at) for at, name in enumerate(names)}
    shown["models"] = {
        name: {"requests": 100, "within": kept, "misses": none | {"late": 100 - kept}, "instances": [[0]]}
        for name, kept in within.items()
    }
    shown |= {"requests": 1200, "misses": none | {"late": sum(100 - kept for kept in within.values())}}
    shown["ttft_slo_s"] = dict.fromkeys(names, 1.0)
    for metric in shown["metrics"].values():
        metric["by_model"] = {name: {"mean": 1.5, "half_width": None} for name in names}
    shown["gpus"] = [shown["gpus"][0] | {"gpu": gpu} for gpu in range(8)]
    return shown | {"unplaced": [{"model": name, "why": "12 models need 243 GiB"} for name in unplaced]}


def test_of_many_models_the_worst_have_rows_and_the_answer_fits_on_a_screen() -> None:
    cells = [twelve_models(f"system {at}", "ab" if at < 3 else "a") for at in range(5)]
    text = shown(cells, answer=answer_of(cells, 1), width=80)
    assert text.count("\n") <= 40
    table = text.partition("Model, ")[2].partition("GPU, ")[0].splitlines()
    assert [line.split()[0] for line in table[1:]] == [*"abcdefgh", "4"]
    assert table[-1].split() == ["4", "others", "400", "100.0"]
    assert "(12 models need 243 GiB): a, b (16.7 %) under System 0, System 1, System 2; a (8.3 %) under System 3," in (
        " ".join(text.split())
    )


@pytest.mark.parametrize("width", [200, 120, 80, 60])
def test_numbers_are_whole_on_narrow_screens(width: int) -> None:
    cells = [cell("mine", 5.0, "A", 0.5, []), cell("static", 5.0, "A", 0.4, [])]
    text = shown(cells, width=width, answer=answer_of(cells, 1))
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert any(line.split()[:5] == ["Mine", "1", "50.0", "±", "1.2"] for line in text.splitlines())


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
    many = [cell("mine", float(scale), "A", 0.5, [f"flag {'x' * scale}"]) for scale in range(1, 16)]
    assert sum(line.startswith("  flag ") for line in shown(many).splitlines()) == 12
    assert "and 3 more flags" in shown(many)
    assert "Handle with care" not in shown([cell("mine", 5.0, "A", 0.5, [])])


def test_flags_that_differ_in_their_number_alone_are_one_line() -> None:
    flags = [["9.5 points > 2"], ["12 points > 2", "no GPU for a-1"], ["10.1 points > 2", "no GPU for a-2"]]
    text = shown([cell("mine", float(scale), "A", 0.5, each) for scale, each in enumerate(flags, 1)])
    assert "9.5 to 12 points > 2: Mine, SLO scale 1, Load A, Rate scale 8 and 2 other cells" in text
    assert "no GPU for a-1: " in text and "no GPU for a-2: " in text


def test_what_step_times_rest_on_is_said_and_warned_of() -> None:
    shares = {"measured": 0.712, "fitted": 0.0, "roofline": 0.2, "assumed": 0.088}
    cells = [cell("mine", 5.0, "A", 0.5, ["short run"])]
    text = shown(cells, step_times={"shares": shares}, warnings=["beyond the measured latency tables: lm_head 4.0%"])
    assert "of the engines' time: 71% measured, 0% fitted, 20% roofline, 9% assumed" in text
    assert text.index("Handle with care") < text.index("lm_head 4.0%") < text.index("short run")
