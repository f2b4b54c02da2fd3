"""Files that are whole or not there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

from fineserve_sim.experiment.file.errors import MachineError, NoLimitError

_STALE_S = 86_400.0


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; it takes the name on success and vanishes on any failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def temporaries(out: Path, pids: Collection[int | None]) -> list[Path]:
    """What processes of these ids have begun to write below ``out``; temporary files of other programs are left alone."""
    names = [f".*.{pid}.tmp" for pid in pids]
    return [path for path in out.rglob(".*.tmp") if any(path.match(name) for name in names)]


def write_json(path: Path, value: Any) -> None:
    """``value`` as JSON, keys in their order, atomically. Raises ValueError for NaN, which JSON does not have."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")


_held: set[tuple[Path, int]] = set()
"""Results folders that this process writes, each with the thread that does."""


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Make the results folder and keep other runs out of it, for their tables would mix. Calls of one thread may nest.

    The operating system drops the lock with its process, so a crashed run locks nothing. Raises MachineError when another run
    is in the folder, or when it cannot be written.
    """
    key = out.resolve(), threading.get_ident()
    if key in _held:
        yield
        return
    path = out / ".lock"
    try:
        (out / "cells").mkdir(parents=True, exist_ok=True)
        lock = _locked(path)
    except OSError as refusal:
        raise unwritable(out, refusal) from None
    if lock is None:
        holder = path.read_text(encoding="utf-8") if path.exists() else ""
        if holder == _process(os.getppid()):
            yield  # a worker that imports an unguarded script: its executor ends it
            return
        problem = f"{holder or 'another process'} writes results into this folder; wait for it, or name another folder"
        raise MachineError(str(out), "", problem)
    _held.add(key)
    try:
        yield
    finally:
        _held.discard(key)
        path.unlink(missing_ok=True)
        os.close(lock)


def _locked(path: Path) -> int | None:
    """The locked file, which names this process; None when another one holds it. A file system without locks locks nothing."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        except OSError as problem:
            if problem.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
        if _is_at(path, file):  # not one that its last holder has just removed
            os.truncate(file, 0)
            os.write(file, _process(os.getpid()).encode())
            return file
        os.close(file)


def _process(pid: int) -> str:
    return f"process {pid} on {platform.node()}"


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


@contextmanager
def gone_if_unused(out: Path) -> Iterator[None]:
    """Be alone in a results folder. One that is new goes with an error that comes before any simulation has finished; so do the
    folders that were made to hold it, unless something else is there. It goes, too, where what was simulated gave no limit."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    with alone_in(out):
        try:
            yield
        except ValueError as problem:
            if made and (isinstance(problem, NoLimitError) or not any((out / "cells").glob("*.json"))):
                rmtree(out, ignore_errors=True)
                with suppress(OSError):
                    for folder in made[1:]:
                        folder.rmdir()
            raise


def check_writable(path: Path, option: str) -> None:
    """Raises ValueError, naming the option, for a path at which no file can be written."""
    if path.is_dir():
        raise ValueError(f"{option} {path}: is a folder; name a file in it")
    if not path.resolve().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")


def prepare(out: Path) -> None:
    """Make the output folder and prove that files can be written in it. Raises MachineError when they cannot."""
    try:
        (out / "cells").mkdir(parents=True, exist_ok=True)
        with atomic(out / "cells" / "probe") as temporary:
            temporary.write_bytes(b"x")
        (out / "cells" / "probe").unlink(missing_ok=True)  # another run into this folder may have been here, too
        _sweep(out)
    except OSError as problem:
        raise unwritable(out, problem) from None


def _sweep(out: Path) -> None:
    """Delete what killed writers left after a day; no writer takes so long for one file."""
    for folder in (out, out / "cells", out / "decisions", out / "figures"):
        for left in folder.glob(".*.tmp"):
            with suppress(FileNotFoundError):  # its writer has just finished
                if time.time() - left.stat().st_mtime > _STALE_S:
                    left.unlink()


def unwritable(out: Path, problem: OSError) -> MachineError:
    """A disk error as one line: full, read-only, a file in the way."""
    at = f" ({problem.filename})" if problem.filename else ""
    return MachineError(str(out), "", f"results cannot be written: {problem.strerror or problem}{at}")
