"""Other processes of a trial, and the bytes that all processes together hold on a GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 60.0
"""Limit of waiting for a word of another process."""
GRACE_S = 10.0

Work = Callable[..., None]
"""A function of a module. It gets a pipe to the first process, and what it is given."""


def used_bytes(device: int = 0) -> int:
    """Read the bytes of a GPU that all processes hold, as the driver counts them."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


@contextmanager
def second(work: Work, *given: object) -> Iterator[Connection]:
    """Run ``work`` in a new process, and give the pipe to it. The process ends with the block."""
    spawned = multiprocessing.get_context("spawn")
    pipe, its = spawned.Pipe()
    process = spawned.Process(target=guarded, args=(work, its, *given), daemon=True)
    process.start()
    its.close()
    try:
        yield pipe
    finally:
        pipe.close()  # it waits for a word, and ends when none can come
        process.join(GRACE_S)
        if process.is_alive():
            process.kill()


def guarded(work: Work, pipe: Connection, *given: object) -> None:
    """Run ``work`` until it ends or the first process does. Tell that process what fails."""
    try:
        work(pipe, *given)
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        with suppress(BrokenPipeError):
            pipe.send(f"{type(error).__name__}: {error}")


def heard(pipe: Connection) -> Any:
    """Wait for what the other process says. Raises RuntimeError when it fails, ends or says nothing in time."""
    if not pipe.poll(LIMIT_S):
        raise RuntimeError(f"the second process said nothing in {LIMIT_S:g} s")
    try:
        said = pipe.recv()
    except EOFError:
        raise RuntimeError("the second process ended without a word") from None
    if isinstance(said, str):
        raise RuntimeError(f"in the second process: {said}")
    return said
