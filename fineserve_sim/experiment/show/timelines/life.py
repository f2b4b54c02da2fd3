"""The life of one request: what it waited for, how long, and on which decision.

Between its arrival and its dispatch a request waits in its scheduler. Each time an engine of the scheduler's scope stands
between two steps, the log shows the engine's state. That state says what kept the request until the next look: no slot, no KV
memory for its prompt, prompts that were admitted before it, or the scheduler's order. After its dispatch it waits in the queue
of its engine, whose state the log shows with every batch, until a batch has its first chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from fineserve_sim.cluster import Cause, Fate, Left, Visit
from fineserve_sim.cluster.scenario import LAST
from fineserve_sim.experiment.show.timelines.decode import Decode
from fineserve_sim.experiment.show.timelines.first_token import own_prefill_s, spent_to_first_s
from fineserve_sim.experiment.show.timelines.stored import RunError, StoredRun

SLOT = "a free slot"
MEMORY = "KV memory for its prompt"
PREFILL = "prompts admitted before it"
ORDER = "its turn in the scheduler's order"
STEP = "the next look at its queue"
WEIGHTS = "the weights of its model, on their way to a GPU"
LAG_S = 2.0
"""Undisturbed engines tell their work when they are looked at, a second later at most."""

LEFT = {
    Left.OPEN: "the run ended",
    Left.FINISHED: "finished",
    Left.CUT: "cut",
    Left.MIGRATED: "migrated with its KV",
    Left.REGROUPED: "engines merged or split",
    Left.EVICTED: "its engine was taken from it",
    Left.FAILED: "its engine failed",
    Left.RESIZED: "the engine's memory became too small for it",
}
"""Why a request left an engine, in words."""

GROUP_COMMANDS = ("DropLayers", "RestoreLayers", "Migrate")


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to the request, ``after_s`` seconds from its arrival."""

    at_s: float
    after_s: float
    what: str


@dataclass(frozen=True, slots=True)
class Life:
    """A request's own story, with the engines that it was at. ``waited_s``: seconds in the queues of schedulers and engines by
    what it waited for, the longest first. ``first_s``: seconds to the first token by what they were spent for, these waits
    included. ``decoded_s``: seconds from there to the last by what they were spent for. ``batch``: sequences that decoded with
    it."""

    request: int
    model: str
    prompt_tokens: int
    output_tokens: int
    visits: tuple[Visit, ...]
    moments: tuple[Moment, ...]
    waited_s: Mapping[str, float]
    first_s: Mapping[str, float]
    verdict: str
    decoded_s: Mapping[str, float]
    batch: float


def life_of(run: StoredRun, request: int) -> Life:
    """The life of a request by its number in arrival order. Raises RunError for a number that no request has, for a bound,
    which decides nothing, and where the run was made without --decisions."""
    if not 0 <= request < len(run.data.arrival_s):
        raise RunError(f"no request {request}: there are {len(run.data.arrival_s)}, from 0 on")
    if not run.data.engine_models and (run.data.fate == Fate.FINISHED).any():
        raise RunError(f"{run.title}: a bound, which no engine serves; name a system that can be run (--system)")
    return lives_of(run, [request], run.decisions())[0]


def lives_of(run: StoredRun, requests: Sequence[int], decisions: Iterable[Mapping[str, Any]]) -> list[Life]:
    """The lives of several requests in one look through the decisions; without any, what the run itself tells of them."""
    readers = {request: (_log_of(run, request), _decode_of(run, request)) for request in requests}
    following = dict(readers)
    for entry in decisions:
        for request, (log, decode) in list(following.items()):
            log.take(entry)
            log.prefill.take(entry)
            decode.take(entry)
            if not log.open and entry["now_s"] > _end_s(run, request) + LAG_S:
                del following[request]
        if not following:
            break
    return [_life(run, request, *readers[request]) for request in requests]


def _log_of(run: StoredRun, request: int) -> _Log:
    data = run.data
    model = data.models[data.model[request]]
    own = {str(engine) for engine, name in enumerate(data.engine_models) if name == model}
    placed = {engine for engine, name in enumerate(run.engine_instance_models) if name == model}
    times_s = (float(data.arrival_s[request]), float(data.first_token_s[request]))
    return _Log(request, *times_s, model, own, None if run.of_groups else placed, data.visits.of(request))


def _decode_of(run: StoredRun, request: int) -> Decode:
    data = run.data
    times_s = (float(data.first_token_s[request]), float(data.finish_s[request]))
    return Decode(request, data.visits.of(request), *times_s)


def _life(run: StoredRun, request: int, log: _Log, decode: Decode) -> Life:
    data = run.data
    arrival_s = float(data.arrival_s[request])
    moments = [
        Moment(arrival_s, 0.0, _surroundings(run, arrival_s)),
        *(_told(run, request, each, log.slowdown) for each in log.moments),
    ]
    moments += [*_moves(run, request), *_outcomes(run, request)]
    return Life(
        request=request,
        model=data.models[data.model[request]],
        prompt_tokens=int(data.prompt_tokens[request]),
        output_tokens=int(data.output_tokens[request]),
        visits=tuple(data.visits.of(request)),
        moments=tuple(sorted(moments, key=lambda moment: moment.at_s)),
        waited_s=dict(sorted(log.waited_s.items(), key=lambda item: -item[1])),
        first_s=spent_to_first_s(run, request, log.prefill, log.first_waited_s),
        verdict=_verdict(run, request, decode),
        decoded_s=decode.spent_s,
        batch=decode.batch,
    )


def _told(run: StoredRun, request: int, moment: Moment, slowdown: float) -> Moment:
    """A moment as it is; a drop with what the prompt would have taken beside the neighbours of then, and what was left."""
    own_s = own_prefill_s(run, request) if moment.what.startswith("Drop") else None
    if own_s is None:
        return moment
    left_s = run.ttft_slo_s[run.data.models[run.data.model[request]]] - moment.after_s
    left = f"{left_s:.3g} s are left" if left_s > 0 else "none are left"
    beside = f"{slowdown * own_s:.3g} s beside its GPU's neighbours, " if slowdown > 1 else ""
    return replace(moment, what=f"{moment.what}; its prompt takes {beside}{own_s:.3g} s on an idle engine, {left}")


def _end_s(run: StoredRun, request: int) -> float:
    finish_s = float(run.data.finish_s[request])
    return math.inf if math.isnan(finish_s) else finish_s


class _Log:
    """Reads the decision log and keeps what concerns one request."""

    def __init__(
        self,
        request: int,
        arrival_s: float,
        first_token_s: float,
        model: str,
        engines: set[str],
        ready: set[int] | None,
        visits: Sequence[Visit],
    ) -> None:
        self._id = request
        self._visits = visits
        self._arrival_s = arrival_s
        self._prompt_tokens = 0
        self._model = model
        self._engines = engines
        self._activated: set[int] = set()
        self._reason: str | None = None
        self._since_s = arrival_s
        self._first_token_s = first_token_s
        self._ready = ready
        self._queue: int | None = None
        self._started = False
        self.moments: list[Moment] = []
        self.slowdown = 1.0  # of steps by neighbours, when an engine of its model was looked at last
        self.waited_s: dict[str, float] = {}
        self.first_waited_s: dict[str, float] = {}
        self.prefill = Decode(request, visits, math.inf, first_token_s)
        self.open = False

    def take(self, entry: Mapping[str, Any]) -> None:
        now = float(entry["now_s"])
        event = entry.get("event")
        if event in ("RequestArrived", "RequestReturned") and entry["request"]["id"] == self._id:
            self._arrives(now, entry["request"])
        elif entry.get("request_id") == self._id and "command" in entry:
            self._decided(now, entry)
        elif entry.get("span") == "Preempted" and entry["request"] == self._id:
            self._note(now, f"preempted{_at(self._visits, now, ' on')}: its KV memory went to others")
        elif entry.get("span") == "Fetched" and entry["request"] == self._id:
            self._note(now, f"{entry['tokens']:,} tokens come from host memory, for {entry['seconds']:.3g} s")
        elif self.open and event == "EngineStepped":
            self._looked_at(now, entry["engines"])
        elif entry.get("span") == "EngineLaunched" and self._queue == entry["engine"]:
            self._launched(now, entry)
        elif entry.get("span") == "Transferred" and self._queue == entry["engine"]:
            self._note(now, f"{entry['what']} of engines {entry['engines']} ends after {entry['seconds']:.3g} s")
        elif entry.get("command") in ("Activate", "Evict"):
            self._moved(now, entry)
        elif event == "EngineReady" and entry["engine"] in self._activated:
            self._is_there(now, entry["engine"])
        elif (self.open or self._reason is not None) and entry.get("command") in GROUP_COMMANDS:
            self._note(now, f"{entry['command']}: {_fields(entry)}")

    def _arrives(self, now: float, request: Mapping[str, Any]) -> None:
        self._close(now)
        self.open = True
        self._prompt_tokens = request["prompt_tokens"]
        self._reason, self._since_s = self._first_reason(), now

    def _first_reason(self) -> str:
        return WEIGHTS if self._ready is not None and not self._ready else STEP

    def _is_there(self, now: float, engine: int) -> None:
        """An engine of its model has its weights."""
        if self._ready is not None:
            self._ready.add(engine)
        if self.open and self._reason == WEIGHTS:
            self._close(now)
            self._reason = STEP

    def _looked_at(self, now: float, engines: Mapping[str, Mapping[str, Any]]) -> None:
        """An engine stepped and the request may have stayed behind: what for, as far as the state tells."""
        own = [state for engine, state in engines.items() if engine in self._engines]
        if own:
            self._close(now)
            self._reason = _reason(own, self._prompt_tokens)
            self.slowdown = min(state["slowdown"] for state in own)

    def _launched(self, now: float, entry: Mapping[str, Any]) -> None:
        """The engine in whose queue it is begins a batch: with its first chunk, or for a reason without it."""
        self._close(now)
        if self._id in entry["starts"]:
            self._reason = None
            if not now >= self._first_token_s:
                self.prefill = Decode(self._id, self._visits, now, self._first_token_s)
            again = "again, " if self._started else ""
            self._started = True
            self._note(now, f"prefill begins {again}on engine {entry['engine']}")
        elif self._reason is not None:
            self._reason = _reason([entry], self._prompt_tokens)

    def _moved(self, now: float, entry: Mapping[str, Any]) -> None:
        """A model comes or goes; its own is told of in any case while the request waits."""
        if entry.get("model") == self._model:
            self._engines.add(str(entry["engine"]))
            self._activated.add(entry["engine"])
        elif self._ready is not None and entry["engine"] in self._ready:
            self._ready.discard(entry["engine"])
        if self.open:
            self._note(now, _move(entry))

    def _decided(self, now: float, entry: Mapping[str, Any]) -> None:
        self._close(now)
        self._reason = None
        self.open = False
        command = entry["command"]
        if command == "Dispatch":
            self._note(now, f"Dispatch to engine {entry['engine']}")
            self._queue, self._reason = entry["engine"], STEP
        elif command == "Migrate":
            self._note(now, f"Migrate from engine {entry['source']} to engine {entry['destination']}")
        else:
            self._note(now, f"{command}: {entry.get('reason', '')}".rstrip(": "))

    def _close(self, now: float) -> None:
        if self._reason is not None and now > self._since_s:
            self.waited_s[self._reason] = self.waited_s.get(self._reason, 0.0) + now - self._since_s
            if not now > self._first_token_s:
                waited_s = self.first_waited_s.get(self._reason, 0.0)
                self.first_waited_s[self._reason] = waited_s + now - self._since_s
        self._since_s = now

    def _note(self, now: float, what: str) -> None:
        self.moments.append(Moment(now, now - self._arrival_s, what))


def _reason(engines: Sequence[Mapping[str, Any]], prompt_tokens: int) -> str:
    """What a request waits for when the engines of its model look like this."""
    if all(state["free_slots"] <= 0 for state in engines):
        return SLOT
    if all(state["free_kv_tokens"] < prompt_tokens for state in engines):
        return MEMORY
    return PREFILL if any(state["prefill_tokens"] > 0 for state in engines) else ORDER


def _move(entry: Mapping[str, Any]) -> str:
    if entry["command"] == "Activate":
        return f"Activate {entry['model']} on GPUs {', '.join(map(str, entry['gpus']))} as engine {entry['engine']}"
    return f"Evict engine {entry['engine']}"


def _fields(entry: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in entry.items() if name not in ("now_s", "command"))


def _surroundings(run: StoredRun, at_s: float) -> str:
    """How full the cluster was at the last sample before a moment."""
    data = run.data
    before = np.flatnonzero(data.sample_s <= at_s)
    if not len(before) or not data.kv_capacity_bytes:
        return "arrives"
    row = before[-1]
    used = data.kv_used_bytes[row].sum() / data.kv_capacity_bytes
    waiting = int(data.waiting[row].sum())
    return (
        f"arrives; {waiting} request{'s wait' if waiting != 1 else ' waits'}, {100 * used:.0f} % of KV memory is in use"
    )


def where(visit: Visit) -> str:
    """An engine, with the instances that it runs on where these have numbers of their own."""
    if visit.stages == (visit.engine,):
        return f"engine {visit.engine}"
    return f"engine {visit.engine} (instance{'s' * (len(visit.stages) > 1)} {', '.join(map(str, visit.stages))})"


def _at(visits: Sequence[Visit], now: float, word: str) -> str:
    """The engine that it was at then, after this word."""
    return next((f"{word} {where(visit)}" for visit in visits if visit.from_s <= now <= visit.to_s), "")


def _moves(run: StoredRun, request: int) -> Iterator[Moment]:
    """Why it left the engines that it did not end at, and whether it went on at once."""
    arrival_s = float(run.data.arrival_s[request])
    for visit, after in zip_longest(visits := run.data.visits.of(request), visits[1:]):
        if visit.left not in LAST:
            goes_on = after is not None and visit.left in (Left.MIGRATED, Left.REGROUPED) and after.from_s == visit.to_s
            then = f", goes on at {where(after)}" if goes_on else ", waits again"
            yield Moment(visit.to_s, visit.to_s - arrival_s, f"leaves {where(visit)}: {LEFT[visit.left]}{then}")


def _outcomes(run: StoredRun, request: int) -> Iterator[Moment]:
    data = run.data
    columns = (data.arrival_s, data.first_token_s, data.finish_s)
    arrival_s, first_s, finish_s = (float(column[request]) for column in columns)
    if math.isfinite(first_s):
        yield Moment(first_s, first_s - arrival_s, f"first token{_at(data.visits.of(request), first_s, ', from')}")
    if math.isfinite(finish_s):
        preempted = int(data.preemptions[request])
        note = f", after {preempted} preemptions" if preempted else ""
        yield Moment(finish_s, finish_s - arrival_s, f"last token{note}")


def _verdict(run: StoredRun, request: int, decode: Decode) -> str:
    """Each latency beside its limit, and what most of a decode above its limit was spent for."""
    data = run.data
    model, fate, cause = data.models[data.model[request]], Fate(data.fate[request]), Cause(data.cause[request])
    limit_s = run.ttft_slo_s[model]
    if fate not in (Fate.FINISHED, Fate.CUT):
        return f"{_unserved(fate, cause)}: a miss (TTFT limit {limit_s:.3g} s)"
    parts = [_held("TTFT", float(data.ttft_s[request]), limit_s)]
    tpot_s = float(data.tpot_s[request])
    if math.isfinite(tpot_s):
        parts.append(_held("TPOT", tpot_s, (run.limits.tpot_s or {}).get(model)))
    if fate is Fate.CUT:
        where = "the context of its model" if cause is Cause.CONTEXT else "the KV memory of its engine"
        generated = int(data.generated_tokens[request])
        parts.insert(0, f"cut after {generated} of {data.output_tokens[request]} tokens, at the end of {where}")
    e2e_s = float(data.finish_s[request] - data.arrival_s[request])
    parts.append(_held("end to end", e2e_s, (run.limits.e2e_s or {}).get(model)))
    if decode.spent_s:
        what, seconds = next(iter(decode.spent_s.items()))
        parts.append(f"{100 * seconds / decode.seconds:.0f} % of the decode went to {what}")
    return "; ".join(parts)


def _unserved(fate: Fate, cause: Cause) -> str:
    if fate is not Fate.REJECTED:
        return fate.name.lower()
    if cause is Cause.PLACEMENT:
        return "unplaced, no engine has its model"
    where = "the context of its model" if cause is Cause.CONTEXT else "the KV memory of any engine of its model"
    return f"rejected, its prompt is longer than {where}"


def _held(name: str, seconds: float, limit_s: float | None) -> str:
    if not limit_s:
        return f"{name} {seconds:.3g} s"
    return f"{name} {seconds:.3g} s, limit {limit_s:.3g} s: {'met' if seconds <= limit_s else 'missed'}"
