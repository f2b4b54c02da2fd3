"""A plan for the demo's models is a file of fineserve-run as it is: placement, engines and answers; fake engines."""

from __future__ import annotations

from pathlib import Path

from fake_engines import continuation
from filekit import start_fake, write_file
from fineserve_runtime.config import load_file
from fineserve_runtime.engines.api import Sampling
from fineserve_runtime.jobs import Job
from fineserve_runtime.launch import launch
from fineserve_runtime.serve import served_scenario
from runtimekit import Heard, eventually
from typer.testing import CliRunner

from fineserve_sim.cli import app

NAMES = ("tiny-bf16", "tiny-fp8")


def test_a_plan_is_served_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    demo = write_file(tmp_path / "demo")
    rows = "".join(f"{number / 10},{60 + number % 9},{20 + number % 5},{NAMES[number % 2]}\n" for number in range(60))
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens,model\n" + rows, encoding="utf-8")
    arguments = ["plan", str(trace), "--like", str(demo), "--gpus", "1", "--ttft-slo", "5", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--evaluations", "4", "--jobs", "1"])
    assert result.exit_code == 0, result.output + str(result.exception)
    file = load_file(tmp_path / "plan.yaml")
    scenario = served_scenario(file, None)
    assert scenario.system.name == "plan" and scenario.system.placement.policy == "pinned"
    with launch(file, scenario, start=start_fake) as running:
        (host,) = running.hosts.values()
        assert {engine.name: engine.max_batched_tokens for engine in host.config.engines} == dict.fromkeys(NAMES, 256)
        assert host.config.region_bytes == 16777216
        for model in NAMES:
            heard = Heard()
            running.driver.submit(lambda id: Job(id, model, (5, 6, 7), Sampling(max_tokens=4), heard, 5.0))  # noqa: B023
            eventually(lambda: heard.end is not None)  # noqa: B023
            assert heard.tokens_ == continuation((5, 6, 7), 4)
