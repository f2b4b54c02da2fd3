"""Engines of two devices: every rank holds its part of each KV block in the slab of the same number of its own region.

Ranks take 15 s to start, so each test is one host's whole story. Memory is scarce and poisoned, and one of the devices has
an engine of its own beside the ranks, so slabs change owners.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fineserve_runtime.engines.api import StepReport, Submission, TinyModel
from fineserve_runtime.engines.table import SlabTable

from .conftest import BF16, SLAB_BYTES, draw_requests

pytestmark = pytest.mark.filterwarnings("ignore")
SLABS = 20
REQUESTS = 16
SHARDS = replace(BF16, name="shards", gpus=(0, 1))
STAGES = replace(BF16, name="stages", gpus=(1, 0), stages=2)
ALONE = replace(BF16, name="alone", model=TinyModel(seed=2), gpus=(1,))


def test_shards_of_layers(
    start: Callable[..., tuple[Any, Any]], same_tokens: Callable[..., None], tmp_path: Path
) -> None:
    """Tensor parallelism. Ranks add up in another order than one engine does, so they are compared with vLLM's own ranks."""
    host, heard = start(SHARDS, ALONE, mode="processes", slabs=SLABS, gpus=(0, 1))
    requests, others = draw_requests(1, REQUESTS), draw_requests(2, REQUESTS)
    _same_slabs_in_both_regions(host, heard, requests, others, tmp_path)
    same_tokens(SHARDS, requests, heard.of(0))
    same_tokens(ALONE, others, heard.of(1))
    _slabs_changed_owners(host)
    _kill_its_scheduler(host, heard, requests, tmp_path)


def test_stages_of_layers(
    start: Callable[..., tuple[Any, Any]], same_tokens: Callable[..., None], tmp_path: Path
) -> None:
    """Pipeline parallelism: what one engine computes, bit by bit."""
    host, heard = start(STAGES, ALONE, mode="processes", slabs=SLABS, gpus=(0, 1))
    requests, others = _long_answers(1), draw_requests(2, REQUESTS)
    _same_slabs_in_both_regions(host, heard, requests, others, tmp_path)
    same_tokens(BF16, requests, heard.of(0))
    same_tokens(ALONE, others, heard.of(1))
    assert heard.preemptions(0), "the memory was to be scarce"
    _slabs_changed_owners(host)
    _kill_a_rank(host, heard, requests, tmp_path)
    _all_free(host)
    host.restart(0)
    heard.tokens.clear(), heard.reasons.clear()
    for request in requests:
        host.engines[0].submit(request)
    assert host.engines[0].drain(60)
    same_tokens(BF16, requests, heard.of(0))


def _same_slabs_in_both_regions(host: Any, heard: Any, requests: list[Any], others: list[Any], folder: Path) -> None:
    tables = _tables(folder)
    both: list[set[int]] = []
    apart: list[StepReport] = []

    def look(report: StepReport) -> None:
        if report.engine == 0:
            held = _same_in(tables)
            if held is None:
                apart.append(report)
            else:
                both.append(held)

    heard.then = look
    for one, other in zip(requests, others, strict=True):
        host.engines[0].submit(one)
        host.engines[1].submit(other)
    assert host.engines[0].drain(120)
    assert host.engines[1].drain(120)
    heard.then = lambda report: None
    assert not heard.deaths
    assert not apart, "the regions held different slabs for as long as they were looked at"
    assert max(map(len, both)) > 4


def _same_in(tables: list[SlabTable]) -> set[int] | None:
    """The slabs of engine 0, once both tables say the same: it takes and gives back in one table after the other, without a
    lock for those it gives back, and may be at its next step already."""
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        one, other = ({s for s in range(SLABS) if table.owner_of(s) == 0} for table in tables)
        if one == other:
            return one
    return None


def _long_answers(seed: int) -> list[Submission]:
    """All start at once, and grow to more than the memory holds, whether the other engine has any or not."""
    return [
        replace(
            request,
            prompt_token_ids=request.prompt_token_ids[:40],
            sampling=replace(request.sampling, max_tokens=96),
        )
        for request in draw_requests(seed, REQUESTS)
    ]


def _slabs_changed_owners(host: Any) -> None:
    """Of the two, whoever came second to a slab zeroed its blocks."""
    assert host.engines[0].stats(0).blocks_zeroed + host.engines[1].stats(1).blocks_zeroed > 5
    _all_free(host)


def _kill_a_rank(host: Any, heard: Any, requests: list[Any], folder: Path) -> None:
    """The engine is dead, its other rank is gone before its slabs are free, and no request is blamed."""
    rows = [table.counters[0] for table in _tables(folder)]
    ranks = [row.get("rank_pid") for row in rows]
    _kill_at_next_step(heard, ranks[1])
    for request in requests:
        host.engines[0].submit(request)
    assert heard.died.wait(60)
    engine, reason, lost = heard.deaths[0]
    assert engine == 0
    assert reason == "the process of one of its ranks ended"
    assert lost
    assert not any(_runs(pid) for pid in ranks)


def _kill_its_scheduler(host: Any, heard: Any, requests: list[Any], folder: Path) -> None:
    row, other = (table.counters[0] for table in _tables(folder))
    ranks = [row.get("rank_pid"), other.get("rank_pid")]
    _kill_at_next_step(heard, row.get("pid"))
    host.engines[0].submit(requests[0])
    assert heard.died.wait(60)
    assert not any(_runs(pid) for pid in ranks), "ranks could write into slabs that are free"
    _all_free(host)


def _kill_at_next_step(heard: Any, pid: int) -> None:
    heard.tokens.clear(), heard.reasons.clear()

    def kill(report: StepReport) -> None:
        heard.then = lambda report: None
        os.kill(pid, signal.SIGKILL)

    heard.then = kill


def _tables(folder: Path) -> list[SlabTable]:
    return [SlabTable(folder / f"fineserve-device{gpu}.table") for gpu in (0, 1)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _all_free(host: Any) -> None:
    for gpu in (0, 1):
        assert host.ledger(gpu).free_bytes == (SLABS - 1) * SLAB_BYTES
