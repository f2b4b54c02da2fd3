"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.file.errors import ConfigError


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
    """What processes of these ids have begun to write below ``out``."""
    return [path for path in out.rglob(".*.tmp") if int(path.suffixes[-2][1:]) in pids]


def write_json(path: Path, value: Any) -> None:
    """``value`` as JSON, keys in their order, atomically. Raises ValueError for NaN, which JSON does not have."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")


def prepare(out: Path) -> None:
    """Make the output folder and prove that files can be written in it. Raises ConfigError when they cannot."""
    try:
        (out / "cells").mkdir(parents=True, exist_ok=True)
        with atomic(out / "cells" / "probe") as temporary:
            temporary.write_bytes(b"x")
        (out / "cells" / "probe").unlink()
    except OSError as problem:
        raise unwritable(out, problem) from None


def unwritable(out: Path, problem: OSError) -> ConfigError:
    """A disk error as one line: full, read-only, a file in the way."""
    at = f" ({problem.filename})" if problem.filename else ""
    return ConfigError(str(out), "", f"results cannot be written: {problem.strerror or problem}{at}")
