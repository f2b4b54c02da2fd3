"""``fineserve-calibrate claims``: every claim of the ledger has an evaluator; decisions on hand-made probe tables."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from fineserve_calibrate.probes.schema import KEYS
from fineserve_evidence.claims import EVALUATORS, ClaimError, Evidence, Verdict, ids_of, read_probes, verdict_of
from fineserve_evidence.commands import claims

from fineserve_sim.latency.tables import TableError, shipped

LEDGER = Path(__file__).parents[3] / "shared" / "spec" / "claims.yaml"


def verdict(name: str, **probes: pd.DataFrame) -> Verdict:
    for operator, rows in probes.items():
        assert set(rows) <= {*KEYS[operator], "latency_s"}  # as the probes write them
    return verdict_of(name, Evidence(shipped(), probes))


def vmm(call_us: float, pages: tuple[int, ...] = (2 * 2**20, 2**30)) -> pd.DataFrame:
    """Every driver call takes the same time, whatever the handle."""
    calls = ("create", "map", "set_access", "unmap", "release")
    rows = [(call, size, 64, load, call_us * 1e-6) for call in calls for size in pages for load in ("idle", "kernel")]
    return pd.DataFrame(rows, columns=[*KEYS["vmm"], "latency_s"])


def copies(pinned: float, pageable: float) -> pd.DataFrame:
    """Host-to-device copies of 1 GB at these GB/s, and small ones that say nothing."""
    rows = [
        ("host_to_device", memory, size, seconds)
        for memory, rate in (("pinned", pinned), ("pageable", pageable))
        for size, seconds in ((1000, 1.0), (10**9, 1 / rate))
    ]
    return pd.DataFrame(rows, columns=[*KEYS["copy"], "latency_s"])


def steps(alpha: float, beta: float = 2e-5) -> pd.DataFrame:
    """Prompt chunks of one engine with KunServe's cost, and one decode step of 10 ms."""
    rows = []
    for tokens in (256, 512, 768, 1024, 1536, 2048, 3072, 4096):
        for prefix in (0, 1024, 4096):
            seconds = alpha * (prefix * tokens + (tokens**2 + tokens) / 2) + beta * tokens + 0.002
            rows.append(("m", "bfloat16", "bfloat16", "graphs", 0, 0, tokens, prefix, seconds))
    rows.append(("m", "bfloat16", "bfloat16", "graphs", 8, 512, 0, 0, 0.01))
    return pd.DataFrame(rows, columns=[*KEYS["step"], "latency_s"])


def pairs(beside_ms: float) -> pd.DataFrame:
    """Engines of every format decode 32 tokens in 10 ms alone, and in ``beside_ms`` beside any other."""
    kinds, rows = ("bfloat16", "fp8", "int4_wo"), []
    for mine in kinds:
        rows.append(("mps", "m", mine, "none", 32, 512, 0, 0, 0, 0.01))
        rows += [("mps", "m", mine, other, 32, 512, 0, 32, 0, beside_ms * 1e-3) for other in kinds]
    return pd.DataFrame(rows, columns=[*KEYS["contention"], "latency_s"])


@pytest.mark.skipif(not LEDGER.is_file(), reason="the shared/ folder with the ledger is absent")
def test_every_claim_of_the_ledger_has_an_evaluator() -> None:
    assert set(ids_of(LEDGER)) == set(EVALUATORS)
    assert len(EVALUATORS) == 26


def test_without_a_gpu_nothing_is_decided_but_what_was_imported() -> None:
    found = {name: verdict(name) for name in EVALUATORS}
    decided = {name for name, one in found.items() if one.status != "open"}
    assert decided == {"KS-4.3-second-chunk"}
    assert all(one.evidence and one.found for one in found.values() if one.status != "open")
    assert all(one.decide for one in found.values() if one.status == "open")


def test_the_second_chunk_of_a_prompt_attends_to_the_first() -> None:
    """From whole prompts; and from chunks after a prefix, once they were measured."""
    assert verdict("KS-4.3-second-chunk").status == "holds"
    measured = verdict("KS-4.3-second-chunk", step=steps(1e-9))
    assert measured.status == "holds" and "1024: 1.0" in measured.found
    assert verdict("KS-4.3-second-chunk", step=steps(0.0)).status == "fails"


@pytest.mark.parametrize(("call_us", "status"), [(3, "fails"), (10, "holds"), (80, "fails")])
def test_driver_calls(call_us: float, status: str) -> None:
    """Map and set-access of one page: 6, 20 and 160 us against 10 to 100."""
    found = verdict("FS-C3-percall", vmm=vmm(call_us))
    assert (found.status, f"{2 * call_us:.1f} us" in found.found) == (status, True)


def test_growth_and_remap_by_hand() -> None:
    # 64 pages x 3 calls x 10 us = 1.92 ms; 14 handles of 1 GiB x 3 calls x 10 us = 0.42 ms
    assert verdict("FS-C3-growth", vmm=vmm(10)) == Verdict("holds", "64 pages created and mapped: 1.92 ms", "vmm")
    remap = verdict("KS-4.1-api", vmm=vmm(10))
    assert remap.status == "holds" and "0.42 ms by handles of 1024 MiB, in 215 ms by the smallest" in remap.found
    assert verdict("KS-4.1-api", vmm=vmm(10, pages=(2 * 2**20,))).status == "fails"


def test_loading() -> None:
    assert verdict("PR-9-small", copy=copies(25.0, 5.0)).status == "holds"  # 16.1 GB / 25 GB/s = 0.64 s
    assert verdict("PR-9-small", copy=copies(20.0, 5.0)).status == "fails"
    assert verdict("PR-9-14b", copy=copies(25.0, 5.0)).status == "holds"  # 5.0x against 5.5x
    assert verdict("PR-9-14b", copy=copies(25.0, 12.5)).status == "fails"
    starts = [("m", "bfloat16", "graphs", "import", 12.0), ("m", "bfloat16", "graphs", "start", 30.0)]
    frame = pd.DataFrame(starts, columns=[*KEYS["engine_start"], "latency_s"])
    assert verdict("PR-9-naive", engine_start=frame).status == "holds"
    assert verdict("PR-9-naive", engine_start=frame.assign(latency_s=1.0)).status == "fails"


def test_the_chunk_cost_against_tokens_alone() -> None:
    """Rows that follow the cost exactly are predicted exactly; without attention a line in the tokens does as well."""
    found = verdict("KS-eq1", step=steps(1e-9))
    assert found.status == "holds" and "largest error on held-out chunks 0.0%" in found.found
    assert verdict("KS-eq1-err", step=steps(1e-9)).status == "holds"
    assert verdict("KS-eq1-err", step=steps(1e-13)).status == "fails"


def test_pairs_of_engines() -> None:
    assert verdict("FS-6-all-gain", contention=pairs(12.0)).status == "holds"  # 2 x 10 / 12 = 1.67
    assert verdict("FS-6-all-gain", contention=pairs(25.0)).status == "fails"  # 0.8
    assert verdict("FS-6-fp8fp8", contention=pairs(10.3)).status == "holds"  # 1.94
    assert verdict("FS-6-fp8fp8", contention=pairs(16.0)).status == "fails"
    some = pairs(12.0)
    assert verdict("FS-6-all-gain", contention=some[some.dtype != "int4_wo"]).status == "open"


def test_extension_ahead_of_the_kernel() -> None:
    """1,024 steps of 10 ms are ample for 64 pages, unless a driver call takes a tenth of a second."""
    chunks = steps(1e-9)
    assert verdict("VT-5-overlap", vmm=vmm(20), step=chunks).status == "holds"
    assert verdict("VT-5-overlap", vmm=vmm(1e5), step=chunks).status == "fails"
    assert verdict("VT-5-overlap", vmm=vmm(20)).status == "open"


# --- the command -------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> str:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(claims)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_command_reads_what_the_probes_wrote(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pandas(vmm(10)), tmp_path / "vmm.parquet")
    rows = json.loads(run("--id", "FS-C3-percall", "--probes", str(tmp_path), "--json"))
    assert rows == [
        {
            "id": "FS-C3-percall",
            "status": "holds",
            "found": "map and set-access of a 2 MiB page: 20.0 us",
            "evidence": "vmm",
            "decide": "",
        }
    ]
    assert "2 holds" not in run() and "25 open" in run()


def test_another_ledger(tmp_path: Path) -> None:
    ledger = tmp_path / "claims.yaml"
    ledger.write_text("claims:\n- {id: NEW-1, backend: calibrator-gpu}\n- {id: X, backend: sim}\n", encoding="utf-8")
    assert "no evaluator knows this claim" in run("--claims-file", str(ledger))


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ClaimError, match="--id NOPE: no such claim; known: FS-C3-percall"):
        run("--id", "NOPE")
    (tmp_path / "x.yaml").write_text("- 1", encoding="utf-8")
    with pytest.raises(ClaimError, match=r"x\.yaml: not a ledger of claims"):
        ids_of(tmp_path / "x.yaml")
    with pytest.raises(TableError, match="no tables there; fineserve-calibrate --gpu h100"):
        read_probes(tmp_path)
    (tmp_path / "vmm.parquet").write_text("call,bytes", encoding="utf-8")
    with pytest.raises(TableError, match=r"vmm\.parquet: not a Parquet file"):
        read_probes(tmp_path)
    pq.write_table(pa.table({"call": ["map"]}), tmp_path / "vmm.parquet")
    with pytest.raises(TableError, match=r"vmm\.parquet: no column latency_s; found call"):
        read_probes(tmp_path)
