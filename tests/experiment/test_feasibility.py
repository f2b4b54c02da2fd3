"""What no number of GPUs can do: against simulated clusters of any size, and as it is told."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fineserve_sim.experiment.show.out_of_reach import out_of_reach_lines
from fineserve_sim.experiment.show.sizes import headline, reasons
from fineserve_sim.experiment.sizing import axis_of, goals, size
from fineserve_sim.experiment.sizing.bisection import first_integer
from fineserve_sim.experiment.sizing.changes import closest, remedies, size_changed
from fineserve_sim.experiment.sizing.feasibility import Alone, Feasibility
from fineserve_sim.experiment.sizing.probe import METRICS, Prober
from fineserve_sim.experiment.sizing.report import as_json

BIG = {"id": "big", "model": "qwen2.5-72b", "precision": "awq", "tp": 2}
YI = {"id": "yi", "model": "yi-34b", "precision": "awq"}
SMALL = {"id": "small", "model": "llama-3.2-1b", "precision": "fp16"}
ENTRIES = (SMALL, YI, {"id": "eight", "model": "llama-3.1-8b", "precision": "fp8"})
SYSTEMS = ("static*", "fineserve", "prism", "muxserve++", "dedicated", "s-partition")

Row = tuple[float, str, int, int]
"""When a request comes, for which model, prompt and output tokens."""


def asked(
    folder: Path, models: list[dict[str, Any]], rows: list[Row], slo: dict[str, Any], targets: str, **changed: Any
) -> Prober:
    """Questions about a trace of these requests."""
    lines = ["arrival_s,model,prompt_tokens,output_tokens", *(",".join(map(str, row)) for row in rows)]
    (folder / "t.csv").write_text("\n".join(lines), encoding="utf-8")
    document = {
        "fineserve": 1,
        "title": "Asked",
        "cluster": {"gpu": "h100-sxm", "count": 2},
        "models": models,
        "workload": {"trace": "t.csv"},
        "slo": slo,
        "systems": ["static*"],
        "seeds": 1,
    }
    (folder / "asked.yaml").write_text(json.dumps(document | changed), encoding="utf-8")
    return Prober(folder / "asked.yaml", folder / "out", goals([targets]), jobs=1)


def bound_of(prober: Prober, system: str, gpus: int) -> Feasibility:
    found = prober.bound(system, "cluster.count", gpus)
    assert found is not None
    return found


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[Row]]:
    models = draw(st.lists(st.sampled_from(ENTRIES), min_size=1, max_size=2, unique_by=lambda entry: str(entry["id"])))
    names = [str(model["id"]) for model in models]
    length = st.sampled_from([1, 60, 700, 2048, 2100, 3900, 4095, 4096, 9000])
    rows = draw(
        st.lists(
            st.tuples(st.floats(0, 4), st.sampled_from(names), length, st.integers(1, 80)), min_size=1, max_size=10
        )
    )
    return models, sorted(rows)


@given(
    loads(),
    st.sampled_from(SYSTEMS),
    st.sampled_from([0.01, 0.05, 0.2, 1.0]),
    st.sampled_from([0.004, 0.009, 0.02, None]),
    st.sampled_from([0.2, 0.8, None]),
    st.sampled_from(["missed", "whole"]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
def test_no_cluster_of_any_size_is_above_the_bound(
    tmp_path_factory: pytest.TempPathFactory,
    load: tuple[list[dict[str, Any]], list[Row]],
    system: str,
    ttft_s: float,
    tpot_s: float | None,
    e2e_s: float | None,
    cut: str,
) -> None:
    limits = {name: value for name, value in (("ttft_s", ttft_s), ("tpot_s", tpot_s), ("e2e_s", e2e_s)) if value}
    prober = asked(
        tmp_path_factory.mktemp("drawn"), *load, limits | {"cut": cut}, "ttft:0.99,all:0.99", systems=[system]
    )
    for gpus in (1, 2, 4):
        found, bound = prober.ask(system, "cluster.count", gpus), bound_of(prober, system, gpus)
        for metric, share in found.shares.items():
            assert share <= bound.bounds[metric] + 1e-12
        assert not (bound.hopeless and found.holds)


ROWS: list[Row] = [
    (1000.0 * at, model, prompt, output)
    for at, (model, prompt, output) in enumerate(
        [
            *[("small", tokens, 9) for tokens in (1, 500, 2048, 2049, 7000, 30000)],
            *[("yi", *lengths) for lengths in ((10, 5), (900, 5), (4000, 90), (4096, 1), (4500, 3), (3000, 900))],
        ]
    )
]


@pytest.mark.parametrize(("metric", "system"), [*product(METRICS, ("static*", "prism")), ("all", "fineserve")])
def test_requests_one_by_one_come_to_the_bound_itself(metric: str, system: str, tmp_path: Path) -> None:
    """None meets another, so what is within reach is reached."""
    limits = {"ttft_s": 0.2, "tpot_s": 0.0109, "e2e_s": 5.0}
    prober = asked(tmp_path, [SMALL, YI], ROWS, limits, f"{metric}:0.9", systems=[system])
    (share,) = prober.ask(system, "cluster.count", 2).shares.values()
    (bound,) = bound_of(prober, system, 2).bounds.values()
    assert 0.2 < bound < 0.95 and share == bound


def test_each_model_says_why_and_what_would_help(tmp_path: Path) -> None:
    rows: list[Row] = [(20.0 * at, "big", tokens, 50) for at, tokens in enumerate((500, 8000, 600, 5000, 700))]
    rows += [(100.0 + at, "yi", tokens, 20) for at, tokens in enumerate((300, 4080, 5000))]
    prober = asked(tmp_path, [BIG, YI], rows, {"ttft_s": 1.0}, "all:0.95")
    assert out_of_reach_lines(bound_of(prober, "static*", 4).told()["models"]) == [
        "big (TP 2): 40.0 % of its requests cannot have a first token within 1 s (prompts above 4,207 tokens); "
        "fp8-kv16 or TP 8 would do.",
        "yi (TP 1): 66.7 % of its requests do not fit into its context of 4,096 tokens; "
        "no other precision or degree would do.",
    ]
    tight = asked(tmp_path, [BIG], rows[:5], {"ttft_s": 1e-4, "tpot_s": 1e-4, "e2e_s": 0.01}, "all:0.95")
    for metric, told in (
        ("ttft", "100.0 % of its requests cannot have a first token within 0.0001 s (no prompt can)"),
        ("tpot", "100.0 % of its requests cannot have a token each 0.0001 s"),
        ("e2e", "100.0 % of its requests cannot end within 0.01 s"),
    ):
        (line,) = out_of_reach_lines(bound_of(_for(tight, f"{metric}:0.5"), "static*", 4).told()["models"])
        assert line == f"big (TP 2): {told}; no other precision or degree would do."


def _for(prober: Prober, target: str) -> Prober:
    return Prober(prober.path, prober.out, goals([target]), jobs=1)


def test_kv_memory_may_be_what_a_prompt_needs_more_of(tmp_path: Path) -> None:
    """On a GPU of 24 GB an 8B model in 16 bits leaves room for some thousand tokens."""
    eight = {"id": "eight", "model": "llama-3.1-8b", "precision": "fp16"}
    rows: list[Row] = [(0.0, "eight", 50_000, 5)]
    prober = asked(tmp_path, [eight], rows, {"ttft_s": 60.0}, "all:0.9", cluster={"gpu": "l4", "count": 1})
    bound = bound_of(prober, "static*", 1)
    (line,) = out_of_reach_lines(bound.told()["models"])
    assert line.startswith("eight (TP 1): 100.0 % of its requests need more KV memory than the ")
    assert not prober.ask("static*", "cluster.count", 1).holds


def test_out_of_reach_is_not_searched_and_a_way_out_is(tmp_path: Path) -> None:
    rows: list[Row] = [(20.0 * at, "big", tokens, 50) for at, tokens in enumerate((500, 8000, 600, 5000, 700))]
    prober, gpus = asked(tmp_path, [BIG], rows, {"ttft_s": 1.0}, "ttft:0.99"), axis_of("gpus")
    (none,) = size(prober, gpus, most_gpus=8)
    assert none.best is None and not none.probes and none.bound is not None
    changed = list(size_changed([(none, prober)], gpus, most_gpus=8, precision=0.1))
    found = [(*map(str, each.changes), each.best and each.best.value) for each, _ in changed]
    assert found == [("big in fp8-kv16", 2), ("big at TP 8", 8)]
    answers = [none, *(answer for answer, _ in changed)]
    data = as_json(answers, gpus, prober.goals, "", found=False)
    assert headline(data) == (
        "No number of h100-sxm keeps 99 % within the limit of TTFT: some requests are out of reach even alone on idle GPUs. "
        "With big in fp8-kv16 the cheapest that keeps them: Static* on 2 h100-sxm, $6.98 an hour."
    )
    assert (
        reasons(data["systems"])[0]
        == "None for Static*: 60.0 % at most are within reach, each model alone on idle GPUs."
    )


@pytest.mark.parametrize("over", ["rate", "slo_scale"])
def test_no_rate_and_no_scale_of_limits_brings_a_longer_context(over: str, tmp_path: Path) -> None:
    prober = asked(tmp_path, [YI], [(0.0, "yi", 10, 5), (9.0, "yi", 5000, 5)], {"ttft_s": 1.0}, "ttft:0.9")
    (answer,) = size(prober, axis_of(over))
    assert answer.best is None and not answer.probes
    assert closest([(answer, prober)]) == (answer, prober)


def test_what_may_hold_at_another_scale_is_searched(tmp_path: Path) -> None:
    """At the file's own scale nothing is within the limit; at 64 times that all is."""
    prober = asked(tmp_path, [SMALL], [(0.0, "small", 900, 5)], {"ttft_s": 0.002}, "ttft:0.9")
    assert bound_of(prober, "static*", 1).hopeless
    (answer,) = size(prober, axis_of("slo_scale"), precision=0.2)
    assert answer.best is not None


def test_a_flat_curve_ends_the_search(tmp_path: Path) -> None:
    """Each model has its GPU, and a burst is late: more GPUs stay empty."""
    rows: list[Row] = [(0.0, "small", 2000, 50) for _ in range(40)]
    prober = asked(tmp_path, [SMALL], rows, {"ttft_s": 0.1}, "ttft:0.9", systems=["dedicated"])
    (answer,) = size(prober, axis_of("gpus"), most_gpus=16)
    assert answer.best is None and answer.bound is None
    assert [probe.value for probe in answer.probes] == [16, 15]
    assert answer.why.endswith("; the same at 16")


@pytest.mark.parametrize(
    ("slo", "phase"), [({"ttft_s": 1.0}, "prefill_s"), ({"ttft_s": 9.0, "tpot_s": 0.012}, "decode_s")]
)
def test_where_all_is_within_reach_the_worst_model_is_tried_in_faster_ways(
    slo: dict[str, float], phase: str, tmp_path: Path
) -> None:
    """A burst is late, or decodes side by side are slow. What is tried has a clearly faster prefill or decode, and room."""
    big = {"id": "big", "model": "qwen2.5-32b", "precision": "awq"}
    rows: list[Row] = [(0.0, "big", 1000, 60) for _ in range(16)] + [(90.0, "small", 10, 2)]
    prober, gpus = asked(tmp_path, [big, SMALL], rows, slo, "all:0.99", systems=["dedicated"]), axis_of("gpus")
    (none,) = size(prober, gpus, most_gpus=4)
    assert none.best is None and none.bound is None
    found = remedies(none, prober, gpus)
    assert found and all(change.model == "big" for (change,) in found)
    now = alone_of(prober, "big")
    for changes in found:
        changed = alone_of(prober.changed(changes, 4), "big")
        assert getattr(changed, phase) <= 0.9 * getattr(now, phase)
        assert changed.kv_tokens >= now.kv_tokens / 4
    tried = list(size_changed([(none, prober)], gpus, most_gpus=4, precision=0.1))
    assert [answer.changes for answer, _ in tried] == found


def alone_of(prober: Prober, model: str) -> Alone:
    return next(each for each in bound_of(prober, "dedicated", 4).models if each.model == model)


def test_two_that_are_alike_end_a_bisection_and_others_do_not() -> None:
    values: list[float] = []

    def holds(value: float) -> bool:
        values.append(value)
        return value in (10, 11)

    assert first_integer(1, 16, holds, lambda some, other: False) == 10
    values.clear()
    assert first_integer(1, 16, holds, lambda some, other: True) is None
    assert values == [16, 15]


def test_prefixes_and_pipelines_have_no_bound(tmp_path: Path) -> None:
    prober = asked(
        tmp_path, [SMALL], [(0.0, "small", 30000, 5)], {"ttft_s": 0.01}, "ttft:0.9", systems=["flexinfer", "vllm-pp"]
    )
    assert [prober.bound(system, "cluster.count", 2) for system in ("flexinfer", "vllm-pp")] == [None, None]


def test_none_comes_with_the_closest_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fineserve_sim.cli.app import app

    rows: list[Row] = [(0.0, "yi", 10, 5), (9.0, "yi", 5000, 5), (10.0, "small", 10, 5)]
    prober = asked(tmp_path, [YI, SMALL], rows, {"ttft_s": 1.0}, "ttft:0.9")
    arguments = ["size", str(prober.path), "--target", "ttft:0.9", "--most-gpus", "4", "--jobs", "1"]
    app([*arguments, "--out", str(tmp_path / "found")], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "yi (TP 1): 50.0 % of its requests do not fit into its context of 4,096 tokens" in shown
    assert "Closest: Static* on 2 h100-sxm" in shown and "GPU, Static*" in shown
    summary = json.loads((tmp_path / "found" / "summary.json").read_text(encoding="utf-8"))
    assert summary["answer"]["choice"]["holds"] is False
    data = json.loads((tmp_path / "found" / "size.json").read_text(encoding="utf-8"))
    assert data["systems"][0]["out_of_reach"]["models"][0]["causes"]["context"] == 1
    assert "do not fit into its context" in (tmp_path / "found" / "report.html").read_text(encoding="utf-8")


def test_compare_says_why_and_searches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fineserve_sim.cli.app import app

    rows = [f"{20 * at},big,{tokens},50" for at, tokens in enumerate((500, 8000, 600, 5000, 700))]
    (tmp_path / "t.csv").write_text("\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows]), encoding="utf-8")
    arguments = ["compare", str(tmp_path / "t.csv"), "--system", "fineserve", "--model", "big=qwen2.5-72b:awq:2"]
    arguments += ["--gpus", "2", "--ttft-slo", "1", "--target", "ttft:0.99", "--jobs", "1"]
    arguments += ["--out", str(tmp_path / "out")]
    app(arguments, standalone_mode=False)
    shown = capsys.readouterr()
    assert "No number of h100-sxm keeps 99 % within the limit of TTFT: 60.0 % at most are within reach" in shown.out
    assert "With big in fp8-kv16, FineServe on 2 h100-sxm keeps the targets with 100.0 %." in shown.out
    assert "FineServe on 2 holds at no rate." in shown.out
    assert shown.err.count("count") == 1 and "rate_scale" not in shown.err


def test_requests_that_are_all_longer_than_the_context_are_no_warning(tmp_path: Path) -> None:
    prober = asked(tmp_path, [YI], [(0.0, "yi", 4096, 1)], {"ttft_s": 0.01}, "all:0.9")
    found = prober.ask("static*", "cluster.count", 1)
    assert found.shares == {"slo_attainment": 0.0} and bound_of(prober, "static*", 1).bounds == found.shares
