"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

from fineserve_sim.experiment.file.errors import MachineError

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


@contextmanager
def gone_if_unused(out: Path) -> Iterator[None]:
    """A results folder that is new goes with an error that comes before any simulation has finished; so do the folders that
    were made to hold it, as far as nobody else has put anything there."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        yield
    except ValueError:
        if made and not any((out / "cells").glob("*.json")):
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
    """What writers left that were killed goes after a day; nobody writes one file for so long."""
    for folder in (out, out / "cells", out / "decisions", out / "figures"):
        for left in folder.glob(".*.tmp"):
            with suppress(FileNotFoundError):  # its writer has just finished
                if time.time() - left.stat().st_mtime > _STALE_S:
                    left.unlink()


def unwritable(out: Path, problem: OSError) -> MachineError:
    """A disk error as one line: full, read-only, a file in the way."""
    at = f" ({problem.filename})" if problem.filename else ""
    return MachineError(str(out), "", f"results cannot be written: {problem.strerror or problem}{at}")
