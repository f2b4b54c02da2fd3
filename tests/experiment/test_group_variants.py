"""Single-model systems in experiment files: variants of their axes, one run for all SLOs, and counters in the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fineserve_sim.experiment import ConfigError, load_experiment, run_experiment

FILE = Path(__file__).parents[2] / "experiments" / "kunserve_fig14.yaml"
SMALL = [
    ("models", json.dumps([{"id": "m", "model": "qwen2.5-14b", "precision": "fp16", "rate_per_s": 2.0}])),
    ("workload", json.dumps({"lengths": {"prompt_tokens": 500, "output_tokens": 20}, "requests": 30})),
    ("sweeps", json.dumps([{"name": "s", "axes": {"slo_scale": [1, 5]}}])),
    ("figures", "[]"),
    ("seeds", "1"),
]


def variant(**axes: object) -> str:
    return json.dumps(["vllm-dp", {"base": "vllm-dp", "name": "mine", **axes}])


def test_an_axis_that_the_base_does_not_have_may_be_given() -> None:
    systems = variant(execution={"stages": 2}, drop={"policy": "kunserve_drop", "max_group": 4})
    experiment = load_experiment(FILE, [("systems", systems), *_slo(), ("figures", "[]")])
    mine = experiment.setup.systems["mine"]
    assert mine.execution is not None and mine.execution.stages == 2
    assert mine.drop is not None and mine.drop.max_group == 4 and mine.drop.trigger == 0.95


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"drop": {"trigers": 1}}, 'unknown option of kunserve_drop; did you mean "trigger"'),
        ({"dispatch": {"policy": "least_load"}}, "unknown dispatch policy"),
        ({"execution": {"stages": 0}}, "stages"),
    ],
)
def test_a_wrong_option_is_named(axes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_experiment(FILE, [("systems", variant(**axes)), *_slo(), ("figures", "[]")])


def _slo() -> list[tuple[str, str]]:
    return [("slo", json.dumps({"ttft_s": 1.0}))]


def test_one_run_serves_all_slo_scales_and_its_counters_are_kept(tmp_path: Path) -> None:
    overrides = [("systems", '["vllm-dp", "kunserve"]'), *_slo(), *SMALL]
    run_experiment(FILE, tmp_path, jobs=1, overrides=overrides)
    assert len(list((tmp_path / "cells").glob("*.json"))) == 2
    cells = json.loads((tmp_path / "summary.json").read_text())["cells"]
    assert len(cells) == 4
    for cell in cells:
        assert cell["metrics"]["drops"]["mean"] == 0
        assert 0 < cell["metrics"]["kv_demand_peak"]["mean"] < 0.1
