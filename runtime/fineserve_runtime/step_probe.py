"""How long steps of a file's engines take where they will run: in the loop of their host, under their driver, over the slab.

Scenes are played on engines that serve nothing else: some sequences of one model decode, prompts of several lengths join them,
and another model's sequences decode as well. A step's time is its period: from the report of the step before it, of any
engine, to its own. So the host's time between steps (driver, core, tokens to clients) is part of it. What a turn of another
engine costs is the difference between rows that are ``in_turn`` and those that are not. It is processor time of the thread
that steps the engines, which other work on the machine disturbs as little as can be.

The rows are a table that ``engine.step_times`` of an experiment takes.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fineserve_runtime.config import RuntimeFile
from fineserve_runtime.engines.api import EngineListener, Logprobs, Sampling, StepReport
from fineserve_runtime.jobs import End, Job
from fineserve_runtime.launch import Running, StartHost, launch
from fineserve_sim.cluster.scenario import Scenario, ServedModel
from fineserve_sim.latency.table_operators import GEMM_DTYPE, KV_DTYPE

DECODES = (1, 2, 4, 8, 12, 15)
PROMPTS = (32, 128, 320)
"""Tokens of the sequences that decode, before they do."""

TOTALS = (32, 96, 160, 240)
"""Tokens of the steps in which a prompt joins the decodes, give or take ``_JITTER``. Kernels are made for a number of rows
when it comes for the first time; prompts of one length alone would never pay for that."""

_JITTER = 12

STEPS = 24
JOINS = 3
"""Decode steps of a scene, and prompts of each length."""

_GROWTH = 56
"""Tokens that a sequence decodes in half of a scene, at most."""

_SETTLED = 3
"""So many decode steps after a prompt's, the caches are the decodes' again."""

_LEAST = 3
"""Steps of a kind that make a row."""

_PATIENCE_S = 60.0
_NO_LIMIT_S = 1e6
_TOKEN_IDS = range(10, 250)
"""That every vocabulary has."""


class Row(NamedTuple):
    """Steps of a kind. ``context``: cached tokens of each decode, in the mean. ``in_turn``: they came after another engine's.
    ``latency_s``: the mean of ``repeats`` periods, since what waits for steps waits for their sum. ``spread``: their
    interquartile range over it. ``stages`` of a pipeline: the seconds of all of them count."""

    model: str
    dtype: str
    mode: str
    kv_dtype: str
    decodes: int
    context: int
    prefill_tokens: int
    cached_tokens: int
    in_turn: bool
    latency_s: float
    spread: float
    repeats: int
    stages: int = 1


class Scene(NamedTuple):
    """``decodes`` sequences with prompts of ``prompt`` tokens decode, alone and ``beside`` as many of another model."""

    model: str
    beside: str | None
    decodes: int
    prompt: int


class Noted(NamedTuple):
    """A step's report, and what processor time the thread that steps the engines had had then."""

    report: StepReport
    processor_s: float


def note(report: StepReport) -> Noted:
    """Call it first where a report is heard, which is on that thread."""
    return Noted(report, time.thread_time())


class Period(NamedTuple):
    """A step that followed another one at once; how long it took by the clock, and of processor time. ``settled``: steps since
    the last one with a prompt, this one included."""

    before: StepReport
    report: StepReport
    settled: int
    seconds: float
    processor_s: float

    @property
    def in_turn(self) -> bool:
        """Whether the other was another engine's."""
        return self.before.engine != self.report.engine


def periods(steps: Sequence[Noted]) -> Iterator[Period]:
    """The steps of engines that take turns before which there was no pause: some engine had work when the last one ended."""
    running: dict[int, int] = {}
    settled = 0
    for (before, before_s), (after, after_s) in pairwise(steps):
        running[before.engine] = before.state.running
        settled = 0 if after.prefill_tokens else settled + 1
        if any(running.values()):
            yield Period(before, after, settled, after.ended_s - before.ended_s, after_s - before_s)


def probe_steps(file: RuntimeFile, scenario: Scenario, *, start: StartHost | None = None, seed: int = 0) -> list[Row]:
    """Start the scenario's system for this alone, and time its steps. Raises ValueError where engines do not step in this
    process, and what ``launch`` raises."""
    with launch(file, scenario, start=start) as running:
        return _Probe(running, scenario, seed).rows()


def write_table(rows: Sequence[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: [getattr(row, name) for row in rows] for name in Row._fields}), path)


class _Tap:
    """Hears the engines before their driver does, and keeps their steps."""

    def __init__(self, to: EngineListener) -> None:
        self.steps: list[Noted] = []
        self._to = to
        self._until: Callable[[StepReport], bool] = lambda report: False
        self._came = threading.Event()
        self._death: str | None = None

    def on_step(self, report: StepReport) -> None:
        self.steps.append(note(report))
        self._to.on_step(report)
        if self._until(report):
            self._came.set()

    def on_died(self, engine: int, reason: str, lost: tuple[int, ...], crashed: bool = False) -> None:
        self._death = reason
        self._came.set()
        self._to.on_died(engine, reason, lost, crashed)

    def await_step(self, until: Callable[[StepReport], bool], begin: Callable[[], None] = lambda: None) -> None:
        """``begin``, then wait for a step of which ``until`` holds. Only then this thread wakes up: it would be in the
        engines' way. Raises RuntimeError when none comes, or an engine dies."""
        self._came.clear()
        self._until = until
        begin()
        came = self._came.wait(_PATIENCE_S)
        self._until = lambda report: False
        if self._death is not None or not came:
            raise RuntimeError(f"the probe of steps: {self._death or 'its engines stand still'}")


class _Deaf:
    """A sink that drops its tokens."""

    def tokens(self, token_ids: tuple[int, ...], logprobs: tuple[Logprobs, ...], last: bool) -> None:
        pass

    def ended(self, end: End) -> None:
        pass


class _Probe:
    """Scenes on the engines of one host, which take turns."""

    def __init__(self, running: Running, scenario: Scenario, seed: int) -> None:
        if len(running.hosts) > 1 or any(host.config.mode != "in_process" for host in running.hosts.values()):
            raise ValueError(
                "steps are probed of engines on one device that step in this process: runtime.mode in_process"
            )
        ((gpu, host),) = running.hosts.items()
        self._driver, self._relay = running.driver, running.relays[gpu]
        self._engines = {handle.config.name: handle for handle in host.engines.values()}
        served = {model.id: model for model in scenario.models}
        self._served = {handle.id: served[name] for name, handle in self._engines.items()}
        handles = self._engines.values()
        self._longest = min(handle.config.max_model_len for handle in handles)
        self._sequences = min(handle.config.max_sequences for handle in handles)
        self._budget = min(handle.config.max_batched_tokens for handle in handles)
        self._room = min(handle.kv_capacity_tokens for handle in handles)
        self._room_of_all = host.ledger().free_bytes // max(h.block_bytes // h.config.block_tokens for h in handles)
        self._rng = random.Random(seed)

    def rows(self) -> list[Row]:
        """Of all scenes, which come in a shuffled order."""
        assert self._relay.to is not None
        tap = self._relay.to = _Tap(self._relay.to)
        scenes = list(self._scenes())
        self._rng.shuffle(scenes)
        return [row for scene in scenes for row in self._play(tap, scene)]

    def _scenes(self) -> Iterator[Scene]:
        """Those that fit in memory, with all that their sequences grow by; alone where they would not side by side."""
        for model, decodes, prompt in product(self._engines, DECODES, PROMPTS):
            if decodes < self._sequences and prompt + 2 * _GROWTH < self._longest:
                other = next((name for name in self._engines if name != model), None)
                join = max(self._totals(decodes), default=0)
                mine, both = (decodes * (n * prompt + m * _GROWTH) + join for n, m in ((1, 2), (2, 3)))
                if mine <= self._room:
                    yield Scene(model, other if both <= self._room_of_all else None, decodes, prompt)

    def _totals(self, decodes: int) -> list[int]:
        most = min(self._budget, self._longest - 1)
        return [total for total in TOTALS if decodes + _JITTER < total <= most - _JITTER]

    def _play(self, tap: _Tap, scene: Scene) -> list[Row]:
        """Alone and beside the other, in either order: what comes later has the longer contexts and the warmer machine."""
        halves = [None, *filter(None, (scene.beside,))]
        self._rng.shuffle(halves)
        tap.steps.clear()
        mine = self._begin_decodes(tap, scene.model, scene)
        for neighbour in halves:
            guests = self._begin_decodes(tap, neighbour, scene) if neighbour else []
            tap.await_step(_nth(STEPS, lambda report: report.engine == self._engines[scene.model].id))
            for total in self._totals(scene.decodes) * JOINS if neighbour is None else ():
                jitter = self._rng.randint(-_JITTER, _JITTER)
                self._join(tap, scene.model, total - scene.decodes + jitter)
            self._end(guests)
        found = list(_rows(tap.steps, scene, self._served))
        self._end(mine)
        return found

    def _begin_decodes(self, tap: _Tap, model: str, scene: Scene) -> list[Job]:
        engine, jobs = self._engines[model].id, list[Job]()

        def begin() -> None:
            jobs.extend(self._submit(model, scene.prompt, self._longest - scene.prompt) for _ in range(scene.decodes))

        tap.await_step(lambda report: report.engine == engine and report.decodes == scene.decodes, begin)
        return jobs

    def _end(self, jobs: Sequence[Job]) -> None:
        """And wait until their engine is rid of them."""
        for job in jobs:
            self._driver.abort(job.id)
        for model in {job.model for job in jobs}:
            self._engines[model].drain(_PATIENCE_S)

    def _join(self, tap: _Tap, model: str, tokens: int) -> None:
        """A prompt joins the decodes; until they have gone on by one step."""
        mine, joined = self._engines[model].id, False

        def went_on(report: StepReport) -> bool:
            nonlocal joined
            if report.engine == mine and report.prefill_tokens:
                joined = True
                return False
            return joined and report.engine == mine

        def join() -> None:
            self._submit(model, tokens, 1)

        tap.await_step(went_on, join)

    def _submit(self, model: str, prompt_tokens: int, output_tokens: int) -> Job:
        prompt = tuple(self._rng.choices(_TOKEN_IDS, k=prompt_tokens))
        sampling = Sampling(max_tokens=output_tokens, ignore_eos=True)
        return self._driver.submit(lambda id: Job(id, model, prompt, sampling, _Deaf(), _NO_LIMIT_S))


def _nth(count: int, wanted: Callable[[StepReport], bool]) -> Callable[[StepReport], bool]:
    """True of the ``count``-th of the wanted steps."""
    left = iter(range(count - 1, -1, -1))
    return lambda report: wanted(report) and next(left, None) == 0


def _rows(steps: Sequence[Noted], scene: Scene, served: Mapping[int, ServedModel]) -> Iterator[Row]:
    """The rows of a scene's steps: of all its decodes, settled, or with a whole prompt. Prompts count alone: what comes is
    taken in before the next step, so its cost falls on that step."""
    kinds: dict[tuple[int, int, bool], list[Period]] = defaultdict(list)
    for period in periods(steps):
        report = period.report
        total = _nominal(report.prefill_tokens, scene.decodes)
        good = not period.in_turn if report.prefill_tokens else period.settled > _SETTLED
        if report.decodes == scene.decodes and total and good:
            kinds[report.engine, total - scene.decodes, period.in_turn].append(period)
    for (engine, prefill_tokens, in_turn), found in kinds.items():
        if len(found) >= _LEAST:
            yield _row(served[engine], scene.decodes, prefill_tokens, in_turn, found)


def _nominal(prefill_tokens: int, decodes: int) -> int | None:
    """Tokens of the step but for the jitter; None: it was not one of the scene's."""
    if not prefill_tokens:
        return decodes
    return next((total for total in TOTALS if abs(prefill_tokens + decodes - total) <= _JITTER), None)


def _row(served: ServedModel, decodes: int, prefill_tokens: int, in_turn: bool, found: Sequence[Period]) -> Row:
    took_s = [period.processor_s for period in found]
    low, high = np.quantile(took_s, [0.25, 0.75]).tolist()
    mean = float(np.mean(took_s))
    context = np.mean([period.report.context_tokens for period in found]) / decodes
    precision = served.precision
    return Row(
        model=served.model.name,
        dtype=GEMM_DTYPE[precision.weight_bits, precision.activation_bits],
        mode="eager",
        kv_dtype=KV_DTYPE[precision.kv_bits],
        decodes=decodes,
        context=round(context),
        prefill_tokens=prefill_tokens,
        cached_tokens=0,
        in_turn=in_turn,
        latency_s=mean,
        spread=(high - low) / mean,
        repeats=len(found),
    )
