"""The driver's book of requests: which are here, and on which engine. Its owner holds a lock around every call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fineserve_runtime.engines.api import TokenChunk
from fineserve_runtime.jobs import End, Job, Observer


class Desk:
    """All requests that have not ended; it tells sinks and observers."""

    def __init__(self, models: Iterable[str], observers: Sequence[Observer]) -> None:
        self._jobs: dict[int, Job] = {}
        self._untouched = dict.fromkeys(models, 0)
        self._on_engine: dict[int, set[int]] = {}
        self._observers = tuple(observers)

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, request_id: int) -> Job | None:
        return self._jobs.get(request_id)

    def all(self) -> list[Job]:
        return list(self._jobs.values())

    def untouched(self, model: str) -> int:
        """Requests of the model that have no token yet."""
        return self._untouched[model]

    def add_model(self, model: str) -> None:
        self._untouched[model] = 0

    def remove_model(self, model: str) -> None:
        """It has no requests."""
        del self._untouched[model]

    def of(self, model: str) -> list[Job]:
        return [job for job in self._jobs.values() if job.model == model]

    def take_in(self, job: Job) -> None:
        self._jobs[job.id] = job
        self._untouched[job.model] += 1
        for observer in self._observers:
            observer.arrived(job)

    def end(self, job: Job, end: End, now: float) -> int | None:
        """The request is over; the engine that it leaves. Does nothing the second time."""
        if self._jobs.pop(job.id, None) is None:
            return None
        self._untouched[job.model] -= job.first_token_s is None
        engine = self.detach(job)
        for observer in self._observers:
            observer.ended(job, end, now)
        job.sink.ended(end)
        return engine

    def emit(self, job: Job, chunk: TokenChunk, now: float) -> None:
        for observer in self._observers:
            observer.emitted(job, len(chunk.token_ids), now)
        if job.first_token_s is None:
            job.first_token_s = now
            self._untouched[job.model] -= 1
        job.last_token_s = now
        job.unproven = False
        job.generated.extend(chunk.token_ids)
        job.sink.tokens(chunk.token_ids, chunk.logprobs, chunk.finish_reason is not None)

    def note_preemption(self, request_id: int) -> None:
        job = self._jobs.get(request_id)
        if job is not None:
            job.preemptions += 1
            for observer in self._observers:
                observer.preempted(job)

    # --- engines ---------------------------------------------------------------------------------------------------

    def open(self, engine: int) -> None:
        self._on_engine[engine] = set()

    def close(self, engine: int) -> list[Job]:
        """The engine is gone; the requests that it had, by id, which are on none now."""
        jobs = self.on(engine)
        self._on_engine.pop(engine, None)
        for job in jobs:
            job.engine = None
        return jobs

    def on(self, engine: int) -> list[Job]:
        return [self._jobs[id] for id in sorted(self._on_engine.get(engine, ()))]

    def prompts_on(self, engine: int) -> list[int]:
        """The prompt tokens of the engine's requests that have no token yet, the oldest first."""
        return [job.tokens for job in self.on(engine) if job.first_token_s is None]

    def shortest_on(self, engine: int) -> Job | None:
        """The request with the fewest tokens among those that decode on the engine and may go on elsewhere."""
        moves = [job for job in self.on(engine) if not job.unproven and job.can_resume]
        return min(moves, key=lambda job: (job.tokens, job.id), default=None)

    def attach(self, job: Job, engine: int, now: float) -> None:
        job.engine = job.served_by = engine
        job.unproven = True
        self._on_engine[engine].add(job.id)
        for observer in self._observers:
            observer.dispatched(job, now)

    def reattach(self, job: Job, engine: int) -> None:
        """The engine that has the request is another one of the core's now."""
        job.engine = job.served_by = engine
        self._on_engine[engine].add(job.id)

    def detach(self, job: Job) -> int | None:
        """The engine that the request leaves."""
        engine, job.engine = job.engine, None
        if engine is not None and engine in self._on_engine:
            self._on_engine[engine].discard(job.id)
        return engine
