"""The memory of a running server for its twin, the simulator: its last requests, and the seconds of its steps.

Both are rings of rows of numbers, so memory is bounded and a row costs a microsecond or two. A question is answered by a
process of its own at the lowest priority (``whatif.py``), which gets copies of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fineserve_runtime.config import RuntimeFile
from fineserve_runtime.engines.api import EngineHost, EngineListener, StepReport
from fineserve_runtime.jobs import End, Job
from fineserve_runtime.launch import Running
from fineserve_runtime.metrics import TWIN_IS_OFF
from fineserve_sim.cluster.scenario import Scenario
from fineserve_sim.experiment.file.schema import Strict
from fineserve_sim.experiment.file.values import Positive

REQUESTS, STEPS = 1 << 15, 1 << 18
_LOOK_S = 0.2
_PATIENCE_S = 300.0


class Question(Strict):
    """The present traffic under another ``system``, ``plan`` (the mapping of a plan.yaml) or TTFT limit, or with one device
    fewer; nothing: as it is. ``seconds``: search so long for a plan of its own, and answer for that."""

    system: str | None = None
    plan: dict[str, Any] | None = None
    ttft_slo_s: Positive | None = None
    one_device_fewer: bool = False
    seconds: Annotated[float, Field(ge=1, le=120)] | None = None


class Ring:
    """The last ``rows`` rows of ``columns`` numbers."""

    def __init__(self, rows: int, columns: int, dtype: type) -> None:
        self._rows: NDArray[Any] = np.zeros((rows, columns), dtype)
        self._count = 0
        self._lock = threading.Lock()

    def add(self, row: tuple[float, ...]) -> None:
        with self._lock:
            self._rows[self._count % len(self._rows)] = row
            self._count += 1

    def copy(self) -> NDArray[Any]:
        """The rows in the order in which they came."""
        with self._lock:
            if self._count <= len(self._rows):
                return self._rows[: self._count].copy()
            return np.roll(self._rows, -(self._count % len(self._rows)), axis=0)


@dataclass
class Memory:
    """An ``Observer`` that keeps requests, and steps of the engines that ``hear`` leads past it. ``models``: their numbers."""

    models: Mapping[str, int]
    requests: Ring = field(default_factory=lambda: Ring(REQUESTS, 8, np.float64))
    steps: Ring = field(default_factory=lambda: Ring(STEPS, 7, np.float32))
    live: dict[int, Job] = field(default_factory=dict)

    def arrived(self, job: Job) -> None:
        self.live[job.id] = job

    def dispatched(self, job: Job, now: float) -> None: ...

    def emitted(self, job: Job, tokens: int, now: float) -> None: ...

    def preempted(self, job: Job) -> None: ...

    def ended(self, job: Job, end: End, now: float) -> None:
        del self.live[job.id]
        served = end.kind == "finished" or (end.kind == "aborted" and bool(job.generated))
        self.requests.add(self._row(job, now if served else np.nan))

    def _row(self, job: Job, end_s: float = np.nan) -> tuple[float, ...]:
        """``arrival_s`` is when the driver had it, ``waited_s`` what its client had waited by then; NaN: not known."""
        first_s = np.nan if job.first_token_s is None else job.first_token_s - job.arrival_s
        tokens = np.nan if np.isnan(end_s) else max(1, len(job.generated))
        number, most = self.models.get(job.model, -1), job.sampling.max_tokens
        return job.arrival_s + job.waited_s, number, len(job.prompt), tokens, most, job.waited_s, first_s, end_s

    def taken(self, running: Running, last_s: float) -> tuple[NDArray[np.float64], float]:
        """The requests of the last seconds by their arrival, those under way included, and the moment of this."""
        with running.driver.locked():
            now_s, rows, live = running.driver.now(), self.requests.copy(), [*map(self._row, self.live.values())]
        rows = np.concatenate([rows, np.array(live, np.float64).reshape(-1, 8)])
        rows = rows[rows[:, 0] >= now_s - last_s]
        return rows[np.argsort(rows[:, 0], kind="stable")], now_s

    def known_steps(self, running: Running) -> NDArray[np.float32]:
        """The steps of the ring, and the warm-up steps, which every model of the start has."""
        facts = [each for each in running.spec.models if each.id in self.models]
        timed = [(self.models[each.id], step[0], step[1], 0, 0, 1, step[2]) for each in facts for step in each.measured]
        return np.concatenate([np.array(timed, np.float32).reshape(-1, 7), self.steps.copy()])

    def hear(self, running: Running) -> None:
        for gpu, relay in running.relays.items():
            assert relay.to is not None
            relay.to = _Tap(relay.to, running.hosts[gpu], self)


class _Tap:
    """Hears the engines of a host before their driver does. A step's time is its period, as in ``step_probe.py``; after a pause
    it is what the engine says. Engines of one process take turns. A pipeline's step counts the seconds of all its stages. Where
    the step before was still under way, its period is one stage's time."""

    def __init__(self, to: EngineListener, host: EngineHost, memory: Memory) -> None:
        self._to, self._host, self._memory = to, host, memory
        self._in_turn = host.config.mode == "in_process"
        self._before: dict[int, StepReport] = {}
        self._last: StepReport | None = None

    def on_step(self, report: StepReport) -> None:
        last = self._last if self._in_turn else self._before.get(report.engine)
        heard = list(self._before.values()) if self._in_turn else [last]
        busy = last is not None and any(each is not None and each.state.running for each in heard)
        self._before[report.engine] = self._last = report._replace(chunks=())
        begun_s = last.ended_s if last is not None and busy else report.started_s
        handle = self._host.engines.get(report.engine)  # one that was removed may have had its last word
        if handle is not None and (report.prefill_tokens or report.decodes) and report.ended_s > begun_s:
            turned = last is not None and busy and last.engine != report.engine
            stages, seconds = handle.config.stages, report.ended_s - begun_s
            if stages > 1:
                overlaps = last is not None and report.started_s < last.ended_s
                seconds = stages * seconds if overlaps else report.ended_s - report.started_s
            sizes = report.prefill_tokens, report.decodes, report.context_tokens
            self._memory.steps.add((self._memory.models.get(handle.config.name, -1), *sizes, turned, stages, seconds))
        self._to.on_step(report)

    def on_died(self, engine: int, reason: str, lost: tuple[int, ...], crashed: bool = False) -> None:
        self._before.pop(engine, None)
        self._to.on_died(engine, reason, lost, crashed)


class Twin:
    """Answers questions about a running server. ``tell`` hears how far the simulator was off, ``alarm`` when that is more than
    the file's ``twin_error``. ``niceness``: the operating system's priority of the process that answers, 19 the lowest."""

    niceness = 19

    def __init__(
        self,
        file: RuntimeFile,
        scenario: Scenario,
        running: Running,
        memory: Memory,
        tell: Callable[[Mapping[str, float]], None],
        alarm: Callable[[str, dict[str, object]], None],
    ) -> None:
        self._file, self._scenario, self._running = file, scenario, running
        self._memory, self._tell, self._alarm = memory, tell, alarm

    def ask(self, question: Question) -> dict[str, Any]:
        """Takes seconds. Raises ValueError for a question without an answer, RuntimeError where the simulator fails."""
        rows, now_s = self._memory.taken(self._running, self._file.section.twin_s)
        steps = self._memory.known_steps(self._running)
        if not len(rows):
            raise ValueError(f"no request came in the last {self._file.section.twin_s:g} s")
        if (rows[:, 1] < 0).any():
            raise ValueError("a model that was added had requests; the twin knows the models of the file")
        with TemporaryDirectory(prefix="fineserve-twin-") as name:
            folder = Path(name)
            np.save(folder / "requests.npy", rows)
            np.save(folder / "steps.npy", steps[steps[:, 0] >= 0])
            (folder / "asked.json").write_text(json.dumps(self._facts(now_s) | {"question": question.model_dump()}))
            answer = self._answered(folder)
        self._judge(answer["error"])
        return answer

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices on which engines can start."""
        return tuple(self._running.devices)

    def groups(self) -> dict[str, list[list[int]]]:
        """The devices of each engine that is awake, by model."""
        found: dict[str, list[list[int]]] = {}
        for host in self._running.hosts.values():
            for handle in host.engines.values():
                if handle.alive and not handle.asleep and not handle.config.borrows:
                    found.setdefault(handle.config.name, []).append(list(handle.gpus))
        return {name: sorted(each) for name, each in found.items()}

    def _facts(self, now_s: float) -> dict[str, Any]:
        section = self._file.section
        return {
            "document": self._file.document.data,
            "folder": str(self._file.folder),
            "system": self._scenario.system.name,
            "groups": self.groups(),
            "region_bytes": self._region_bytes(),
            "weight_bytes": self._weight_bytes() if section.weights_in_region else None,
            "in_turn": all(host.config.mode == "in_process" for host in self._running.hosts.values()),
            "now_s": now_s,
        }

    def _region_bytes(self) -> int:
        """What a device has for KV, and for weights that are in its region: all but the null slab and the tail."""
        hosts = self._running.hosts.values()
        ledgers = [host.ledger(gpu) for host in hosts for gpu in host.config.gpus]
        return min(ledger.total_bytes - ledger.lost_bytes for ledger in ledgers)

    def _weight_bytes(self) -> dict[str, int]:
        """The bytes of the slabs that the weights of each model take; 0 for one that is away."""
        found = dict.fromkeys(self._memory.models, 0)
        for host in self._running.hosts.values():
            for handle in host.engines.values():
                name = handle.config.name
                found[name] = max(found.get(name, 0), handle.stats().weight_bytes)
        return found

    def _answered(self, folder: Path) -> dict[str, Any]:
        """The answer of a process of its own. Raises ValueError with its line for a question without an answer. Raises
        RuntimeError when it fails or takes too long, or the server ends."""
        command = [sys.executable, "-m", "fineserve_runtime.whatif", str(folder), str(self.niceness)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            for _ in range(int(_PATIENCE_S / _LOOK_S)):
                try:
                    out, err = child.communicate(timeout=_LOOK_S)
                    break
                except subprocess.TimeoutExpired:
                    if self._running.driver.draining:
                        child.kill()
                        raise RuntimeError("the server is shutting down") from None
            else:
                child.kill()
                raise RuntimeError(f"the simulator had no answer within {_PATIENCE_S:g} s")
        if child.returncode:
            raise RuntimeError(f"the simulator failed: {(err.strip().splitlines() or ['without a word'])[-1][:300]}")
        answer: dict[str, Any] = json.loads(out)
        if "problem" in answer:
            raise ValueError(answer["problem"])
        return answer

    def _judge(self, error: Mapping[str, float | None]) -> None:
        known = {name: value for name, value in error.items() if value is not None}
        self._tell(known)
        if any(abs(value) > self._file.section.twin_error for value in known.values()):
            self._alarm(TWIN_IS_OFF, {**known, "allowed": self._file.section.twin_error})
