"""Process groups that are made at the start: the first of a process, and one more beside it.

NCCL takes no GPU twice into one communicator, so that two processes on one GPU have none of two ranks. One rank shows what
library and communicator take before there is a peer.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

from fineserve_evidence.campaign.shapes.second import LIMIT_S, heard, second, used_bytes


def nccl() -> dict[str, float]:
    """Measure groups of one rank, and of two where there are two GPUs."""
    import torch

    found = made("nccl", 1)
    return found | made("nccl", 2) if torch.cuda.device_count() > 1 else found


def made(backend: str, ranks: int) -> dict[str, float]:
    """Make both groups in ``ranks`` processes. Return seconds, and bytes of a rank on its GPU, the most of all ranks."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        given = (backend, ranks, str(Path(folder) / "store"))
        pipes = [stack.enter_context(second(join, rank, *given)) for rank in range(ranks)]
        for pipe in pipes:
            heard(pipe)
        for pipe in pipes:
            pipe.send(True)
        answers = [heard(pipe) for pipe in pipes]
    return {f"{ranks}_ranks_{name}": max(answer[name] for answer in answers) for name in answers[0]}


def join(pipe: Connection, rank: int, backend: str, ranks: int, store: str) -> None:
    """Make both groups in one rank's process, once all ranks are there. A group is ready when its first sum is."""
    import torch
    from torch import distributed

    on_gpu = backend == "nccl"
    one = torch.ones(1, device=f"cuda:{rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(rank)
    pipe.send(True)
    pipe.recv()
    found = dict[str, float]()
    for name in ("first", "next"):
        before, begun_s = used_bytes(rank) if on_gpu else 0, time.perf_counter()
        if name == "first":
            limit, shared = timedelta(seconds=LIMIT_S), distributed.FileStore(store, ranks)
            distributed.init_process_group(backend, store=shared, rank=rank, world_size=ranks, timeout=limit)
            distributed.all_reduce(one)
        else:
            distributed.all_reduce(one, group=distributed.new_group())
        float(one)  # the device has finished
        found[f"{name}_s"] = time.perf_counter() - begun_s
        if on_gpu:
            found[f"{name}_bytes"] = float(used_bytes(rank) - before)
    pipe.send(found)
    pipe.recv()
