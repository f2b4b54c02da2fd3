"""A process of KunServe's engines is killed: while layers drop, while KV is exchanged, in the pipeline, while layers come back.

Each request ends once, with the text of one instance with plenty of memory. The log replays.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fineserve_runtime.config import load_file
from fineserve_runtime.decisions import Entry
from fineserve_runtime.launch import Running, launch
from fineserve_runtime.replay_log import replay
from fineserve_runtime.serve import served_scenario
from realkit import NEEDS_VLLM, answered, draw_prompts, one_model, pair_of_kunserve
from runtimekit import LIKELY, assert_same_but_for_ties, eventually

pytestmark = [*NEEDS_VLLM, pytest.mark.slow]
WHOLE, PIPELINE = 1, 2
"""The engines of the host: 0 and 1 have all layers on a device each; 2 is over both."""


class Strike(NamedTuple):
    """At the ``count``-th line of the log that is this event or command the process of an engine ends: of a whole engine its
    only one, of the pipeline the rank on device 1."""

    line: str
    count: int
    engine: int


STRIKES = {
    "drop": Strike("DropLayers", 1, WHOLE),
    "exchange": Strike("LayersDropped", 1, PIPELINE),
    "pipeline": Strike("StepMeasured", 10, PIPELINE),
    "restore": Strike("RestoreLayers", 1, WHOLE),
    "restored": Strike("LayersRestored", 1, PIPELINE),
}
"""Steps are counted from the first drop on."""


@pytest.mark.parametrize("when", STRIKES)
def test_no_request_is_lost(when: str, tmp_path: Path) -> None:
    (path, shared), prompts = one_model(tmp_path), draw_prompts(60)
    alone = load_file(path, [*shared, ("systems", "[fineserve]")])
    with launch(alone, served_scenario(alone, None)) as running:
        expected = [sink for _, sink in answered(running, prompts, lambda number: 48, logprobs=LIKELY)]
    file = load_file(path, [*shared, *pair_of_kunserve("kunserve", "exchange"), ("runtime.mode", "processes")])
    log, incidents = list[Entry](), list[str]()
    killer = Killer(STRIKES[when])
    with launch(
        file, served_scenario(file, None), log=killer.watching(log), on_incident=lambda what, _: incidents.append(what)
    ) as running:
        killer.running = running
        asked = answered(running, prompts, lambda number: 48)
        # a restored pipeline has nothing left to do, and may be let go before its death is seen
        ends = {"engine died", "evicted"} if when == "restored" else {"engine died"}
        eventually(lambda: killer.struck and not ends.isdisjoint(incidents), 60)
    print(f"\n{when}: {', '.join(incidents)}")
    assert_same_but_for_ties([sink for _, sink in asked], expected)
    assert all(sink.ends == 1 for _, sink in asked)
    assert replay([json.loads(json.dumps(entry)) for entry in log]).difference is None


class Killer:
    def __init__(self, strike: Strike) -> None:
        self._strike, self._left, self._dropped = strike, strike.count, False
        self.running: Running | None = None
        self.struck = False

    def watching(self, log: list[Entry]) -> Callable[[Entry], None]:
        def write(entry: Entry) -> None:
            log.append(entry)
            self._see(entry)

        return write

    def _see(self, entry: Entry) -> None:
        line = entry.get("event") or entry.get("command")
        self._dropped |= line == "LayersDropped"
        if line != self._strike.line or (line == "StepMeasured" and not self._dropped):
            return
        self._left -= 1
        if not self._left:
            os.kill(self._pid(), signal.SIGKILL)
            self.struck = True

    def _pid(self) -> int:
        from fineserve_runtime.engines.table import SlabTable

        assert self.running is not None
        host: Any = self.running.hosts[0]
        rows = [SlabTable(path).counters[self._strike.engine] for path in _tables(host)]
        return int(rows[1].get("rank_pid") if self._strike.engine == PIPELINE else max(row.get("pid") for row in rows))


def _tables(host: Any) -> list[Path]:
    """Of both devices."""
    name = host.table_path.name
    return [host.table_path.with_name(name.replace("0.table", f"{gpu}.table")) for gpu in (0, 1)]
