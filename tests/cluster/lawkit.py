"""What every run must obey, whatever its cluster: ``judge`` runs a scenario in every way and names the laws that it breaks.

* ``runs``: it ends by itself, within its horizon, and no memory contradicts itself at any step.
* ``ends once``: a request finishes, or is refused by one command, or is open at the horizon; effects follow causes.
* ``visits``: those of a request do not overlap, in the order of their times; its tokens are those of its visits.
* ``all end``: nobody is open at the horizon (where nobody may wait for ever).
* ``nothing leaks``: ``CALM_S`` after the last request in flight has gone, nobody holds KV memory (but for kept prefixes).
* ``merged = plain``: one event an iteration gives the same bits and commands. ``twice``: so does the same run again.
* ``replayed``: a fresh controller that is told the events of the log, as a file gives them back, says the same commands.
* ``twin``: so does the static cluster that it equals, but for the words of its commands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from logkit import commands_of, replay
from pytest import MonkeyPatch

from fineserve_sim.cluster import Fate, Left, RunResult, Scenario, ScenarioError, Visits, simulate
from fineserve_sim.cluster.engine.swap import HostTier
from fineserve_sim.cluster.scenario import LAST
from fineserve_sim.cluster.simulation import prepare

LONGEST_LOG = 100_000
"""Lines of a decision log after which a run is taken to go on for ever; those of random clusters have a tenth of it."""

CALM_S = 5.0
"""Longer than any copy takes that was under way for a request that ended meanwhile."""

ENDED = (Fate.FINISHED, Fate.CUT)
RESULTS = (
    "first_token_s",
    "finish_s",
    "fate",
    "preemptions",
    "engine",
    "cause",
    "generated_tokens",
    "iterations",
    "end_s",
)
TIMELINES = ("time_s", "waiting", "running", "kv_used_bytes", "gpu_stranded_bytes", "gpu_free_bytes")


class Runaway(AssertionError):
    """A run that does not end."""


class Run(NamedTuple):
    """A run and its log, without the spans in which engines compute."""

    result: RunResult
    log: list[dict[str, Any]]


@dataclass(slots=True)
class Verdict:
    """``broken``: the laws, each with the first thing that breaks it. ``counts``: what the merged run went through."""

    broken: dict[str, str]
    counts: Counter[str]


def bounded(scenario: Scenario, **changes: Any) -> Run:
    """Run it. Raises Runaway, instead of going on for ever, when its log grows beyond ``LONGEST_LOG`` lines."""
    log: list[dict[str, Any]] = []
    lines = 0

    def write(line: dict[str, Any]) -> None:
        nonlocal lines
        lines += 1
        if lines > LONGEST_LOG:
            raise Runaway(f"{lines} lines of log, and it is {line['now_s']} s only")
        if "span" not in line:
            log.append(line)

    return Run(simulate(replace(scenario, log=write, **changes)), log)


def judge(
    scenario: Scenario, twin: Scenario | None = None, *, all_end: bool = False, timelines: bool = True
) -> Verdict:
    """Run ``scenario`` merged, plain and again. ``twin`` must equal it, ``timelines`` included if they have the same
    columns; ``all_end`` asks that nobody is open at the horizon. Raises ScenarioError for a scenario that cannot be."""
    broken: dict[str, str] = {}
    merged = _attempt(scenario, "runs", broken)
    if merged is None:
        return Verdict(broken, Counter())
    _note(broken, "ends once", _wrong_ends(scenario, merged))
    _note(broken, "visits", _wrong_visits(merged.result))
    if not getattr(scenario.system.memory, "prefix_cache", False):
        _note(broken, "nothing leaks", _leaks(scenario, merged))
    if all_end:
        _note(broken, "all end", (f"request {id}" for id in np.flatnonzero(merged.result.fate == Fate.UNFINISHED)))
    plain = _attempt(replace(scenario, exact_steps=True), "merged = plain", broken)
    if plain is not None:
        _note(broken, "merged = plain", differences(merged, plain))
    again = _attempt(scenario, "twice", broken)
    if again is not None:
        _note(broken, "twice", differences(merged, again))
    told = replay(merged.log, prepare(scenario).parts.cluster.controller.handle)
    _note(broken, "replayed", iter([told] if told else []))
    other = None if twin is None else _attempt(twin, "twin", broken)
    if other is not None:
        _note(broken, "twin", differences(merged, other, commands=False, timelines=timelines))
    return Verdict(broken, counts_of(merged))


def counts_of(run: Run) -> Counter[str]:
    """What happened in a run."""
    names = Counter(line.get("command") or line.get("event") for line in run.log)
    counted = Counter(
        runs=1,
        requests=len(run.result.fate),
        steps=run.result.iterations,
        preemptions=int(run.result.preemptions.sum()),
        faults=names["EngineFailed"],
        activations=names["Activate"],
        evictions=names["Evict"],
    )
    for name in ("drops", "restores", "migrations"):
        counted[name] = int(run.result.counters.get(name, 0))
    counted.update(Fate(fate).name.lower() for fate in run.result.fate.tolist())
    return counted


@contextmanager
def counting_swaps() -> Iterator[Counter[str]]:
    """Counts sequences that are swapped out, which no run tells of: all runs meanwhile, the repeated ones too."""
    seen: Counter[str] = Counter()
    swap_out = HostTier._swap_out

    def counted(*arguments: Any) -> None:
        seen["swaps"] += 1
        swap_out(*arguments)

    with MonkeyPatch.context() as patch:
        patch.setattr(HostTier, "_swap_out", counted)
        yield seen


def differences(a: Run, b: Run, *, commands: bool = True, timelines: bool = True) -> Iterator[str]:
    """Where two runs differ by a bit."""
    for name in RESULTS:
        yield from _differing(name, getattr(a.result, name), getattr(b.result, name))
    for name in Visits.COLUMNS:
        yield from _differing(f"visits.{name}", getattr(a.result.visits, name), getattr(b.result.visits, name))
    for name in TIMELINES if timelines else ():
        yield from _differing(f"timeline.{name}", getattr(a.result.timeline, name), getattr(b.result.timeline, name))
    if commands:
        if a.result.counters != b.result.counters:
            yield f"counters: {a.result.counters} != {b.result.counters}"
        pairs = zip(commands_of(a.log), commands_of(b.log), strict=False)
        yield from (f"command {number}: {x} != {y}" for number, (x, y) in enumerate(pairs) if x != y)
        if len(commands_of(a.log)) != len(commands_of(b.log)):
            yield f"{len(commands_of(a.log))} commands != {len(commands_of(b.log))}"


def _differing(name: str, a: Any, b: Any) -> Iterator[str]:
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        yield f"{name}: shape {a.shape} != {b.shape}"
        return
    same = (a == b) | (np.not_equal(a, a) & np.not_equal(b, b))
    yield from (f"{name}[{', '.join(map(str, at))}]: {a[tuple(at)]} != {b[tuple(at)]}" for at in np.argwhere(~same))


def _attempt(scenario: Scenario, law: str, broken: dict[str, str]) -> Run | None:
    try:
        return bounded(scenario)
    except ScenarioError:
        raise
    except Exception as problem:  # whatever it is, a law says that it must not be
        broken[law] = f"{type(problem).__name__}: {problem}"
        return None


def _note(broken: dict[str, str], law: str, problems: Iterator[str]) -> None:
    first = next(problems, None)
    if first is not None:
        broken[law] = first


def _wrong_ends(scenario: Scenario, run: Run) -> Iterator[str]:
    result, arrival_s = run.result, scenario.trace.arrival_s
    refused = {Fate.DROPPED: "Drop", Fate.REJECTED: "Reject"}
    told = Counter((line["command"], line["request_id"]) for line in commands_of(run.log) if "request_id" in line)
    for request, fate in enumerate(result.fate.tolist()):
        first_s, finish_s = result.first_token_s[request], result.finish_s[request]
        if (fate in ENDED) != bool(np.isfinite(finish_s)):
            yield f"request {request} is {Fate(fate).name} and its finish {finish_s}"
        if fate in ENDED and not arrival_s[request] < first_s <= finish_s <= result.end_s:
            yield f"request {request} comes at {arrival_s[request]}, answers at {first_s} and ends at {finish_s}"
        if fate in ENDED and not told["Dispatch", request]:
            yield f"request {request} finished and was never dispatched"
        for kind, command in refused.items():
            if told[command, request] != (fate == kind):
                yield f"request {request} is {Fate(fate).name} after {told[command, request]} times {command}"
        if fate == Fate.UNFINISHED and result.end_s != arrival_s[-1] + scenario.drain_s:
            yield f"request {request} is open, and the run ended at {result.end_s}, before its horizon"


def _wrong_visits(result: RunResult) -> Iterator[str]:
    visits = result.visits
    assert (np.diff(visits.request) >= 0).all(), "visits are not sorted by request"
    for request, (fate, engine) in enumerate(zip(result.fate.tolist(), result.engine.tolist(), strict=True)):
        stays, first_s, end_s = visits.of(request), result.first_token_s[request], result.finish_s[request]
        moments = [moment for visit in stays for moment in (visit.from_s, visit.to_s)]
        if moments != sorted(moments) or any(visit.tokens < 0 for visit in stays):
            yield f"request {request} is at {stays}"
        if any(visit.left in LAST for visit in stays[:-1]):
            yield f"request {request} goes on after its end: {stays}"
        ends = {Fate.FINISHED: Left.FINISHED, Fate.CUT: Left.CUT}.get(Fate(fate))
        if ends is None:
            if any(visit.left in (Left.FINISHED, Left.CUT) for visit in stays):
                yield f"request {request} is {Fate(fate).name}, and did it end? {stays}"
            continue
        if not stays or (stays[-1].left, stays[-1].to_s, stays[-1].stages[0]) != (ends, end_s, engine):
            yield f"request {request} is {ends.name} at {end_s} on {engine}, and was at {stays}"
        if sum(visit.tokens for visit in stays) != result.generated_tokens[request]:
            yield f"request {request} has {result.generated_tokens[request]} tokens, and from {stays}"
        if not any(visit.from_s <= first_s <= visit.to_s and visit.tokens for visit in stays):
            yield f"request {request} has its first token at {first_s}, outside of {stays}"


def _leaks(scenario: Scenario, run: Run) -> Iterator[str]:
    result = run.result
    gone_s = np.where(np.isfinite(result.finish_s), result.finish_s, np.inf)
    for line in commands_of(run.log):
        if line["command"] in ("Drop", "Reject"):
            gone_s[line["request_id"]] = line["now_s"]
    timeline = result.timeline
    for sample, now in enumerate(timeline.time_s):
        in_flight = (scenario.trace.arrival_s <= now) & (now <= gone_s + CALM_S)
        held = (timeline.kv_used_bytes[sample].sum(), timeline.gpu_stranded_bytes[sample].sum())
        if not in_flight.any() and any(held):
            yield f"at {now} s, with nobody there, {held[0]} bytes are used and {held[1]} stranded"


def as_text(broken: dict[str, str]) -> str:
    return "; ".join(f"{law}: {problem}" for law, problem in broken.items())
