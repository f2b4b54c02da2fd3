"""``--metrics summary``: the numbers of all requests, and no row of any."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fineserve_traces import Requests, drawn, onoff, trace_file, whole

from fineserve_sim.cluster import outcomes, simulation
from fineserve_sim.cluster.arrivals import Joined
from fineserve_sim.cluster.scenario import EndedRequests
from fineserve_sim.experiment import load_experiment, run_loaded
from fineserve_sim.experiment.file.errors import ConfigError
from fineserve_sim.experiment.results.histogram import RELATIVE_ERROR
from fineserve_sim.experiment.run import run, work, workload
from fineserve_sim.experiment.run.store import Store, _digests

SYSTEMS = 'systems: [fineserve, "prism*"]'
LOAD = ("systems: [fineserve", "systems: [clairvoyant, prism, fineserve")
NOTE = "metrics alone were kept: percentiles come from histograms and are right to 0.5 %"


def both(path: Path, out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The summaries of an experiment whose rows are kept, and of one whose metrics alone are."""
    found = []
    for name in ("rows", "summary"):
        run_loaded(load_experiment(path, quick=True), out / name, jobs=1, summary=name == "summary")
        found.append(json.loads((out / name / "summary.json").read_text(encoding="utf-8")))
    return found[0], found[1]


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two documents differ beyond the last bits of sums; percentiles beyond their bound."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*dict.fromkeys([*one, *other])]
        return [text for key in keys for text in differences(one.get(key), other.get(key), f"{place}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [text for at in range(len(one)) for text in differences(one[at], other[at], f"{place}.{at}")]
    bound = RELATIVE_ERROR if "_p" in place.rpartition("metrics.")[2].partition(".")[0] else 1e-9
    if isinstance(one, float) and isinstance(other, float):
        if "half_width" in place and bound == RELATIVE_ERROR:
            return []  # of percentiles that are a little off
        return [] if math.isclose(one, other, rel_tol=bound, abs_tol=1e-12) else [f"{place}: {one} {other}"]
    return [] if one == other or place.endswith(".runs") else [f"{place}: {one} {other}"]


@pytest.fixture
def ran(write_file, tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    return tmp_path, *both(write_file(LOAD), tmp_path)


def test_every_number_is_that_of_the_rows(ran: tuple[Path, dict[str, Any], dict[str, Any]]) -> None:
    _, rows, summary = ran
    assert summary.pop("warnings") == [*rows.pop("warnings"), NOTE]
    for each in (rows, summary):
        for cell in each["cells"]:
            del cell["runs"]
    assert differences(rows, summary) == []


def test_gpu_hours_are_of_whole_gpus(write_file, tmp_path: Path) -> None:
    """Two halves of one GPU by MIG are a GPU hour an hour, and cost it, whichever way metrics are made."""
    slices = write_file(("count: 2", "count: 1, sharing: {mig: 3g}"), LOAD)
    for summary in both(slices, tmp_path):
        for cell in summary["cells"]:
            assert cell["cluster"]["slices"] == "2 of 3g"
            metrics, cost = cell["metrics"], cell["cost"]
            hours = metrics["gpu_hours_per_mtoken"]["mean"]
            assert hours == pytest.approx(1 / 3600 * 1e6 / metrics["token_throughput_per_s"]["mean"], rel=0.1)
            assert cost["usd_per_mtoken"] == pytest.approx(hours * cost["usd_per_hour"])


def test_no_row_is_kept_of_any_cell(ran: tuple[Path, dict[str, Any], dict[str, Any]]) -> None:
    """Those of the runs that limits come from stay."""
    out, _, summary = ran
    assert not (out / "summary" / "requests.parquet").exists()
    keys = {key for cell in summary["cells"] for key in cell["runs"]}
    kept = {path.name.partition(".")[0] for path in (out / "summary" / "cells").glob("*.parquet")}
    assert keys and not keys & kept and len(kept) == 2
    for table in ("cells", "models", "gpus", "placements"):
        assert (out / "summary" / f"{table}.parquet").exists()
    with pytest.raises(ValueError, match="metrics alone were kept; run it again without --metrics summary"):
        Store(out / "summary").read(min(keys))


def test_other_formulas_are_other_metrics(write_file, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A summary that an older version made is not taken for one of this version, as rows are."""
    path, out = write_file(), tmp_path / "out"
    keys = []
    for digest in ("older", "newer"):
        monkeypatch.setattr(work, "metrics_digest", lambda digest=digest: digest)
        run_loaded(load_experiment(path, quick=True), out, jobs=1, summary=True)
        found = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        keys.append({key for cell in found["cells"] for key in cell["runs"]})
    assert keys[0] and not keys[0] & keys[1]


def test_it_goes_on_where_it_stopped_and_keeps_rows_beside(write_file, tmp_path: Path) -> None:
    """A folder may hold both; each is taken up again."""
    path, done = write_file(), []
    for summary in (True, False, True):
        files = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out" / "cells").glob("*.summary.json")}
        run_loaded(load_experiment(path, quick=True), tmp_path / "out", jobs=1, summary=summary)
        done.append(files)
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out" / "cells").glob("*.summary.json")}
    assert done[1] == done[2] == after
    assert not (tmp_path / "out" / "requests.parquet").exists()


STREAMS = """\
fineserve: 1
title: Streams
cluster: {{gpu: h100-sxm, count: 2}}
models:
  - {{id: A, model: llama-3.1-8b, precision: W16A16{}}}
  - {{id: B, model: llama-3.1-8b, precision: fp8{}}}
workload:
  lengths: sharegpt_v3_first_turn
  {}
slo: {{ttft_s: 0.1}}
systems: [fineserve, prism]
sweeps: [{{name: rates, axes: {{rate_scale: [1, 2]}}}}]
seeds: 1
"""
PHASES = "phases: [{duration_s: 9, rate_per_s: 9}, {duration_s: 9, rate_per_s: 2}, {duration_s: 9, rate_per_s: 9}]"
STEADY = (
    ", rate_per_s: 2",
    ", rate_per_s: 3",
    "arrivals: {process: gamma, cv: 2}\n  requests: 400\n  warmup_requests: 30",
)
KINDS = {
    "steady": STEADY,
    "phases": (f", {PHASES}", ", rate_per_s: 5", "arrivals: {process: poisson}"),
    "servegen": ("", "", "arrivals: {process: servegen, duration_s: 60, scale: 0.02}"),
    "provider": ("", "", "arrivals: {process: provider, duration_s: 3000, scale: 1}"),
}


@pytest.fixture
def most_kept(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Path], int]:
    """Keeps the metrics of an experiment with small windows; the most requests that a run kept at any time."""
    monkeypatch.setattr(drawn, "ROWS", 16)
    monkeypatch.setattr(onoff, "PIECE", 16)
    monkeypatch.setattr(outcomes, "BATCH", 8)
    kept: list[int] = []

    def joined(requests: Requests, told: Callable[[EndedRequests], None]) -> Joined:
        def heard(came: EndedRequests) -> None:
            kept.append(sum(map(len, found._chunks.values())))
            told(came)

        found = Joined(requests, heard)
        return found

    def ran(path: Path, out: Path) -> int:
        kept.clear()
        run_loaded(load_experiment(path), out, jobs=1, summary=True)
        return max(kept)

    monkeypatch.setattr(simulation, "Joined", joined)
    return ran


def contents(out: Path) -> dict[str, bytes]:
    files = [path for path in out.rglob("*") if path.is_file() and path.name != "environment.json"]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_requests_stream_in_and_change_no_byte(
    kind: tuple[str, str, str],
    most_kept: Callable[[Path, Path], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of any file."""
    path = tmp_path / "streams.yaml"
    path.write_text(STREAMS.format(*kind), encoding="utf-8")
    streamed = most_kept(path, tmp_path / "streamed")
    monkeypatch.setattr(run, "build_requests", run.build_trace)
    assert 2 * streamed < most_kept(path, tmp_path / "held")
    assert contents(tmp_path / "streamed") == contents(tmp_path / "held")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_how_requests_are_drawn_travels(kind: tuple[str, str, str], tmp_path: Path) -> None:
    """To another process or machine, in less than the requests take."""
    path = tmp_path / "streams.yaml"
    path.write_text(STREAMS.format(*kind).replace("400", "40000"), encoding="utf-8")
    experiment = load_experiment(path)
    setup = experiment.setup_of(experiment.points[0])
    packed = pickle.dumps(workload.build_requests(setup, None, 2.0, 1))
    here, there = workload.build_trace(setup, None, 2.0, 1), whole(pickle.loads(packed))
    for name in ("arrival_s", "model", "prompt_tokens", "output_tokens"):
        assert getattr(here, name).tobytes() == getattr(there, name).tobytes(), name
    assert here.models == there.models and here.source == there.source
    assert kind != STEADY or len(packed) < 28 * len(here) / 10


@pytest.mark.slow
def test_four_times_as_many_requests_keep_no_more(most_kept: Callable[[Path, Path], int], tmp_path: Path) -> None:
    path, most = tmp_path / "streams.yaml", []
    for requests in ("400", "1600"):
        path.write_text(STREAMS.format(*STEADY).replace("400", requests), encoding="utf-8")
        most.append(most_kept(path, tmp_path / requests))
    assert most[1] < 1.5 * most[0] < 200


REPLAYS = """\
fineserve: 1
title: Replays
cluster: {{gpu: h100-sxm, count: 2}}
models:
  - {{id: A, model: llama-3.1-8b, precision: W16A16{}}}
  - {{id: B, model: llama-3.1-8b, precision: fp8{}}}
workload: {{trace: trace.dat{}}}
slo: {}
systems: [fineserve, prism]
sweeps: [{{name: rates, axes: {{rate_scale: [1, 2]}}}}]
seeds: 1
"""
ISOLATED = "{ttft: {reference: {system: dedicated, quantile: 0.9, load: isolated}, scale: 2}}"
REPLAYED = {
    "by name": ("", "", "", "{ttft_s: 0.1}"),
    "the first, with limits of their own": ("", "", ", requests: 300, warmup_requests: 20", ISOLATED),
    "dealt by shares": (", share: 0.7", ", share: 0.3", ", assign: share", "{ttft_s: 0.1}"),
}


def write_recorded(path: Path, requests: int) -> None:
    rows = (f"{3 + n / 20},{'AB'[n % 3 == 1]},{50 + 7 * n % 900},{5 + n % 90}" for n in range(requests))
    path.write_text("\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows, ""]), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("kind", REPLAYED.values(), ids=REPLAYED)
def test_a_trace_file_streams_in_and_changes_no_byte(
    kind: tuple[str, ...], most_kept: Callable[[Path, Path], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "BLOCK_BYTES", 256)
    write_recorded(tmp_path / "trace.dat", 600)
    path = tmp_path / "replays.yaml"
    path.write_text(REPLAYS.format(*kind), encoding="utf-8")
    streamed = most_kept(path, tmp_path / "streamed")
    monkeypatch.setattr(run, "build_requests", run.build_trace)
    assert 2 * streamed < most_kept(path, tmp_path / "held")
    assert contents(tmp_path / "streamed") == contents(tmp_path / "held")


@pytest.mark.slow
def test_an_output_that_is_cut_counts_as_long_as_it_came(tmp_path: Path) -> None:
    """A request for a million tokens ends at its model's context: tokens that it did not get are in no metric."""
    write_recorded(tmp_path / "trace.dat", 60)
    text = (tmp_path / "trace.dat").read_text(encoding="utf-8")
    (tmp_path / "trace.dat").write_text(text.replace(",330,45", ",330,1000000"), encoding="utf-8")
    text = REPLAYS.format(*REPLAYED["by name"]) + "quick: {seeds: 1}\n"
    (tmp_path / "replays.yaml").write_text(text, encoding="utf-8")
    rows, summary = both(tmp_path / "replays.yaml", tmp_path)
    found = pq.read_table(tmp_path / "rows" / "requests.parquet").to_pandas()
    long = found[found.prompt_tokens == 330]
    assert set(long.output_tokens) == {1_000_000} and set(long.generated_tokens) == {131_072 - 330}
    assert set(long.fate) == {"cut"} and set(long.cause) == {"context"} and set(long.miss) == {"cut_context"}
    for document in (rows, summary):
        for cell in document["cells"]:
            assert 0.003 < cell["metrics"]["tpot_p50_s"]["mean"] < 0.1
            assert cell["metrics"]["tpot_mean_s"]["mean"] > 0.003
    found = differences(rows["cells"], summary["cells"])
    assert not [text for text in found if ".runs." not in text]


@pytest.mark.slow
def test_four_times_as_long_a_trace_file_keeps_no_more(
    most_kept: Callable[[Path, Path], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "BLOCK_BYTES", 256)
    most = []
    for requests in (400, 1600):
        folder = tmp_path / str(requests)
        folder.mkdir()
        write_recorded(folder / "trace.dat", requests)
        (folder / "replays.yaml").write_text(REPLAYS.format(*REPLAYED["by name"]), encoding="utf-8")
        most.append(most_kept(folder / "replays.yaml", folder / "out"))
    assert most[1] < 1.5 * most[0] < 200


def test_a_row_out_of_order_is_told_with_its_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "BLOCK_BYTES", 256)
    write_recorded(tmp_path / "trace.dat", 600)
    with (tmp_path / "trace.dat").open("a", encoding="utf-8") as file:
        file.write("4.5,A,10,10\n")
    (tmp_path / "replays.yaml").write_text(REPLAYS.format(*REPLAYED["by name"]), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"trace\.dat, row 601, column arrival_s: 4.5 is earlier than the row before it"
    ):
        load_experiment(tmp_path / "replays.yaml")


def test_prefixes_of_a_trace_file_stream_in_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "BLOCK_BYTES", 256)
    rows = (
        {"timestamp": 50 * n, "input_length": 1200, "output_length": 9, "hash_ids": [n % 5, n % 5]} for n in range(90)
    )
    (tmp_path / "trace.dat").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    kind = (", share: 1", ", share: 1", ", assign: share", "{ttft_s: 0.1}")
    text = REPLAYS.format(*kind).replace("[fineserve, prism]", "[vllm-v0.4.2]")
    experiment = load_experiment_of(tmp_path, text)
    setup = experiment.setup_of(experiment.points[0])
    streamed, held = (build(setup, None, 1.0, 0) for build in (workload.build_requests, workload.build_trace))
    assert len([*streamed.chunks()]) > 5
    assert whole(streamed).prefix_hashes == held.prefix_hashes is not None
    assert _digests(streamed) == _digests(held)


def load_experiment_of(folder: Path, text: str) -> Any:
    (folder / "replays.yaml").write_text(text, encoding="utf-8")
    return load_experiment(folder / "replays.yaml")
