"""A device behind a Ray actor: the same commands and messages, over Ray's calls instead of a pipe.

Engines of a device share its memory, so a device is one actor. The actor's process owns the region. It steps the engines in a
thread or in processes below it, as a server without Ray does on its own machine. The driver's side keeps two calls under
way: one that brings commands, in their order, and one that waits for news. Figures (bytes, free tokens) come with the news,
at least every `NEWS_S` seconds, because the owner table lies on the other machine.

An actor that is gone, with its node or alone, is the death of every engine in it. So is one that has no news for
``HostConfig.silent_s``, be it while its engines start: it is ended. A new one can take its place.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from fineserve_runtime.engines.api import EngineConfig, EngineStats, HostConfig
from fineserve_runtime.engines.device import Device, DeviceFacts, EngineFacts, OpenDevice
from fineserve_runtime.engines.links import Receive
from fineserve_runtime.engines.loop import BEAT_S, Died, EngineCommand, Message, one_line
from fineserve_sim.policy.interfaces import KVLedger

NEWS_S = 0.5
"""An engine gives up idle prefixes without a step; so old may figures be then."""

CALL_S = 120.0
"""A device that is not there after this time (its node may be on its way back) will not come."""

NEWS = "news"
"""The actor's thread that waits for news, so that commands do not wait behind it."""

AGAIN_S = 1.0
"""For some seconds Ray may take a node that died for one that has room."""

_NEAR_S, _CLOSE_S, _GOODBYE_S = 3.0, 15.0, 2.0
"""An actor with news within the first has the second to close, another the third."""

_LOOK_S = 0.2

_LOG = logging.getLogger("fineserve.engines")


class ActorGone(RuntimeError):
    """The actor is dead, or Ray lost sight of it."""


class Figures(NamedTuple):
    """All that can be looked up of a device, at one moment."""

    stats: tuple[EngineStats, ...]
    free_kv_tokens: tuple[int, ...]
    kv_capacity_tokens: tuple[int, ...]
    ledger: KVLedger

    @classmethod
    def of(cls, device: Device) -> Figures:
        engines = range(len(device.facts.engines))
        return cls(
            tuple(device.stats(engine) for engine in engines),
            tuple(device.free_kv_tokens(engine) for engine in engines),
            tuple(device.kv_capacity_tokens(engine) for engine in engines),
            device.ledger(),
        )


class DeviceActor:
    """What runs in the actor: a device of its machine, and a queue of what its engines said. Before ``open`` there is only
    ``news``."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._opened = False
        self._device: Device

    def here(self) -> None:
        """Ray found a place for it."""

    def open(self, open_device: OpenDevice, config: HostConfig) -> tuple[DeviceFacts, Figures]:
        self._device = open_device(config, self._messages.put)
        self._opened = True
        return self._device.facts, Figures.of(self._device)

    def start(self, engines: Sequence[int]) -> None:
        self._device.start(engines)

    def clear(self, engine: int) -> tuple[int, ...]:
        return self._device.clear(engine)

    def send(self, commands: Sequence[EngineCommand]) -> None:
        for command in commands:
            self._device.send(command)

    def news(self) -> tuple[list[Message], Figures | None]:
        """All messages that are there, after a wait for the first. No figures before ``open``."""
        messages: list[Message] = []
        with contextlib.suppress(queue.Empty):
            messages.append(self._messages.get(timeout=NEWS_S))
            while True:
                messages.append(self._messages.get_nowait())
        return messages, Figures.of(self._device) if self._opened else None

    def close(self) -> None:
        self._device.close()


class ActorLink:
    """One actor for as long as it lives. ``on_lost`` is called once, when it is gone without having been closed, or was ended
    because it had no news for ``silent_s``."""

    def __init__(
        self,
        actor: Any,
        on_news: Callable[[list[Message], Figures | None], None],
        on_lost: Callable[[str], None],
        silent_s: float,
        quits: threading.Event,
    ) -> None:
        self._actor = actor
        self._on_news = on_news
        self._on_lost = on_lost
        self._silent_s = silent_s
        self._quits = quits
        self._heard_s = -math.inf
        self._outbox: queue.SimpleQueue[EngineCommand | None] = queue.SimpleQueue()
        self._closing = False
        self._ended: str | None = None
        self._reader = threading.Thread(target=self._read, name="fineserve-ray-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="fineserve-ray-writer", daemon=True)

    def await_actor(self) -> None:
        """Until it is there. From then on news come, and commands go. Raises as ``call`` does."""
        self.call("here")
        self._reader.start()
        self._writer.start()

    def call(self, method: str, *arguments: Any) -> Any:
        """Raises what the method raises, ActorGone, or RuntimeError when the actor found no place in time, or the server shuts
        down."""
        end_s = time.monotonic() + CALL_S
        try:
            answer = getattr(self._actor, method).remote(*arguments)
            while not ray.wait([answer], timeout=_LOOK_S)[0]:
                if self._quits.is_set():
                    raise RuntimeError(f"{method} of a device is not waited for: the server is shutting down")
                if time.monotonic() > end_s:
                    problem = f"Ray found no room for a device, or it does not answer: no {method} in {CALL_S:g} s"
                    raise RuntimeError(problem)
            return ray.get(answer)
        except RayTaskError as problem:
            raise problem.cause from None
        except RayError as problem:
            raise ActorGone(self._ended or _reason(problem)) from None

    def send(self, command: EngineCommand) -> None:
        self._outbox.put(command)

    def close(self) -> None:
        """An actor of which nothing is heard is hardly waited for: what is left of it is Ray's to end."""
        self._closing = True
        near = time.monotonic() - self._heard_s < _NEAR_S
        try:
            ray.get(self._actor.close.remote(), timeout=_CLOSE_S if near else _GOODBYE_S)
        except RayError as problem:
            _LOG.warning("a device of the Ray cluster was left as it was: %s", one_line(problem))
        self.end(_GOODBYE_S)

    def kill(self) -> None:
        """The reader hears of it."""
        ray.kill(self._actor)

    def end(self, within_s: float = CALL_S) -> None:
        """Let go of an actor that is closed or lost."""
        self._outbox.put(None)
        ray.kill(self._actor)
        for thread in (self._reader, self._writer):
            if thread.is_alive() and threading.current_thread() is not thread:
                thread.join(timeout=within_s)

    def _write(self) -> None:
        """One call at a time, with all commands that came since the last: Ray keeps no order among calls under way."""
        try:
            while (command := self._outbox.get()) is not None:
                batch = [command]
                with contextlib.suppress(queue.Empty):
                    while (command := self._outbox.get_nowait()) is not None:
                        batch.append(command)
                ray.get(self._actor.send.remote(batch))
                if command is None:
                    return
        except RayError:
            self.kill()  # who takes no commands is of no use, if it lives

    def _read(self) -> None:
        """The end of this thread is told as the actor's loss, since no more news can come. One that Ray lost sight of counts as
        dead: what its engines said meanwhile is lost."""
        reason = self._hear()
        if not self._closing:
            self._on_lost(reason)

    def _hear(self) -> str:
        """Until the actor is closed, gone or ended; why. Engines that serve are for the driver's watch, which counts hangs, so
        it comes a beat before."""
        patience_s = self._silent_s + BEAT_S
        while not self._closing:
            try:
                news = ray.get(self._actor.news.options(concurrency_group=NEWS).remote(), timeout=patience_s)
            except GetTimeoutError:
                return self._give_up(f"the Ray actor of its device gave no sign of life for {self._silent_s:g} s")
            except RayError as problem:
                return _reason(problem)
            self._heard_s = time.monotonic()
            try:
                self._on_news(*news)
            except Exception as problem:
                return self._give_up(f"what the actor said could not be handled: {one_line(problem)}")
        return "closed"

    def _give_up(self, reason: str) -> str:
        self._ended = reason
        self.kill()
        return reason


class RayDevice:
    """An `engines.device.Device`. ``new_actor()`` starts an actor where its GPU, or its share of a CPU, is; ``open_device``
    is called there."""

    facts: DeviceFacts
    _is_open = False
    _lost = False
    _empty: Figures
    _figures: Figures

    def __init__(
        self, config: HostConfig, receive: Receive, new_actor: Callable[[], Any], open_device: OpenDevice
    ) -> None:
        self._config = config
        self._receive = receive
        self._new_actor = new_actor
        self._open_device = open_device
        self._quits = threading.Event()
        self._open()

    def start(self, engines: Sequence[int]) -> None:
        self._link.call("start", tuple(engines))

    @property
    def sound(self) -> bool:
        """What hangs, hangs in the actor, which can be replaced."""
        return True

    def holds_up(self, engine: int) -> bool:
        """The lock is the actor's, which is ended as a whole."""
        return False

    def end_hung(self, engines: Sequence[int], reason: str) -> None:
        """The actor goes, which may hang itself, and all engines of the device with it."""
        self._link.kill()

    def clear(self, engine: int) -> tuple[int, ...]:
        if not self._lost:
            with contextlib.suppress(ActorGone):  # of which the reader is about to hear
                return tuple(self._link.call("clear", engine))
        self._link.end()
        self._open()
        return tuple(range(len(self._config.engines)))

    def add(self, engine: EngineConfig) -> tuple[int, EngineFacts]:
        raise ValueError(f"{engine.name}: models cannot be added to a device of a Ray cluster")

    def forget(self, engine: int) -> None:
        raise ValueError("models cannot be removed from a device of a Ray cluster")

    def send(self, command: EngineCommand) -> None:
        self._link.send(command)

    def stats(self, engine: int, gpu: int | None = None) -> EngineStats:
        return self._figures.stats[engine]

    def free_kv_tokens(self, engine: int) -> int:
        return self._figures.free_kv_tokens[engine]

    def kv_capacity_tokens(self, engine: int) -> int:
        return self._figures.kv_capacity_tokens[engine]

    def ledger(self, gpu: int | None = None) -> KVLedger:
        return self._figures.ledger

    def quit(self) -> None:
        self._quits.set()

    def close(self) -> None:
        self._link.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Figures of a device whose engines have not started look as if its engines were gone."""
        end_s = time.monotonic() + CALL_S
        while not self._try_open(end_s):
            self._quits.wait(AGAIN_S)
        self._figures = self._empty

    def _try_open(self, end_s: float) -> bool:
        """False when the actor was lost and there is time for another."""
        self._lost = self._is_open = False
        self._link = ActorLink(self._new_actor(), self._on_news, self._on_lost, self._config.silent_s, self._quits)
        try:
            self._link.await_actor()
            self.facts, self._empty = self._link.call("open", self._open_device, self._config)
        except BaseException as problem:
            self._link.end()
            if isinstance(problem, ActorGone) and time.monotonic() < end_s and not self._quits.is_set():
                return False
            raise
        self._is_open = True
        return True

    def _on_news(self, messages: list[Message], figures: Figures | None) -> None:
        if figures is not None:
            self._figures = figures
        for message in messages:
            self._receive(message)

    def _on_lost(self, reason: str) -> None:
        if not self._is_open:  # who opens it finds out
            return
        self._lost = True
        self._figures = self._empty
        for engine in range(len(self._config.engines)):
            self._receive(Died(engine, reason))


def _reason(problem: RayError) -> str:
    """Ray's first line; the others are a report."""
    return f"the Ray actor of its device is gone: {str(problem).strip().splitlines()[0]}"
