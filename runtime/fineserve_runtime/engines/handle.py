"""The host's side of one engine: commands sent, its last report, and the threads that wait for an answer."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from fineserve_runtime.engines.api import EngineConfig, EngineDied, EngineStats, KvPart, Lent, StepReport, Submission
from fineserve_runtime.engines.device import Device, EngineFacts
from fineserve_runtime.engines.loop import Abort, Call, EngineCommand, Method, Remove, Reply, Stepped, Submit
from fineserve_sim.policy.interfaces import EngineState

CALL_S = 120.0
"""Weights of a large model take seconds to move; an engine that does not answer for so long will not."""


class Handle:
    """An `api.EngineHandle`. The host feeds it with its engine's messages."""

    def __init__(self, engine: int, config: EngineConfig, facts: EngineFacts, device: Device) -> None:
        self.id = engine
        self.config = config
        self.model_dir, self.eos_token_ids, self.block_bytes, self.gpus = facts
        self.ready = threading.Event()
        self.death: str | None = None
        self.asleep = False
        self._device = device
        self._changed = threading.Condition(threading.RLock())
        self._sent = 0
        self._base = EngineState(0, 0, 0, config.max_sequences, 0, 1.0)
        self._pending: dict[int, Submission] = {}  # by number of the command, until a report takes it into account
        self._unfinished: set[int] = set()
        self._calls: dict[int, Future[Any]] = {}
        self._tickets = itertools.count()
        self._heard_s = time.monotonic()

    # --- what drivers do ---------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self.death is None

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard_s if self.alive and self.ready.is_set() else 0.0

    @property
    def kv_capacity_tokens(self) -> int:
        return self._device.kv_capacity_tokens(self.id)

    def submit(self, submission: Submission) -> None:
        tokens = len(submission.prompt_token_ids)
        if not 0 < tokens < self.config.max_model_len:
            raise ValueError(
                f"{self.config.name}: prompt of {tokens} tokens; it must be 1 to {self.config.max_model_len - 1}"
            )
        with self._changed:
            self._check_usable()
            self._unfinished.add(submission.request_id)
            self._pending[self._send(Submit(self.id, submission))] = submission

    def abort(self, request_id: int) -> None:
        with self._changed:
            if self.alive and request_id in self._unfinished:
                self._send(Abort(self.id, request_id))

    def state(self) -> EngineState:
        with self._changed:
            pending = list(self._pending.values())
            running = self._base.running + len(pending)
            prefill_tokens = self._base.prefill_tokens + sum(len(item.prompt_token_ids) for item in pending)
            return self._base._replace(
                running=running,
                prefill_tokens=prefill_tokens,
                free_slots=max(0, self.config.max_sequences - running),
                free_kv_tokens=self._device.free_kv_tokens(self.id),
            )

    def stats(self, gpu: int | None = None) -> EngineStats:
        return self._device.stats(self.id, gpu)

    def drain(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, timeout_s)

    def sleep(self) -> float:
        with self._changed:
            if self._unfinished:
                raise RuntimeError(f"{self.config.name} still has {len(self._unfinished)} requests; drain it first")
            if self.asleep:
                return 0.0
            self._check_usable()
            self.asleep = True
        started_s = time.monotonic()
        try:
            self._call("sleep")
        except RuntimeError:
            self.asleep = False
            raise
        return time.monotonic() - started_s

    def wake(self) -> float:
        if not self.asleep:
            return 0.0
        started_s = time.monotonic()
        self._call("wake")
        self.asleep = False
        return time.monotonic() - started_s

    def copy_kv(self, request_id: int, first_block: int, *, stop: bool = False) -> KvPart | None:
        part: KvPart | None = self._call("copy_kv", request_id, first_block, stop)
        if stop and part is not None:
            with self._changed:
                self._unfinished.discard(request_id)
                self._changed.notify_all()
        return part

    def hold_kv(self, request_id: int, part: KvPart, *, last: bool = False) -> bool:
        return bool(self._call("hold_kv", request_id, part, last))

    def forget_kv(self, request_id: int) -> None:
        with self._changed:
            if self.alive:
                self._send(Call(self.id, next(self._tickets), "forget_kv", (request_id,)))

    def evacuate(self, *, with_kv: bool) -> list[tuple[int, KvPart | None]]:
        found: list[tuple[int, KvPart | None]] = self._call("evacuate", with_kv)
        with self._changed:
            self._unfinished -= {request_id for request_id, _ in found}
            self._changed.notify_all()
        return found

    def droppable_bytes(self) -> int:
        return int(self._call("droppable_bytes"))

    def drop_layers(self) -> Lent:
        lent: Lent = self._call("drop_layers")
        self.asleep = True
        return lent

    def borrow(self, lent: Sequence[Lent]) -> None:
        self._call("borrow", tuple(lent))

    def vacate(self, first_slab: int | None) -> None:
        self._call("vacate", first_slab)

    # --- what the host does ------------------------------------------------------------------------------------------

    def on_ready(self, state: EngineState) -> None:
        self._base = state
        self._heard_s = time.monotonic()
        self.ready.set()

    def on_heard(self) -> None:
        """A sign of life."""
        self._heard_s = time.monotonic()

    def on_stepped(self, message: Stepped) -> None:
        with self._changed:
            self._note(message.report.state, message.seen)

    def on_told(self, report: StepReport) -> None:
        """The listener has heard of this step. Requests that ended in it are left until then: a drain waits for all that is
        said, and where the listener fails, they are lost like the others. One that was sent again since is not ended."""
        with self._changed:
            sent_again = {submission.request_id for submission in self._pending.values()}
            finished = {chunk.request_id for chunk in report.chunks if chunk.finish_reason} - sent_again
            if finished:
                self._unfinished -= finished
                self._changed.notify_all()

    def on_reply(self, reply: Reply) -> None:
        with self._changed:
            self._note(reply.state, reply.seen)
            future = self._calls.pop(reply.ticket, None)
        if future is not None and reply.error is None:
            future.set_result(reply.value)
        elif future is not None:
            future.set_exception(RuntimeError(reply.error))

    def on_died(self, reason: str) -> tuple[int, ...]:
        """The requests that are lost."""
        with self._changed:
            self.death = reason
            lost = tuple(sorted(self._unfinished))
            self._unfinished.clear()
            self._pending.clear()
            calls, self._calls = list(self._calls.values()), {}
            self._changed.notify_all()
        for future in calls:
            future.set_exception(EngineDied(f"{self.config.name}: {reason}"))
        self.ready.set()
        return lost

    def leaves(self) -> None:
        """The engine is to end for good."""
        with self._changed:
            if self.alive:
                self._send(Remove(self.id))

    def await_death(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self.alive, timeout_s)

    def revive(self) -> None:
        """The engine is started again, with nothing in it."""
        with self._changed:
            self.death, self.asleep, self._sent = None, False, 0
            self.ready.clear()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self.death is not None:
            raise EngineDied(f"{self.config.name}: {self.death}")
        if self.asleep:
            raise RuntimeError(f"{self.config.name} is asleep; wake it first")

    def _send(self, command: EngineCommand) -> int:
        self._sent += 1
        self._device.send(command)
        return self._sent

    def _note(self, state: EngineState, seen: int) -> None:
        """The engine's state, which takes its first ``seen`` commands into account."""
        self._base = state
        self._pending = {number: item for number, item in self._pending.items() if number > seen}

    def _call(self, method: Method, *arguments: Any) -> Any:
        future: Future[Any] = Future()
        with self._changed:
            if self.death is not None:
                raise EngineDied(f"{self.config.name}: {self.death}")
            ticket = next(self._tickets)
            self._calls[ticket] = future
            self._send(Call(self.id, ticket, method, arguments))
        try:
            return future.result(CALL_S)
        except TimeoutError:
            raise RuntimeError(f"{self.config.name}: no answer to {method} in {CALL_S:g} s") from None
