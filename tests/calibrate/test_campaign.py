"""A campaign on a simulated device: what is asked, what fits, what counts, what is on disk, what the report says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fineserve_calibrate import cli
from fineserve_calibrate.probes.engine_worker import ROUND
from fineserve_calibrate.probes.engines import LLAMA_8B, TINY, Composition
from fineserve_calibrate.probes.schema import Identity, ProbeError, Unavailable
from fineserve_evidence.campaign import command
from fineserve_evidence.campaign.bench import side_by_side
from fineserve_evidence.campaign.command import Request, campaign
from fineserve_evidence.campaign.crew import Steps, kv_bytes, settings, statistics, steady, stretches
from fineserve_evidence.campaign.items import Item, Seat, Spot, Take, parse_seat, seat_text
from fineserve_evidence.campaign.plan import BF16, GPU, plan
from fineserve_evidence.campaign.predictions import slowdowns
from fineserve_evidence.campaign.record import Journal, opened, read_journal
from fineserve_evidence.campaign.report import conclude
from fineserve_evidence.campaign.run import LOST
from hypothesis import given
from hypothesis import strategies as st
from simulatedkit import SimulatedBench, SimulatedDevice, slowdown

from fineserve_sim.catalog import gpu

H100 = gpu("h100-sxm")
H100_NAME = "NVIDIA H100 80GB HBM3"
ITEMS = plan(False, LLAMA_8B.name)


def identity(driver: str = "580") -> Identity:
    return Identity(H100_NAME, 1, driver, "13.0", "2.11.0", "0.32.0")


def bench(**given: Any) -> SimulatedBench:
    return SimulatedBench(SimulatedDevice(H100, H100, identity()), **given)


def measure(folder: Path, found: SimulatedBench, **asked: Any) -> list[str]:
    """Run the command on a bench; its lines."""
    lines: list[str] = []
    campaign(Request(**{"gpu": "h100", "out": folder, **asked}), lines.append, lambda *_: found)
    return lines


# --- which steps count ------------------------------------------------------------------------------------------------


def back_to_back(start: float, seconds: Sequence[float]) -> list[tuple[float, float]]:
    ends, now = [], start
    for each in seconds:
        now += each
        ends.append((now, each))
    return ends


some_steps = st.builds(back_to_back, st.floats(0, 5), st.lists(st.floats(0.01, 0.5), min_size=1, max_size=20))


@given(st.lists(some_steps, min_size=1, max_size=3), st.floats(0, 3), st.floats(1, 6))
def test_steps_that_count_lie_within_the_window_and_within_the_others_work(
    engines: list[Steps], from_s: float, hold_s: float
) -> None:
    found = steady(engines, from_s, from_s + hold_s)
    spans = [(steps[0][0] - steps[0][1], steps[-1][0]) for steps in engines]
    since, until = max([from_s, *(a for a, _ in spans)]), min([from_s + hold_s, *(b for _, b in spans)])
    for steps, seconds in zip(engines, found, strict=True):
        clear = [each for end, each in steps if end - each >= since + 1e-5 and end <= until - 1e-5]
        assert len(clear) <= len(seconds) <= len(steps)
        assert sum(seconds) <= max(0.0, until - since) + 1e-4


def test_an_engine_alone_keeps_every_step_of_the_window() -> None:
    assert steady([back_to_back(0.0, [1.0] * 9)], 2.5, 7.5) == [[1.0] * 4]


def test_a_pause_of_a_neighbour_takes_out_the_steps_over_it() -> None:
    """Hand-worked: the neighbour rests from 2 to 4, so of my steps those from 2 to 3 and from 3 to 4 do not count."""
    mine = back_to_back(0.0, [1.0] * 6)
    theirs = [*back_to_back(0.0, [0.5] * 4), *back_to_back(4.0, [0.5] * 4)]
    assert stretches(theirs) == [(0.0, 2.0), (4.0, 6.0)]
    assert steady([mine, theirs], 0.0, 9.0) == [[1.0] * 4, [0.5] * 8]


def test_the_mean_sees_turns_that_the_median_does_not() -> None:
    found = statistics([1.0, 1.0, 1.0, 5.0])
    assert (found["latency_s"], found["mean_s"], found["repeats"]) == (1.0, 2.0, 4)


def test_too_few_steps_are_taken_for_longer_and_then_given_up() -> None:
    take = next(item.ask for item in ITEMS if isinstance(item.ask, Take))
    holds: list[float] = []

    def run(each_s: float) -> Callable[[float], tuple[float, list[Steps]]]:
        def once(hold_s: float) -> tuple[float, list[Steps]]:
            holds.append(hold_s)
            return 100.0, [back_to_back(100.0, [each_s] * int(hold_s / each_s))]

        return once

    assert len(side_by_side(run(0.4), take)[0]) >= 8
    assert holds == [2.5, 5.0]
    with pytest.raises(Unavailable, match="only 1 steps side by side in 10 s"):
        side_by_side(run(5.0), take)


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_cpu", [True, False])
def test_items_differ_and_those_of_a_setup_follow_each_other(on_cpu: bool) -> None:
    items = plan(on_cpu, "m")
    assert len({item.key for item in items}) == len(items)
    setups = [item.setup for item in items if item.setup]
    changes = sum(one != other for one, other in pairwise(setups)) + 1
    assert changes == len(set(setups))


def test_what_matters_most_fits_into_25_minutes() -> None:
    seconds, running, done = 0.0, "", set[str]()
    for item in ITEMS:
        seconds += item.expected_s + (item.setup_s if item.setup != running else 0.0)
        running = item.setup
        if seconds <= 25 * 60:
            done.add(item.part)
    essential = {(sharing, count) for sharing in ("time_slice", "mps") for count in ("pairs", "threes")}
    assert {(part.split("-")[1], part.split("-")[0]) for part in done if part.count("-") > 1} >= essential
    assert {"host-graphs", "host-eager", "driver", "layouts", "steps-bfloat16-graphs"} <= done
    assert any(item.part == "pairs-mps-bfloat16@50+bfloat16@50" for item in ITEMS)
    assert any(item.part == "pairs-mps-bfloat16@70+bfloat16@30" for item in ITEMS)


def test_pairs_are_decodes_of_three_sizes_and_prefill_against_each_other() -> None:
    takes = [item.ask for item in ITEMS if item.part == "pairs-time_slice-bfloat16+fp8"]
    loads = GPU.loads
    assert [load.decodes for load in loads] == [1, 32, 256, 0]
    pairs = {take.loads for take in takes if isinstance(take, Take)}
    assert pairs == {(a, b) for a in (*loads, None) for b in (*loads, None) if (a, b) != (None, None)}


@pytest.mark.parametrize("item", {item.part: item for item in ITEMS if isinstance(item.ask, Take)}.values(), ids=str)
def test_every_load_of_a_scene_fits_into_its_engines(item: Item) -> None:
    assert isinstance(item.ask, Take)
    scene, gib = item.ask.scene, 2**30
    total = 0.0
    for place, seat in enumerate(scene.seats):
        given = settings(scene, place, LLAMA_8B, on_cpu=False, mps=())
        arguments = given["arguments"]
        for load in scene.loads:
            assert load.decodes <= arguments["max_num_seqs"]
            assert load.prefill_tokens in (0, arguments["max_num_batched_tokens"])  # a prompt is one step
            assert max(load.context + ROUND, load.prefill_tokens) < arguments["max_model_len"]
            token_bytes = 65536 if seat.dtype == "fp8" else 131072
            assert kv_bytes(scene, seat, LLAMA_8B) > load.decodes * (load.context + ROUND) * token_bytes
        assert (given["environment"].get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")) == str(seat.percent)
        weights_gib = {"bfloat16": 15.0, "fp8": 8.5, "int4_wo": 5.4}[seat.dtype]
        total += weights_gib + kv_bytes(scene, seat, LLAMA_8B) / gib + 2.0  # context and activations
    assert total < 79  # of an H100


@given(st.sampled_from(["bfloat16", "fp8"]), st.integers(1, 100), st.integers(0, 512), st.integers(1, 4096))
def test_neighbours_are_read_as_they_are_written(dtype: str, percent: int, decodes: int, tokens: int) -> None:
    load = Composition(decodes, tokens, 0) if decodes else Composition(0, 0, tokens)
    for each in (load, None):
        assert parse_seat(seat_text(Seat(dtype, percent), each)) == (Seat(dtype, percent), each)


def test_what_is_no_neighbour_is_refused() -> None:
    with pytest.raises(ValueError, match="'fp8 d1' names no engine"):
        parse_seat("fp8 d1")


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_whole_campaign_in_commands_of_nine_minutes(tmp_path: Path) -> None:
    commands, measured = 0, list[str]()
    while True:
        found = bench()
        lines = measure(tmp_path, found)
        assert found.device.now_s() <= 9 * 60 + command.OVERDUE_S and found.device.closed
        measured += [item.key for item in found.measured]
        commands += 1
        if lines[-1] == "complete: nothing is left":
            break
    assert sorted(measured) == sorted(item.key for item in ITEMS)  # each of them once
    assert 5 <= commands <= 12
    assert measured[:60] == [item.key for item in ITEMS[:60]]  # the first ones first


def test_the_next_command_measures_nothing_twice(tmp_path: Path) -> None:
    measure(tmp_path, bench(), only="driver,layouts")
    again = bench()
    assert measure(tmp_path, again, only="driver,layouts")[-1] == "complete: nothing is left"
    assert again.measured == []


def test_a_setup_is_started_only_where_time_is_left_to_use_it(tmp_path: Path) -> None:
    found = bench()
    measure(tmp_path, found, minutes=75 / 60, only="pairs-time_slice-bfloat16+bfloat16,driver")
    assert found.started == [] and {item.part for item in found.measured} == {"driver"}


def test_expectations_follow_what_was_measured(tmp_path: Path) -> None:
    """Engines that start in four times the time expected: the second scene is not begun in what is left."""
    slow = bench(setup_ratio=4.0)
    measure(tmp_path, slow, minutes=9, only="pairs-time_slice-bfloat16+bfloat16,pairs-mps-bfloat16+bfloat16")
    assert slow.started == ["pairs-time_slice-bfloat16+bfloat16"]
    assert slow.device.now_s() <= 9 * 60


def test_what_cannot_be_measured_is_said_and_tried_again_on_request(tmp_path: Path) -> None:
    def fails(item: Item) -> None:
        if isinstance(item.ask, Spot) and item.ask.point["call"] == "map":
            raise RuntimeError("out of\nmemory")

    lines = measure(tmp_path, bench(fails=fails), only="driver")
    assert "driver: 32 measured, 8 could not be: RuntimeError: out of memory, 0 left" in lines
    again = bench()
    measure(tmp_path, again, only="driver", retry=True)
    assert len(again.measured) == 8


def test_a_way_of_sharing_that_is_missing_costs_no_other_part(tmp_path: Path) -> None:
    lines = measure(tmp_path, bench(lacks=("mps",)), only="bfloat16+bfloat16,driver")
    assert "pairs-mps-bfloat16+bfloat16: 0 measured, 14 could not be: no mps here, 0 left" in lines
    assert "pairs-time_slice-bfloat16+bfloat16: 14 measured, 0 could not be, 0 left" in lines


def test_a_device_on_which_nothing_starts_any_more_ends_the_command(tmp_path: Path) -> None:
    found = bench(breaks=("",))
    with pytest.raises(ProbeError, match=f"{LOST} setups in a row did not start"):
        measure(tmp_path, found, minutes=99)
    assert found.device.closed and (tmp_path / command.NAME).exists()


@pytest.mark.parametrize("how", [KeyboardInterrupt, lambda: signal.raise_signal(signal.SIGTERM)])
def test_an_interrupted_command_ends_what_it_started_and_packs(tmp_path: Path, how: Any) -> None:
    def interrupt(item: Item) -> None:
        if len(found.measured) == 5:
            error = how()
            if error is not None:
                raise error

    found = bench(fails=interrupt)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, found)
    assert found.device.closed and signal.getsignal(signal.SIGTERM) is before
    assert len(opened(tmp_path / command.NAME)[1]) == 5
    again = bench()
    measure(tmp_path, again)
    assert again.measured[0] == ITEMS[5]


def test_an_item_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    first = [signal.SIGALRM]
    hung = bench(fails=lambda item: signal.raise_signal(first.pop()) if first else None)
    lines = measure(tmp_path, hung, only="driver")
    assert any("1 could not be: not finished when the time of the command was over" in line for line in lines)


def test_a_setup_that_is_overdue_is_left_for_the_next_command(tmp_path: Path) -> None:
    """It is given up only where it had the whole time of a command."""
    parts = "driver,steps-bfloat16-eager"
    late = bench(overdue=("steps",))
    lines = measure(tmp_path, late, only=parts)
    assert "steps-bfloat16-eager: 0 measured, 0 could not be, 21 left" in lines
    lines = measure(tmp_path, bench(overdue=("steps",)), only=parts)
    assert "steps-bfloat16-eager: 0 measured, 21 could not be: still starting, 0 left" in lines


def test_a_lost_device_ends_the_command_and_the_next_goes_on(tmp_path: Path) -> None:
    def fails(item: Item) -> None:
        if len(lost.measured) == 3:
            lost.device.lost = True
            raise RuntimeError("an illegal memory access")

    lost = bench(fails=fails)
    with pytest.raises(ProbeError, match="the device does not answer any more after RuntimeError: an illegal"):
        measure(tmp_path, lost, only="driver")
    again = bench()
    assert measure(tmp_path, again, only="driver")[-1] == "complete: nothing is left"
    assert len(again.measured) == 40 - 4


# --- on disk ----------------------------------------------------------------------------------------------------------


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    measure(tmp_path, bench(), only="layouts")
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-20])
    again = bench()
    measure(tmp_path, again, only="layouts")
    assert len(again.measured) == 1
    entries = read_journal(journal.read_text(encoding="utf-8"), "j")[1]
    assert len(entries) == len({entry["key"] for entry in entries}) == 24


def test_a_folder_is_of_one_device_and_software(tmp_path: Path) -> None:
    measure(tmp_path, bench(), only="layouts")
    with pytest.raises(ProbeError, match=r"holds a campaign of another machine \(driver 580\); give another folder"):
        Journal(tmp_path, identity(driver="590"))
    (tmp_path / "journal.jsonl").write_text("[]\n", encoding="utf-8")
    with pytest.raises(ProbeError, match="no campaign's journal"):
        Journal(tmp_path, identity())


def test_the_archive_is_small_and_says_what_is_complete(tmp_path: Path) -> None:
    measure(tmp_path, bench(), only="threes-time_slice-bfloat16+bfloat16,layouts")
    (tmp_path / "trials" / "replay").mkdir(parents=True)
    (tmp_path / "trials" / "replay" / "model.safetensors").write_bytes(bytes(2**20 + 1))
    (tmp_path / "trials" / "demo.log").write_text("a word\n", encoding="utf-8")
    measure(tmp_path, bench(), only="driver")
    packed = tmp_path / command.NAME
    assert packed.stat().st_size < 2**20
    with tarfile.open(packed) as tar:
        names = set(tar.getnames())
    tables = {"sharing.parquet", "kv_layout.parquet", "vmm.parquet"}
    assert names == {"manifest.json", "journal.jsonl", "trials/demo.log", *tables}
    found, entries, manifest, _ = opened(packed)
    assert found == identity() and len(entries) == 4 + 24 + 40
    assert manifest["identity"] == asdict(found) and not manifest["complete"]
    assert manifest["parts"]["layouts"] == {"measured": 24, "failed": 0, "left": 0, "reasons": [], "complete": True}
    assert manifest["parts"]["steps-bfloat16-graphs"]["left"] == 21
    assert {"gpu", "host", "packages"} <= set(manifest["machine"])


# --- the report -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of a whole campaign."""
    folder = tmp_path_factory.mktemp("whole")
    measure(folder, bench(), minutes=999)
    return folder / command.NAME


def test_slowdowns_are_those_of_the_device(whole: Path) -> None:
    rows = [row for entry in opened(whole)[1] if entry["table"] == "sharing" for row in entry["rows"]]
    found = slowdowns(rows, None)
    assert {len(each.engines) for each in found} == {2, 3}
    assert {seat.dtype for each in found for seat, _ in each.engines} == {"bfloat16", "fp8", "int4_wo"}
    for each in found:
        caps = slowdown(each.sharing, 1, each.engines[0][0].percent)
        own = slowdown(each.sharing, len(each.engines), each.engines[0][0].percent) / caps
        assert each.measured == pytest.approx(own)


def test_the_report_says_what_to_commit_and_how_predictions_fare(whole: Path) -> None:
    written = conclude(whole)
    assert {path.name for path in written} >= {"sharing.parquet", "step.parquet", "report.md"}
    text = written[-1].read_text(encoding="utf-8")
    assert f"# Campaign on {H100_NAME}" in text and "All of it was measured." in text
    assert "| sharing.parquet | 688 | 2.0% | commit |" in text
    assert "| time_slice | decode_graphs | 3 | decode, 0 of 3 prefill | 15 | 3.30 | 3.30 to 3.30 | 1.10 |" in text
    assert "| bfloat16@50 | 1 decodes at 512 | decode_graphs | 1.41 | 1.00 |" in text
    errors = [line for line in text.splitlines() if line.startswith("| bfloat16 | graphs | decode |")]
    assert len(errors) == 1 and errors[0].endswith("% |")
    for heading in (
        "Steps of one engine",
        "With and without graphs",
        "The host's part",
        "Calls of the driver",
        "KV layouts",
    ):
        assert f"# {heading}\n" in text


def test_a_device_that_the_catalog_lacks_is_reported_without_predictions(tmp_path: Path) -> None:
    other = SimulatedBench(SimulatedDevice(None, H100))
    measure(tmp_path, other, only="pairs-time_slice-bfloat16+bfloat16")
    text = conclude(tmp_path)[-1].read_text(encoding="utf-8")
    assert "| 2.20 | 2.20 to 2.20 | 1.10 | unknown |" in text
    assert "Not all of it was measured." in text


def test_what_is_no_campaign_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="no campaign; give a folder or an archive"):
        conclude(tmp_path)
    (tmp_path / "x.tar.gz").write_bytes(b"no")
    with pytest.raises(ProbeError, match=r"x.tar.gz: no campaign's archive"):
        conclude(tmp_path / "x.tar.gz")


# --- the command line -------------------------------------------------------------------------------------------------


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fineserve-calibrate", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def on_a_bench(request: Request, say: Callable[[str], None]) -> Path:
        return campaign(request, say, lambda *_: bench())

    monkeypatch.setattr("fineserve_evidence.campaign.command.campaign", on_a_bench)
    out = str(tmp_path / "out")
    assert run_cli(monkeypatch, "campaign", "--gpu", "h100", "--minutes", "9", "--out", out, "--only", "layouts") == 0
    said = capsys.readouterr().out
    assert f"packed {out}/campaign.tar.gz; fineserve-calibrate report" in said
    assert run_cli(monkeypatch, "report", f"{out}/campaign.tar.gz") == 0
    assert f"wrote {out}/campaign/report.md" in capsys.readouterr().out


def test_the_plan_is_shown_without_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(monkeypatch, "campaign", "--gpu", "h200", "--plan") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["pairs-time_slice-bfloat16+bfloat16", "14"]
    assert len(lines) == 1 + len({item.part for item in ITEMS})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpu", "h300"), "--gpu h300: unknown; choose one of"),
        (("--gpu", "cpu", "--only", "nothing-like-it"), "--only nothing-like-it: no such part; parts: pairs-"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    arguments: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(monkeypatch, "campaign", *arguments) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_too_short_a_time_is_said(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"--minutes 0.001: nothing fits into them; give more"):
        measure(tmp_path, bench(), minutes=0.001, only="pairs-mps")


def test_part_files_are_json_without_surprises(tmp_path: Path) -> None:
    measure(tmp_path, bench(), only="threes-time_slice-bfloat16+bfloat16+bfloat16")
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[0]["identity"]["device"] == H100_NAME
    rows = lines[1]["rows"]
    assert len(rows) == 3 and rows[0]["neighbours"] == "bfloat16@100 d1c512 + bfloat16@100 d1c512"
    assert rows[0]["dtype"] == BF16 and rows[0]["processes"] == 3


def test_the_cpus_plan_is_a_rehearsal_of_the_gpus() -> None:
    """Every kind of item, and every way to share, is on the CPU's plan, too."""
    kinds = {(type(item.ask), item.table) for item in ITEMS}
    assert {(type(item.ask), item.table) for item in plan(True, TINY.name)} == kinds
    assert sum(item.expected_s for item in plan(True, TINY.name)) < 6 * 60


BARE = """
import sys
for name in ("pyarrow", "pandas", "scipy", "matplotlib", "typer", "simpy", "rich", "torch", "vllm"):
    sys.modules[name] = None
from fineserve_calibrate.probes import nvidia
def load():
    raise nvidia.DriverError("there is no NVIDIA driver")
nvidia.load_driver = load
import fineserve_evidence.campaign.bench
from fineserve_evidence.campaign.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(("more", "code"), [(["--plan"], 0), ([], 2)])
def test_measuring_needs_few_packages(tmp_path: Path, more: list[str], code: int) -> None:
    command = [sys.executable, "-c", BARE, "--gpu", "h100", *more]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == code, run.stderr
    if code:
        assert run.stderr.startswith("error: --gpu h100: no GPU was found") and run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_where_tables_cannot_be_written_the_journal_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fineserve_calibrate.probes.store", None)
    measure(tmp_path, bench(), only="layouts")
    with tarfile.open(tmp_path / command.NAME) as tar:
        assert set(tar.getnames()) == {"manifest.json", "journal.jsonl"}
    monkeypatch.undo()
    assert "kv_layout.parquet" in {path.name for path in conclude(tmp_path / command.NAME)}
