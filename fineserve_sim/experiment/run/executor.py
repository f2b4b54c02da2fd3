"""Where simulations run: processes of this machine, or a Ray cluster. Nothing above knows which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fineserve_sim.experiment.run.work import Work

W = TypeVar("W", bound=Work)

LOOKS_S = 1.0
"""Seconds between two looks at how far work is."""


class Executor(Protocol):
    """Does work, as much at a time as it has workers."""

    @property
    def workers(self) -> int:
        """How much is done at a time."""

    @property
    def ready(self) -> bool:
        """Whether its processes have started, so that small work is worth handing out."""

    def each(self, works: Iterable[W], out: Path, tell: Callable[[W, float], None]) -> Iterator[tuple[W, Any]]:
        """Do all ``works`` and yield each with what came of it, in order of completion; its files are in ``out`` then. Work is
        taken from the iterable as it is needed, and done again where a worker died. ``tell`` is called now and then with the
        share of a work that is done.

        Raises what the work raises, ConfigError when workers die again and again.
        """
