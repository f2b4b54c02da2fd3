"""KunServe on real vLLM engines: two instances over two devices, and the pipeline over the same weights.

A burst overflows the KV of both instances, so layers are dropped. When it has passed, they come back. All texts are those of
one instance with plenty of memory. Freed slabs and dropped layers are poisoned.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from fineserve_runtime.config import load_file
from fineserve_runtime.decisions import Entry
from fineserve_runtime.jobs import Handover
from fineserve_runtime.launch import Running, launch
from fineserve_runtime.replay_log import replay
from fineserve_runtime.serve import served_scenario
from realkit import NEEDS_VLLM, Prompts, answered, draw_prompts, one_model, pair_of_kunserve
from runtimekit import LIKELY, Heard, assert_same_but_for_ties, eventually

pytestmark = NEEDS_VLLM
DROPS = int(os.environ.get("FINESERVE_DROPS", "1"))
"""So many drops and restores, for long runs by hand."""


@pytest.mark.parametrize(("system", "handover"), [("kunserve", "exchange"), ("kunserve-exchange", "recompute")])
def test_layers_drop_and_come_back_and_every_text_is_right(system: str, handover: Handover, tmp_path: Path) -> None:
    (path, shared), prompts = one_model(tmp_path), draw_prompts(60)
    alone = load_file(path, [*shared, ("systems", "[fineserve]")])
    with launch(alone, served_scenario(alone, None)) as running:
        expected = _answers(running, prompts, LIKELY)
    file, log = load_file(path, [*shared, *pair_of_kunserve(system, handover)]), list[Entry]()
    incidents: list[tuple[str, dict[str, object]]] = []
    with launch(
        file, served_scenario(file, None), log=log.append, on_incident=lambda *told: incidents.append(told)
    ) as running:
        before = _weights(running)
        for round_ in range(DROPS):
            assert_same_but_for_ties(_answers(running, prompts), expected)
            eventually(lambda: _told(log)["EngineDrained"] > round_)  # noqa: B023  # called at once
        assert _weights(running) == before
    told = _told(log)
    assert told["DropLayers"] == told["LayersDropped"] == told["LayersRestored"] == told["EngineDrained"] >= DROPS
    _check_capacity(log, told["DropLayers"])
    assert replay([json.loads(json.dumps(entry)) for entry in log]).difference is None
    for what, facts in incidents:
        print(f"\n{what}: {facts}", end="")


def _check_capacity(log: list[Entry], drops: int) -> None:
    """Each pipeline holds as many tokens as the plan says, and an instance as many as before."""
    pipelines = [entry["engine"] for entry in log if entry.get("command") == "DropLayers"]
    told: dict[int, int] = {}
    for entry in log:
        for engine, tokens in entry.get("kv_tokens", {}).items():
            told.setdefault(int(engine), tokens)
    layers = log[0]["core"]["layers"]
    assert [told[engine] for engine in pipelines] == drops * [layers["pair_tokens"]]


def _told(log: list[Entry]) -> Counter[str]:
    return Counter(entry.get("event") or entry.get("command", "") for entry in list(log))


def _weights(running: Running) -> list[bytes]:
    """The bytes of the weights on each device, which lie at the upper end of its region."""
    name, found = running.hosts[0].config.region_name, []
    for gpu, engine in enumerate(list(running.hosts[0].engines.values())[:2]):
        region = Path(f"/dev/shm/fineserve-{name}{gpu}.kv").read_bytes()
        found.append(region[-engine.stats().weight_bytes :])
    return found


def _answers(running: Running, prompts: Prompts, logprobs: int | None = None) -> list[Heard]:
    return [sink for _, sink in answered(running, prompts, lambda number: 48, logprobs=logprobs)]
