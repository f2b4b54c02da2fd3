"""A driver over fake engines, and sinks that remember."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec

from fake_engines import BLOCK_BYTES, FakeHost
from fineserve_runtime.bounds import Bounds
from fineserve_runtime.core import CoreSpec, GpuFacts, LayerFacts, LoadFacts, ModelFacts, Stay
from fineserve_runtime.decisions import Entry
from fineserve_runtime.driver import Driver
from fineserve_runtime.engines.api import EngineConfig, HostConfig, Logprobs, Sampling, TinyModel
from fineserve_runtime.jobs import End, Handover, Job, Observer
from fineserve_runtime.step_times import MeasuredStep

from fineserve_sim.systems.spec import (
    AdaptiveSpec,
    DedicatedPlacementSpec,
    DispatchSpec,
    KunServeDropSpec,
    LlumnixMigrationSpec,
    ResidencySpec,
    SchedulerSpec,
)

BLOCK_TOKENS = 16
HANGS_S = 300.0
"""After so long something hangs. No test passes or fails by a shorter time of the machine."""

QUICK = (MeasuredStep(64, 0, 0.001), MeasuredStep(8, 4, 0.0002))


def narrow(model: TinyModel) -> tuple[TinyModel, str]:
    """See ``narrow_kv``; where no real engine can run, the model as it is, in FP8."""
    if find_spec("vllm") is None:
        return model, "fp8_e4m3"
    from fineserve_runtime.engines.tiny_model import narrow_kv

    return narrow_kv(model)


def engine_config(name: str, **changes: object) -> EngineConfig:
    settings: dict[str, object] = {"block_tokens": BLOCK_TOKENS, "max_sequences": 8, "max_batched_tokens": 64}
    return EngineConfig(name, TinyModel(), **(settings | changes))  # type: ignore[arg-type]


def core_spec(
    models: tuple[str, ...] = ("A", "B"),
    *,
    scheduler: SchedulerSpec | None = None,
    residency: ResidencySpec | None = None,
    dispatch: DispatchSpec | None = None,
    migration: LlumnixMigrationSpec | None = None,
    drop: KunServeDropSpec | None = None,
    slo_s: float = 10.0,
    blocks: int = 64,
    weight_bytes: int = 0,
    resident: tuple[str, ...] | None = None,
    gpus: int = 1,
    max_tokens: int = 512,
    measured: tuple[MeasuredStep, ...] = QUICK,
    load: LoadFacts | None = None,
) -> CoreSpec:
    facts = [
        ModelFacts(
            id=model,
            rate_per_s=1.0,
            slo_s=slo_s,
            weight_bytes=weight_bytes,
            token_bytes=BLOCK_BYTES // BLOCK_TOKENS,
            max_tokens=max_tokens,
            block_tokens=BLOCK_TOKENS,
            measured=measured,
            load=load,
        )
        for model in models
    ]
    return CoreSpec(
        scheduler=scheduler or AdaptiveSpec(),
        placement=DedicatedPlacementSpec(),
        residency=residency,
        dispatch=dispatch,
        migration=migration,
        drop=drop,
        layers=drop and _layers(blocks * BLOCK_BYTES, weight_bytes),
        token_budget=64,
        shares_memory=True,
        gpus=tuple(GpuFacts(id=gpu, memory_bytes=blocks * BLOCK_BYTES) for gpu in range(gpus)),
        models=tuple(facts),
        stays=tuple(Stay(model=model, gpus=(gpu,)) for gpu in range(gpus) for model in resident or models),
    )


def _layers(region_bytes: int, weight_bytes: int) -> LayerFacts:
    """Of two instances that drop half of their weights each."""
    base_bytes = region_bytes - weight_bytes
    pair_tokens = (2 * base_bytes + weight_bytes) // BLOCK_BYTES * BLOCK_TOKENS
    return LayerFacts(
        layers=2, copy_bytes=weight_bytes, block_bytes=BLOCK_BYTES, base_bytes=base_bytes, pair_tokens=pair_tokens
    )


@dataclass
class Heard:
    """A sink: what a client would have seen."""

    tokens_: list[int] = field(default_factory=list)
    logprobs_: list[Logprobs] = field(default_factory=list)
    end: End | None = None
    ends: int = 0

    def tokens(self, token_ids: tuple[int, ...], logprobs: tuple[Logprobs, ...], last: bool) -> None:
        assert self.end is None
        self.tokens_.extend(token_ids)
        self.logprobs_.extend(logprobs)

    def ended(self, end: End) -> None:
        self.end = end
        self.ends += 1


@dataclass
class Runtime:
    driver: Driver
    hosts: dict[int, FakeHost]
    log: list[Entry]
    incidents: list[tuple[str, dict[str, object]]]

    @property
    def host(self) -> FakeHost:
        return self.hosts[0]

    def ask(
        self,
        model: str,
        prompt: tuple[int, ...] = (5, 6, 7),
        *,
        tokens: int = 4,
        slo_s: float = 10.0,
        priority: int = 0,
        sampling: Sampling | None = None,
        waited_s: float = 0.0,
    ) -> tuple[Job, Heard]:
        heard = Heard()
        wanted = sampling or Sampling(max_tokens=tokens)
        job = self.driver.submit(lambda id: Job(id, model, prompt, wanted, heard, slo_s, priority, waited_s=waited_s))
        return job, heard

    def run(self) -> bool:
        """Step all engines until none has anything to do; True, for lambdas."""
        while any([host.step_all() for host in self.hosts.values()]):  # noqa: C419  # all of them
            pass
        return True

    def commands(self, kind: str) -> list[Entry]:
        return [entry for entry in self.log if entry.get("command") == kind]


def _devices(spec: CoreSpec, changes: dict[str, object]) -> list[HostConfig]:
    engines = tuple(engine_config(model.id, **changes) for model in spec.models)
    in_region = spec.models[0].weight_bytes > 0
    return [HostConfig(engines, gpu.memory_bytes, gpus=(gpu.id,), weights_in_region=in_region) for gpu in spec.gpus]


def _pair(spec: CoreSpec, changes: dict[str, object]) -> list[HostConfig]:
    """Two devices with an instance each, and the pipeline over both. Their memory is one here."""
    name, memory_bytes = spec.models[0].id, sum(gpu.memory_bytes for gpu in spec.gpus)
    own_bytes = spec.gpus[0].memory_bytes - spec.models[0].weight_bytes
    engines = (
        engine_config(name, gpus=(0,), keeps=(0, 1), kv_limit_bytes=own_bytes, **changes),
        engine_config(name, gpus=(1,), keeps=(1, 2), kv_limit_bytes=own_bytes, **changes),
        engine_config(name, gpus=(0, 1), stages=2, borrows=True, **changes),
    )
    return [HostConfig(engines, memory_bytes, "processes", gpus=(0, 1), weights_in_region=True)]


@contextmanager
def runtime(
    spec: CoreSpec,
    *,
    bounds: Bounds | None = None,
    step_s: float | None = None,
    observers: Sequence[Observer] = (),
    log: Callable[[Entry], None] | None = None,
    on_incident: Callable[[str, dict[str, object]], None] = lambda what, facts: None,
    handover: Handover = "exchange",
    **changes: object,
) -> Iterator[Runtime]:
    entries: list[Entry] = []
    incidents: list[tuple[str, dict[str, object]]] = []

    def incident(what: str, facts: dict[str, object]) -> None:
        incidents.append((what, facts))
        on_incident(what, facts)

    driver = Driver(
        spec,
        bounds=bounds,
        handover=handover,
        log=log or entries.append,
        observers=observers,
        on_incident=incident,
    )
    weights = spec.models[0].weight_bytes
    hosts = {}
    for config in _pair(spec, changes) if spec.drop else _devices(spec, changes):
        gpu = config.gpus[0]
        hosts[gpu] = FakeHost(config, driver.listener(gpu), weight_bytes=weights, step_s=step_s)
    driver.start(hosts)
    try:
        yield Runtime(driver, hosts, entries, incidents)
    finally:
        for host in hosts.values():
            host.close()
        driver.close()


def eventually(true: Callable[[], bool], timeout_s: float = HANGS_S) -> None:
    """Wait for another thread, which on a busy machine may have no core for seconds."""
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.002)


LIKELY = 5
"""Log probabilities of so many tokens are asked of an undisturbed run."""
TIE_LOGITS = 0.25
"""Logits of the tiny models lie below 16, where a bfloat16 has steps of 1/16. Four of them count as a tie."""


def assert_same_but_for_ties(heard: Sequence[Heard], undisturbed: Sequence[Heard]) -> None:
    """Streams are the undisturbed ones up to a token where the undisturbed run's own logits tie.

    Real engines round a row by the size of its batch on some processors, and a prompt otherwise than its tokens one by one. So
    another token may win a tie, and every token behind it is then another one. The undisturbed run was asked for ``LIKELY``
    log probabilities."""
    assert [len(each.tokens_) for each in heard] == [len(each.tokens_) for each in undisturbed]
    for number, (ours, theirs) in enumerate(zip(heard, undisturbed, strict=True)):
        pairs = enumerate(zip(ours.tokens_, theirs.tokens_, strict=True))
        at = next((place for place, (our, their) in pairs if our != their), None)
        if at is not None:
            likely = dict(theirs.logprobs_[at])
            worse = max(likely.values()) - likely.get(ours.tokens_[at], -math.inf)
            assert worse <= TIE_LOGITS, f"stream {number} differs from token {at} on, which is worse by {worse:.2f}"
