"""Play an experiment's requests on real engines in real time, and return results in the simulator's form.

``replay_on(file)`` gives a function with the place of the simulator's ``simulate``: the experiment's runner calls it for
every cell, and writes the same results folder. Arrivals keep their times; prompts are random tokens of the right number,
outputs are exactly as long as the trace says. A run in which each request is to be alone (a reference for SLOs) starts the
next one when the last has ended.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fineserve_runtime.config import RuntimeFile
from fineserve_runtime.core import Stay
from fineserve_runtime.driver import Driver
from fineserve_runtime.engines.api import Logprobs, Sampling
from fineserve_runtime.jobs import End, Job, Refused
from fineserve_runtime.launch import Running, StartHost, launch
from fineserve_sim.cluster.samples import sample_time_s
from fineserve_sim.cluster.scenario import Cause, Fate, RunResult, Scenario, Timeline
from fineserve_sim.experiment.file.document import read_yaml
from fineserve_sim.experiment.file.errors import ConfigError
from fineserve_sim.experiment.run.files import write_json
from fineserve_sim.policy.interfaces import EngineState

_FATES = {
    "deadline": Fate.DROPPED,
    "queue_full": Fate.DROPPED,
    "queue_timeout": Fate.DROPPED,
    "rejected": Fate.REJECTED,
}
_TOKENS = range(10, 250)
"""Token ids that every vocabulary has."""


def replay_on(file: RuntimeFile, *, start: StartHost | None = None) -> Callable[[Scenario], RunResult]:
    """Raises, when called, what ``launch`` raises."""

    def play(scenario: Scenario) -> RunResult:
        with launch(file, scenario, log=scenario.log, start=start) as running:
            return _Play(scenario, running, file).result()

    return play


def with_trace(file: Path, trace: Path, speed: float, requests: int | None) -> list[tuple[str, Any, str]]:
    """The changes that make a file one comparison of its systems on a trace. Loads of its own give way, so that a server
    and a replay take the same file. Raises ConfigError for a file that cannot be read."""
    place = f"--trace {trace}"
    workload = {"trace": str(trace.resolve())} | ({} if requests is None else {"requests": requests})
    models = read_yaml(file).data.get("models")
    loads = [
        (f"models.{number}.{key}", None, place)
        for number, model in enumerate(models if isinstance(models, list) else ())
        if isinstance(model, dict)
        for key in ("rate_per_s", "share", "phases")
        if key in model
    ]
    return [
        *loads,
        ("workload", workload, place),
        ("sweeps", [{"name": "run", "at": {"rate_scale": speed}}], place),
        ("loads", {}, place),
        ("claims", [], place),
        ("figures", [], place),
        ("seeds", 1, place),
    ]


def without_model_warnings(summary: Path) -> None:
    """What is said of simulated step times does not hold where real engines took theirs."""
    found = json.loads(summary.read_text(encoding="utf-8"))
    write_json(summary, found | {"warnings": []})


def claim_folder(out: Path, backend: str) -> None:
    """Mark ``out`` as results of real engines. Raises ConfigError when it holds simulated ones: the two must not mix."""
    marker = out / "runtime.json"
    if not marker.exists() and any((out / "cells").glob("*.json")):
        raise ConfigError(str(out), "", "holds simulated results; give another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    write_json(marker, {"engines": "real", "backend": backend})


class _Record:
    """The sink of one request of the trace."""

    def __init__(self, index: int, play: _Play) -> None:
        self._index = index
        self._play = play

    def tokens(self, token_ids: tuple[int, ...], logprobs: tuple[Logprobs, ...], last: bool) -> None:
        pass

    def ended(self, end: End) -> None:
        self._play.note_end(self._index, end)


class _Play:
    """One run: submit, sample, wait."""

    def __init__(self, scenario: Scenario, running: Running, file: RuntimeFile) -> None:
        self._scenario = scenario
        self._running = running
        self._driver: Driver = running.driver
        self._longest = {name: files.max_model_len for name, files in file.section.models.items()}
        self._slo_s = {model.id: model.ttft_slo_s for model in scenario.models}
        requests = len(scenario.whole_trace.arrival_s)
        self._jobs: list[Job | None] = [None] * requests
        # Prompts are drawn before the clock runs: drawing would delay what arrives.
        lengths = scenario.whole_trace.prompt_tokens.tolist()
        self._prompts = [tuple(random.Random(i).choices(_TOKENS, k=length)) for i, length in enumerate(lengths)]
        self._fate = np.zeros(requests, dtype=np.int8)
        self._cause = np.zeros(requests, dtype=np.int8)
        self._finish_s = np.full(requests, np.nan)
        self._open = requests
        self._changed = threading.Condition()
        self._begin_s = 0.0
        self._samples: dict[str, list[list[int]]] = {
            name: [] for name in ("waiting", "running", "kv_used_bytes", "gpu_stranded_bytes", "gpu_free_bytes")
        }
        self._sample_s: list[float] = []

    def result(self) -> RunResult:
        self._begin_s = self._driver.now()
        done = threading.Event()
        sampler = threading.Thread(target=self._sample_until, args=(done,), name="sampler")
        sampler.start()
        try:
            self._submit_all()
            self._wait_until_open(0)
        finally:
            done.set()
            sampler.join()
        return self._outcome(self._driver.now() - self._begin_s)

    # --- requests --------------------------------------------------------------------------------------------------

    def _submit_all(self) -> None:
        alone = self._scenario.sample_s == 0
        for index, arrival_s in enumerate(self._scenario.whole_trace.arrival_s.tolist()):
            if alone:
                self._wait_until_open(len(self._jobs) - index)
            else:
                time.sleep(max(0.0, self._begin_s + arrival_s - self._driver.now()))
            self._submit(index)

    def _submit(self, index: int) -> None:
        trace = self._scenario.whole_trace
        model = trace.models[int(trace.model[index])]
        prompt, output = self._prompts[index], int(trace.output_tokens[index])
        sampling = Sampling(max_tokens=max(1, min(output, self._longest[model] - len(prompt))), ignore_eos=True)

        def make(id: int) -> Job:
            job = Job(id, model, prompt, sampling, _Record(index, self), self._slo_s[model])
            self._jobs[index] = job
            return job

        try:
            self._driver.submit(make)
        except Refused as problem:
            self.note_end(index, End("refused", problem.reason, str(problem)))

    def note_end(self, index: int, end: End) -> None:
        with self._changed:
            if end.kind == "finished":
                self._fate[index] = Fate.FINISHED
                self._finish_s[index] = self._driver.now()
            elif end.kind == "refused":
                self._fate[index] = _FATES[end.reason]
            self._open -= 1
            self._changed.notify_all()

    def _wait_until_open(self, requests: int) -> None:
        """Until no more than these have not ended, or for as long as the scenario lets a run go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._open <= requests, self._scenario.drain_s)

    # --- samples ---------------------------------------------------------------------------------------------------

    def _sample_until(self, done: threading.Event) -> None:
        gap_s = self._scenario.sample_s
        if gap_s == 0:
            return
        while True:
            now_s = self._driver.now() - self._begin_s
            self._sample(now_s)
            if done.wait(sample_time_s(len(self._sample_s), gap_s) - now_s):
                return

    def _sample(self, now_s: float) -> None:
        """Engines are counted by the placement: an engine that was evicted and came back is the same one here."""
        self._sample_s.append(now_s)
        devices = self._running.devices
        handles = {
            stay: next(
                handle
                for handle in devices[stay.gpus[0]].engines.values()
                if (handle.config.name, handle.gpus) == (stay.model, stay.gpus)
            )
            for stay in self._running.spec.stays
        }
        states = [handle.state() if handle.alive else None for handle in handles.values()]
        running = [state.running if state else 0 for state in states]
        ledgers = [host.ledger(gpu) for gpu, host in devices.items()]
        rows = self._samples
        rows["running"].append(running)
        rows["waiting"].append(self._waiting(list(zip(handles, states, strict=True))))
        rows["kv_used_bytes"].append([handle.stats().used_bytes for handle in handles.values()])
        rows["gpu_stranded_bytes"].append([ledger.stranded_bytes for ledger in ledgers])
        rows["gpu_free_bytes"].append([ledger.free_bytes for ledger in ledgers])

    def _waiting(self, states: list[tuple[Stay, EngineState | None]]) -> list[int]:
        """Requests of each model that no engine has begun to prefill; requests of a model with replicas stand at its first."""
        waiting = {stay.model: self._driver.untouched(stay.model) for stay, _ in states}
        for stay, state in states:
            waiting[stay.model] -= state.running - state.decoding if state else 0
        return [max(0, waiting.pop(stay.model, 0)) for stay, _ in states]

    # --- the end ---------------------------------------------------------------------------------------------------

    def _outcome(self, end_s: float) -> RunResult:
        first_s = [job.first_token_s if job and job.first_token_s is not None else np.nan for job in self._jobs]
        shift_s = np.full(len(self._jobs), self._begin_s)
        if self._scenario.sample_s == 0:  # each request was alone: its arrival is when it was submitted
            submitted_s = np.array([job.arrival_s if job else np.nan for job in self._jobs])
            shift_s = submitted_s - self._scenario.whole_trace.arrival_s
        generated_tokens = np.array([len(job.generated) if job else 0 for job in self._jobs], dtype=np.int64)
        generated_tokens[self._fate != Fate.FINISHED] = 0
        cut = (generated_tokens > 0) & (generated_tokens < self._scenario.whole_trace.output_tokens)
        self._fate[cut], self._cause[cut] = Fate.CUT, Cause.CONTEXT  # a server promises no more than max_model_len
        hosts = self._running.hosts
        steps = sum(handle.stats().steps for host in hosts.values() for handle in host.engines.values())
        return RunResult(
            first_token_s=np.array(first_s) - shift_s,
            finish_s=self._finish_s - shift_s,
            fate=self._fate,
            preemptions=np.array([job.preemptions if job else 0 for job in self._jobs], dtype=np.int64),
            engine=np.array([self._engine(job) for job in self._jobs], dtype=np.int32),
            cause=self._cause,
            generated_tokens=generated_tokens,
            placement=self._running.placement,
            kv_capacity_bytes=self._running.capacity_bytes,
            timeline=self._timeline(),
            end_s=end_s,
            iterations=steps,
            events=0,
            loop_cpu_s=0.0,
        )

    def _engine(self, job: Job | None) -> int:
        return -1 if job is None or job.served_by is None else job.served_by

    def _timeline(self) -> Timeline:
        stays = self._running.spec.stays
        columns = {name: len(self._running.devices if name.startswith("gpu_") else stays) for name in self._samples}
        return Timeline(
            time_s=np.array(self._sample_s, dtype=np.float64),
            engine_models=tuple(stay.model for stay in stays),
            **{
                name: np.array(rows, dtype=np.int64).reshape(len(self._sample_s), columns[name])
                for name, rows in self._samples.items()
            },
        )
