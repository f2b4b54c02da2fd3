"""The runner, resume, tables and report of the probes, on a simulated device whose speed is known."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fineserve_calibrate.probes.parts import QUICK, Effort, Part, collect, measure, run_part, shuffled, summary
from fineserve_calibrate.probes.plan import GIB, grid, plan, powers
from fineserve_calibrate.probes.report import conclude, ideal_s, measured_spec
from fineserve_calibrate.probes.schema import KEYS, MEASURED, Identity, Point, Prepared, ProbeError, Unavailable
from fineserve_calibrate.probes.session import Session, default_folder, select
from fineserve_calibrate.tables import COLUMNS, check, read_table
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from simulatedkit import NOISE, SimulatedDevice

from fineserve_sim.catalog import deployment, gpu, model, precision
from fineserve_sim.latency import StepModel
from fineserve_sim.latency.tables import load

H100 = gpu("h100-sxm")
SIZES = (1, 16, 256, 4096)
GEMM = Part("gemm", "gemm", grid("gemm", dtype=["bfloat16"], m=SIZES, n=[1024, 4096], k=[1024, 4096]), QUICK, 60.0, 1.0)
COPIES = grid("copy", direction=["host_to_device"], host_memory=["pinned"], bytes=powers(4096, GIB, 16))
COPY = Part("copy", "copy", COPIES, QUICK, 60.0, 1.0)


SOFTWARE = {"gpus": 1, "driver": "1.0", "cuda": "13.0", "torch": "2.0", "vllm": "0.0"}
NAME = "NVIDIA H100 80GB HBM3"


def device(name: str = NAME, **changes: object) -> SimulatedDevice:
    settings: dict[str, object] = {"identity": Identity(name, **SOFTWARE), "spec": H100} | changes  # type: ignore[arg-type]
    return SimulatedDevice(data_sheet=H100, **settings)  # type: ignore[arg-type]


def session(backend: SimulatedDevice, folder: Path) -> Session:
    return Session(backend, folder, "quick", Console(file=io.StringIO()))


def fails_at(**wanted: object) -> object:
    def fail(operator: str, point: Point) -> None:
        if all(point.get(name) == value for name, value in wanted.items()):
            raise RuntimeError("out of memory\nTraceback")

    return fail


# --- the runner -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.integers(0, 60), st.floats(0, 2), st.floats(1e-4, 0.5))
def test_repeats_stay_within_their_bounds_and_end_with_the_target(
    least: int, more: int, target_s: float, each_s: float
) -> None:
    effort, clock = Effort(2, least, least + more, target_s), [0.0]

    def sample(count: int) -> list[float]:
        clock[0] += count * each_s
        return [each_s] * count

    seconds = measure(Prepared(sample, "test"), effort, lambda: clock[0])
    spent_s = clock[0] - 2 * each_s
    assert effort.least <= len(seconds) <= effort.most
    assert len(seconds) == effort.most or spent_s >= target_s - 1e-9
    if len(seconds) > effort.least:  # the last batch was begun before the target was reached, and doubled at most
        assert spent_s <= 2 * target_s + least * each_s + 1e-9


def test_the_summary_of_a_hand_worked_example() -> None:
    assert summary([4.0, 1.0, 2.0, 3.0, 5.0]) == {"latency_s": 3.0, "spread": pytest.approx(2 / 3), "repeats": 5}


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clock_that_gives_no_times_is_noticed(bad: float) -> None:
    with pytest.raises(Unavailable, match="clock"):
        summary([1.0, bad, 2.0])


def test_rows_are_the_medians_of_the_known_times() -> None:
    backend = device()
    outcome = run_part(GEMM, backend)
    assert len(outcome.rows) == len(GEMM.points)
    for row in outcome.rows:
        point = {name: row[name] for name in KEYS["gemm"]}
        assert row["latency_s"] == pytest.approx(device().exact_s("gemm", point) * np.median(NOISE), rel=0.01)
        assert 0 < row["spread"] < 0.05
        assert row["implementation"] == "simulated"


def test_the_order_is_shuffled_the_same_way_each_time() -> None:
    assert shuffled(GEMM) == shuffled(GEMM) != list(GEMM.points)
    assert sorted(map(str, shuffled(GEMM))) == sorted(map(str, GEMM.points))


@given(st.floats(0, 0.2))
def test_every_point_is_measured_unavailable_or_left_out(limit_s: float) -> None:
    told = []
    part = replace(GEMM, limit_s=limit_s)
    outcome = run_part(part, device(prepare_s=0.01, fail=fails_at(m=16)), told.append)
    assert len(outcome.rows) + len(outcome.unavailable) + outcome.left_out == len(part.points) == sum(told)
    assert outcome.left_out == 0 or outcome.seconds > limit_s
    assert len(told) - 1 == len(part.points) - outcome.left_out >= 1


def test_a_point_that_fails_does_not_stop_the_others() -> None:
    outcome = run_part(GEMM, device(fail=fails_at(m=16)))
    assert {row["m"] for row in outcome.rows} == {1, 256, 4096}
    assert {reason for _, reason in outcome.unavailable} == {"RuntimeError: out of memory"}
    assert all(point["m"] == 16 for point, _ in outcome.unavailable)


def test_a_device_that_is_lost_ends_the_part() -> None:
    outcome = run_part(GEMM, device(fail=fails_at(m=16), lost=True))
    assert outcome.device_lost
    assert len(outcome.unavailable) == 1
    assert len(outcome.rows) + 1 + outcome.left_out == len(GEMM.points)


def test_a_part_needs_the_columns_of_its_operator() -> None:
    with pytest.raises(ValueError, match="a point of gemm has dtype, m, n, k"):
        Part("gemm", "gemm", ({"m": 1},), QUICK, 1.0, 1.0)


# --- resume -----------------------------------------------------------------------------------------------------------


def test_finished_parts_are_not_measured_again(tmp_path: Path) -> None:
    session(device(), tmp_path).measure([GEMM, COPY])
    first = collect(tmp_path)
    assert [part.name for part in first.parts] == ["copy", "gemm"]
    again = device()
    session(again, tmp_path).measure([GEMM, COPY])
    assert again.prepared == [] and collect(tmp_path) == first
    assert not list((tmp_path / "parts").glob("*.partial"))


def test_another_driver_or_another_grid_is_measured_anew(tmp_path: Path) -> None:
    session(device(), tmp_path).measure([GEMM, COPY])
    newer = device(identity=Identity(NAME, **SOFTWARE | {"driver": "2.0"}))  # type: ignore[arg-type]
    session(newer, tmp_path).measure([COPY])
    assert len(newer.prepared) == len(COPY.points)
    assert [part.name for part in collect(tmp_path).parts] == ["copy"]  # not mixed with another driver's
    wider = device()
    session(wider, tmp_path).measure([replace(GEMM, points=GEMM.points[:4])])
    assert len(wider.prepared) == 4


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"format": 1}'])
def test_a_damaged_part_is_measured_anew(tmp_path: Path, damage: str) -> None:
    session(device(), tmp_path).measure([COPY])
    (tmp_path / "parts" / "copy.json").write_text(damage, encoding="utf-8")
    again = device()
    session(again, tmp_path).measure([COPY])
    assert len(again.prepared) == len(COPY.points)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    def interrupt(operator: str, point: Point) -> None:
        if operator == "copy":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session(device(fail=interrupt), tmp_path).measure([GEMM, COPY])
    again = device()
    session(again, tmp_path).measure([GEMM, COPY])
    assert {point["operator"] for point in again.prepared} == {"copy"}


def test_a_lost_device_is_an_error_and_the_next_run_skips_what_lost_it(tmp_path: Path) -> None:
    with pytest.raises(
        ProbeError, match=r"gemm: the device does not answer any more after RuntimeError: out of memory"
    ):
        session(device(fail=fails_at(m=16), lost=True), tmp_path).measure([GEMM, COPY])
    again = device()
    session(again, tmp_path).measure([GEMM, COPY])
    assert {point["operator"] for point in again.prepared} == {"copy"}


# --- tables and report ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quick run of the whole plan of a GPU."""
    folder = tmp_path_factory.mktemp("quick")
    session(device(), folder).measure(plan(on_cpu=False, quick=True, model="llama-3.1-8b"))
    conclude(folder)
    return folder


@pytest.mark.parametrize("operator", ["gemm", "prefill_attention", "decode_attention"])
def test_tables_are_in_the_imported_format_and_pass_its_checks(results: Path, operator: str) -> None:
    table = read_table(results / f"{operator}.parquet")
    check(table, NAME, H100)
    fingerprint = table.fingerprint
    assert (fingerprint.driver, fingerprint.cuda, fingerprint.torch) == ("1.0", "13.0", "2.0")
    assert fingerprint.backend == "vllm 0.0"
    assert fingerprint.clocks == "1980 MHz"
    assert "a row" in fingerprint.repeats and "%" in fingerprint.spread
    bound = ideal_s(table, H100)
    assert bound is not None
    assert table.columns["latency_s"] == pytest.approx(5e-6 + bound / 0.7, rel=0.03)


def test_every_operator_has_a_table_with_statistics(results: Path) -> None:
    import pyarrow.parquet as pq

    for path in results.glob("*.parquet"):
        names = pq.read_table(path).column_names
        assert tuple(names) == (*KEYS[path.stem], *MEASURED)
    found = {path.stem for path in results.glob("*.parquet")}
    assert set(KEYS) - found == {"all_reduce", "point_to_point", "contention", "host_overhead"}  # one GPU, quick


def test_the_simulator_predicts_from_the_probed_tables(results: Path) -> None:
    tables = load(results / "h100-sxm.npz", device=NAME)
    shape = (model("llama-3.1-8b"), precision("fp16"), 1, H100, deployment("vllm-cudagraph"))
    step = StepModel(*shape, tables=tables)
    assert step.step_s(8, 8 * 512, 0, 0, 0, 8) == pytest.approx(
        StepModel(*shape).step_s(8, 8 * 512, 0, 0, 0, 8), rel=0.3
    )


def test_the_report_says_what_was_measured_and_what_was_not(results: Path) -> None:
    text = (results / "report.md").read_text(encoding="utf-8")
    assert f"# Probes of {NAME}" in text
    assert "* gemm: passed" in text
    assert "| gemm | simulated | 72 |" in text
    assert "all-reduce: 9 points, 1 GPUs, needs more" in text
    assert "* Compact set: h100-sxm.npz" in text
    assert (results / "figures" / "roofline.png").stat().st_size > 10_000


def test_times_in_milliseconds_are_reported(tmp_path: Path) -> None:
    session(device(efficiency=0.7e-3, launch_s=5e-3), tmp_path).measure([GEMM])
    conclude(tmp_path)
    assert "look like milliseconds" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_alternatives_are_compared_at_the_points_that_both_have(tmp_path: Path) -> None:
    """Hand-worked: every row takes a millisecond, and Machete fails at 16 rows."""
    points = grid("int4_gemm", kernel=["machete", "marlin"], m=[1, 16], n=[4096], k=[4096])
    part = Part("int4-kernels", "int4_gemm", points, QUICK, 60.0, 1.0)
    session(device(fail=fails_at(kernel="machete", m=16)), tmp_path).measure([part])
    conclude(tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "* int4_gemm: marlin takes 1.00 times as long as machete" in text
    assert "| int4_gemm | simulated | 3 |" in text


def test_nothing_measured_still_gives_a_report(tmp_path: Path) -> None:
    session(device(fail=fails_at()), tmp_path).measure([GEMM])
    conclude(tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "Nothing was measured." in text
    assert f"gemm: {len(GEMM.points)} points, RuntimeError: out of memory" in text


def test_a_device_without_a_data_sheet_is_held_against_its_own_best(tmp_path: Path) -> None:
    session(device("Other GPU", spec=None), tmp_path).measure([GEMM, COPY])
    conclude(tmp_path)
    table = read_table(tmp_path / "gemm.parquet")
    spec = measured_spec([table], "own")
    assert spec is not None
    share = ideal_s(table, spec) / table.columns["latency_s"]  # type: ignore[operator]
    assert share.max() == pytest.approx(1.0)
    assert spec.bf16_flops_per_s < H100.bf16_flops_per_s
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "roofline of its own best rows" in text and "not in its catalog" in text


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("quick", [True, False])
def test_plans_have_short_parts_with_names_and_points_of_their_own(on_cpu: bool, quick: bool) -> None:
    parts = plan(on_cpu, quick, "some-model")
    assert len({part.name for part in parts}) == len(parts)
    assert all(part.points and part.limit_s <= 7 * 60 and part.expected_s < 8 * 60 for part in parts)
    assert set(COLUMNS) <= {part.operator for part in parts}
    for operator in KEYS:
        points = [tuple(point.items()) for part in parts if part.operator == operator for point in part.points]
        assert len(set(points)) == len(points)
    if quick:
        assert sum(part.expected_s for part in parts) <= 120


def test_full_plans_cover_every_operator() -> None:
    assert {part.operator for part in plan(False, False, "m")} == set(KEYS)
    assert next(part.operator for part in plan(False, False, "m")) == "step"


def test_parts_are_chosen_by_name(tmp_path: Path) -> None:
    parts = plan(True, True, "m")
    assert {part.operator for part in select(parts, "gemm")} == {"gemm"}
    with pytest.raises(ProbeError, match="--only gem-m: no such part; parts: gemm-bfloat16-0, "):
        select(parts, "gem-m")
    assert default_folder(device(), on_cpu=False, quick=True) == Path("calibration/h100-sxm-quick")
    assert default_folder(device(), on_cpu=True, quick=False) == Path("calibration/cpu")
    assert default_folder(device("Other GPU", spec=None), False, False) == Path("calibration/other-gpu")


def test_part_files_are_json_without_surprises(tmp_path: Path) -> None:
    session(device(), tmp_path).measure([COPY])
    data = json.loads((tmp_path / "parts" / "copy.json").read_text(encoding="utf-8"))
    assert data["identity"]["device"] == NAME
    assert len(data["rows"]) == len(COPY.points)


def test_columns_are_those_of_the_imported_tables() -> None:
    assert {operator: (*KEYS[operator], "latency_s") for operator in COLUMNS} == COLUMNS


def test_a_folder_without_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="no finished parts"):
        conclude(tmp_path)


MEASURING = """
import sys
for name in ("pyarrow", "pandas", "scipy", "matplotlib", "typer", "simpy", "torch", "vllm"):
    sys.modules[name] = None
sys.argv = ["probes", "--gpu", "h100", "--only", "gemm"]
from fineserve_calibrate.probes import nvidia
def load():
    raise nvidia.DriverError("there is no NVIDIA driver")
nvidia.load_driver = load
from fineserve_calibrate.probes.__main__ import main
sys.exit(main())
"""


def test_measuring_needs_few_packages(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", MEASURING], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("error: --gpu h100: no GPU was found") and run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
