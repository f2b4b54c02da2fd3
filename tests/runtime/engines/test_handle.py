"""What the host knows of an engine while its messages come in. A device that keeps nothing stands for the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fineserve_runtime.engines.api import (
    EngineConfig,
    HostConfig,
    Sampling,
    StepReport,
    Submission,
    TinyModel,
    TokenChunk,
)
from fineserve_runtime.engines.device import DeviceFacts, EngineFacts
from fineserve_runtime.engines.host import Host
from fineserve_runtime.engines.loop import Died, Ready, Stepped

from fineserve_sim.policy.interfaces import EngineState
from fineserve_sim.policy.memory.geometry import SlabPlan

STATE = EngineState(0, 0, 0, 16, 0, 1.0)


class Kept:
    """The device and the listener of a host."""

    def __init__(self) -> None:
        self.facts = DeviceFacts((EngineFacts(Path("model"), (), 64, (0,)),), SlabPlan(64, (1,)), Path("table"), False)
        self.lost: tuple[int, ...] | None = None
        self.heard: Callable[[], None] = lambda: None
        engine = EngineConfig("one", TinyModel())
        device: Any = self
        self.host = Host(HostConfig(engines=(engine,), region_bytes=1024), self, lambda config, receive: device)
        self.host._receive(Ready(0, STATE))

    def send(self, command: Any) -> None:
        pass

    def free_kv_tokens(self, engine: int) -> int:
        return 0

    def on_step(self, report: StepReport) -> None:
        self.heard()

    def on_died(self, engine: int, reason: str, lost: tuple[int, ...], crashed: bool = False) -> None:
        self.lost = lost

    def ends(self, request_id: int) -> None:
        chunk = TokenChunk(request_id, (7,), "length")
        self.host._receive(Stepped(2, StepReport(0, 0.0, 1.0, 0.0, 1, 0, 1, (chunk,), (), STATE)))


@pytest.fixture
def kept() -> Kept:
    kept = Kept()
    for number in (0, 1):
        kept.host.engines[0].submit(Submission(number, (5, 6), Sampling(max_tokens=1)))
    return kept


def test_nothing_is_drained_before_the_listener_heard_it(kept: Kept) -> None:
    handle = kept.host.engines[0]
    kept.ends(0)
    drained = []
    kept.heard = lambda: drained.append(handle.drain(0.0))
    kept.ends(1)
    assert drained == [False]
    assert handle.drain(0.0)


def test_a_request_that_is_sent_again_has_not_ended(kept: Kept) -> None:
    """Its first try was aborted; the report of that came after it was sent again, or sends it again."""
    handle = kept.host.engines[0]
    kept.ends(0)
    kept.heard = lambda: handle.submit(Submission(1, (5, 6, 7), Sampling(max_tokens=1)))
    kept.ends(1)
    assert not handle.drain(0.0)
    kept.host._receive(Died(0, "killed"))
    assert kept.lost == (1,)


def test_what_the_listener_failed_on_is_lost(kept: Kept) -> None:
    """Its client was told nothing, so it must be answered like those of the engine's other requests."""

    def fail() -> None:
        raise OSError("No space left on device")

    kept.heard = fail
    with pytest.raises(OSError, match="No space"):
        kept.ends(1)
    kept.host._receive(Died(0, "what it said could not be handled"))
    assert kept.lost == (0, 1)
