"""A prompt by itself: the first token that an idle engine gives, and misses that are the prompt's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fineserve_traces import Trace

from fineserve_sim import catalog
from fineserve_sim.cluster import EngineSettings, Gpu, Scenario, ServedModel, simulate
from fineserve_sim.cluster.compose.profiling import step_model
from fineserve_sim.experiment import run_experiment
from fineserve_sim.experiment.results.summary import read_summary
from fineserve_sim.experiment.run.alone import first_token_s
from fineserve_sim.systems import load_systems

H100 = catalog.gpu("h100-sxm")


@pytest.mark.parametrize(("model", "precision", "tp"), [("qwen2.5-72b", "awq", 2), ("llama-3.1-8b", "fp8", 1)])
@pytest.mark.parametrize("system", ["dedicated", "muxserve++", "prism", "fineserve"])
def test_an_idle_engine_gives_the_first_token_then(model: str, precision: str, tp: int, system: str) -> None:
    served = ServedModel("A", catalog.model(model), catalog.precision(precision), tp, 1e-3, math.inf, 500, 50)
    prompts = np.array([1, 100, 2047, 2048, 2049, 4096, 9000])
    trace = Trace(
        arrival_s=np.arange(len(prompts)) * 1000.0,
        model=np.zeros(len(prompts), dtype=np.int32),
        prompt_tokens=prompts,
        output_tokens=np.full(len(prompts), 5),
        models=("A",),
        source="one by one",
    )
    gpus = tuple(Gpu(number, 0, H100) for number in range(tp))
    found = simulate(Scenario(load_systems()[system], (served,), gpus, trace)).first_token_s - trace.arrival_s
    step, budget = step_model(served, H100, EngineSettings()), EngineSettings().token_budget
    assert found == pytest.approx([first_token_s(step, int(tokens), budget) for tokens in prompts], abs=1e-9)


LONG = """\
fineserve: 1
title: Long prompts
cluster: {gpu: h100-sxm, count: 2}
models:
  - {id: big, model: qwen2.5-72b, precision: awq, tp: 2, share: 1}
workload: {trace: long.csv, assign: share}
slo: {ttft_s: 1.0}
systems: [SYSTEM]
seeds: 1
"""


def misses_of(folder: Path, system: str) -> dict[str, Any]:
    prompts = [500, 8000, 600, 5000, 700, 300, 200, 900, 1000, 400]
    rows = [f"{20 * at},{tokens},50" for at, tokens in enumerate(prompts)]
    (folder / "long.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]), encoding="utf-8")
    (folder / "long.yaml").write_text(LONG.replace("SYSTEM", f'"{system}"'), encoding="utf-8")
    run_experiment(folder / "long.yaml", folder / "out", jobs=1)
    (cell,) = read_summary(folder / "out")["cells"]
    return dict(cell)


@pytest.mark.parametrize("system", ["static*", "fineserve", "prism"])
def test_what_is_late_even_alone_misses_by_the_prompt_itself(system: str, tmp_path: Path) -> None:
    """Served late or dropped, 5,000 tokens are out of reach within a second: no policy is to blame."""
    cell = misses_of(tmp_path, system)
    assert {cause: count for cause, count in cell["misses"].items() if count} == {"prompt": 2}
    assert [(entry["what"], entry["misses"]) for entry in cell["binds"]] == [("prompt", 2)]
    assert 4000 < cell["reach_tokens"]["big"] < 5000
