"""A plan for the demo's models is served as it is, on real engines, with stock vLLM's tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fineserve_runtime.config import load_file
from fineserve_runtime.demo import MODELS, make_demo
from fineserve_runtime.engines.api import Submission
from fineserve_runtime.jobs import Job
from fineserve_runtime.launch import Running, launch
from fineserve_runtime.serve import served_scenario
from runtimekit import Heard, eventually
from typer.testing import CliRunner

from fineserve_sim.cli import app

from .conftest import draw_requests

pytestmark = pytest.mark.filterwarnings("ignore")
REQUESTS, TOGETHER = 300, 100


def ask(running: Running, model: str, each: Submission, ear: Heard) -> None:
    running.driver.submit(lambda id: Job(id, model, each.prompt_token_ids, each.sampling, ear, 60.0))


def test_a_plan_serves_300_requests(vllm_installed: None, same_tokens: Callable[..., None], tmp_path: Path) -> None:
    demo, names = make_demo(tmp_path / "demo", 0), list(MODELS)
    requests = draw_requests(7, REQUESTS)
    rows = [
        f"{number / 20},{len(each.prompt_token_ids)},{each.sampling.max_tokens},{names[number % 2]}\n"
        for number, each in enumerate(requests)
    ]
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens,model\n" + "".join(rows), encoding="utf-8")
    arguments = ["plan", str(trace), "--like", str(demo), "--gpus", "1", "--ttft-slo", "5", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--evaluations", "4", "--jobs", "1"])
    assert result.exit_code == 0, result.output + str(result.exception)
    file = load_file(tmp_path / "plan.yaml")
    heard = [Heard() for _ in requests]
    with launch(file, served_scenario(file, None)) as running:
        (host,) = running.hosts.values()
        configs = {engine.name: engine for engine in host.config.engines}
        for first in range(0, REQUESTS, TOGETHER):
            together = slice(first, first + TOGETHER)
            for number, (each, ear) in enumerate(zip(requests[together], heard[together], strict=True)):
                ask(running, names[number % 2], each, ear)
            eventually(lambda: all(ear.end is not None for ear in heard[together]))  # noqa: B023
    for place, name in enumerate(names):
        mine = requests[place::2]
        answered = {each.request_id: tuple(heard[each.request_id].tokens_) for each in mine}
        same_tokens(configs[name], mine, answered)
