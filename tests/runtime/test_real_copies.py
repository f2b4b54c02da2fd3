"""KV that leaves a real vLLM engine as bytes and comes back: to another instance (Llumnix), or from host memory (InferCept).

Nothing is computed again, which the decision log shows: the prompt tokens of all steps are those of the prompts.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import NamedTuple

from fineserve_runtime.config import load_file
from fineserve_runtime.decisions import Entry
from fineserve_runtime.launch import launch
from fineserve_runtime.replay_log import replay
from fineserve_runtime.serve import served_scenario
from realkit import NEEDS_VLLM, Changes, Prompts, answered, draw_prompts, one_model
from runtimekit import LIKELY, Heard, assert_same_but_for_ties

pytestmark = NEEDS_VLLM
POISONED = ("runtime.poison_freed", "true")
REQUESTS = int(os.environ.get("FINESERVE_PARITY_REQUESTS", "60"))
LLUMNIX = """{base: llumnix, name: llumnix, dispatch: {policy: round_robin},
              migration: {policy: llumnix, out_blocks: 64, in_blocks: 64}}"""
"""Every second request goes to the same instance. Where these are the long ones, requests move from there all the time."""


def test_requests_move_between_instances_with_their_kv(tmp_path: Path) -> None:
    (path, shared), prompts = one_model(tmp_path), draw_prompts(REQUESTS)
    stock = _run(path, [*shared, ("systems", "[fineserve]")], prompts, LIKELY)
    run = _run(path, [*shared, POISONED, ("cluster.count", "2"), ("systems", f"[{LLUMNIX}]")], prompts)
    assert_same_but_for_ties(run.heard, stock.heard)
    moves, stopped_s = len(run.stopped_s), statistics.median(run.stopped_s)
    print(f"\n{len(prompts)} requests, {moves} moves, stopped for {1e3 * stopped_s:.1f} ms (median)")
    assert moves > 0 and run.preemptions == 0
    # A destination computes the one token whose KV its source had not.
    assert run.prefill_tokens == sum(map(len, prompts)) + moves


def test_preempted_requests_come_back_from_host_memory(tmp_path: Path) -> None:
    (path, shared), prompts = one_model(tmp_path), draw_prompts(REQUESTS)
    small = ("runtime.region_bytes", str(24 * 65536))
    stock = _run(path, [*shared, ("systems", "[fineserve]")], prompts, LIKELY)
    run = _run(path, [*shared, POISONED, small, ("systems", "[infercept]")], prompts)
    assert_same_but_for_ties(run.heard, stock.heard)
    print(f"\n{len(prompts)} requests, {run.preemptions} preemptions")
    assert run.preemptions > 0
    assert run.prefill_tokens == sum(map(len, prompts))


class _Run(NamedTuple):
    """Each answer, and what the engines did for them. ``stopped_s``: of each move, how long its request stood."""

    heard: list[Heard]
    preemptions: int
    prefill_tokens: int
    stopped_s: list[float]


def _run(path: Path, changes: Changes, prompts: Prompts, logprobs: int | None = None) -> _Run:
    """Its decision log replays."""
    file, log, stopped_s = load_file(path, changes), list[Entry](), list[float]()

    def hear(what: str, facts: dict[str, object]) -> None:
        if what == "migrated":
            stopped_s.append(float(str(facts["stopped_s"])))

    with launch(file, served_scenario(file, None), log=log.append, on_incident=hear) as running:
        asked = answered(running, prompts, lambda number: (64, 8)[number % 2], logprobs=logprobs)
    assert replay([json.loads(json.dumps(entry)) for entry in log]).difference is None
    prefilled = sum(entry["prefill_tokens"] for entry in log if entry.get("event") == "StepMeasured")
    heard = [sink for _, sink in asked]
    return _Run(heard, sum(job.preemptions for job, _ in asked), prefilled, stopped_s)
