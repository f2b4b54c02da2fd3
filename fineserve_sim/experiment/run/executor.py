"""Where simulations run: processes of this machine, or a Ray cluster. Nothing above knows which."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fineserve_sim.experiment.run.work import Work

W = TypeVar("W", bound=Work)


class Executor(Protocol):
    """Does work, as much at a time as it has workers."""

    @property
    def workers(self) -> int:
        """How much is done at a time."""

    def each(self, works: Iterable[W], out: Path) -> Iterator[tuple[W, Any]]:
        """Do all ``works`` and yield each with what came of it, in order of completion; its files are in ``out`` then. Work is
        taken from the iterable as it is needed, and done again where a worker died.

        Raises what the work raises, ConfigError when workers die again and again.
        """


@contextmanager
def executor_of(text: str, jobs: int | None = None) -> Iterator[Executor]:
    """``local``: processes here. ``ray`` or ``ray:HOST:PORT``: a Ray cluster. ``jobs``: at a time; else one a core.

    Raises ValueError for another text, when Ray is not installed, or when no cluster answers.
    """
    name, colon, address = text.partition(":")
    if text == "local":
        from fineserve_sim.experiment.run.local import LocalProcesses

        with LocalProcesses(jobs) as local:
            yield local
    elif name == "ray" and bool(colon) == bool(address):
        os.environ.setdefault(
            "RAY_DEDUP_LOGS_SKIP_REGEX", "."
        )  # Ray tells of dead workers on stdout, where JSON may go
        try:
            import ray  # noqa: F401
        except ImportError:
            raise ValueError("--executor ray: Ray is not installed; pip install 'fineserve[ray]'") from None
        from fineserve_sim.experiment.run.on_ray import ray_cluster

        with ray_cluster(address or None, jobs) as cluster:
            yield cluster
    else:
        raise ValueError(f"--executor {text}: expected local, ray or ray:HOST:PORT")


def lent(executor: Executor | None, jobs: int | None) -> AbstractContextManager[Executor]:
    """``executor``, whose end is the owner's affair, or ``jobs`` processes of this machine until the block ends."""
    return executor_of("local", jobs) if executor is None else nullcontext(executor)
