"""What step times rest on, over the runs of an experiment: shares pooled by samples, and what is warned of."""

from __future__ import annotations

from typing import Any

import pytest

from fineserve_sim.catalog import GpuSpec, gpu
from fineserve_sim.cluster import EngineSettings
from fineserve_sim.experiment.results.step_times import pooled, sentence, tables_of, warnings

H100, H200, H800, L4 = gpu("h100-sxm"), gpu("h200-sxm"), gpu("h800"), gpu("l4")
RUNS: list[dict[str, Any]] = [
    {"step_samples": 30, "step_times": {"qkv": {"measured": 0.8}, "lm_head": {"extrapolated": 0.2}}},
    {"step_samples": 10, "step_times": {"qkv": {"measured": 0.4, "fitted": 0.2}, "host_overhead": {"assumed": 0.4}}},
    {"step_samples": 0, "step_times": {}},
]


def test_runs_weigh_as_much_as_their_samples() -> None:
    found = pooled(RUNS)
    assert found["samples"] == 40
    assert found["shares"] == pytest.approx({"measured": 0.7, "fitted": 0.05, "roofline": 0.15, "assumed": 0.1})
    assert found["beyond_tables"] == pytest.approx({"lm_head": 0.15})
    assert pooled(RUNS[2:]) == {}
    assert sentence(found).endswith("70% measured, 5% fitted, 15% roofline, 10% assumed")
    assert "70% measured on h200-sxm, 5% fitted" in sentence(found | {"tables_of": tables_of([H200], EngineSettings())})


def test_what_left_the_measured_range_is_warned_of_once_by_operator() -> None:
    (line,) = warnings(pooled(RUNS), [H100], EngineSettings())
    assert "lm_head 15.0%" in line and "qkv" not in line
    assert list(warnings(pooled(RUNS[1:]), [H100], EngineSettings())) == []


def test_a_gpu_without_tables_is_warned_of_unless_rooflines_were_asked_for() -> None:
    (line,) = warnings({}, [H800], EngineSettings())
    assert "no measured latency tables for GPU h800: step times are rooflines" in line
    assert list(warnings({}, [H800], EngineSettings(latency="roofline"))) == []


def test_tables_scaled_from_another_gpu_are_told() -> None:
    (line,) = warnings({}, [L4], EngineSettings())
    assert "no measured latency tables for GPU l4: step times are those of l40s, scaled" in line
    assert (
        list(warnings({}, [L4], EngineSettings(latency="roofline")))
        == list(warnings({}, [H200], EngineSettings()))
        == []
    )


@pytest.mark.parametrize(
    ("spec", "engine", "name"),
    [
        (H100, EngineSettings(), "h100-sxm"),
        (H200, EngineSettings(), "h200-sxm"),
        (L4, EngineSettings(), "l40s"),
        (H800, EngineSettings(), None),
        (H200, EngineSettings(latency="roofline"), None),
    ],
)
def test_the_answer_names_the_gpu_whose_tables_it_rests_on(
    spec: GpuSpec, engine: EngineSettings, name: str | None
) -> None:
    assert tables_of([spec], engine) == name
