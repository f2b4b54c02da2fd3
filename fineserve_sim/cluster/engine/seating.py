"""Which batching policy an engine has: the one place that knows them all, when the engine is built."""

from __future__ import annotations

from fineserve_sim.cluster.engine.batching import VllmBatching
from fineserve_sim.cluster.engine.loop import Engine, EngineHost
from fineserve_sim.cluster.engine.sglang import SglangBatching
from fineserve_sim.cluster.engine.state import Seat


def seated(seat: Seat, host: EngineHost, *, lanes: int = 1, shared_queue: bool = True) -> Engine:
    """The engine of a seat with the batching policy of its settings. It has no executor yet."""
    engine = Engine(seat, host, lanes=lanes, shared_queue=shared_queue)
    if seat.settings.batching == "vllm":
        VllmBatching(engine)
    else:
        SglangBatching(engine, mixed=seat.settings.batching == "sglang_mixed")
    return engine
