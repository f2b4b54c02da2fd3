"""LLMServingSim's bench runs: the reader on tiny files, and data-parallel ranks against the measured run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from fineserve_evidence.commands import Latency, step_factory
from fineserve_evidence.validate.cases import OpenLoop, with_load
from fineserve_evidence.validate.layouts import read_set
from fineserve_evidence.validate.predict import StepFactory, kv_bytes, predict_set
from fineserve_evidence.validate.rows import LayoutError
from servingsimkit import ProfiledRanks, link_of, over_link, profiled

from fineserve_sim.catalog import kv_token_bytes

BENCH = Path(__file__).parents[3] / "shared" / "data" / "fleets" / "llmservingsim_bench"
RUN = "RTXPRO6000_Qwen3-30B-A3B-Instruct-2507"
MIXTURE = "Qwen/Qwen3-30B-A3B-Instruct-2507"
TOLD: dict[str, Any] = {
    "model": MIXTURE,
    "tensor_parallel_size": 1,
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
}
ROWS = [
    {"request_id": f"bench-{i}", "input_toks": 100 + i, "output_toks": 1 + 9 * (i > 0), "arrival_time": 1e9 + i}
    | {
        "queued_ts": 50.0 + i,
        "scheduled_ts": 50.1 + i,
        "first_token_ts": 50.2 + i,
        "last_token_ts": 50.2 + i + 0.9 * (i > 0),
    }
    for i in range(4)
]
by_tables = step_factory(Latency.TABLES)


META = {"engine_kwargs": TOLD, "dataset_path": "workloads/small.jsonl"}
PROMPTS = [[*range(32), *range(1000 * i, 1000 * i + 68 + i)] for i in range(4)]  # the first two blocks are alike


def _lines(path: Path, rows: Iterable[object]) -> Path:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return path


def _write(
    folder: Path,
    meta: dict[str, Any] | None,
    name: str = "RTXPRO6000_Small",
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> Path:
    if meta is not None:
        (folder / f"{name}_meta.json").write_text(json.dumps(meta), encoding="utf-8")
    _lines(folder / "small.jsonl.gz", ({"input_tok_ids": prompt} for prompt in prompts))
    return _lines(folder / f"{name}_requests.jsonl.gz", reversed(ROWS))


def test_a_run_is_a_case_with_its_ranks(tmp_path: Path) -> None:
    measured = read_set(_write(tmp_path, META), by_tables)
    (case,) = measured.cases
    experts = case.serving.model.experts
    assert experts is not None and (experts.ranks, experts.spread) == (2, "whole")
    assert (case.serving.tp, case.serving.max_sequences, case.serving.token_budget) == (1, 128, 2048)
    assert isinstance(case.load, OpenLoop) and case.load.replicas == 2
    assert case.load.arrival_s.tolist() == [0, 1, 2, 3] and case.load.prompt_tokens.tolist() == [100, 101, 102, 103]
    assert case.ttft_s == pytest.approx(np.full(4, 0.2))
    assert case.tpot_s[1:] == pytest.approx(np.full(3, 0.1)) and np.isnan(case.tpot_s[0])
    (predicted,) = predict_set(measured, by_tables)
    assert np.isfinite(predicted.ttft_s).all() and np.isfinite(predicted.tpot_s[1:]).all()


def test_kv_is_as_large_as_recorded(tmp_path: Path) -> None:
    path = _write(tmp_path, META)
    beside = path.with_name("RTXPRO6000_Small_meta.json")
    plain = read_set(path, by_tables).cases[0].serving
    beside.write_text(json.dumps(META | {"kv_cache": {"num_kv_tokens": 41408}}), encoding="utf-8")
    known = read_set(path, by_tables).cases[0].serving
    token_bytes = kv_token_bytes(known.model, known.precision, known.tp)
    assert kv_bytes(known) == pytest.approx(41408 * token_bytes, abs=token_bytes) and kv_bytes(known) < kv_bytes(plain)


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("RTX0000_Small", {}, "GPU RTX0000 not in the catalog"),
        ("RTXPRO6000_Small", {"model": "meta-llama/Llama-3.1-8B"}, "no experts"),
        ("RTXPRO6000_Small", {"kv_cache_dtype": "fp8"}, "KV cache in fp8"),
    ],
)
def test_runs_that_no_case_stands_for_are_counted(
    tmp_path: Path, name: str, changed: dict[str, Any], reason: str
) -> None:
    measured = read_set(_write(tmp_path, META | {"engine_kwargs": TOLD | changed}, name), by_tables)
    ((_, model, why),) = measured.unsupported
    assert not measured.cases and measured.unsupported.total() == 4
    assert model == (TOLD | changed)["model"] and reason in why


def test_settings_must_be_beside_the_requests(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"RTXPRO6000_Small_meta\.json: expected engine_kwargs and dataset_path"):
        read_set(_write(tmp_path, None), by_tables)
    without = {name: value for name, value in TOLD.items() if name != "dtype"}
    with pytest.raises(LayoutError, match="no dtype in engine_kwargs"):
        read_set(_write(tmp_path, META | {"engine_kwargs": without}), by_tables)


def test_blocks_have_one_name_where_prompts_begin_alike(tmp_path: Path) -> None:
    """Blocks of 16 tokens. The third holds the first tokens that differ; outputs, of one or ten tokens, are each its own."""
    (case,) = read_set(_write(tmp_path, META), by_tables).cases
    assert isinstance(case.load, OpenLoop) and case.load.blocks is not None
    first, *others = case.load.blocks
    assert [len(names) for names in case.load.blocks] == [6, 6, 7, 7]  # 101, 111, 112 and 113 tokens
    assert all(names[:2] == first[:2] for names in others)
    rest = [name for names in case.load.blocks for name in names[2:]]
    assert len(set(rest)) == len(rest) and not set(rest) & set(first[:2])


def test_a_workload_of_other_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        LayoutError, match=r"small\.jsonl\.gz: expected prompts as long as the requests of the run record"
    ):
        read_set(_write(tmp_path, META, prompts=PROMPTS[::-1]), by_tables)
    path = _write(tmp_path, META)
    (tmp_path / "small.jsonl.gz").unlink()
    with pytest.raises(LayoutError, match=r"small\.jsonl\.gz: expected JSON lines with input_tok_ids"):
        read_set(path, by_tables)


def test_a_broken_file_says_what_it_should_be(tmp_path: Path) -> None:
    path = tmp_path / "x_requests.jsonl.gz"
    path.write_bytes(gzip.compress(b"{not json"))
    with pytest.raises(LayoutError, match="not a readable file of JSON lines"):
        read_set(path, by_tables)


needs_runs = pytest.mark.skipif(not BENCH.is_dir(), reason="the shared/ folder with the measured sets is absent")


def means_off(run: str, make_step: StepFactory) -> list[float]:
    """How far the means of TPOT, end to end and TTFT are off, in percent."""
    measured = read_set(BENCH / f"{run}_requests.jsonl.gz", make_step)
    once = replace(measured, cases=tuple(map(with_load(OpenLoop, phases=1), measured.cases)))
    (found,) = predict_set(once, make_step)
    case, gaps = found.case, found.case.load.output_tokens - 1
    whole = found.ttft_s + found.tpot_s * gaps, case.ttft_s + case.tpot_s * gaps
    pairs = [(found.tpot_s, case.tpot_s), whole, (found.ttft_s, case.ttft_s)]
    return [100 * float(np.nanmean(predicted) / np.nanmean(real) - 1) for predicted, real in pairs]


LIMITS = (3, 4, 10)


def known_blocks(load: OpenLoop) -> int:
    """Blocks with which prompts begin as an earlier one does."""
    seen: set[int] = set()
    found = 0
    for names in load.blocks or ():
        found += len(seen.intersection(names))
        seen.update(names)
    return found


@needs_runs
@pytest.mark.parametrize(
    ("run", "off"),
    [
        ("RTX4090_Llama-3.1-8B", [2.8, 3.0, 3.1]),
        ("RTXPRO6000_Llama-3.1-8B", [-2.0, -2.8, -5.1]),
    ],
)
def test_runs_on_one_gpu_are_predicted_by_its_tables(run: str, off: list[float]) -> None:
    """One with its KV full nearly all the time, one with all slots taken."""
    (case,) = read_set(BENCH / f"{run}_requests.jsonl.gz", by_tables).cases
    assert isinstance(case.load, OpenLoop) and case.load.blocks is not None
    assert 16 * known_blocks(case.load) / case.load.prompt_tokens.sum() == pytest.approx(
        0.076, abs=0.001
    )  # docs/fidelity.md
    found = means_off(run, by_tables)
    assert found == pytest.approx(off, abs=0.1)  # docs/fidelity.md
    assert all(abs(part) <= limit for part, limit in zip(found, LIMITS, strict=True))


@needs_runs
def test_a_tp_group_is_predicted_over_the_link_of_its_machine() -> None:
    """Two GPUs. Their cluster file has a link of 16 GB/s and 20 us; by the all-reduce that was measured on another machine the
    means are off by 18, 21 and 26 %."""
    run = "RTXPRO6000_Qwen3-32B"
    found = means_off(run, partial(over_link, link_of(BENCH, run), by_tables))
    assert found == pytest.approx([-2.0, -1.3, -0.4], abs=0.1)  # docs/fidelity.md
    assert all(abs(part) <= limit for part, limit in zip(found, LIMITS, strict=True))
    assert means_off(run, by_tables) == pytest.approx([-17.9, -21.2, -25.9], abs=0.1)


@needs_runs
def test_ranks_take_as_long_as_measured_where_operators_are_known() -> None:
    """Qwen3-30B-A3B in two ranks, experts over both, with operators and link of the machine. By our tables, and the link of
    another machine, TPOT is 11 % too short."""
    found = means_off(RUN, partial(ProfiledRanks, profiled(BENCH, "RTXPRO6000", MIXTURE, RUN)))
    assert found == pytest.approx([-0.2, -0.4, -5.5], abs=0.1)  # docs/experiments.md
    assert all(abs(part) <= limit for part, limit in zip(found, LIMITS, strict=True))
    assert means_off(RUN, by_tables)[0] == pytest.approx(-11.3, abs=0.1)
