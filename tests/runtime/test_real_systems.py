"""Every system on real vLLM engines: all tokens are those of one device with plenty of memory, and the log replays.

Freed slabs and dropped layers are poisoned. ``FINESERVE_PARITY_REQUESTS=300`` plays so many requests with each system.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from fineserve_runtime.config import load_file
from fineserve_runtime.decisions import Entry
from fineserve_runtime.demo import make_demo
from fineserve_runtime.launch import launch
from fineserve_runtime.replay_log import replay
from fineserve_runtime.serve import served_scenario
from realkit import NEEDS_VLLM, REGION_BYTES, Asked, Changes, answered, draw_prompts, one_model
from runtimekit import LIKELY, Heard, assert_same_but_for_ties

from fineserve_sim.systems import load_systems

pytestmark = [*NEEDS_VLLM, pytest.mark.slow]
REQUESTS, WAVE = int(os.environ.get("FINESERVE_PARITY_REQUESTS", "60")), 30
PLENTY: Changes = [("systems", "[fineserve]"), ("runtime.region_bytes", str(64 * 2**20))]
POISONED: Changes = [("runtime.poison_freed", "true"), ("runtime.weights_in_region", "true")]
SCARCE = 24 * 65536
"""Blocks of one model for a few requests, beside which no weights lie."""


class Play(NamedTuple):
    """How a system is played: what a file says of it beside its name, on so many devices with so many bytes each. ``tells``:
    what its log must have. Where ``weights`` is false, weights lie outside the region."""

    says: str = ""
    devices: int = 1
    region_bytes: int = 16 * 2**20
    tells: tuple[str, ...] = ()
    weights: bool = True


PAGES = "memory: {policy: kvcached, page_bytes: 16384}"
TWO_MODELS = {
    "fineserve": Play(),
    "balanced": Play(),
    "static*": Play(),
    "s-partition": Play(),
    "prism*": Play(),
    "muxserve": Play(),
    "muxserve++": Play(PAGES),
    "kvcached": Play(PAGES),
    "prism": Play(
        f"{PAGES}, residency: {{policy: prism, idle_s: 0.0, pressure_fraction: 0.9, move: false, tick_s: 0.1}}",
        region_bytes=14 * 2**20,
    ),
    "qlm": Play("residency: {policy: qlm, swap_s: 0.1, tick_s: 0.05}", tells=("Evict", "Activate")),
    # Both models begin on the first device. With these limits a second one spares late requests, where the machine is slow
    # enough that there are any; so no move is asked for.
    "drifting": Play(
        "placement: {policy: pinned, groups: {tiny-bf16: [[0]], tiny-fp8: [[0]]}}, "
        f"{PAGES}, residency: {{policy: drifting, replace_s: 0.5, idle_s: 0.5, tick_s: 0.1}}",
        devices=2,
    ),
    "dedicated": Play(devices=2),
}
PAIR = Play(devices=2, region_bytes=REGION_BYTES, tells=("DropLayers", "LayersRestored"))
THREE = Play(devices=3, region_bytes=SCARCE, weights=False, tells=("served by 0", "served by 1", "served by 2"))
ONE_MODEL = {
    "vllm-v0.4.2": Play(region_bytes=SCARCE, weights=False),
    "native": Play(region_bytes=5 * 16 * 65536, weights=False),
    "flexinfer": Play("memory: {policy: vtensor, chunk_bytes: 8192}", region_bytes=SCARCE, weights=False),
    "vllm-pp": Play(devices=2, region_bytes=SCARCE, weights=False),
    "vllm-dp": THREE,
    "llumnix": THREE,
    "infercept": THREE,
    "kunserve": PAIR,
    "kunserve-drop": PAIR,
    "kunserve-exchange": PAIR,
    "kunserve-norestore": PAIR._replace(tells=("DropLayers",)),
}
ELSEWHERE = {"clairvoyant": "a bound", "distserve": "roles", "vllm-pd": "roles"}
"""Systems that no engine carries out, which are refused by name (``test_config.py``)."""


def test_every_system_is_played_or_refused_by_name() -> None:
    assert {*TWO_MODELS, *ONE_MODEL, *ELSEWHERE} == load_systems().keys()


@pytest.mark.parametrize("system", TWO_MODELS)
def test_two_models(system: str, two_models: Stock) -> None:
    two_models.check(system, TWO_MODELS[system])


@pytest.mark.parametrize("system", ONE_MODEL)
def test_one_model(system: str, one: Stock) -> None:
    one.check(system, ONE_MODEL[system])


class Stock:
    """A file, and the tokens of its requests on one device with plenty of memory."""

    def __init__(self, path: Path, shared: Changes, models: tuple[str, ...], tokens: Callable[[int], int]) -> None:
        self._path, self._shared, self._models, self._lengths = path, shared, models, tokens
        self._expected = _sinks(self._run(PLENTY, [], LIKELY))

    def check(self, system: str, play: Play) -> None:
        item = f'{{base: "{system}", name: s, {play.says}}}' if play.says else f'"{system}"'
        told = self._told(
            [
                *(POISONED if play.weights else POISONED[:1]),
                ("cluster.count", str(play.devices)),
                ("systems", f"[{item}]"),
                ("runtime.region_bytes", str(play.region_bytes)),
            ]
        )
        assert set(play.tells) <= told.keys()

    def _told(self, changes: Changes) -> Counter[str]:
        """What the log of a changed run tells. Its tokens must be the expected ones, and it must replay."""
        log: list[Entry] = []
        asked = self._run(changes, log)
        heard = _sinks(asked)
        same = sum(ours.tokens_ == theirs.tokens_ for ours, theirs in zip(heard, self._expected, strict=True))
        told = Counter(entry.get("event") or entry.get("command", "") for entry in log)
        print(f"\n{len(asked)} requests, {same} with the same tokens; {dict(told)}")
        assert_same_but_for_ties(heard, self._expected)
        assert replay([json.loads(json.dumps(entry)) for entry in log]).difference is None
        return told + Counter(f"served by {job.served_by}" for job, _ in asked)

    def _run(self, changes: Changes, log: list[Entry], logprobs: int | None = None) -> Asked:
        """In waves, so that models have something to do again and again."""
        file, prompts = load_file(self._path, [*self._shared, *changes]), draw_prompts(REQUESTS)
        asked: Asked = []
        with launch(file, served_scenario(file, None), log=log.append) as running:
            for first in range(0, len(prompts), WAVE):
                wave = prompts[first : first + WAVE]
                asked += answered(running, wave, self._lengths, self._models, logprobs)
        return asked


def _sinks(asked: Asked) -> list[Heard]:
    return [sink for _, sink in asked]


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    shared = [("runtime.region_name", f"two-{os.getpid()}"), ("runtime.queued_requests", "1000")]
    shared += [(f"models.{number}.ttft_slo_s", "0.2") for number in (0, 1)]
    path = make_demo(tmp_path_factory.mktemp("two"), 0)
    return Stock(path, shared, ("tiny-bf16", "tiny-fp8"), lambda number: 8 + number % 17)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    path, shared = one_model(tmp_path_factory.mktemp(f"one-{os.getpid()}"))
    return Stock(path, [*shared, ("engine.max_sequences", "64")], ("m",), lambda number: 40 + number % 17)
