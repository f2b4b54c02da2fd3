"""Work on a Ray cluster. Nothing is shared with its nodes: our code goes there as a folder, what a work reads goes with it
as data, and the files that it writes come back as bytes."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fineserve_traces
import ray

import fineserve_sim
from fineserve_sim.experiment.file.errors import MachineError
from fineserve_sim.experiment.run.executor import LOOKS_S, W
from fineserve_sim.experiment.run.files import atomic, prepare
from fineserve_sim.experiment.run.work import Work

RETRIES = 3
"""How often work is done again because its process or node died."""

_ANSWERS_S = 5.0
_LIBRARIES = ("numpy", "scipy", "pyarrow", "pydantic", "simpy")
"""What makes the bytes of results beside our code."""

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a gRPC client opens a connection: HTTP/2's preface and empty settings. The server answers with settings of its own."""


def carry_out(work: Work, number: int, board: Any, libraries: Mapping[str, str]) -> tuple[dict[str, bytes], Any]:
    """On a worker: the files that the work has written, by their path in the results folder, and what came of it."""
    _check_libraries(tuple(libraries.items()))
    with TemporaryDirectory(prefix="fineserve-") as folder:
        out = Path(folder)
        prepare(out)
        found = work(out, partial(board.note.remote, number))
        files = sorted(path for path in out.rglob("*") if path.is_file())
        return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}, found


@cache
def _check_libraries(expected: tuple[tuple[str, str], ...]) -> None:
    """Raises MachineError where libraries differ from the asking machine's."""
    here = libraries()
    for name, wanted in expected:
        if here[name] != wanted:
            problem = f"{name} {here[name]}, this machine has {wanted}; install the same lock file on every node"
            raise MachineError(f"Ray node {platform.node()}", "", problem)


def libraries() -> dict[str, str]:
    """The versions of Python and of the libraries that results depend on."""
    return {"Python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}}


def _new_board() -> Any:
    """An actor where workers note how far they are. Its class travels by value: its process imports nothing of ours."""

    class Board:
        def __init__(self) -> None:
            self.shares: dict[int, float] = {}

        def note(self, number: int, share: float) -> None:
            self.shares[number] = share

        def read(self, numbers: list[int]) -> dict[int, float]:
            self.shares = {number: self.shares[number] for number in numbers if number in self.shares}
            return self.shares

    return ray.remote(num_cpus=0, max_restarts=-1)(Board).remote()


class RayCluster:
    """The Ray cluster that this process is a driver of. ``jobs``: work at a time; one a CPU of the cluster if not given."""

    def __init__(self, jobs: int | None) -> None:
        self._jobs = jobs
        self._libraries = libraries()
        self._numbers = count()
        self._board = _new_board()
        self._carry_out = ray.remote(num_cpus=1, max_retries=RETRIES)(carry_out)

    ready = False  # work travels

    @property
    def workers(self) -> int:
        return self._jobs or max(1, int(ray.cluster_resources().get("CPU", 1)))

    def each(self, works: Iterable[W], out: Path, tell: Callable[[W, float], None]) -> Iterator[tuple[W, Any]]:
        """As ``Executor.each``. After an error what is on its way goes on to its end, unheard: Ray 2.60 ends this process if a
        task is cancelled as it returns."""
        left, running = iter(works), dict[Any, tuple[int, W]]()
        while True:
            room = self._jobs or 2 * self.workers  # the next work is there before a CPU is free
            for work in islice(
                left, max(0, room - len(running))
            ):  # a lost node may leave more running than there is room
                number = next(self._numbers)
                ref = self._carry_out.remote(work.packed(), number, self._board, self._libraries)
                running[ref] = number, work
            if not running:
                return
            for done in ray.wait(list(running), timeout=LOOKS_S)[0]:
                files, found = _result(done)
                _, work = running.pop(done)
                _write(files, out)
                yield work, found
            shares = self._noted([number for number, _ in running.values()])
            for number, work in running.values():
                if number in shares:
                    tell(work, shares[number])

    def _noted(self, numbers: list[int]) -> dict[int, float]:
        """How far work is, by its number; nothing while Ray looks for another place for the board."""
        try:
            found: dict[int, float] = ray.get(self._board.read.remote(numbers), timeout=LOOKS_S)
        except ray.exceptions.RayError:
            return {}
        return found


def _result(done: Any) -> tuple[dict[str, bytes], Any]:
    """What ``carry_out`` returned. Raises what it raised."""
    try:
        files, found = ray.get(done)
    except ray.exceptions.RayTaskError as problem:
        raise problem.cause from None
    except ray.exceptions.RayError as problem:
        told = str(problem).strip().splitlines()[0]
        raise MachineError(
            "", "", f"Ray gave up after {RETRIES + 1} tries, perhaps for want of memory: {told}"
        ) from None
    return files, found


def _write(files: Mapping[str, bytes], out: Path) -> None:
    """Files of a run, its JSON last, which says that it is there."""
    for name in sorted(files, key=lambda name: (name.endswith(".json"), name)):
        path = out / name
        path.parent.mkdir(exist_ok=True)
        with atomic(path) as temporary:
            temporary.write_bytes(files[name])


@contextmanager
def ray_cluster(address: str | None, jobs: int | None) -> Iterator[RayCluster]:
    """Be a driver of the cluster at ``address``. Without one it is the cluster that RAY_ADDRESS names or that runs on this
    machine. If there is none, this machine alone is one for as long as the block lasts. Raises ValueError when none answers."""
    _check_answers(address or os.environ.get("RAY_ADDRESS"))
    before = signal.getsignal(signal.SIGTERM)
    options = {} if address else {"include_dashboard": False}
    try:
        with _our_code() as code:
            ray.init(address, runtime_env={"working_dir": code}, log_to_driver=False, logging_level="ERROR", **options)
    except (ConnectionError, RuntimeError, ValueError) as problem:
        told = str(problem).strip().splitlines()[0]
        raise ValueError(f"--executor ray: {told}; if it takes a token, set RAY_AUTH_MODE=token") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray sets a handler of its own
    try:
        yield RayCluster(jobs)
    finally:
        ray.shutdown()


@contextmanager
def _our_code() -> Iterator[str]:
    """A folder with our two packages, and the module that a compiled build has beside them."""
    with TemporaryDirectory(prefix="fineserve-") as folder:
        for package in (fineserve_sim, fineserve_traces):
            place = Path(folder) / package.__name__
            shutil.copytree(package.__path__[0], place, ignore=shutil.ignore_patterns("__pycache__"))
        compiled = find_spec("fineserve_sim__mypyc")
        if compiled is not None and compiled.origin is not None:
            shutil.copy(compiled.origin, folder)
        yield folder


def _check_answers(address: str | None) -> None:
    """Ray itself tries for minutes. Raises ValueError where no gRPC server is."""
    host, _, port = (address or "").rpartition(":")
    if address in (None, "", "auto", "local"):
        return
    if not host or not port.isdigit():
        raise ValueError(f"--executor ray:{address}: expected ray:HOST:PORT, such as ray:10.0.0.1:6379")
    try:
        with socket.create_connection((host, int(port)), _ANSWERS_S) as server:
            server.sendall(_HELLO)
            answer = server.recv(9)
    except OSError as problem:
        raise ValueError(f"--executor ray: no Ray cluster at {address}: {problem.strerror or problem}") from None
    if answer[3:4] != b"\x04":
        raise ValueError(f"--executor ray: no Ray cluster at {address}: what answers there is something else")
