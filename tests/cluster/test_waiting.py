"""What a request costs while it waits: tens of thousands do in an overload of hours, and a run's peak of memory is theirs."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from fineserve_traces import Trace
from simkit import gpus, served
from tracekit import Chunked

from fineserve_sim.cluster import EngineSettings, Scenario, simulate_streamed
from fineserve_sim.systems import load_systems

REQUESTS = 20_000
ARRIVE_S = 5.0
LATER_S = 30.0


@dataclass(frozen=True)
class Weighed(Chunked):
    """Notes how many bytes there are before each chunk, and after the last, when all requests before it have arrived."""

    bytes: list[int] = field(default_factory=list)

    def chunks(self) -> Iterator[Trace]:
        self.bytes.clear()
        for chunk in super().chunks():
            self.bytes.append(tracemalloc.get_traced_memory()[0])
            yield chunk
        self.bytes.append(tracemalloc.get_traced_memory()[0])


def crowd(system: str, ttft_s: float) -> Scenario:
    """More requests within seconds than an engine of four sequences takes in an hour; then two more, long after."""
    random = np.random.default_rng(0)
    trace = Trace(
        arrival_s=np.append(np.linspace(0.0, ARRIVE_S, REQUESTS), [LATER_S, LATER_S]),
        model=np.zeros(REQUESTS + 2, dtype=np.int32),
        prompt_tokens=random.integers(300, 2000, REQUESTS + 2),
        output_tokens=random.integers(300, 2000, REQUESTS + 2),
        models=("m",),
        source="a crowd",
    )
    m = served(name="llama-3.1-8b", rate_per_s=REQUESTS / ARRIVE_S, slo_s=ttft_s)
    settings = EngineSettings(max_sequences=4)
    chunks = Weighed(trace, REQUESTS // 2 + 1)
    return Scenario(load_systems()[system], (m,), gpus(1), chunks, settings, sample_s=0.0, drain_s=0.0)


def bytes_a_request(scenario: Scenario) -> float:
    simulate_streamed(scenario, lambda _: None, lambda _: None)  # what is kept for other runs as well is there now
    gc.collect()
    tracemalloc.start()
    try:
        simulate_streamed(scenario, lambda _: None, lambda _: None)
    finally:
        tracemalloc.stop()
    assert isinstance(scenario.trace, Weighed)
    before, _, after = scenario.trace.bytes
    return (after - before) / REQUESTS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "ttft_s", "most_bytes"),
    [
        pytest.param("prism", 1.0, 560, id="in a scheduler, late"),
        pytest.param("prism", 1e6, 900, id="in a scheduler, on time"),
        pytest.param("static*", 1.0, 460, id="in an engine"),
    ],
)
def test_bytes_of_a_request_that_waits(system: str, ttft_s: float, most_bytes: int) -> None:
    """In the build that takes more; they were 957, 1,046 and 431 when each had a sequence and a job from the start. In an
    engine a visit has begun, which takes 88 bytes."""
    assert bytes_a_request(crowd(system, ttft_s)) < most_bytes
