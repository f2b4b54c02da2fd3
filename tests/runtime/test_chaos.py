"""A law for the driver: whatever happens to engines, every request ends once, with right tokens or with a word why."""

from __future__ import annotations

import random
import time

import pytest
from fake_engines import continuation
from fineserve_runtime import backoff
from fineserve_runtime.bounds import Bounds
from fineserve_runtime.core import CoreSpec
from fineserve_runtime.decisions import Entry
from fineserve_runtime.engines.api import Sampling
from fineserve_runtime.jobs import Job, Refused
from fineserve_runtime.replay_log import replay
from runtimekit import Heard, Runtime, core_spec, eventually, runtime

from fineserve_sim.systems.spec import FcfsSpec, MooreHodgsonSpec, PrismResidencySpec

WEIGHTS = 4 * 1024
SPECS = {
    "adaptive": core_spec(weight_bytes=WEIGHTS),
    "fcfs-two-devices": core_spec(scheduler=FcfsSpec(), weight_bytes=WEIGHTS, gpus=2),
    "prism": core_spec(
        ("A", "B", "C"),
        scheduler=MooreHodgsonSpec(late="drop"),
        weight_bytes=WEIGHTS,
        blocks=24,
        resident=("A",),
        residency=PrismResidencySpec(idle_s=0.0, pressure_fraction=0.3, move=False, tick_s=0.05),
    ),
}
REASONS = {
    "finished": {"length"},
    "aborted": {"abort"},
    "refused": {"deadline", "queue_timeout", "model_down"},
    "failed": {"engine_died", "engine_error", "model_down", "queue_timeout"},
}


class Chaos:
    """What strikes next is drawn from a seed; when it does, threads decide."""

    def __init__(self, here: Runtime, models: list[str], seed: int) -> None:
        self.here = here
        self.models = models
        self.rng = random.Random(seed)
        self.asked: list[tuple[Job, Heard]] = []

    def steps(self) -> int:
        return sum(engine.steps for host in self.here.hosts.values() for engine in host.engines.values())

    def breathe(self) -> None:
        """Let engines take some steps, if they have any to take."""
        enough, end_s = self.steps() + 4, time.monotonic() + 0.02
        while self.steps() < enough and time.monotonic() < end_s:
            time.sleep(0.0005)

    def strike(self) -> None:
        here, rng = self.here, self.rng
        host = here.hosts[rng.randrange(len(here.hosts))]
        engine, model = rng.randrange(len(self.models)), rng.choice(self.models)
        what = rng.choice(["ask"] * 12 + ["abort", "abort", "kill", "crash", "hang", "no restart", "stop", "resume"])
        if what == "ask":
            self.ask(model)
        elif what == "abort" and self.asked:
            here.driver.abort(rng.choice(self.asked)[0].id)
        elif what in ("kill", "crash") and host.engines[engine].alive:
            host.kill(engine, what, crashed=what == "crash")
        elif what == "hang" and host.engines[engine].alive:
            host.engines[engine].silent_s = 9.0
        elif what == "no restart":
            host.failing_restarts = rng.randrange(3)
        elif what == "stop":
            here.driver.stop(model)
        elif what == "resume":
            here.driver.resume(model)

    def ask(self, model: str) -> tuple[Job, Heard] | None:
        prompt = tuple(self.rng.randrange(2, 200) for _ in range(self.rng.randrange(3, 60)))
        heard = Heard()
        sampling = Sampling(max_tokens=self.rng.randrange(1, 60))
        slo_s = self.rng.choice([0.05, 10.0, 10.0])
        try:
            job = self.here.driver.submit(lambda id: Job(id, model, prompt, sampling, heard, slo_s))
        except Refused as problem:
            assert problem.reason in ("model_down", "model_stopped", "queue_full")
            return None
        self.asked.append((job, heard))
        return job, heard

    def serves_again(self, model: str) -> bool:
        asked = self.ask(model)
        if asked is None:
            return False
        eventually(lambda: asked[1].end is not None)
        return asked[1].end is not None and asked[1].end.kind == "finished"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("name", SPECS)
def test_every_request_ends_once_and_right_whatever_strikes(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant, value in (("FIRST_S", 0.05), ("MOST_S", 0.2), ("GOOD_S", 0.5)):
        monkeypatch.setattr(backoff, constant, value)
    spec: CoreSpec = SPECS[name]
    models = [model.id for model in spec.models]
    log: list[Entry] = []
    with runtime(spec, bounds=Bounds(queued_s=20, silent_s=5.0), step_s=0.0002, log=log.append) as here:
        chaos = Chaos(here, models, seed)
        for _ in range(250):
            chaos.strike()
            chaos.breathe()
        for host in here.hosts.values():
            host.failing_restarts = 0
        for model in models:
            here.driver.resume(model)
        eventually(lambda: all(heard.end for _, heard in chaos.asked))
        for model in models:
            eventually(lambda model=model: chaos.serves_again(model))  # type: ignore[misc]
        assert not [facts for what, facts in here.incidents if what == "internal error"]
        eventually(lambda: not any(e.used_blocks for host in here.hosts.values() for e in host.engines.values()))
        assert here.driver.wait_empty(0)
    for job, heard in chaos.asked:
        assert heard.ends == 1 and heard.end is not None and heard.end.reason in REASONS[heard.end.kind], heard.end
        right = continuation(job.prompt, job.sampling.max_tokens)
        assert heard.tokens_ == (right if heard.end.kind == "finished" else right[: len(heard.tokens_)])
    assert sum(heard.end.kind == "finished" for _, heard in chaos.asked if heard.end) > 5
    assert replay(log).difference is None, "and the log of it decides the same again"
