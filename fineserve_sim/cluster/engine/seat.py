"""What an engine is made of."""

from __future__ import annotations

from dataclasses import dataclass

from fineserve_sim.cluster.engine.kv import EngineKV
from fineserve_sim.cluster.scenario import EngineSettings
from fineserve_sim.latency import StepModel


@dataclass(frozen=True, slots=True)
class Seat:
    """An engine before it exists. ``max_tokens`` bounds prompt and output of a sequence together; the block of ``settings`` is
    that of its memory."""

    engine: int
    model: str
    step: StepModel
    kv: EngineKV
    max_tokens: int
    settings: EngineSettings

    @property
    def able(self) -> bool:
        """Without room for a prompt and a token the engine gets no requests: they are turned away at the door."""
        return self.max_tokens > 1
