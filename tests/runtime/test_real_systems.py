"""Systems on real vLLM engines under 300 requests each: all tokens are those of one device with plenty of memory, and the log
replays. Freed slabs are poisoned."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from fineserve_runtime.config import load_file
from fineserve_runtime.decisions import Entry
from fineserve_runtime.demo import make_demo
from fineserve_runtime.launch import launch
from fineserve_runtime.replay_log import replay
from fineserve_runtime.serve import served_scenario
from realkit import NEEDS_VLLM, Asked, Changes, answered, draw_prompts, one_model
from runtimekit import assert_same_but_for_ties

pytestmark = [*NEEDS_VLLM, pytest.mark.slow]
REQUESTS, WAVE = int(os.environ.get("FINESERVE_PARITY_REQUESTS", "300")), 30
PLENTY: Changes = [("systems", "[fineserve]"), ("runtime.region_bytes", str(64 * 2**20))]
POISONED: Changes = [("runtime.poison_freed", "true"), ("runtime.weights_in_region", "true")]

QLM = "{base: qlm, name: s, residency: {policy: qlm, swap_s: 0.1, tick_s: 0.05}}"
DRIFTING = """{base: drifting, name: s, placement: {policy: pinned, groups: {tiny-bf16: [[0]], tiny-fp8: [[0]]}},
               memory: {policy: kvcached, page_bytes: 16384},
               residency: {policy: drifting, replace_s: 0.5, idle_s: 0.5, tick_s: 0.1}}"""
"""Both models begin on the first of two devices. With these limits a second one spares late requests, where the machine is slow
enough that there are any; so no move is asked for."""

TIGHT: Changes = [(f"models.{number}.ttft_slo_s", "0.2") for number in (0, 1)]


@pytest.mark.parametrize(
    ("system", "devices", "commands"),
    [(QLM, 1, {"Evict", "Activate"}), (DRIFTING, 2, set()), ("dedicated", 2, set())],
    ids=["qlm", "drifting", "dedicated"],
)
def test_two_models(system: str, devices: int, commands: set[str], two_models: Stock) -> None:
    here = [("cluster.count", str(devices)), ("systems", f"[{system}]"), ("runtime.region_bytes", str(16 * 2**20))]
    assert commands <= two_models.told([*POISONED, *TIGHT, *here]).keys()


@pytest.mark.parametrize("system", ["vllm-dp", "llumnix", "infercept"])
def test_one_model_on_three_devices(system: str, one: Stock) -> None:
    """Each has memory for a few requests."""
    here = [("cluster.count", "3"), ("systems", f"[{system}]"), ("runtime.region_bytes", str(24 * 65536))]
    told = one.told([("runtime.poison_freed", "true"), *here])
    assert {f"served by {engine}" for engine in range(3)} <= told.keys()


class Stock:
    """A file, and the tokens of its requests on one device with plenty of memory."""

    def __init__(self, path: Path, shared: Changes, models: tuple[str, ...]) -> None:
        self._path, self._shared, self._models = path, shared, models
        self._expected = _tokens(self._run(PLENTY, []))

    def told(self, changes: Changes) -> Counter[str]:
        """What the log of a changed run tells. Its tokens must be the expected ones, and it must replay."""
        log: list[Entry] = []
        asked = self._run(changes, log)
        assert_same_but_for_ties(_tokens(asked), self._expected)
        same = sum(ours == theirs for ours, theirs in zip(_tokens(asked), self._expected, strict=True))
        told = Counter(entry.get("event") or entry.get("command", "") for entry in log)
        print(f"\n{len(asked)} requests, {same} with the same tokens; {dict(told)}")
        assert replay([json.loads(json.dumps(entry)) for entry in log]).difference is None
        return told + Counter(f"served by {job.served_by}" for job, _ in asked)

    def _run(self, changes: Changes, log: list[Entry]) -> Asked:
        """In waves, so that models have something to do again and again."""
        file, prompts = load_file(self._path, [*self._shared, *changes]), draw_prompts(REQUESTS)
        asked: Asked = []
        with launch(file, served_scenario(file, None), log=log.append) as running:
            for first in range(0, len(prompts), WAVE):
                wave = prompts[first : first + WAVE]
                asked += answered(running, wave, lambda number: 8 + number % 17, self._models)
        return asked


def _tokens(asked: Asked) -> list[list[int]]:
    return [sink.tokens_ for _, sink in asked]


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("two")
    shared = [("runtime.region_name", f"two-{os.getpid()}"), ("runtime.queued_requests", "1000")]
    return Stock(make_demo(folder, 0), shared, ("tiny-bf16", "tiny-fp8"))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    path, shared = one_model(tmp_path_factory.mktemp(f"one-{os.getpid()}"))
    return Stock(path, shared, ("m",))
