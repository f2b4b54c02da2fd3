"""``fineserve-calibrate sharing``: constants come out of their rows again, and limits hold on the other rows."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from fineserve_evidence.commands import SharingError, sharing
from fineserve_evidence.sharing.caps import (
    AUTHORS_FILES,
    FILE,
    cap_errors,
    fit_saturation,
    predicted,
    read_authors_caps,
    read_caps,
)
from fineserve_evidence.sharing.pairs import PAIRS, REPLICAS, Compared, compare_pairs, compare_replicas

from fineserve_sim.latency import StepModel
from fineserve_sim.latency.sharing import MEMORY_SATURATION
from fineserve_sim.latency.tables import shipped

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "sharing"
needs_files = pytest.mark.skipif(not FOLDER.is_dir(), reason="the shared/ folder with the measurements is absent")
by_tables = partial(StepModel, tables=shipped())


def errors(compared: list[Compared]) -> np.ndarray:
    """predicted / measured - 1 of the rows that have both and were not fitted on."""
    pairs = [(one.predicted, one.measured) for one in compared if not one.fitted]
    return np.array([p / m - 1 for p, m in pairs if p is not None and m is not None])


CAPS = (
    "model,tp,mps_percentage,batch,seq_len,prefill_ms,decode_ms\n"
    "llama-7b,1,50,8,512,400,16\nllama-7b,1,100,8,512,220,13\nllama-30b,2,30,1,32,-1,40\nllama-30b,2,100,1,32,60,38\n"
)
ROWS = (
    "src,gpu,mode,n_procs,workload_a,workload_b,metric,unit,solo,shared,note\n"
    "S1,H200,timeslice,2,Higgs-TTS-3-4B,same,aggregate,req/s,50,75,\n"
    "F2,H200,mig 4g.71gb (64 SM),1,Qwen3-30B-A3B-FP8,,throughput of A,tok/s,200,100,\n"
    "P,A100,mps60/60,2,Qwen3-4B-FP8,same,TPOT median,ms,50,60,\n"
    "S4,H200,mps100,2,Qwen3-TTS,same,mean latency,s,2,1,same total load\n"
    "Z,A100,mps100,2,an engine nobody knows,same,aggregate,req/s,1,1.5,\n"
    "X,RTX,mps50/50,2,DRAM copy 4 GB (micro-kernel),same,bandwidth,GB/s,9,5,\n"
)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_caps_are_read_against_all_sms(tmp_path: Path) -> None:
    found = read_caps(written(tmp_path, "caps.csv", CAPS), by_tables)
    assert found[["model", "phase", "share"]].to_numpy().tolist() == [
        ["llama-7b", "prefill", 0.5],
        ["llama-7b", "decode", 0.5],
        ["llama-30b", "decode", 0.3],  # its prefill under the cap failed
    ]
    assert found.slowdown.tolist() == pytest.approx([400 / 220, 16 / 13, 40 / 38])
    assert found.compute[0] > 0.5 > found.bandwidth[0]
    assert found.bandwidth[1] > found.compute[1]
    assert predicted(found, saturation=0.4)[1] == pytest.approx(
        1 + found.compute[1]
    )  # memory does not feel half of the SMs
    assert [one.held_out for one in cap_errors(found)] == [True, False, False]


def test_what_a_row_measured_is_one_engines_slowdown(tmp_path: Path) -> None:
    tts, sliced, capped, shared_out, unknown = compare_pairs(written(tmp_path, "pairs.csv", ROWS), by_tables)
    assert tts.measured == pytest.approx(2 * 50 / 75)
    assert (sliced.measured, capped.measured) == (2.0, 1.2)
    assert sliced.predicted == pytest.approx(1 + 0.2 * (132 / 64 - 1) + 0.65)
    assert shared_out.predicted is None
    assert unknown.predicted is None
    assert unknown.note == "no demand stated"


def test_a_folder_without_the_files_is_named(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(sharing)
    result = CliRunner().invoke(app, ["--data", str(tmp_path)])
    assert isinstance(result.exception, SharingError)
    assert f"no {FILE} in it" in str(result.exception)


@cache
def caps() -> pd.DataFrame:
    return read_caps(FOLDER / FILE, by_tables)


@cache
def pairs() -> tuple[Compared, ...]:
    return tuple(compare_pairs(FOLDER / PAIRS, by_tables))


@needs_files
def test_memory_saturation_is_what_the_small_models_give() -> None:
    assert pytest.approx(fit_saturation(caps()), rel=0.02) == MEMORY_SATURATION


@needs_files
def test_large_models_under_caps() -> None:
    held_out = [one for one in cap_errors(caps()) if one.held_out]
    assert {one.model for one in held_out} == {"llama-30b", "llama-65b"}
    assert all(one.median_abs < 0.10 for one in held_out)


@needs_files
def test_the_authors_profile_under_caps() -> None:
    """Another GPU, and nothing fitted on it; a fifth of the SMs, the worst, is part of it."""
    for name in AUTHORS_FILES:
        for one in cap_errors(read_authors_caps(FOLDER.parent / "e2e" / name, by_tables)):
            assert one.median_abs < (0.05 if one.phase == "decode" else 0.16), one


@needs_files
def test_two_replicas_on_a_small_gpu() -> None:
    """Nothing was fitted on them."""
    found = compare_replicas(FOLDER / REPLICAS)
    assert len(found) == 2
    assert (np.abs(errors(found)) < 0.20).all()


@needs_files
def test_the_fp8_pair() -> None:
    (pair,) = (one for one in pairs() if one.source == "D")
    assert abs(errors([pair])[0]) < 0.20


@needs_files
def test_every_row_of_engines_is_there_with_its_prediction() -> None:
    """Without one: capped green contexts, for which there is no law, and loads that are shared out."""
    rows = pd.read_csv(FOLDER / PAIRS)
    assert len(pairs()) == (rows.src != "X").sum()  # X: micro-kernels
    without = [one for one in pairs() if one.predicted is None]
    assert {one.source for one in without} == {"S4", "S5", "S7"}
    assert json.dumps([one._asdict() for one in pairs()])
