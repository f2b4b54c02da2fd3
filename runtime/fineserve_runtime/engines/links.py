"""How the host reaches a loop: a queue to a thread of its own process, or a pipe to a process."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol

from fineserve_runtime.engines.loop import Command, Died, EngineLoop, Message, Stop, one_line

Receive = Callable[[Message], None]

CLOSE_S = 10.0
"""An engine that has not stopped by then is left behind (a thread) or killed (a process)."""


class Link(Protocol):
    def send(self, command: Command) -> None:
        """Does not block; a command to a dead engine is dropped."""
        ...

    def close(self) -> None: ...

    @property
    def lives(self) -> bool:
        """Whether the thread or process is there; a hung one is."""
        ...


class _QueueInbox:
    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def take(self, timeout_s: float | None) -> Command | None:
        try:
            return self.queue.get_nowait() if timeout_s == 0.0 else self.queue.get(timeout=timeout_s)
        except queue.Empty:
            return None


class ThreadLink:
    """All engines of the host in one thread of this process."""

    def __init__(self, build: Mapping[int, Callable[[], Any]], receive: Receive) -> None:
        self._inbox = _QueueInbox()
        loop = EngineLoop(build, self._inbox, receive)
        self._thread = threading.Thread(target=loop.run, name="fineserve-engines", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.queue.put(command)

    @property
    def lives(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self.send(Stop())
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=CLOSE_S)


class PipeInbox:
    """Raises EOFError once the host is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def take(self, timeout_s: float | None) -> Command | None:
        if not self._connection.poll(timeout_s):
            return None
        command: Command = self._connection.recv()
        return command


class ProcessLink:
    """One engine in a process of its own. ``main(connection, *arguments)`` runs there; its end is this engine's death.

    A thread each for sending and receiving: were one thread to do both, two full pipes could block both sides for ever.
    """

    def __init__(self, engine: int, main: Callable[..., None], arguments: tuple[Any, ...], receive: Receive) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._engine = engine
        self._receive = receive
        self._connection = ours
        self._outbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._closing = False
        self.process = context.Process(target=main, args=(theirs, *arguments), name=f"fineserve-engine-{engine}")
        self.process.daemon = True
        self.process.start()
        theirs.close()
        self._reader = threading.Thread(target=self._read, name=f"fineserve-reader-{engine}", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"fineserve-writer-{engine}", daemon=True)
        self._reader.start()
        self._writer.start()

    def send(self, command: Command) -> None:
        self._outbox.put(command)

    def _write(self) -> None:
        """Until the engine was told to stop, or is gone."""
        command: Command | None = None
        with contextlib.suppress(OSError):
            while not isinstance(command, Stop):
                command = self._outbox.get()
                self._connection.send(command)

    @property
    def lives(self) -> bool:
        return self.process.is_alive()

    def kill(self) -> None:
        """The process goes, even a stopped one; the reader hears of it."""
        self.process.kill()

    def _read(self) -> None:
        """The end of this thread is told as the engine's death, since no more news can come."""
        problem = self._hear()
        if problem is not None:
            self.process.kill()
        self.process.join()
        self.send(Stop())  # lets the writer end
        if not self._closing:
            self._receive(Died(self._engine, problem or f"its process ended with code {self.process.exitcode}"))

    def _hear(self) -> str | None:
        """Until the process is gone; what went wrong, if it was something else. A message that could not be handled may have
        had tokens in it, so nothing that the engine says later makes sense."""
        while True:
            try:
                message: Message = self._connection.recv()
            except (EOFError, OSError):
                return None
            try:
                self._receive(message)
            except Exception as error:
                return f"what it said could not be handled: {one_line(error)}"

    def close(self) -> None:
        self._closing = True
        self.send(Stop())
        self.process.join(timeout=CLOSE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        for thread in (self._reader, self._writer):
            if threading.current_thread() is not thread:
                thread.join(timeout=CLOSE_S)
        self._connection.close()
