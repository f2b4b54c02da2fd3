"""Processes as the kernel shows them: of the chaos campaign's own alone, whose ids are looked up anew each time."""

from __future__ import annotations

from pathlib import Path


def children(pid: int, word: str) -> list[int]:
    """The children of a process whose command has this word; none if the process is gone."""
    lists = [_read(each) for each in Path(f"/proc/{pid}/task").glob("*/children")]
    found = [int(child) for each in lists for child in each.split()]
    return [child for child in found if word in _read(Path(f"/proc/{child}/cmdline"))]


def mapping(name: str) -> list[int]:
    """Those that have a file of this name in their memory, be it deleted."""
    return [int(path.parts[2]) for path in Path("/proc").glob("[0-9]*/maps") if name in _read(path)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the process is gone, or another's
        return ""
