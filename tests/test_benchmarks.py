"""The speed benchmark: it counts what it says, merging pays in events (which are exact; seconds are not), and its ratios hold
for one and the same work."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from fineserve_sim.systems import load_systems

ROOT = Path(__file__).parents[1]
WORKLOAD_10K = ROOT.parent / "shared" / "bench" / "workload_10k.csv"
REQUESTS = 1000
KEYS = {
    "machine",
    "requests",
    "requests_per_cpu_s",
    "iterations_per_cpu_s",
    "events",
    "iterations",
    "loop_s",
    "startup_s",
    "process_s",
    "peak_mb",
    "ttft_s",
    "tpot_s",
}
PLAIN_KEYS = {"plain_events", "plain_requests_per_cpu_s", "event_ratio", "speed_ratio", "same_results"}


@pytest.fixture(scope="module")
def bench() -> dict[str, ModuleType]:
    """The modules of the folder benchmarks, which is no installed package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from benchmarks import cluster_costs, costs, engine, executors, peers, record, scaling

        return {
            "engine": engine,
            "peers": peers,
            "scaling": scaling,
            "costs": costs,
            "cluster_costs": cluster_costs,
            "record": record,
            "executors": executors,
        }


@pytest.fixture(scope="module")
def counts(bench: dict[str, ModuleType]) -> Callable[..., dict[str, float]]:
    """Counters of a 1,000-request run with and without merging, after checking that both give the same bits."""

    def count(stretch: float = 1.0, replicas: int = 1, colocated: bool = False) -> dict[str, float]:
        engine = bench["engine"]
        trace = engine.stretch(engine.workload(REQUESTS), stretch)
        scenario = engine.colocated(trace) if colocated else engine.solo(trace, replicas)
        result, measured = engine.measure(scenario, repeat=1)
        rows: dict[str, float] = measured | engine.against_plain(scenario, result, repeat=1)
        assert rows["same_results"]
        assert np.isfinite(result.finish_s).all(), "every request finishes at this load"
        return rows

    return count


def test_the_drawn_workload_has_the_published_law(bench: dict[str, ModuleType]) -> None:
    trace = bench["engine"].workload(20_000)
    assert len(trace) / trace.arrival_s[-1] == pytest.approx(8.2, rel=0.03)
    assert np.median(trace.prompt_tokens) == pytest.approx(485, rel=0.03)
    assert np.median(trace.output_tokens) == pytest.approx(198, rel=0.03)
    assert (trace.prompt_tokens.max(), trace.output_tokens.max()) == (3000, 1000)
    assert trace.prompt_tokens.mean() == pytest.approx(615, rel=0.05)
    assert trace.output_tokens.mean() == pytest.approx(245, rel=0.05)


def test_solo_needs_six_events_a_request_at_most(counts: Callable[..., dict[str, float]]) -> None:
    """An arrival, its prefill, the span it cuts, its end: the bound of 60,000 events for 10,000 requests, on a tenth."""
    rows = counts()
    assert rows["events"] <= 6 * REQUESTS
    assert rows["plain_events"] >= rows["iterations"] + REQUESTS
    assert rows["event_ratio"] > 2.5


def test_longer_outputs_cost_iterations_and_hardly_events(counts: Callable[..., dict[str, float]]) -> None:
    short, long = counts(), counts(stretch=8)
    assert long["event_ratio"] >= 15
    assert long["iterations"] > 6 * short["iterations"]
    assert long["events"] < 1.25 * short["events"]


def test_replicas_cost_few_events_more(counts: Callable[..., dict[str, float]]) -> None:
    one, eight = counts(), counts(replicas=8)
    assert eight["events"] <= 1.15 * one["events"]


def test_colocated_models_merge_too(counts: Callable[..., dict[str, float]]) -> None:
    """Of an engine's events hardly one comes before its span ends, however often neighbours move that end."""
    rows = counts(colocated=True)
    assert rows["event_ratio"] > 3
    assert rows["events"] <= 7 * REQUESTS
    assert rows["iterations"] > 2 * counts()["iterations"], "four small batches instead of one"


def test_replicas_and_stretch_keep_the_load(bench: dict[str, ModuleType]) -> None:
    engine = bench["engine"]
    trace = engine.workload(REQUESTS)
    assert engine.solo(trace, 8).trace.arrival_s[-1] == trace.arrival_s[-1] / 8
    longer = engine.stretch(trace, 8)
    ratio = longer.output_tokens.sum() / longer.arrival_s[-1] / (trace.output_tokens.sum() / trace.arrival_s[-1])
    assert ratio == pytest.approx(1)


def test_the_published_workload_holds_its_bound_on_events(bench: dict[str, ModuleType]) -> None:
    if not WORKLOAD_10K.exists():
        pytest.skip("shared/bench/workload_10k.csv is not there")
    engine = bench["engine"]
    result = engine.simulate(engine.solo(engine.read_trace(WORKLOAD_10K), 1))
    assert result.events <= 60_000
    assert np.isfinite(result.finish_s).all()


# --- command line ------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/engine.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture
def trace_csv(tmp_path: Path) -> Path:
    path = tmp_path / "three.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0.5,100,20\n0.75,1300,1\n3.0,512,40\n")
    return path


def test_json_has_every_key(trace_csv: Path) -> None:
    done = run("--trace", str(trace_csv), "--json", "--plain", "--profile", "--repeat", "2")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert set(rows) == KEYS | PLAIN_KEYS | {"profile", "plain_profile"}
    assert rows["requests"] == 3
    assert rows["same_results"] is True
    assert rows["requests_per_cpu_s"] == pytest.approx(3 / rows["loop_s"])
    assert rows["startup_s"] + rows["loop_s"] <= rows["process_s"]
    assert set(rows["machine"]) == {"cpu", "cores", "python", "build", "platform"}
    assert sum(row["own_share"] for row in rows["profile"] if "module" in row["code"]) <= 1


def test_counters_of_three_requests_by_hand(trace_csv: Path) -> None:
    """Under a budget of 512 the prompts of 100, 1,300 and 512 tokens take 1, 3 and 1 steps, the last of which yields the first
    token; 19, 0 and 39 are left to decode. Each request has ended when the next one comes."""
    rows = json.loads(run("--trace", str(trace_csv), "--json").stdout)
    assert rows["iterations"] == (1 + 19) + 3 + (1 + 39)


def test_wrong_use_is_one_line(trace_csv: Path) -> None:
    done = run("--trace", str(trace_csv), "--colocated", "--replicas", "2")
    assert done.returncode == 2
    assert "--colocated is a set-up of its own" in done.stderr
    done = run("--trace", str(trace_csv), "--peer", "nobody")
    assert done.returncode == 1
    assert "nobody" in done.stderr
    assert "Traceback" not in done.stderr


# --- peers and scaling -------------------------------------------------------------------------------------------------


def test_mooncake_rows_hold_the_same_requests(bench: dict[str, ModuleType], trace_csv: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.jsonl"
    assert bench["peers"].write_mooncake(trace_csv, target) == (3, 61)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    with trace_csv.open(newline="") as file:
        for row, source in zip(rows, csv.DictReader(file), strict=True):
            assert row["timestamp"] == float(source["arrival_s"]) * 1000
            assert (row["input_length"], row["output_length"]) == (
                int(source["prompt_tokens"]),
                int(source["output_tokens"]),
            )
    assert [row["hash_ids"] for row in rows] == [[0], [1, 2, 3], [4]], "no prompt shares a block with another"


def test_a_peer_that_is_absent_is_named(trace_csv: Path) -> None:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('aisimulate') is not None)"
    if subprocess.run([sys.executable, "-c", code], check=False).returncode:
        pytest.skip("aisimulate is installed here")
    done = run("--trace", str(trace_csv), "--peer", "aisimulate")
    assert done.returncode == 1
    assert "no package 'aisimulate'" in done.stderr


def test_the_slope_is_that_of_a_power_law(bench: dict[str, ModuleType]) -> None:
    x = [1.0, 10.0, 100.0]
    assert bench["scaling"].slope(x, [3 * value**1.5 for value in x]) == pytest.approx(1.5)


def test_events_grow_linearly_with_the_queue(bench: dict[str, ModuleType]) -> None:
    """A burst at each scheduler: waiting requests cause no events."""
    scaling = bench["scaling"]
    for name, (scheduler, _) in scaling.QUEUES.items():
        points = [(size, scaling.burst(size, scheduler)) for size in (50, 100, 200)]
        one = scaling.curve(name, ("requests", "CPU s"), points, "request", 1)
        assert scaling.slope(one.x, one.events) == pytest.approx(1, abs=0.15), name


def test_the_figure_is_drawn_alike_twice(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    scaling = bench["scaling"]
    one = scaling.Curve("requests", "requests", "CPU s", [1.0, 2.0], [1.0, 2.0], [1, 2], 1.0)
    two = scaling.Curve("batch", "sequences", "CPU s", [1.0, 2.0], [1.0, 2.0], [1, 2], 1.0)
    for name in ("a.svg", "b.svg"):
        scaling.draw([one, two], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.slow
def test_every_cost_is_measured_at_small_sizes(bench: dict[str, ModuleType]) -> None:
    """Each has a name of its own and does some work; the table has a line for each."""
    costs, all_costs = bench["costs"], (*bench["costs"].COSTS, *bench["cluster_costs"].CLUSTER_COSTS)
    measured = [costs.measure(cost, 1, sizes=(25, 48)) for cost in all_costs]
    assert len({(one.name, one.unit) for one in measured}) == len(all_costs)
    assert all(min(one.cost_s) > 0 and np.isfinite(one.slope) for one in measured)
    lines = costs.table(measured).splitlines()[1:]
    assert [line.startswith(one.name) for line, one in zip(lines, measured, strict=True)] == [True] * len(measured)


def test_a_cost_above_its_bound_is_marked(bench: dict[str, ModuleType]) -> None:
    costs = bench["costs"]
    quick = costs.Measured("thing", "a look", [10, 20], [1e-4, 2e-4], 1.0, 3e-4)
    slow = costs.Measured("thing", "a look", [10, 20], [1e-4, 4e-4], 2.0, 3e-4)
    assert quick.holds and not slow.holds
    assert "ABOVE" not in costs.table([quick]) and costs.table([slow]).endswith("400 us  ABOVE")


def test_the_hash_of_a_record_is_of_rows_in_any_order(bench: dict[str, ModuleType]) -> None:
    """And of every bit of them."""

    def hashed(*parts: list[int], engine: int = 0) -> str:
        digest = bench["record"].Digest()
        for rows in parts:
            columns = {name: np.array(rows) for name in digest.COLUMNS}
            columns |= {"finish_s": np.array(rows) + 0.5, "engine": np.full(len(rows), engine)}
            digest.add(SimpleNamespace(ended=SimpleNamespace(**columns)))
        return str(digest.text())

    assert hashed([0, 1, 2]) == hashed([2], [1, 0]) != hashed([0, 1])
    assert len({hashed([0, 1, 2]), hashed([0, 1, 3]), hashed([0, 1, 2], engine=1), hashed([1, 0, 0])}) == 4


@pytest.mark.parametrize("system", ["fineserve", "static*", "prism", "muxserve++"])
def test_the_record_in_small(bench: dict[str, ModuleType], system: str) -> None:
    """A hundredth of the cluster, the first minutes: every request ends, and the hash is that of docs/performance.md. Another
    one means other results: write it there, and measure the record again."""
    record, page = bench["record"], (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    first = record.measure(record.TIERS["hour"], system, 0.01, 0.05, 0)
    assert first["hash"] != record.measure(record.TIERS["hour"], system, 0.01, 0.05, 1)["hash"]
    assert f"`{first['hash']}` ({load_systems()[system].title})" in page
    assert first["models"] == 20 and first["gpus"] == 8
    assert first["requests"] == first["finished"] > 200
    assert first["within_ttft"] > 0.9 and first["gpu_hours"] == pytest.approx(8 * 180 / 3600, rel=0.1)


@pytest.mark.slow
def test_the_record_measures_each_system_in_a_process_of_its_own(
    bench: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["day", "--scale", "0.05", "--part", "0.0005", "--json"]
    assert bench["record"].main(options) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["system"] for row in rows] == ["fineserve", "prism"]
    assert all(row["peak_mb"] > 30 and row["cpu_s"] > 0 for row in rows)


@pytest.mark.slow
def test_executors_are_measured_once_their_workers_are_there(bench: dict[str, ModuleType]) -> None:
    executors = bench["executors"]
    digests: tuple[set[str], set[str]] = (set(), set())
    cells, whole = executors.experiment(20, 2), executors.experiment(40, 1)
    found = {f"local {jobs}": executors.measured("local", jobs, cells, whole, digests) for jobs in (1, 2)}
    assert all(tuple(row) == executors.MEASURES and min(row.values()) > 0 for row in found.values())
    assert [len(each) for each in digests] == [1, 1], "the same bytes"
    one, two = ({**found[f"local {jobs}"], "cells_s": 8.0 / jobs} for jobs in (1, 2))
    first, second = executors.lines({"local 1": one, "local 2": two})
    assert "cells 1.00" in first and "cells 2.00" in second


def test_the_page_of_offloading_has_the_table_that_its_script_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import kv_offloading

    page = (ROOT / "docs" / "offloading.md").read_text(encoding="utf-8")
    assert kv_offloading.table(kv_offloading.engines()) in page
    many, few = kv_offloading.engine("llama-2-7b", "fp16", 1), kv_offloading.engine("llama-3.1-8b", "fp16", 1)
    assert many.break_even_tokens(1e9) is None and few.break_even_tokens(1e15) == kv_offloading.BLOCK_TOKENS
    breaks = [few.break_even_tokens(link * 1e9) or 10**9 for link in kv_offloading.LINKS_GB_PER_S]
    assert breaks == sorted(breaks, reverse=True)
