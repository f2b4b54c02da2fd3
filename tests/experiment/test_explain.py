"""The life of a request and the trace file, from a stored run with a decision log."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fineserve_sim.cluster import Left
from fineserve_sim.experiment import run_experiment
from fineserve_sim.experiment.results.summary import read_summary
from fineserve_sim.experiment.show.page.build import write_page
from fineserve_sim.experiment.show.page.requests import worth_telling
from fineserve_sim.experiment.show.timelines.chrome import write_trace
from fineserve_sim.experiment.show.timelines.decode import DECODES, NEIGHBOURS, PREEMPTED, PROMPTS
from fineserve_sim.experiment.show.timelines.first_token import OTHERS, OWN
from fineserve_sim.experiment.show.timelines.life import WEIGHTS, life_of, lives_of
from fineserve_sim.experiment.show.timelines.stored import RunError, StoredRun, stored_run

CROWDED = """\
fineserve: 1
title: Crowded
cluster: {gpu: h100-sxm, count: 1}
engine: {max_sequences: 4}
models:
  - {id: A, model: llama-3.1-8b, precision: W16A16, rate_per_s: 40}
workload: {lengths: {prompt_tokens: 512, output_tokens: 30}, requests: 60}
slo: {ttft_s: 1.0}
systems: ["static*", fineserve]
sweeps:
  - {name: rate, axes: {rate_scale: [1, 2]}}
seeds: 1
"""

SPIKE = """\
fineserve: 1
title: Spike
cluster: {gpu: a800, count: 4, gpus_per_node: 1}
engine: {memory_utilization: 0.42}
models:
  - {id: A, model: qwen2.5-14b, precision: fp16, phases: [{duration_s: 5, rate_per_s: 40}, {duration_s: 40, rate_per_s: 0.2}]}
workload: {lengths: {prompt_tokens: 800, output_tokens: 300}}
slo: {ttft_s: 1.0}
systems: [kunserve]
seeds: 1
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crowded")
    (folder / "crowded.yaml").write_text(CROWDED, encoding="utf-8")
    run_experiment(folder / "crowded.yaml", folder / "out", jobs=1, decisions=True)
    return folder / "out"


@pytest.fixture(scope="module")
def run(out: Path) -> StoredRun:
    return stored_run(out, "fineserve", at={"rate_scale": "2"})


@pytest.fixture(scope="module")
def spike(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    folder = tmp_path_factory.mktemp("spike")
    (folder / "spike.yaml").write_text(SPIKE, encoding="utf-8")
    run_experiment(folder / "spike.yaml", folder / "out", jobs=1, decisions=True)
    return stored_run(folder / "out")


@pytest.mark.parametrize("system", ["distserve", "vllm-pd"])
def test_a_request_that_decodes_elsewhere_shows_both_engines(tmp_path: Path, system: str) -> None:
    text = SPIKE.replace("[kunserve]", f"[{system}]").replace("rate_per_s: 40", "rate_per_s: 8")
    (tmp_path / "apart.yaml").write_text(text, encoding="utf-8")
    run_experiment(tmp_path / "apart.yaml", tmp_path / "out", jobs=1, decisions=True)
    run = stored_run(tmp_path / "out")
    here, there = run.data.visits.of(5)
    assert (here.engine < 2, there.engine >= 2) == (True, True)
    told = [moment.what for moment in life_of(run, 5).moments]
    assert f"Migrate from engine {here.engine} to engine {there.engine}" in told
    (left,) = [what for what in told if what.startswith("leaves ")]
    assert f"{here.engine}: migrated with its KV, goes on at" in left and left.endswith(str(there.engine))


def test_a_prefix_from_host_memory_is_told(tmp_path: Path) -> None:
    text = CROWDED.replace("{max_sequences: 4}", "{memory_utilization: 0.23, kv_offloading: {size_gib: 32}}")
    text = text.replace("requests: 60}", "requests: 60, conversations: {turns: 3, gap_s: 4}}")
    keeps = "{base: dedicated, name: keeps, memory: {policy: private, prefix_cache: true}}"
    (tmp_path / "keeps.yaml").write_text(text.replace('["static*", fineserve]', f"[{keeps}]"), encoding="utf-8")
    run_experiment(tmp_path / "keeps.yaml", tmp_path / "out", jobs=1, decisions=True)
    run = stored_run(tmp_path / "out", "keeps", at={"rate_scale": "1"})
    lives = (life_of(run, request) for request in reversed(range(len(run.data.arrival_s))))
    told = next(moment.what for life in lives for moment in life.moments if "host memory" in moment.what)
    assert "tokens come from host memory, for " in told


@pytest.mark.slow
def test_the_life_of_a_request_in_a_group(spike: StoredRun) -> None:
    """Between its dispatch and its first chunk it waits in its group's queue, and every moment of that has a reason."""
    assert spike.data.counters["drops"] and spike.data.counters["restores"]
    reasons = set()
    for request in range(0, len(spike.data.arrival_s), 3):
        life = life_of(spike, request)
        begins = [moment.after_s for moment in life.moments if moment.what.startswith("prefill begins on")]
        assert len(begins) == 1
        again = any("again" in moment.what for moment in life.moments)
        assert again or sum(life.waited_s.values()) == pytest.approx(begins[0], abs=1e-9)
        assert begins[0] <= spike.data.ttft_s[request]
        reasons |= set(life.waited_s)
    assert {"KV memory for its prompt", "prompts admitted before it"} <= reasons
    told = [
        moment.what for request in range(0, len(spike.data.arrival_s), 9) for moment in life_of(spike, request).moments
    ]
    assert any(what.startswith("DropLayers: ") for what in told)
    assert any(what.startswith("KV exchange of engines [") for what in told)


def test_a_bound_has_no_lives(tmp_path: Path) -> None:
    text = CROWDED.replace('systems: ["static*", fineserve]', "systems: [clairvoyant]")
    (tmp_path / "bound.yaml").write_text(text, encoding="utf-8")
    run_experiment(tmp_path / "bound.yaml", tmp_path / "out", jobs=1, decisions=True)
    with pytest.raises(RunError, match=r"Clairvoyant bound, .*: a bound, which no engine serves; name a system"):
        life_of(stored_run(tmp_path / "out"), 3)


def test_a_request_of_a_model_without_an_engine_is_unplaced(tmp_path: Path) -> None:
    text = CROWDED.replace(
        'systems: ["static*", fineserve]', "systems: [{base: fineserve, name: one, placement: {policy: dedicated}}]"
    )
    text = text.replace("workload:", "  - {id: B, model: llama-3.1-8b, precision: W16A16, rate_per_s: 4}\nworkload:")
    (tmp_path / "two.yaml").write_text(text, encoding="utf-8")
    run_experiment(tmp_path / "two.yaml", tmp_path / "out", jobs=1, decisions=True)
    run = stored_run(tmp_path / "out")
    request = next(index for index, model in enumerate(run.data.model) if run.data.models[model] in run.unplaced)
    assert life_of(run, request).verdict == "unplaced, no engine has its model: a miss (TTFT limit 1 s)"


def test_the_trace_file_shows_when_engines_are_busy(run: StoredRun, tmp_path: Path) -> None:
    """Every first token comes out at the end of a span, and all prompt tokens are in spans that do not overlap."""
    write_trace([run], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    spans = sorted((event["ts"], event["ts"] + event["dur"], event["args"]) for event in events if event["ph"] == "X")
    assert all(end <= begin + 1e-3 for (_, end, _), (begin, _, _) in pairwise(spans))
    ends_s = [end / 1e6 for _, end, _ in spans]
    finished = run.data.fate == 1
    assert all(min(abs(end - at_s) for end in ends_s) < 1e-9 for at_s in run.data.first_token_s[finished])
    assert sum(arguments["prefill_tokens"] for *_, arguments in spans) == run.data.prompt_tokens[finished].sum()
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {"engine 0: A"}


def test_the_trace_file_shows_what_instances_compute_and_send(spike: StoredRun, tmp_path: Path) -> None:
    """Spans of an engine do not overlap, and together are the time that it was busy."""
    write_trace([spike], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    busy = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            busy[event["tid"]].append((event["ts"], event["dur"], event["args"]["prefill_tokens"]))
    assert set(busy) == {0, 1, 2, 3}
    for spans in busy.values():
        assert all(start + length <= after + 1 for (start, length, _), (after, _, _) in pairwise(spans))
    stages = sum(tokens for spans in busy.values() for *_, tokens in spans)
    assert stages >= spike.data.prompt_tokens.sum()  # a prompt token passes through every stage of its pipeline
    names = {event["name"] for event in events if event["ph"] == "b"}
    assert {"KV exchange", "restore"} <= names


def test_a_request_that_moved_stands_at_each_engine_that_it_was_at(spike: StoredRun, tmp_path: Path) -> None:
    """Its engines merged and split again: the story says when it left each, and the trace file shows it on their GPUs."""
    visits = spike.data.visits
    moved = int(visits.moved().request[0])
    first, *_, last = life_of(spike, moved).visits
    assert first.to_s <= last.from_s and last.to_s == spike.data.finish_s[moved]
    told = [moment.what for moment in life_of(spike, moved).moments if moment.what.startswith("leaves ")]
    assert len(told) == len(visits.of(moved)) - 1 and all("engines merged or split" in what for what in told)
    write_trace([spike], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    spans = [event for event in events if event["name"].startswith(f"request {moved} at ") and event["ph"] == "b"]
    stood = {(event["name"].rpartition(" ")[2], event["pid"] - 1) for event in spans}  # instance n is on GPU n
    assert stood == {(str(visit.engine), stage) for visit in visits.of(moved) for stage in visit.stages}
    assert any(len(visit.stages) > 1 for visit in visits.of(moved))


def test_the_results_folder_has_the_visits_of_requests_that_moved(spike: StoredRun, out: Path) -> None:
    table = pd.read_parquet(spike.decisions_path.parents[1] / "visits.parquet")
    moved = spike.data.visits.moved()
    assert table["request"].tolist() == moved.request.tolist()
    assert {*table["left"]} == {"regrouped", "finished"} and {*table["model"]} == {"A"}
    tokens = table.groupby("request")["tokens"].sum()
    assert tokens.tolist() == spike.data.generated_tokens[tokens.index].tolist()
    assert not (out / "visits.parquet").exists()  # of engines that stay nobody moves


def test_the_page_says_how_many_moved_and_why(spike: StoredRun, tmp_path: Path) -> None:
    page = write_page([spike.decisions_path.parents[1]], tmp_path / "page.html").read_text(encoding="utf-8")
    row = f"<td>engines merged or split</td><td>{np.isin(spike.data.visits.left, Left.REGROUPED).sum()}</td>"
    assert "Requests that moved" in page and row in re.sub(r" class=[^>]*", "", page)


def test_each_gpu_is_a_process_with_a_track_for_each_engine_on_it(tmp_path: Path) -> None:
    """An engine over two GPUs is on both, and those that share a GPU are in one process."""
    text = CROWDED.replace("count: 1}", "count: 3}").replace('systems: ["static*", fineserve]', 'systems: ["static*"]')
    text = text.replace(
        "workload:", "  - {id: B, model: llama-3.1-8b, tp: 2, rate_per_s: 4, precision: fp8}\nworkload:"
    )
    (tmp_path / "two.yaml").write_text(text, encoding="utf-8")
    run_experiment(tmp_path / "two.yaml", tmp_path / "out", jobs=1, decisions=True)
    run = stored_run(tmp_path / "out")
    write_trace([run], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    tracks: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if event["ph"] == "X":
            assert processes[event["pid"]].startswith("GPU ")
            tracks[event["tid"]].add(event["pid"])
    gpus = {
        engine: {int(processes[pid].split(",")[0].removeprefix("GPU ")) for pid in pids}
        for engine, pids in tracks.items()
    }
    assert gpus == {engine: set(placed) for engine, placed in enumerate(run.engine_gpus)}
    assert any(len(placed) == 2 for placed in run.engine_gpus)
    memory = {event["pid"] for event in events if event["ph"] == "C" and event["name"] == "KV used, GiB"}
    assert memory == set().union(*tracks.values())


def test_where_models_come_and_go_their_stays_are_tracks_of_their_gpus(tmp_path: Path) -> None:
    text = CROWDED.replace('systems: ["static*", fineserve]', "systems: [qlm]").replace(
        "max_sequences: 4", "max_sequences: 64"
    )
    text = text.replace("workload:", "  - {id: B, model: qwen3-32b, precision: W16A16, rate_per_s: 2}\nworkload:")
    (tmp_path / "swap.yaml").write_text(text, encoding="utf-8")
    run_experiment(tmp_path / "swap.yaml", tmp_path / "out", jobs=1, decisions=True)
    run = stored_run(tmp_path / "out")
    write_trace([run], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    activations = [entry for entry in run.decisions() if entry.get("command") == "Activate"]
    assert activations
    for entry in activations:
        assert named[1 + entry["gpus"][0], entry["engine"]] == f"engine {entry['engine']}: {entry['model']}"
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= set(named)


def test_what_it_waited_for_adds_up_to_its_wait_in_the_scheduler(run: StoredRun) -> None:
    for request in range(0, 60, 7):
        life = life_of(run, request)
        dispatched = [moment for moment in life.moments if moment.what.startswith("Dispatch")]
        if dispatched:
            assert sum(life.waited_s.values()) == pytest.approx(dispatched[0].after_s, abs=1e-9)


def test_with_four_slots_a_late_request_waits_for_a_slot(run: StoredRun) -> None:
    life = life_of(run, 40)
    assert next(iter(life.waited_s)) == "a free slot"
    assert [moment.at_s for moment in life.moments] == sorted(moment.at_s for moment in life.moments)
    assert life.moments[0].what.startswith("arrives; ")


def test_moments_are_those_of_the_run(run: StoredRun) -> None:
    life = life_of(run, 5)
    by_what = {moment.what.split(",")[0]: moment for moment in life.moments}
    assert by_what["first token"].at_s == run.data.first_token_s[5]
    assert by_what["last token"].after_s == pytest.approx(run.data.finish_s[5] - run.data.arrival_s[5])
    assert life.verdict.startswith(f"TTFT {run.data.ttft_s[5]:.3g} s, limit 1 s")


def test_a_dropped_request_has_its_reason(run: StoredRun) -> None:
    dropped = [request for request, fate in enumerate(run.data.fate) if fate == 2]
    assert dropped
    life = life_of(run, dropped[0])
    assert life.verdict.startswith("dropped: a miss")
    assert life.moments[-1].what.startswith("Drop: ")


def test_cells_and_requests_that_are_not_there(out: Path, run: StoredRun) -> None:
    with pytest.raises(RunError, match=r"no cell fits; systems: static\*, fineserve"):
        stored_run(out, "prism")
    with pytest.raises(RunError, match="no seed 3"):
        stored_run(out, seed=3)
    with pytest.raises(RunError, match="no request 60"):
        life_of(run, 60)


def test_without_a_decision_log(out: Path, tmp_path: Path) -> None:
    path = tmp_path / "crowded.yaml"
    path.write_text(CROWDED, encoding="utf-8")
    run_experiment(path, tmp_path / "out", jobs=1, overrides=[("systems", "[dedicated]")])
    with pytest.raises(RunError, match="again with --decisions"):
        life_of(stored_run(tmp_path / "out"), 0)


def test_spans_of_the_trace_file_open_and_close_in_order(run: StoredRun, tmp_path: Path) -> None:
    write_trace([run, run], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    spans = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            spans[event["id"], event["name"]].append((event["ph"], event["ts"]))
    assert all([ph for ph, _ in pair] == ["b", "e"] and pair[0][1] <= pair[1][1] for pair in spans.values())
    finished = int((run.data.fate == 1).sum())
    visits = len(run.data.visits.request)
    assert len(spans) == 2 * (4 * finished + visits) and visits >= finished
    drops = [event for event in events if event["ph"] == "i" and event["name"] == "Drop"]
    assert len(drops) == 2 * int((run.data.fate == 2).sum())
    counters = [event for event in events if event["ph"] == "C"]
    assert len(counters) == 2 * 2 * len(run.data.sample_s)


SHARED = """\
fineserve: 1
title: Two models that share a GPU, and one alone with little memory
cluster: {gpu: h100-sxm, count: 1}
engine: {memory_utilization: 0.62}
models:
  - {id: A, model: llama-3.1-8b, precision: W16A16, rate_per_s: 6}
  - {id: B, model: llama-3.1-8b, precision: W16A16, rate_per_s: 6}
workload: {lengths: {prompt_tokens: 3000, output_tokens: 300}, requests: 80}
slo: {ttft_s: 1.0, tpot_s: 0.02, e2e_s: 5.0}
systems: ["prism*", "static*"]
seeds: 1
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    (folder / "shared.yaml").write_text(SHARED, encoding="utf-8")
    run_experiment(folder / "shared.yaml", folder / "out", jobs=1, decisions=True)
    return folder / "out"


@pytest.mark.parametrize("system", ["prism*", "static*"])
def test_what_a_decode_was_spent_for_adds_up_to_it(shared: Path, system: str) -> None:
    run = stored_run(shared, system)
    spent = set()
    for request in range(0, 80, 5):
        life = life_of(run, request)
        decoded_s = run.data.finish_s[request] - run.data.first_token_s[request]
        assert sum(life.decoded_s.values()) == pytest.approx(decoded_s, rel=1e-6)
        assert list(life.decoded_s.values()) == sorted(life.decoded_s.values(), reverse=True)
        assert 1.0 <= life.batch <= 80
        spent |= set(life.decoded_s)
    assert {NEIGHBOURS, PROMPTS, DECODES} <= spent


def test_a_preempted_decode_tells_what_it_waited_for_again(shared: Path) -> None:
    run = stored_run(shared, "static*")
    preempted = [request for request, times in enumerate(run.data.preemptions) if times]
    assert preempted
    lives = [life_of(run, request) for request in preempted]
    assert any(life.decoded_s.get(PREEMPTED, 0.0) > 0 for life in lives)
    assert all(any(moment.what.startswith("preempted on engine") for moment in life.moments) for life in lives)


def test_the_verdict_has_every_latency_beside_its_limit(shared: Path) -> None:
    run = stored_run(shared, "static*")
    life = life_of(run, 70)
    assert f"TPOT {run.data.tpot_s[70]:.3g} s, limit 0.02 s: met" in life.verdict
    assert "end to end" in life.verdict and "limit 5 s" in life.verdict and "% of the decode went to" in life.verdict


@pytest.mark.parametrize("system", ["prism*", "static*"])
def test_what_a_ttft_was_spent_for_adds_up_to_it(shared: Path, system: str) -> None:
    run = stored_run(shared, system)
    spent = set()
    for request in range(80):
        life = life_of(run, request)
        assert sum(life.first_s.values()) == pytest.approx(run.data.ttft_s[request], abs=1e-9)
        assert all(seconds > 0 for seconds in life.first_s.values())
        assert OWN in life.first_s
        spent |= set(life.first_s)
    assert {OWN, OTHERS, NEIGHBOURS} <= spent and any(what.startswith("waiting for ") for what in spent)


def test_the_first_request_has_its_own_prompt_alone(run: StoredRun, shared: Path) -> None:
    """Nothing else is there, so that its TTFT is what an idle engine takes."""
    for each in (run, stored_run(shared, "static*")):
        life = life_of(each, 0)
        assert life.first_s == {OWN: pytest.approx(each.data.ttft_s[0], abs=1e-9)}


def test_a_drop_shows_what_is_needed_and_what_is_left(run: StoredRun) -> None:
    dropped = next(request for request, fate in enumerate(run.data.fate) if fate == 2)
    (told,) = [moment for moment in life_of(run, dropped).moments if moment.what.startswith("Drop: ")]
    found = re.search(r"; its prompt takes ([\d.]+) s on an idle engine, (?:([\d.]+) s|none) are left$", told.what)
    assert found is not None and float(found[2] or 0) == pytest.approx(max(0.0, 1.0 - told.after_s), rel=0.01)


def test_a_drop_counts_the_neighbours_that_its_policy_saw(run: StoredRun) -> None:
    """A prompt that takes 0.8 s on an idle engine was dropped with 0.98 s left: 1.3 s beside others, which was not told."""
    dropped = next(request for request, fate in enumerate(run.data.fate) if fate == 2)
    decisions = list(run.decisions())
    looks = [entry for entry in decisions if entry.get("event") == "EngineStepped"]
    for look in looks:
        look["engines"] = {engine: {**state, "slowdown": 2.0} for engine, state in look["engines"].items()}
    (told,) = [each.what for each in lives_of(run, [dropped], decisions)[0].moments if each.what.startswith("Drop: ")]
    found = re.search(
        r"; its prompt takes ([\d.]+) s beside its GPU's neighbours, ([\d.]+) s on an idle engine, ", told
    )
    assert found is not None and float(found[1]) == pytest.approx(2 * float(found[2]), rel=0.01)


def test_the_report_tells_of_misses_of_every_cause(shared: Path, run: StoredRun) -> None:
    for each in (run, stored_run(shared, "static*"), stored_run(shared, "prism*")):
        cell = next(
            cell
            for cell in read_summary(each.folder)["cells"]
            if (cell["system"], cell["axes"]) == (each.system, each.axes)
        )
        counted = {cause for cause, count in cell["misses"].items() if count}
        few, many = worth_telling(each, len(counted)), worth_telling(each, 1000)
        assert set(few.values()) == counted
        causes = list(many.values())
        assert {cause: causes.count(cause) for cause in counted} == {cause: cell["misses"][cause] for cause in counted}
        assert causes == sorted(causes, key=lambda cause: not cause)  # misses before all others
    assert {"dropped"} <= set(worth_telling(run, 10).values())


def test_weights_on_their_way_are_part_of_a_ttft(tmp_path: Path) -> None:
    """QLM has one model at a time on the GPU: a request of the other one waits for its weights."""
    text = CROWDED.replace('systems: ["static*", fineserve]', "systems: [qlm]").replace(
        "max_sequences: 4", "max_sequences: 64"
    )
    text = text.replace("workload:", "  - {id: B, model: qwen3-32b, precision: W16A16, rate_per_s: 2}\nworkload:")
    (tmp_path / "swap.yaml").write_text(text, encoding="utf-8")
    run_experiment(tmp_path / "swap.yaml", tmp_path / "out", jobs=1, decisions=True)
    run = stored_run(tmp_path / "out", at={"rate_scale": "1"})
    served = [request for request in range(len(run.data.arrival_s)) if np.isfinite(run.data.ttft_s[request])]
    lives = [life_of(run, request) for request in served]
    for request, life in zip(served, lives, strict=True):
        assert sum(life.first_s.values()) == pytest.approx(run.data.ttft_s[request], abs=1e-9)
    waits = [life.first_s.get(f"waiting for {WEIGHTS}", 0.0) for life in lives]
    assert max(waits) > 20.0  # a swap takes 30 s


def test_in_a_group_the_decode_adds_up_too(spike: StoredRun) -> None:
    for request in range(0, len(spike.data.arrival_s), 40):
        life = life_of(spike, request)
        decoded_s = spike.data.finish_s[request] - spike.data.first_token_s[request]
        assert sum(life.decoded_s.values()) == pytest.approx(decoded_s, rel=1e-6)
        assert sum(life.first_s.values()) == pytest.approx(spike.data.ttft_s[request], abs=1e-9)
        assert all(seconds > 0 for seconds in life.first_s.values())
