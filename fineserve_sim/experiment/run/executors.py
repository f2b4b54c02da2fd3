"""The executor that a caller asks for, and for how long it is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from fineserve_sim.experiment.run.executor import Executor
from fineserve_sim.experiment.run.local import LocalProcesses

_QUIET = {
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # else dead workers are told of on stdout, beside JSON
    "RAY_NUM_REDIS_GET_RETRIES": "5",  # seconds until a cluster that does not let us in is given up
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""What Ray looks up when it is imported."""


@contextmanager
def executor_of(text: str, jobs: int | None = None) -> Iterator[Executor]:
    """``local``: processes here. ``ray`` or ``ray:HOST:PORT``: a Ray cluster. ``jobs``: at a time; else one a core.

    Raises ValueError for another text, when Ray is not installed, or when no cluster answers.
    """
    name, colon, address = text.partition(":")
    if text == "local":
        with LocalProcesses(jobs) as local:
            yield local
    elif name == "ray" and bool(colon) == bool(address):
        for variable, value in _QUIET.items():
            os.environ.setdefault(variable, value)
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
