"""The step model against measurements that it was not fitted to, except where a constant says so.

Bounds are wide on purpose: they say how wrong the model may be, and fail when it gets worse. What the model takes from
the same profile: the host floors (batch 1) and the AWQ and QoQ compute rates (batch 16 and 32). Figures are printed.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from fineserve_sim.catalog import deployment, gpu, model, precision
from fineserve_sim.latency import StepModel, batch_prefill_s, profile

SHARED = Path(__file__).parents[3] / "shared"
AUTHORS = SHARED / "data" / "e2e" / "fineserve_authors_h100_8b.csv"
AUTHORS_BUDGET = 16384  # assumed: vLLM 0.9.1's default for offline batches on an H100; the profile does not state it

needs_profile = pytest.mark.skipif(
    not AUTHORS.exists(), reason="the shared/ folder with the authors' profile is absent"
)


@cache
def rows(fmt: str) -> list[dict[str, str]]:
    with AUTHORS.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["qformat"] == fmt and row["mps_percentage"] == "100"]


def errors(fmt: str) -> dict[str, list[float]]:
    """Relative errors (model / measured - 1) of TPOT, prefill time and TTFT over batch 1-32, inputs 256 and 512."""
    name = {"org": "fp16"}.get(fmt, fmt)
    deployed = deployment("vllm-0.9.1-authors")
    step = StepModel(model("llama-3.1-8b"), precision(name), 1, gpu("h100-sxm"), deployed)
    found: dict[str, list[float]] = {"tpot": [], "prefill_time": [], "ttft": []}
    for row in rows(fmt):
        batch, prompt, output = int(row["batch_size"]), int(row["input_len"]), int(row["output_len"])
        tpot_s = float(step.decode_steps_s(batch, batch * prompt, output - 1).mean())
        prefill_s = batch_prefill_s(step, batch, prompt, AUTHORS_BUDGET)
        for column, predicted in (("tpot", tpot_s), ("prefill_time", prefill_s), ("ttft", prefill_s)):
            found[column].append(predicted / float(row[column]) - 1)
    return found


@needs_profile
@pytest.mark.parametrize(
    ("fmt", "tpot_bound", "ttft_bound"),
    [("org", 0.10, 0.20), ("fp8_kv8", 0.10, 0.20), ("awq", 0.10, 0.20), ("qoq", 0.10, 0.35)],
)
def test_authors_profile(fmt: str, tpot_bound: float, ttft_bound: float) -> None:
    found = errors(fmt)
    for column, values in found.items():
        middle, worst = median(map(abs, values)), max(values, key=abs)
        print(f"{fmt} {column}: median |error| {middle:.1%}, worst {worst:+.1%}, {[round(v, 2) for v in values]}")
    assert len(found["tpot"]) == 12
    assert median(map(abs, found["tpot"])) < tpot_bound
    assert median(map(abs, found["ttft"])) < ttft_bound


def test_mean_tpot_of_the_speed_workload() -> None:
    """Llama-3.1-8B FP16, 8.2 req/s of 615 + 245 tokens, budget 512: two independent simulators print 8.1 and 8.5 ms on
    the H100. Ours by Little's law: the batch that carries 8.2 req/s, and its time per token."""
    step = StepModel(model("llama-3.1-8b"), precision("fp16"), 1, gpu("h100-sxm"), deployment("vllm-cudagraph"))
    pure_s = step.step_s(20, 20 * (615 + 122), 0, 0, 0, 20)
    below, above = (next(p for p in profile(step, 615, 245, 512, size)[::-1] if p.batch == size) for size in (12, 24))
    slope = (above.throughput_per_s - below.throughput_per_s) / (above.batch - below.batch)
    batch = below.batch + (8.2 - below.throughput_per_s) / slope
    tpot_s = batch / 8.2 / 247  # 244 decode steps, and the two or three of the prefill
    print(f"decode step at 20: {pure_s * 1e3:.2f} ms; mean TPOT at 8.2 req/s: {tpot_s * 1e3:.2f} ms, batch {batch:.1f}")
    assert pure_s < tpot_s
    assert 0.0081 * 0.9 < tpot_s < 0.0085 * 1.1
