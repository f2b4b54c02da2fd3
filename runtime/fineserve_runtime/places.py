"""Which engine of the core is which engine process: an engine of the core is one stay of a model on a device.

Every device has one engine process a model that may stay there; it sleeps while the model is elsewhere. What takes long
(waking, putting to sleep, starting anew) is done by one thread a device, in order. So memory that an eviction frees is free
when the activation behind it looks for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from fineserve_runtime.engines.api import EngineDied, EngineHandle, EngineHost, Submission
from fineserve_sim.policy.interfaces import EngineLoad, EngineState

_WAKE_S = 10.0
"""A core that sees enough free memory may be a moment ahead, or the memory in pieces: so long an engine waits for it."""

_ABORTS_S = 30.0
"""Aborted requests leave their engine at the end of its step; no step lasts this long."""


class Place(NamedTuple):
    """An engine process: the first device of its host, and its id there."""

    gpu: int
    local: int


class Places:
    """``hosts`` by their first device; ``on_trouble`` hears what a callback raises. Raises ValueError for a model that has no
    engine process on the devices where it is to be."""

    def __init__(self, hosts: Mapping[int, EngineHost], on_trouble: Callable[[Exception], None]) -> None:
        self._hosts = dict(hosts)
        self._on_trouble = on_trouble
        self._host_of = {gpu: first for first, host in hosts.items() for gpu in host.config.gpus}
        self._place: dict[int, Place] = {}
        self._engine: dict[Place, int] = {}
        self._loads: dict[int, EngineLoad] = {}  # as the core knows them; it counts what it gives an engine itself
        self._closed = False
        self._workers = {gpu: ThreadPoolExecutor(1, thread_name_prefix=f"device-{gpu}") for gpu in hosts}

    def settle(self, engine: int, model: str, gpus: tuple[int, ...]) -> None:
        """Make the process of ``model`` on these devices the core's ``engine``."""
        place = self.process(model, gpus)
        self._place[engine] = place
        self._engine[place] = engine

    def process(self, model: str, gpus: tuple[int, ...]) -> Place:
        """Raises ValueError where there is none."""
        first = self._host_of[gpus[0]]
        for local, handle in self._hosts[first].engines.items():
            if handle.config.name == model and handle.gpus == gpus:
                return Place(first, local)
        raise ValueError(f"devices {gpus} have no engine process for model {model}")

    def leave(self, engine: int) -> None:
        """End the stay. Reports of the process are dropped until the next stay."""
        place = self._place.pop(engine, None)
        if place is not None and self._engine.get(place) == engine:
            del self._engine[place]

    def engine_at(self, place: Place) -> int | None:
        return self._engine.get(place)

    def place(self, engine: int) -> Place:
        return self._place[engine]

    def gpu_of(self, engine: int) -> int:
        return self._place[engine].gpu

    def handle(self, engine: int) -> EngineHandle:
        return self.at(self._place[engine])

    def at(self, place: Place) -> EngineHandle:
        return self._hosts[place.gpu].engines[place.local]

    def states(self, engines: Sequence[int]) -> dict[int, EngineState]:
        """The states of these engines, as far as they can be given work."""
        handles = {engine: self.handle(engine) for engine in engines}
        return {engine: handle.state() for engine, handle in handles.items() if handle.alive and not handle.asleep}

    def submit(self, engine: int, submission: Submission) -> None:
        """Raises what ``EngineHandle.submit`` does."""
        self._loads.pop(engine, None)
        self.handle(engine).submit(submission)

    def loads(self, prompts_on: Callable[[int], Sequence[int]]) -> dict[int, EngineLoad]:
        """The loads of all engines. ``prompts_on``: the prompt tokens of an engine's requests that have no token yet, the
        oldest first.

        An engine tells tokens and not its queue. So the blocks of prompts that it has not computed count as queued, and
        requests past their prefill as running."""
        return {
            engine: _load(self.handle(engine), state, prompts_on(engine))
            for engine, state in self.states(self.engines()).items()
        }

    def changed_loads(self, prompts_on: Callable[[int], Sequence[int]]) -> dict[int, EngineLoad]:
        """The loads of the engines whose load is news to the core."""
        told, self._loads = self._loads, self.loads(prompts_on)
        return {engine: load for engine, load in self._loads.items() if told.get(engine) != load}

    def kv_tokens(self) -> dict[int, int]:
        """The KV tokens that each awake engine could hold while no other engine holds any."""
        handles = {engine: self.handle(engine) for engine in self.engines()}
        return {engine: each.kv_capacity_tokens for engine, each in handles.items() if each.alive and not each.asleep}

    def is_idle(self, engine: int) -> bool:
        handle = self.handle(engine)
        return handle.alive and handle.state().running == 0

    def take_turns(self, gpu: int) -> bool:
        """Whether one thread steps the engines of this host, so that all are between two steps when one of them reports."""
        return self._hosts[gpu].config.mode == "in_process"

    def engines(self, gpu: int | None = None) -> list[int]:
        """The engines that have a place (on this host), in the order of their ids."""
        return sorted(engine for engine, place in self._place.items() if gpu is None or place.gpu == gpu)

    def free_bytes(self, gpu: int, memory_bytes: int, weights: Mapping[str, int]) -> int:
        """What weights could take of a device's memory: all but KV in use and the weights of the core's engines there. Engines
        that still load count; evicted ones do not, even while they leave. ``weights`` by model."""
        host = self._hosts[self._host_of[gpu]]
        handles = [self.handle(engine) for engine in self.engines(self._host_of[gpu])]
        here = [handle.config.name for handle in handles if gpu in handle.gpus]
        ledger = host.ledger(gpu)
        stats = [handle.stats(gpu) for handle in host.engines.values() if gpu in handle.gpus]
        kv_bytes = ledger.used_bytes + ledger.stranded_bytes + ledger.lost_bytes - sum(s.weight_bytes for s in stats)
        return memory_bytes - max(0, kv_bytes) - sum(weights[name] for name in here)

    @property
    def hosts(self) -> Mapping[int, EngineHost]:
        return self._hosts

    def wake(self, engine: int, done: Callable[[float, BaseException | None], None]) -> None:
        """Bring the process of ``engine`` up, by and by; ``done`` gets the seconds it took, and what went wrong."""
        place = self._place[engine]

        def work() -> float:
            begun_s = time.monotonic()
            if not self.at(place).alive:
                self.restart(place)
            wake_patiently(self.at(place))
            return time.monotonic() - begun_s

        self._later(place.gpu, work, done)

    def restart(self, place: Place) -> None:
        """Start a dead process anew. Raises RuntimeError, as ``EngineHost.restart`` does. It takes long."""
        self._hosts[place.gpu].restart(place.local)

    def sleep(self, engine: int, done: Callable[[float, BaseException | None], None]) -> None:
        """Put the process of ``engine`` to sleep, by and by; it must have no requests but aborted ones. It stays awake if it is
        another engine of the core by then."""
        place = self._place[engine]

        def work() -> float:
            if self._engine.get(place, engine) != engine:
                return 0.0
            handle = self._hosts[place.gpu].engines[place.local]
            handle.drain(_ABORTS_S)
            return handle.sleep()

        self._later(place.gpu, work, done)

    def remove(self, gpu: int, model: str) -> Future[None]:
        """End the model's process on this device for good, after the work that is queued for it."""

        def work() -> None:
            for local, handle in list(self._hosts[gpu].engines.items()):
                if handle.config.name == model:
                    self._hosts[gpu].remove(local)

        return self._workers[gpu].submit(work)

    def close(self) -> None:
        """Take no more work, and end the work under way. Engines that start are not waited for."""
        self._closed = True
        for host in self._hosts.values():
            host.quit()
        for worker in self._workers.values():
            worker.shutdown(wait=True, cancel_futures=True)

    def run(self, gpu: int, work: Callable[[], None]) -> None:
        """Do this in the device's thread, after the work that is queued there."""

        def done(seconds: float, problem: BaseException | None) -> None:
            if isinstance(problem, Exception):
                self._on_trouble(problem)

        def timed() -> float:
            work()
            return 0.0

        self._later(gpu, timed, done)

    def _later(self, gpu: int, work: Callable[[], float], done: Callable[[float, BaseException | None], None]) -> None:
        def run() -> None:
            seconds, problem = 0.0, None
            try:
                seconds = work()
            except Exception as raised:
                problem = raised
            try:
                if problem is None or not self._closed:
                    done(seconds, problem)
            except Exception as raised:  # the pool would keep it to itself
                self._on_trouble(raised)

        with suppress(RuntimeError):  # closed
            self._workers[gpu].submit(run)


def _load(handle: EngineHandle, state: EngineState, prompts: Sequence[int]) -> EngineLoad:
    block_tokens = handle.config.block_tokens
    capacity_blocks = handle.kv_capacity_tokens // block_tokens
    blocks = [-(-tokens // block_tokens) for tokens in prompts]
    computed_tokens = sum(prompts) - state.prefill_tokens
    used_blocks = max(0, capacity_blocks - state.free_kv_tokens // block_tokens)
    return EngineLoad(
        used_blocks=used_blocks,
        capacity_blocks=capacity_blocks,
        queued_blocks=max(0, sum(blocks) - computed_tokens // block_tokens),
        head_blocks=blocks[0] if blocks else 0,
        running=state.decoding,
        fullest_bytes=used_blocks * handle.block_bytes if len(handle.gpus) > 1 else 0,
    )


def wake_patiently(handle: EngineHandle) -> None:
    """Raises RuntimeError when there was no memory for the weights for too long."""
    begun_s = time.monotonic()
    while handle.asleep:
        try:
            handle.wake()
        except EngineDied:
            raise
        except RuntimeError:
            if time.monotonic() - begun_s > _WAKE_S:
                raise
            time.sleep(0.01)
