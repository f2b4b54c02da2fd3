"""One model on two devices under real vLLM engines: an instance on each (vLLM (DP)), or both as a pipeline (vLLM (PP))."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fineserve_runtime.config import load_file
from fineserve_runtime.decisions import Entry
from fineserve_runtime.launch import launch
from fineserve_runtime.replay_log import replay
from fineserve_runtime.serve import served_scenario
from realkit import NEEDS_VLLM, Asked, Changes, Prompts, answered, draw_prompts, one_model
from runtimekit import LIKELY, assert_same_but_for_ties

pytestmark = NEEDS_VLLM


@pytest.mark.parametrize(("system", "engines"), [("vllm-dp", {0, 1}), ("vllm-pp", {0})])
def test_two_devices_serve_one_load_with_the_tokens_of_one_alone(
    system: str, engines: set[int], tmp_path: Path
) -> None:
    (path, shared), prompts, log = one_model(tmp_path), draw_prompts(40), list[Entry]()
    alone = _run(path, [*shared, ("systems", "[fineserve]")], prompts, [], LIKELY)
    two = [("cluster.count", "2"), ("runtime.poison_freed", "true"), ("systems", f"[{system}]")]
    asked = _run(path, [*shared, *two], prompts, log)
    assert_same_but_for_ties([sink for _, sink in asked], [sink for _, sink in alone])
    assert {job.served_by for job, _ in asked} == engines
    assert replay([json.loads(json.dumps(entry)) for entry in log]).difference is None


def _run(path: Path, changes: Changes, prompts: Prompts, log: list[Entry], logprobs: int | None = None) -> Asked:
    file = load_file(path, changes)
    with launch(file, served_scenario(file, None), log=log.append) as running:
        return answered(running, prompts, lambda number: 24, logprobs=logprobs)
